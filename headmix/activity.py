"""What a layer's heads do on text, derived once from its weights and Moments for all metrics.

With the QR factorisation ``W_O[h] = A_h Q_h`` (orthonormal rows Q_h), ``x_h = z_h A_h`` is what
head h writes, ``o_h = x_h Q_h``, in d_head coordinates: an isometric copy of o_h, the same in every
gauge up to a rotation. Metrics compare heads on x_h, never on z_h.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor

from headmix import linalg
from headmix.heads import Heads, NotApplicable
from headmix.moments import Moments

#: What a null that counts tokens must add.
INDEPENDENT = " for independent tokens (those of one document are not)"

T = TypeVar("T")


def shared(function: Callable[[Heads, Moments], T]) -> Callable[[Heads, Moments], T]:
    """Compute a function of (heads, moments) once for all metrics, for as long as both live.

    The result is kept with the moments, whose ``update`` forgets all that was derived from them.
    """

    @wraps(function)
    def cached(heads: Heads, moments: Moments) -> T:
        derived = moments.__dict__.setdefault("shared", WeakKeyDictionary())
        mine = derived.setdefault(heads, {})
        if function not in mine:
            mine[function] = function(heads, moments)
        return mine[function]

    return cached


def sandwich(
    M: Float[Tensor, "concat concat"], B: Float[Tensor, "head d k"]
) -> Float[Tensor, "head k head k"]:
    """``BᵀMB`` for block-diagonal B: second moments in other coordinates of each head."""
    H, d, k = B.shape
    right = M.reshape(H * d, H, d).transpose(0, 1) @ B
    left = B.mT @ right.reshape(H, H, d, k).permute(1, 2, 0, 3).reshape(H, d, H * k)
    return left.reshape(H, k, H, k)


def diagonal_blocks(M: Float[Tensor, "head k head k"]) -> Float[Tensor, "head k k"]:
    return M.diagonal(dim1=0, dim2=2).permute(2, 0, 1)


@shared
def frames(
    heads: Heads, moments: Moments
) -> tuple[Float[Tensor, "head d_head k"], Float[Tensor, "head k d_model"]]:
    """A_h and Q_h of ``W_O[h] = A_h Q_h``; k = min(d_head, d_model).

    Raises:
        ValueError: the moments are those of another layer.
    """
    if (heads.n_heads, heads.d_head) != (moments.n_heads, moments.d_head):
        raise ValueError(
            f"{heads.layer}: the moments are of {moments.n_heads} heads of width "
            f"{moments.d_head}, the weights of {heads.n_heads} of width {heads.d_head}"
        )
    Q, R = torch.linalg.qr(heads.W_O.to(moments.first).mT)
    return R.mT, Q.mT


@shared
def scatter(heads: Heads, moments: Moments) -> Float[Tensor, "head k head k"]:
    """Σ x xᵀ over tokens, about the pivot."""
    return sandwich(moments.scatter, frames(heads, moments)[0])


def in_x(heads: Heads, moments: Moments, z: Float[Tensor, "concat"]) -> Float[Tensor, "head k"]:
    """One point of z in each head's coordinates."""
    A, _ = frames(heads, moments)
    return torch.einsum("hd,hdk->hk", z.unflatten(0, A.shape[:2]), A)


@shared
def first(heads: Heads, moments: Moments) -> Float[Tensor, "head k"]:
    """Σ x over tokens, about the pivot."""
    return in_x(heads, moments, moments.first.sum(0))


@shared
def weighted(heads: Heads, moments: Moments) -> Float[Tensor, "head k head"]:
    """``T_ij = Σ x_i ‖x_j‖²`` over tokens, about the pivot."""
    A, _ = frames(heads, moments)
    return A.mT @ moments.weighted.sum(0).unflatten(0, A.shape[:2])


def require_finite(moments: Moments) -> None:
    """Raises NotApplicable where a layer's activations held NaN or infinity."""
    if not moments.square.isfinite().all():
        raise NotApplicable("the activations hold NaN or infinity")


