"""What heads know of each other on text: kernels, canonical correlations, information.

All compare what heads write, in any basis; none sees where it is written. Nulls that count n are
for independent tokens. The tokens of one document are not, so the true spread is wider: the
interval over documents shows it.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from headmix import activity, nulls
from headmix.heads import Heads
from headmix.moments import Moments
from headmix.registry import NotApplicable, metric

_ANY_MAP = ("gauge", "rotation", "scale", "head_scale")


@activity.shared
def hsic(heads: Heads, moments: Moments) -> Float[Tensor, "head head"]:
    """The unbiased Hilbert–Schmidt independence criterion of linear kernels on o_h.

    From sums over tokens, with kernels K_i, K_j whose diagonals are left out. U-centring removes
    whatever is added to a kernel as ``f(s) + f(t)``: the pivot of x drops out exactly.
    """
    n = moments.n
    activity.covariance(heads, moments)  # refuses layers that write nothing
    if n < 4:
        raise NotApplicable(f"debiased HSIC needs at least four tokens, got {int(n)}")
    C, s = activity.scatter(heads, moments), activity.first(heads, moments)
    r, N = moments.square.sum(0), moments.square_pairs.sum(0)
    sT = torch.einsum("ik,ikj->ij", s, activity.weighted(heads, moments))
    ones = s.square().sum(1) - r  # 1ᵀK1
    both = torch.einsum("ik,ikjl,jl->ij", s, C, s) - sT - sT.T + N  # 1ᵀK_i K_j 1
    trace = C.square().sum((1, 3)) - N  # tr K_i K_j
    mixed = torch.outer(ones, ones) / ((n - 1) * (n - 2)) - 2 / (n - 2) * both
    return (trace + mixed) / (n * (n - 3))


def _kernel_alignment(H: Float[Tensor, "unit unit"]) -> Float[Tensor, "unit unit"]:
    own = H.diagonal()
    return H / torch.outer(own, own).sqrt()


def _cka_null(heads: Heads, moments: Moments) -> tuple[Tensor, Tensor]:
    n = moments.n
    sd = moments.first.new_tensor(2 / (n * (n - 3))).sqrt()
    return torch.zeros_like(sd), sd


@metric(
    title="Centred kernel alignment, debiased",
    formula="HSIC₁(o_i, o_j) / √(HSIC₁(o_i, o_i) · HSIC₁(o_j, o_j))",
    dims=("head", "head_b"),
    range=(-1, 1),
    null=_cka_null,
    null_text="independent heads: mean 0, sd √(2/(n(n−3)))" + activity.INDEPENDENT,
    invariant=_ANY_MAP,
    reference="Kornblith et al. 2019; debiased by Song et al. 2012; sd: Székely & Rizzo 2013",
)
def cka(heads: Heads, moments: Moments) -> Float[Tensor, "head head"]:
    """Whether two heads find the same tokens alike, from what they write.

    Debiased linear CKA of o_h: the cosine of the two heads' token-by-token similarities. 1 where
    one output is a rotation and rescaling of the other; around 0, also below, where they are
    independent. Strong directions count most, unlike in ``cca``. NaN for a head whose output does
    not vary.
    """
    return _kernel_alignment(hsic(heads, moments))


def _across_null(layers: Sequence[Heads], joint: Moments) -> tuple[Tensor, Tensor]:
    return _cka_null(Heads.side_by_side(layers), joint)


@metric(
    title="Centred kernel alignment across layers, debiased",
    formula="HSIC₁(o_i, o_j) / √(HSIC₁(o_i, o_i) · HSIC₁(o_j, o_j)), any two heads of the model",
    dims=("layer", "head", "layer_b", "head_b"),
    range=(-1, 1),
    null=_across_null,
    null_text="independent heads: mean 0, sd √(2/(n(n−3)))" + activity.INDEPENDENT,
    invariant=_ANY_MAP,
    reference="Kornblith et al. 2019; Song et al. 2012; between layers",
    default=False,
)
def cka_across_layers(
    layers: Sequence[Heads], joint: Moments
) -> Float[Tensor, "layer head layer head"]:
    """Whether any two heads of the model find the same tokens alike, in whichever layers.

    ``cka`` of all heads side by side. Its sums grow with the square of layers × concat, so it is
    computed only when asked for by name.

    Raises:
        NotApplicable: layers differ in heads or widths.
    """
    if len({h.n_heads for h in layers}) > 1:
        raise NotApplicable("the layers have different numbers of heads")
    L, H = len(layers), layers[0].n_heads
    return cka(Heads.side_by_side(layers), joint).reshape(L, H, L, H)


def _group_cka_null(heads: Heads, moments: Moments) -> tuple[Tensor, Tensor]:
    return _cka_null(heads, moments)


@metric(
    title="Centred kernel alignment of KV groups, debiased",
    formula="Σ_{i∈a, j∈b} HSIC₁(o_i, o_j), normalised",
    dims=("kv_head", "kv_head_b"),
    range=(-1, 1),
    null=_group_cka_null,
    null_text="independent groups: mean 0, sd √(2/(n(n−3)))" + activity.INDEPENDENT,
    invariant=("gauge", "rotation", "scale"),
    reference="Kornblith et al. 2019; Song et al. 2012; by KV group",
)
def group_cka(heads: Heads, moments: Moments) -> Float[Tensor, "kv_head kv_head"]:
    """Whether two KV groups find the same tokens alike.

    As ``cka``, a group being what its query heads write, side by side: its kernel is the sum of
    theirs.
    """
    groups = activity.kv_groups(heads)
    member = moments.first.new_zeros(len(groups), heads.n_heads)
    for g, heads_of_g in enumerate(groups):
        member[g, heads_of_g] = 1
    return _kernel_alignment(member @ hsic(heads, moments) @ member.T)


def _ranks(heads: Heads, moments: Moments) -> tuple[Float[Tensor, "head 1"], Tensor]:
    rank = activity.whitening(heads, moments).rank
    return rank[:, None], rank[None, :]


def _cca_null(heads: Heads, moments: Moments) -> tuple[Tensor, Tensor]:
    p, q = _ranks(heads, moments)
    mean, sd = nulls.haar_inner_product(p, p, q, q, round(moments.n) - 1)
    least = torch.minimum(p, q)
    return (mean / least).clamp(max=1), sd / least


@metric(
    title="Canonical correlation, mean square",
    formula="tr(Σ_ii⁻¹ Σ_ij Σ_jj⁻¹ Σ_ji) / min(d_i, d_j)",
    dims=("head", "head_b"),
    range=(0, 1),
    null=_cca_null,
    null_text="independent Gaussian heads: E Σρ² = d_i d_j/(n−1), exact sd" + activity.INDEPENDENT,
    invariant=_ANY_MAP,
    reference="Hotelling 1936; Raghu et al. 2017; Pillai's trace",
    within_position=True,
)
def cca(heads: Heads, moments: Moments) -> Float[Tensor, "head head"]:
    """How much of each direction of one head's output is a linear function of the other's.

    The mean squared canonical correlation: 1 where the outputs are linear images of each other.
    Weak directions count as much as strong ones. In-sample: its bias is its null mean. NaN for a
    head whose output does not vary.
    """
    R = activity.correlation(heads, moments)
    least = torch.minimum(*_ranks(heads, moments))
    return (R.square().sum((1, 3)) / least).clamp(max=1).where(least > 0, torch.nan)


def _wilks(
    p: Float[Tensor, "*pair"], q: Float[Tensor, "*pair"], n: float
) -> tuple[Float[Tensor, "*pair"], Float[Tensor, "*pair"]]:
    """Mean and sd of the information that n tokens show between independent Gaussians.

    ``−½ ln Λ`` with Wilks' Λ(p, q), a product of p independent Beta((n−q−i)/2, q/2): exact; about
    ``pq/2n``.
    """
    i = torch.arange(1, int(p.max()) + 1).to(p)
    below, above = ((n - q[..., None] - i) / 2).clamp(min=1e-3), (n - i).clamp(min=1) / 2
    counted = i <= p[..., None]
    mean = (torch.digamma(above) - torch.digamma(below)) * counted
    variance = (torch.polygamma(1, below) - torch.polygamma(1, above)) * counted
    return mean.sum(-1) / 2, variance.sum(-1).sqrt() / 2


def _log_determinant(
    M: Float[Tensor, "*block k k"], noise: Float[Tensor, "*block k"]
) -> Float[Tensor, "*block"]:
    """``ln |M|``; −∞ where what those before it leave of a direction is no more than rounding."""
    L, failed = torch.linalg.cholesky_ex(M)
    pivots = L.diagonal(dim1=-2, dim2=-1).square()
    known = (pivots > noise).logical_or(noise == 1).all(-1) & (failed == 0)
    return pivots.log().sum(-1).where(known, -torch.inf)


def _need_tokens(heads: Heads, moments: Moments, directions: Tensor) -> None:
    if moments.n - 1 <= directions:
        raise NotApplicable(
            f"{int(moments.n)} tokens always look dependent in {int(directions)} directions"
        )


def _gaussian_mi_null(heads: Heads, moments: Moments) -> tuple[Tensor, Tensor]:
    p, q = torch.broadcast_tensors(*_ranks(heads, moments))
    return _wilks(p, q, moments.n)


@metric(
    title="Mutual information of two heads",
    formula="−½ Σ ln(1 − ρ²) over canonical correlations ρ",
    dims=("head", "head_b"),
    range=(0, float("inf")),
    null=_gaussian_mi_null,
    null_text="independent Gaussian heads: about d_i d_j/2n, exact by digamma"
    + activity.INDEPENDENT,
    invariant=_ANY_MAP,
    reference="mutual information of Gaussians; Wilks 1932",
    unit="nats",
    within_position=True,
)
def gaussian_mi(heads: Heads, moments: Moments) -> Float[Tensor, "head head"]:
    """Mutual information of two heads' outputs as if Gaussian, in nats; ∞ with itself.

    ∞ also where a direction of one is an exact linear function of the other. In-sample: its bias
    is its null mean. NaN for a head whose output does not vary.
    """
    R, white = activity.correlation(heads, moments), activity.whitening(heads, moments)
    rank, (H, k) = white.rank, white.scale.shape
    _need_tokens(heads, moments, rank.topk(min(2, H)).values.sum())
    eye, out = torch.eye(k).to(R), torch.full((H, H), torch.inf).to(R)
    for i in range(H - 1):
        across = R[i, :, i + 1 :].permute(1, 0, 2)
        given_i = eye - across.mT @ across
        out[i, i + 1 :] = -_log_determinant(given_i, white.noise[i + 1 :]) / 2
    out = torch.minimum(out, out.T).clamp(min=0)
    return out.where(torch.minimum(rank[:, None], rank) > 0, torch.nan)


def _total_correlation_null(heads: Heads, moments: Moments) -> tuple[Tensor, Tensor]:
    rank = activity.whitening(heads, moments).rank
    # the chain rule: each head against all before it, independently
    mean, sd = _wilks(rank, rank.cumsum(0) - rank, moments.n)
    return mean.sum(), sd.square().sum().sqrt()


@metric(
    title="Total correlation of all heads",
    formula="½ (Σ_h ln|Σ_hh| − ln|Σ|)",
    dims=(),
    range=(0, float("inf")),
    null=_total_correlation_null,
    null_text="independent Gaussian heads: about (Dc² − Σd_h²)/4n, exact by digamma"
    + activity.INDEPENDENT,
    invariant=_ANY_MAP,
    reference="Watanabe 1960; Wilks 1932",
    unit="nats",
    within_position=True,
)
def total_correlation(heads: Heads, moments: Moments) -> Float[Tensor, ""]:
    """How much information heads share with one another, all together, as if Gaussian, in nats.

    0 where heads are independent, ∞ where a direction of one is an exact linear function of the
    others. In-sample: its bias is its null mean.
    """
    R, white = activity.correlation(heads, moments), activity.whitening(heads, moments)
    _need_tokens(heads, moments, white.rank.sum())
    size = white.scale.numel()
    return (-_log_determinant(R.reshape(size, size), white.noise.flatten()) / 2).clamp(min=0)
