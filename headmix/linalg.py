"""Bases, angles and entropies, under one tolerance policy.

The policy: a singular value counts as zero when it is at most ``max(rows, columns) · eps · σ_max``
(numpy's and LAPACK's convention). Half-precision input is refused, because there are no
half-precision decompositions worth trusting: convert first.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Bool, Complex, Float
from torch import Tensor


class LinalgError(ValueError):
    """A decomposition was asked of numbers that have none: NaN, infinity, or no convergence."""


@dataclass(frozen=True, eq=False)
class Basis:
    """Orthonormal rows spanning the row space of each block: ``W[b] = factor[b] @ Q[b]``.

    Directions beyond the rank are zero rows of Q and zero columns of the factor.
    """

    Q: Float[Tensor, "block k n"]
    factor: Float[Tensor, "block m k"]
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


@cache
def _workers(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "linalg", initializer=torch.set_num_threads, initargs=(1,))


# the threads of a pool do not live on in a forked process
os.register_at_fork(after_in_child=_workers.cache_clear)


def _spread(function: Callable[[Tensor], Any], A: Float[Tensor, "*block m n"]) -> Any:
    """LAPACK on many narrow blocks, some on each core.

    Threads inside one narrow block would wait for one another longer than they compute.
    """
    threads = torch.get_num_threads()
    narrow = A.ndim > 2 and min(A.shape[-2:]) <= 512 and A.device.type == "cpu"
    differentiated = A.requires_grad and torch.is_grad_enabled()
    if not narrow or differentiated or min(threads, len(A)) < 2:
        return function(A)
    parts = list(_workers(threads).map(function, A.detach().chunk(threads)))
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    return tuple(torch.cat(same) for same in zip(*parts, strict=True))


def _decompose(function, A):
    """Run a LAPACK routine; retry once in float64 on the CPU before giving up by name."""
    if A.dtype not in (torch.float32, torch.float64):
        raise LinalgError(f"decompositions need float32 or float64, got {A.dtype}; convert first")
    if not all_finite(A):
        raise LinalgError(f"a matrix of shape {tuple(A.shape)} holds NaN or infinity")
    try:
        return _spread(function, A)
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
        return Basis(Q=Q.mT, factor=R.mT, rank=Q.new_full(Q.shape[:1], Q.shape[2]))
    U, S, _ = svd(R)
    kept = _nonzero(S, W)
    if not kept.any():
        raise LinalgError(f"all {len(W)} blocks of shape {tuple(W.shape[1:])} are zero")
    U = U * kept[:, None, :]
    return Basis(Q=(Q @ U).mT, factor=R.mT @ U, rank=kept.sum(-1).to(W.dtype))


def _surely_full_rank(R: Float[Tensor, "block k n"], W: Tensor) -> bool:
    """Whether ``σ_min ≥ 1/‖R⁻¹‖_F`` alone puts every block above the tolerance."""
    k, n = R.shape[-2:]
    if k != n or not R.diagonal(dim1=-2, dim2=-1).all():
        return False
    eye = torch.eye(k, dtype=R.dtype, device=R.device)
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