@shared
def covariance(heads: Heads, moments: Moments) -> Float[Tensor, "head k head k"]:
    """Cov(x): what the heads write, laid side by side.

    Raises:
        NotApplicable: fewer than two tokens, activations that are not finite, or no head's output
            varies.
    """
    if moments.n < 2:
        raise NotApplicable(f"a covariance needs at least two tokens, got {int(moments.n)}")
    require_finite(moments)
    mean = first(heads, moments) / moments.n
    K = scatter(heads, moments) / moments.n - torch.einsum("ik,jl->ikjl", mean, mean)
    if not diagonal_blocks(K).any():
        raise NotApplicable("the variance of what each head writes is zero")
    return K


@shared
def head_covariances(heads: Heads, moments: Moments) -> Float[Tensor, "head head"]:
    """``tr Cov(o_i, o_j)``: how much the outputs of two heads add to or cancel each other."""
    _, Q = frames(heads, moments)
    H, k, _ = Q.shape
    flat = Q.flatten(0, 1)
    gram = (flat @ flat.T).reshape(H, k, H, k)
    return (covariance(heads, moments) * gram).sum((1, 3))


@shared
def cross_norms(heads: Heads, moments: Moments) -> Float[Tensor, "head head"]:
    """``‖Cov(o_i, o_j)‖_F``."""
    return covariance(heads, moments).square().sum((1, 3)).sqrt()


@dataclass(frozen=True, eq=False)
class Whitening:
    """Coordinates in which each head's own covariance is the identity, ``y_h = x_h U_h λ_h^-½``.

    A direction that varies no more than rounding (``linalg.tolerance``) is left out: its column is
    zero. Everything computed from y is the same for any invertible map of a head's output.

    Attributes:
        U: ``[head, k, k]``, eigenvectors of Cov(x_h), in columns.
        variance: ``[head, k]``, eigenvalues λ of Cov(o_h), descending.
        scale: ``[head, k]``, λ^-½, zero for what is left out.
        noise: ``[head, k]``, how much of a direction's variance may be rounding; 1 for what is
            left out.
    """

    U: Float[Tensor, "head k k"]
    variance: Float[Tensor, "head k"]
    scale: Float[Tensor, "head k"]
    noise: Float[Tensor, "head k"]

    @property
    def rank(self) -> Float[Tensor, "head"]:
        return (self.scale > 0).sum(1).to(self.scale)

    @property
    def map(self) -> Float[Tensor, "head k k"]:
        """x → y."""
        return self.U * self.scale[:, None, :]

    def writes(self, Q: Float[Tensor, "head k d_model"]) -> Float[Tensor, "concat d_model"]:
        """y → o: ``o_h − E o_h = y_h F_h``, F stacked over heads."""
        root = torch.where(self.scale > 0, self.variance.sqrt(), 0)
        return (root[..., None] * self.U.mT @ Q).flatten(0, 1)


@shared
def whitening(heads: Heads, moments: Moments) -> Whitening:
    """Each head's own coordinates. Raises NotApplicable as ``covariance`` does."""
    K = covariance(heads, moments)
    U, variance, _ = linalg.svd(diagonal_blocks(K))
    concat = heads.n_heads * heads.d_head
    rounding = linalg.tolerance(variance, concat, concat)[:, None]
    kept = variance > rounding
    return Whitening(
        U=U,
        variance=variance,
        scale=torch.where(kept, variance.rsqrt(), 0),
        noise=torch.where(kept, rounding / variance, 1),
    )


@shared
def correlation(heads: Heads, moments: Moments) -> Float[Tensor, "head k head k"]:
    """Cov(y): the identity within heads, canonical correlations' matrix between any two.

    Directions left out have ones on the diagonal: they are independent of everything.
    """
    white = whitening(heads, moments)
    H, k = white.scale.shape
    R = sandwich(covariance(heads, moments).reshape(H * k, H * k), white.map)
    left_out = torch.diag((white.scale == 0).to(R).flatten())
    return R + left_out.reshape(H, k, H, k)


def kv_groups(heads: Heads) -> list[list[int]]:
    """The query heads of each KV head.

    Raises:
        NotApplicable: each query head has its own, or all share one.
    """
    if heads.n_kv_heads == heads.n_heads:
        raise NotApplicable("each query head has its own KV head: groups are heads")
    if heads.n_kv_heads == 1:
        raise NotApplicable("all query heads share one KV head, so there is no other group")
    owner = list(heads.kv_of_head or ())
    return [[h for h, g in enumerate(owner) if g == group] for group in range(heads.n_kv_heads)]
