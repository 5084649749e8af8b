"""What heads know of each other on text: kernels, canonical correlations, prediction, information.

All compare what heads write, in any basis; none sees where it is written. Nulls that count n are
for independent tokens. The tokens of one document are not, so the true spread is wider: the
interval over documents shows it.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headmix import activity, nulls
from headmix.heads import Heads
from headmix.moments import Moments
from headmix.registry import NotApplicable, metric

_ANY_MAP = ("gauge", "rotation", "scale", "head_scale")
_INDEPENDENT = " for independent tokens (those of one document are not)"


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
    null_text="independent heads: mean 0, sd √(2/(n(n−3)))" + _INDEPENDENT,
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


def _groups(heads: Heads) -> list[list[int]]:
    """The query heads of each KV head."""
    if heads.n_kv_heads == heads.n_heads:
        raise NotApplicable("each query head has its own KV head: groups are heads")
    if heads.n_kv_heads == 1:
        raise NotApplicable("all query heads share one KV head, so there is no other group")
    owner = list(heads.kv_of_head or ())
    return [[h for h, g in enumerate(owner) if g == group] for group in range(heads.n_kv_heads)]


def _group_cka_null(heads: Heads, moments: Moments) -> tuple[Tensor, Tensor]:
    return _cka_null(heads, moments)


@metric(
    title="Centred kernel alignment of KV groups, debiased",
    formula="Σ_{i∈a, j∈b} HSIC₁(o_i, o_j), normalised",
    dims=("kv_head", "kv_head_b"),
    range=(-1, 1),
    null=_group_cka_null,
    null_text="independent groups: mean 0, sd √(2/(n(n−3)))" + _INDEPENDENT,
    invariant=("gauge", "rotation", "scale"),
    reference="Kornblith et al. 2019; Song et al. 2012; by KV group",
)
def group_cka(heads: Heads, moments: Moments) -> Float[Tensor, "kv_head kv_head"]:
    """Whether two KV groups find the same tokens alike.

    As ``cka``, a group being what its query heads write, side by side: its kernel is the sum of
    theirs.
    """
    groups = _groups(heads)
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
    null_text="independent Gaussian heads: E Σρ² = d_i d_j/(n−1), exact sd" + _INDEPENDENT,
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


def _one_head_each(heads: Heads) -> list[list[int]]:
    if heads.n_heads == 1:
        raise NotApplicable("a single head has no others to predict it")
    return [[h] for h in range(heads.n_heads)]


def _rows(white: activity.Whitening, unit: Sequence[int]) -> Int[Tensor, "row"]:
    """Where the directions of a unit's heads are among those of all heads."""
    H, k = white.scale.shape
    return torch.arange(H * k, device=white.scale.device).reshape(H, k)[list(unit)].flatten()


def _predictors(
    heads: Heads, moments: Moments, units: Sequence[Sequence[int]]
) -> Float[Tensor, "unit"]:
    """How many directions of the other heads predict each unit.

    Raises:
        NotApplicable: fewer than two folds hold tokens, or a fold leaves too few to fit.
    """
    rank = activity.whitening(heads, moments).rank
    p = torch.stack([rank.sum() - rank[list(unit)].sum() for unit in units])
    filled = moments.count[moments.count > 0]
    if len(filled) < 2:
        raise NotApplicable(
            f"held-out R² needs tokens in at least two folds of documents, got {len(filled)}"
        )
    fewest = int(moments.n - filled.max())
    if fewest <= p.max() + 2:
        raise NotApplicable(
            f"{fewest} tokens outside one fold are too few to fit {int(p.max())} predictors"
        )
    return p


def _held_out_r2(
    heads: Heads, moments: Moments, units: Sequence[Sequence[int]]
) -> Float[Tensor, "unit"]:
    _predictors(heads, moments, units)
    known = _all_held_out_r2(heads, moments)
    return torch.stack([known[tuple(unit)] for unit in units])


@activity.shared
def _all_held_out_r2(heads: Heads, moments: Moments) -> dict[tuple[int, ...], Tensor]:
    """Held-out R² of every head and KV group from all other heads.

    Fitted without a fold and tested on it, for every fold. With P the inverse of the training
    covariance, what is left of unit g is ``P_gg⁻¹ P_g: (y − mean)``, the mean being the training
    mean. The ridge is as large as rounding, so that duplicated heads have a solution.
    """
    white = activity.whitening(heads, moments)
    A, Q = activity.frames(heads, moments)
    B, F = A @ white.map, white.writes(Q)
    members = {(h,) for h in range(heads.n_heads)}
    members |= {tuple(torch.where(heads.kv_index == g)[0].tolist()) for g in heads.kv_of_head or ()}
    units = {unit: _rows(white, unit) for unit in members}
    grams = {unit: F[rows] @ F[rows].T for unit, rows in units.items()}
    error, total = dict.fromkeys(units, F.new_zeros(())), dict.fromkeys(units, F.new_zeros(()))
    whole = _second_moments(moments, B)
    for fold in moments.count.nonzero().flatten().tolist():
        train, test = _train_and_test(moments, whole, fold, B)
        P = _inverse(train + torch.diag(white.noise.flatten()))
        P_test = P @ test
        for unit, rows in units.items():
            P_gg = P[rows][:, rows]
            half = torch.linalg.solve(P_gg, P_test[rows] @ P[rows].T)
            left = torch.linalg.solve(P_gg, half.T)  # scatter of what is left of the unit
            error[unit] = error[unit] + (left * grams[unit]).sum()
            total[unit] = total[unit] + (test[rows][:, rows] * grams[unit]).sum()
    return {unit: 1 - error[unit] / total[unit] for unit in units}


