"""How the outputs of heads add up in the residual stream: shares, interference, cancellation."""

import torch
from jaxtyping import Float
from torch import Tensor

from headmix import activity
from headmix.heads import Heads
from headmix.moments import Moments
from headmix.registry import NotApplicable, metric

_ROTATED = "W_O of each head turned by an independent Haar rotation of the stream"


def _upper(pairs: Float[Tensor, "head head"]) -> Float[Tensor, ""]:
    """The sum over pairs of different heads, each once."""
    return pairs.triu(1).sum()


@metric(
    title="Share of the output's variance",
    formula="tr Cov(o_h, Σo) / tr Cov(Σo)",
    dims=("head",),
    range=(float("-inf"), float("inf")),
    null=lambda heads, moments: (moments.first.new_tensor(1 / heads.n_heads), None),
    null_text="heads that contribute alike: 1/H",
    invariant=("gauge", "rotation", "scale"),
    reference="covariance decomposition of a sum; equals the Shapley value of variance",
    within_position=True,
)
def variance_share(heads: Heads, moments: Moments) -> Float[Tensor, "head"]:
    """How much of the variance of the attention output is due to each head; sums to 1.

    ``tr Cov(o_h, Σo) / tr Cov(Σo)``, that is the head's own variance and half of every covariance
    it takes part in. Negative for a head that mostly cancels others. Variance that all heads
    cancel together is in no share: see ``interference_ratio``.

    >>> heads = Heads(torch.tensor([2.0, -1.0]).reshape(2, 1, 1))
    >>> moments = Moments.zeros(heads.W_O, folds=1)
    >>> moments.update(torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), fold=0)
    >>> variance_share(heads, moments)
    tensor([ 2., -1.], dtype=torch.float64)
    """
    S = activity.head_covariances(heads, moments)
    return S.sum(1) / S.sum()


def _interference_ratio_null(heads: Heads, moments: Moments) -> tuple[Tensor, Tensor]:
    own = activity.head_covariances(heads, moments).trace()
    # tr(C R) has variance ‖C‖²_F/D for Haar R, independent over pairs of heads
    variance = _upper(activity.cross_norms(heads, moments).square()) * 4 / heads.d_model
    return torch.ones_like(own), variance.sqrt() / own


@metric(
    title="Interference",
    formula="tr Cov(Σ_h o_h) / Σ_h tr Cov(o_h)",
    dims=(),
    range=(0, "H"),
    null=_interference_ratio_null,
    null_text=_ROTATED + ": mean 1, exact sd √(Σ_{i<j} 4‖Cov(o_i, o_j)‖²_F/D) / Σ_h tr Cov(o_h)",
    invariant=("gauge", "rotation", "scale"),
    reference="variance of a sum over the sum of variances",
    within_position=True,
)
def interference_ratio(heads: Heads, moments: Moments) -> Float[Tensor, ""]:
    """Whether heads add to each other in the residual stream (> 1) or cancel (< 1).

    The variance of the attention output over the sum of its heads' variances: 1 where heads are
    uncorrelated or write orthogonally, H where all write the same, 0 where they cancel.

    >>> heads = Heads(torch.ones(2, 1, 3))
    >>> moments = Moments.zeros(heads.W_O, folds=1)
    >>> moments.update(torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), fold=0)
    >>> round(float(interference_ratio(heads, moments)), 9)
    2.0
    """
    S = activity.head_covariances(heads, moments)
    return S.sum() / S.trace()


def _pair_norm(heads: Heads, moments: Moments) -> Float[Tensor, "head head"]:
    own = activity.head_covariances(heads, moments).diagonal()
    return torch.outer(own, own).sqrt()


def _pair_interference_null(heads: Heads, moments: Moments) -> tuple[Tensor, Tensor]:
    norm = _pair_norm(heads, moments)
    sd = activity.cross_norms(heads, moments) / heads.d_model**0.5 / norm
    return torch.zeros_like(norm), sd


@metric(
    title="Interference of two heads",
    formula="tr Cov(o_i, o_j) / √(tr Cov(o_i) · tr Cov(o_j))",
    dims=("head", "head_b"),
    range=(-1, 1),
    null=_pair_interference_null,
    null_text=_ROTATED + ": mean 0, exact sd ‖Cov(o_i, o_j)‖_F / √D over the same norm",
    invariant=("gauge", "rotation", "scale", "head_scale"),
    reference="correlation of two vector-valued outputs",
    within_position=True,
)
def pair_interference(heads: Heads, moments: Moments) -> Float[Tensor, "head head"]:
    """Whether two heads push the residual stream the same way (> 0) or against each other (< 0).

    The correlation of their outputs as vectors. Zero also for heads that are fully redundant but
    write into orthogonal directions: redundancy is what ``cka`` and ``cca`` see. NaN for a head
    whose output does not vary.
    """
    return activity.head_covariances(heads, moments) / _pair_norm(heads, moments)


