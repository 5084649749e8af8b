"""Bases, angles and entropies, under one tolerance policy.

The policy: a singular value counts as zero when it is at most ``max(rows, columns) · eps · σ_max``
(numpy's and LAPACK's convention). Half-precision input is refused, because there are no
half-precision decompositions worth trusting: convert first.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Complex, Float
from torch import Tensor


class LinalgError(ValueError):
    """A decomposition was asked of numbers that have none: NaN, infinity, or no convergence."""


@dataclass(frozen=True, eq=False)
class Basis:
    """Orthonormal rows spanning one subspace a block; directions beyond the rank are zero rows."""

    Q: Float[Tensor, "block k n"]
    rank: Float[Tensor, "block"]


def tolerance(sigma: Float[Tensor, "*block k"], rows: int, columns: int) -> Float[Tensor, "*block"]:
    """The largest value that counts as zero, for each block of descending singular values."""
    return max(rows, columns) * torch.finfo(sigma.dtype).eps * sigma[..., 0]


def singular_values(A: Float[Tensor, "*block m n"]) -> Float[Tensor, "*block k"]:
    """Singular values in descending order."""
    return _decompose(torch.linalg.svdvals, A)


def svd(
    A: Float[Tensor, "*block m n"],
) -> tuple[Float[Tensor, "*block m k"], Float[Tensor, "*block k"], Float[Tensor, "*block k n"]]:
    """Thin singular value decomposition ``A = U diag(S) Vh``."""
    return _decompose(lambda a: torch.linalg.svd(a, full_matrices=False), A)


def eigenvalues_symmetric(A: Float[Tensor, "*block n n"]) -> Float[Tensor, "*block n"]:
    """Eigenvalues of a symmetric matrix in ascending order."""
    return _decompose(torch.linalg.eigvalsh, A)


def eigenvalues(A: Float[Tensor, "*block n n"]) -> Complex[Tensor, "*block n"]:
    """Eigenvalues of a general square matrix, in no order."""
    return _decompose(torch.linalg.eigvals, A)


def all_finite(A: Tensor) -> bool:
    """Whether A holds neither NaN nor infinity."""
    # a sum is quicker to check, and finite only where everything is
    return bool(A.sum().isfinite()) or bool(A.isfinite().all())


@contextmanager
def _one_thread(A: Tensor) -> Iterator[None]:
    """LAPACK on many narrow blocks: threads would wait for one another longer than they compute."""
    threads = torch.get_num_threads()
    if A.ndim < 3 or min(A.shape[-2:]) > 512:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _decompose(function, A):
    """Run a LAPACK routine; retry once in float64 on the CPU before giving up by name."""
    if A.dtype not in (torch.float32, torch.float64):
        raise LinalgError(f"decompositions need float32 or float64, got {A.dtype}; convert first")
    if not all_finite(A):
        raise LinalgError(f"a matrix of shape {tuple(A.shape)} holds NaN or infinity")
    try:
        with _one_thread(A):
            return function(A)
    except torch.linalg.LinAlgError:
        pass
    try:
        result = function(A.double().cpu())
    except torch.linalg.LinAlgError as error:
        raise LinalgError(f"no convergence for shape {tuple(A.shape)}, also in float64") from error
    if isinstance(result, Tensor):
        return result.to(A.device, A.dtype.to_complex() if result.is_complex() else A.dtype)
    return tuple(part.to(A) for part in result)


def triangular_factor(A: Float[Tensor, "*block m n"]) -> Float[Tensor, "*block k n"]:
    """R of the QR factorisation ``A = QR``: keeps every inner product of A's columns."""
    return _decompose(lambda a: torch.linalg.qr(a, mode="r").R, A)


def row_space(W: Float[Tensor, "block k n"]) -> Basis:
    """Orthonormal basis of the row space of each block.

    QR of the tall transpose first, so that everything after it only sees [k, k] triangles; their
    singular values are needed only where rank may be missing.

    Raises:
        LinalgError: all blocks are zero, or hold NaN or infinity.
    """
    Q, R = _decompose(torch.linalg.qr, W.mT)
    if _surely_full_rank(R, W):
        return Basis(Q=Q.mT, rank=Q.new_full(Q.shape[:1], Q.shape[2]))
    U, S, _ = svd(R)
    kept = _nonzero(S, W)
    if not kept.any():
        raise LinalgError(f"all {len(W)} blocks of shape {tuple(W.shape[1:])} are zero")
    return Basis(Q=(Q @ U * kept[:, None, :]).mT, rank=kept.sum(-1).to(W.dtype))


def _surely_full_rank(R: Float[Tensor, "block k n"], W: Tensor) -> bool:
    """Whether ``σ_min ≥ 1/‖R⁻¹‖_F`` alone puts every block above the tolerance."""
    k, n = R.shape[-2:]
    if k != n or not R.diagonal(dim1=-2, dim2=-1).all():
        return False
    eye = torch.eye(k, dtype=R.dtype, device=R.device).expand_as(R)
    inverse = _decompose(lambda r: torch.linalg.solve_triangular(r, eye.to(r), upper=True), R)
    bounds = torch.stack([torch.linalg.matrix_norm(R), 1 / torch.linalg.matrix_norm(inverse)], -1)
    # rounding in the inverse is far below the factor of 10
    return bool((bounds[..., 1] > 10 * tolerance(bounds, *W.shape[-2:])).all())


def _nonzero(sigma: Float[Tensor, "block k"], W: Tensor) -> Bool[Tensor, "block k"]:
    return sigma > tolerance(sigma, W.shape[-2], W.shape[-1])[..., None]


def participation_ratio(weights: Float[Tensor, "*block k"]) -> Float[Tensor, "*block"]:
    """``(Σw)² / Σw²``: how many of the non-negative weights count, from 1 to k."""
    return weights.sum(-1).square() / weights.square().sum(-1)


def effective_rank(weights: Float[Tensor, "*block k"]) -> Float[Tensor, "*block"]:
    """``exp`` of the Shannon entropy of the normalised weights (Roy & Vetterli 2007)."""
    p = weights / weights.sum(-1, keepdim=True)
    return torch.special.entr(p).sum(-1).exp()