def _second_moments(
    moments: Moments, B: Float[Tensor, "head d k"]
) -> tuple[Float[Tensor, "y y"], Float[Tensor, "y"]]:
    """Σ y yᵀ and Σ y of ``y = u B``."""
    first = torch.einsum("hd,hdk->hk", moments.first.sum(0).unflatten(0, B.shape[:2]), B).flatten()
    return activity.sandwich(moments.scatter, B).reshape(len(first), len(first)), first


def _train_and_test(
    moments: Moments, whole: tuple[Tensor, Tensor], fold: int, B: Float[Tensor, "head d k"]
) -> tuple[Float[Tensor, "y y"], Float[Tensor, "y y"]]:
    """Covariance without a fold, and the fold's scatter, both about the mean without the fold."""
    second, first = _second_moments(moments.select([fold]), B)
    n_test = moments.count[fold]
    n_train = moments.n - n_test
    mean = (whole[1] - first) / n_train
    outer, cross = torch.outer(mean, mean), torch.outer(first, mean)
    train = (whole[0] - second) / n_train - outer
    return train, second - cross - cross.T + n_test * outer


def _inverse(M: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    L, failed = torch.linalg.cholesky_ex(M)
    return torch.linalg.pinv(M, hermitian=True) if failed else torch.cholesky_inverse(L)


def _held_out_null(
    heads: Heads, moments: Moments, units: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """Held-out R² of predictors that are pure noise.

    Fitting p of them costs ``p/(n_train − p − 2)``, exactly for Gaussian data. The variance,
    to first order in p/n, counts products of residuals of two tokens: those of different folds
    come in as prediction and as test, those of one fold as prediction only.
    """
    p = _predictors(heads, moments, units)
    count = moments.count[moments.count > 0][:, None]
    mean = -(count * p / (moments.n - count - p - 2)).sum(0) / moments.n
    K = len(count)
    c = K / (K - 1)
    dimensions = torch.stack([_participation(heads, moments, unit) for unit in units])
    variance = 2 * p / dimensions * (c**3 + c**2 / K) / moments.n**2
    return mean, variance.sqrt()


def _participation(heads: Heads, moments: Moments, unit: Sequence[int]) -> Float[Tensor, ""]:
    """The participation ratio of the covariance of what a unit's heads write together."""
    white = activity.whitening(heads, moments)
    rows = _rows(white, unit)
    F = white.writes(activity.frames(heads, moments)[1])[rows]
    R = activity.correlation(heads, moments).flatten(2).flatten(0, 1)
    C = R[rows][:, rows] @ F @ F.T
    return C.trace().square() / (C * C.T).sum()


_HELD_OUT_NULL = (
    "predictors of pure noise: mean −p/(n_train − p − 2), exact for Gaussian data, sd to first "
    "order in p/n; p directions of other heads" + _INDEPENDENT
)


@metric(
    title="Held-out R² from the other heads",
    formula="1 − Σ‖o_h − ô_h‖² / Σ‖o_h − ō_h‖², ô_h least squares on the others, K-fold",
    dims=("head",),
    range=(float("-inf"), 1),
    null=lambda heads, moments: _held_out_null(heads, moments, _one_head_each(heads)),
    null_text=_HELD_OUT_NULL,
    invariant=_ANY_MAP,
    reference="multivariate least squares; Schur complement of Σ; K-fold over documents",
    within_position=True,
)
def loo_r2(heads: Heads, moments: Moments) -> Float[Tensor, "head"]:
    """How well the other heads together predict what a head writes, on documents not fitted on.

    1 − R² is the relative error that deleting the head leaves at the attention output when the
    others' blocks of W_O may be refitted. Negative where fitting does worse than the mean. NaN for
    a head whose output does not vary.

    Raises:
        NotApplicable: one head, one fold, or too few tokens to fit.
    """
    return _held_out_r2(heads, moments, _one_head_each(heads))


@metric(
    title="Held-out R² of a KV group from the other groups",
    formula="1 − Σ‖o_g − ô_g‖² / Σ‖o_g − ō_g‖², o_g = Σ_{h∈g} o_h, K-fold",
    dims=("kv_head",),
    range=(float("-inf"), 1),
    null=lambda heads, moments: _held_out_null(heads, moments, _groups(heads)),
    null_text=_HELD_OUT_NULL,
    invariant=("gauge", "rotation", "scale"),
    reference="multivariate least squares; K-fold over documents",
    within_position=True,
)
def group_loo_r2(heads: Heads, moments: Moments) -> Float[Tensor, "kv_head"]:
    """How well the other KV groups predict what a group's query heads write together.

    Only a whole group frees its keys and values, so this is the number to ask before one goes.

    Raises:
        NotApplicable: groups are heads, there is one group or fold, or too few tokens to fit.
    """
    return _held_out_r2(heads, moments, _groups(heads))


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
    null_text="independent Gaussian heads: about d_i d_j/2n, exact by digamma" + _INDEPENDENT,
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
    null_text="independent Gaussian heads: about (Dc² − Σd_h²)/4n, exact by digamma" + _INDEPENDENT,
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