def _mean_norm(heads: Heads, moments: Moments) -> Float[Tensor, "head"]:
    activity.frames(heads, moments)
    if not moments.n:
        raise NotApplicable("the moments hold no tokens")
    activity.require_finite(moments)
    if not moments.norm.any():
        raise NotApplicable("the norm of what each head writes is zero")
    return moments.norm.sum(0) / moments.n


def _head_norm_null(heads: Heads, moments: Moments) -> tuple[Tensor, None]:
    norm = _mean_norm(heads, moments)
    return norm.mean().expand_as(norm), None


@metric(
    title="Mean norm of a head's output",
    formula="E‖o_h‖",
    dims=("head",),
    range=(0, float("inf")),
    null=_head_norm_null,
    null_text="heads that write alike: the mean over the layer's heads",
    invariant=("gauge", "rotation"),
    reference="norm-based analysis: Kobayashi et al. 2020",
)
def head_norm(heads: Heads, moments: Moments) -> Float[Tensor, "head"]:
    """How much a head writes, a token: the mean Euclidean norm of ``o_h = z_h W_O[h]``.

    In units of the residual stream. Not centred, so it holds what the value bias contributes
    (``b_V W_O``, the same for every token).
    """
    return _mean_norm(heads, moments)


def _norm_moments(
    heads: Heads, moments: Moments
) -> tuple[Float[Tensor, "head"], Float[Tensor, "head head"], Float[Tensor, "head head"]]:
    """``E‖o_i‖²``, ``E ‖o_i‖²‖o_j‖²`` and ``‖E o_iᵀo_j‖²_F``: about zero, not about the pivot."""
    n, p = moments.n, activity.in_x(heads, moments, moments.pivot)
    s, C = activity.first(heads, moments) / n, activity.scatter(heads, moments) / n
    r, N = moments.square.sum(0) / n, moments.square_pairs.sum(0) / n
    T = activity.weighted(heads, moments) / n
    # ‖x + p‖² = ‖x‖² + 2 p·x + ‖p‖²
    ps, pp = 2 * (p * s).sum(1), p.square().sum(1)
    pT = 2 * torch.einsum("ik,ikj->ij", p, T) + torch.outer(pp, r + ps)
    pCp = 4 * torch.einsum("ik,ikjl,jl->ij", p, C, p)
    outer = torch.einsum("ik,jl->ikjl", s, p)
    second = C + outer + torch.einsum("ikjl->jlik", outer) + torch.einsum("ik,jl->ikjl", p, p)
    fourth = N + pT + pT.T + pCp + torch.outer(pp, pp)
    return r + ps + pp, fourth, second.square().sum((1, 3))


def _cancellation_ratio_null(heads: Heads, moments: Moments) -> tuple[Tensor, Tensor]:
    squares, fourth, cross = _norm_moments(heads, moments)
    total, each = squares.sum(), _mean_norm(heads, moments).sum()
    # a token's ‖Σo‖²: its heads' squares, and products of variance 4 ‖o_i‖²‖o_j‖²/D a pair
    spread = fourth.sum() - total.square() + _upper(fourth) * 4 / heads.d_model
    root = total.sqrt() * (1 - spread / total.square() / 8)  # E√X to second order
    sd = (_upper(cross) / heads.d_model / total).sqrt()
    return (root / each).clamp(0, 1), sd / each


@metric(
    title="Length left when heads are added",
    formula="E‖Σ_h o_h‖ / E Σ_h ‖o_h‖",
    dims=(),
    range=(0, 1),
    null=_cancellation_ratio_null,
    null_text=_ROTATED
    + ": to second order; near √(Σ_h E‖o_h‖²) / Σ_h E‖o_h‖, 1/√H for heads alike",
    invariant=("gauge", "rotation", "scale"),
    reference="triangle inequality; Kobayashi et al. 2020 on cancelling vectors",
)
def cancellation_ratio(heads: Heads, moments: Moments) -> Float[Tensor, ""]:
    """How much of what heads write is left after they are added: 1 all of it, 0 they cancel.

    ``E‖Σ_h o_h‖ / E Σ_h ‖o_h‖`` over tokens. Not centred: what all tokens share counts too.
    """
    each = _mean_norm(heads, moments).sum()
    if not moments.joint_norm.any():
        raise NotApplicable("the norm of the sum of heads was not kept, or is zero throughout")
    return moments.joint_norm.sum() / moments.n / each
