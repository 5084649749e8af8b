"""Where heads write: overlap of the subspaces that the blocks of W_O span."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from headmix import linalg, nulls
from headmix.heads import Heads
from headmix.registry import NotApplicable, metric

_SUBSPACE = ("gauge", "rotation", "scale", "head_scale")


def _squared_overlap(basis: linalg.Basis) -> Float[Tensor, "block block"]:
    """tr(P_i P_j): the sum of squared cosines of the principal angles."""
    B, k, _ = basis.Q.shape
    flat = basis.Q.flatten(0, 1)
    out = flat.new_zeros(B, B)
    step = max(1, B // 8)  # of a symmetric matrix, one half and a sixteenth
    for i in range(0, B, step):
        rows = flat[i * k : (i + step) * k] @ flat[i * k :].T
        out[i : i + step, i:] = rows.square_().reshape(-1, k, B - i, k).sum((1, 3))
    return out.triu() + out.triu(1).T


def _haar_overlap(basis: linalg.Basis) -> tuple[Tensor, Tensor]:
    """Moments of tr(P_i P_j) for independent Haar-random subspaces of the same ranks."""
    r_i, r_j = basis.rank[:, None], basis.rank[None, :]
    return nulls.haar_inner_product(r_i, r_i, r_j, r_j, basis.Q.shape[-1])


def _pair_norm(basis: linalg.Basis) -> Float[Tensor, "block block"]:
    return (basis.rank[:, None] * basis.rank[None, :]).sqrt()


def _off_diagonal_mean(A: Float[Tensor, "n n"]) -> Float[Tensor, ""]:
    """The mean over pairs of different heads that write anything."""
    others = ~torch.eye(len(A), dtype=torch.bool, device=A.device)
    return A[others].nanmean()


def _need_pairs(heads: Heads) -> None:
    if heads.n_heads == 1:
        raise NotApplicable("a single head has no pairs")


def _projection_kernel_null(heads: Heads) -> tuple[Tensor, Tensor]:
    mean, sd = _haar_overlap(heads.write_basis)
    norm = _pair_norm(heads.write_basis)
    return mean / norm, sd / norm


@metric(
    title="Write-subspace overlap",
    formula="tr(P_i P_j) / √(d_i d_j)",
    dims=("head", "head_b"),
    range=(0, 1),
    null=_projection_kernel_null,
    null_text="Haar-random subspaces of the same ranks: mean √(d_i d_j)/D, exact variance",
    invariant=_SUBSPACE,
    reference="Yamagiwa 2026; mean squared cosine of the principal angles",
)
def projection_kernel(heads: Heads) -> Float[Tensor, "head head"]:
    """How far two heads write into the same directions of the residual stream.

    ``tr(P_i P_j) / √(d_i d_j)``, with P_h the orthogonal projector onto the row space of
    ``W_O[h]``: the mean squared cosine of the principal angles. 0 is orthogonal, 1 the same
    subspace. Works for rank-deficient heads, whose own rank then takes the place of d_head; a head
    whose W_O is zero has no subspace, and gets NaN.

    >>> import torch
    >>> blocks = torch.eye(6).reshape(3, 2, 6)
    >>> projection_kernel(Heads(blocks))
    tensor([[1., 0., 0.],
            [0., 1., 0.],
            [0., 0., 1.]])
    """
    return _squared_overlap(heads.write_basis) / _pair_norm(heads.write_basis)


def _mean_overlap_null(heads: Heads) -> tuple[Tensor, Tensor]:
    _need_pairs(heads)
    mean, sd = _projection_kernel_null(heads)
    # overlaps of different pairs are uncorrelated under Haar, also where they share a head
    writing = (heads.write_basis.rank > 0).sum()
    pairs = writing * (writing - 1) / 2
    return _off_diagonal_mean(mean), (_off_diagonal_mean(sd.square()) / pairs).sqrt()


@metric(
    title="Mean overlap between heads",
    formula="mean over i ≠ j of tr(P_i P_j) / √(d_i d_j)",
    dims=(),
    range=(0, 1),
    null=_mean_overlap_null,
    null_text="Haar-random subspaces: mean d/D, exact variance of the mean over pairs",
    invariant=_SUBSPACE,
    reference="Yamagiwa 2026",
)
def mean_overlap(heads: Heads) -> Float[Tensor, ""]:
    """Mean write-subspace overlap over all pairs of different heads of the layer.

    Compare it with ``welch_floor``, which no arrangement of heads can go below.

    >>> import torch
    >>> mean_overlap(Heads(torch.eye(6).reshape(3, 2, 6)))
    tensor(0.)
    """
    _need_pairs(heads)
    return _off_diagonal_mean(projection_kernel(heads))


@metric(
    title="Welch floor of the mean overlap",
    formula="max(0, (Hd/D − 1)/(H − 1))",
    dims=(),
    range=(0, 1),
    null_text="itself a bound: mean_overlap cannot be smaller; equality is a tight frame",
    invariant=_SUBSPACE,
    reference="Welch 1974",
)
def welch_floor(heads: Heads) -> Float[Tensor, ""]:
    """The smallest mean overlap that heads of these ranks can have in D dimensions.

    Above zero only where the concatenation is wider than the stream (Dc > D): overlap is then
    forced. From ``‖Σ_h P_h/√d_h‖²_F ≥ (Σ_h √d_h)²/D``; for equal ranks d this is
    ``max(0, (Hd/D − 1)/(H − 1))``.

    >>> import torch
    >>> welch_floor(Heads(torch.randn(4, 3, 6)))
    tensor(0.3333)
    """
    _need_pairs(heads)
    rank = heads.write_basis.rank
    rank = rank[rank > 0]
    H = len(rank)
    floor = rank.sqrt().sum().square() / heads.d_model - H
    return floor.clamp(min=0) / max(H * (H - 1), 1)


def _principal_angles_null(
    heads: Heads, pairs: Sequence[tuple[int, int]] | None = None
) -> tuple[Tensor, Tensor]:
    d, D = heads.d_head, heads.d_model
    stream = nulls.generator()
    draws = [torch.randn(D, d, generator=stream, dtype=torch.float64) for _ in range(32)]
    # one of two Haar subspaces may be held fixed: the first d coordinates
    cosines = [linalg.singular_values(torch.linalg.qr(g).Q[:d]) for g in draws]
    angles = torch.stack(cosines).clamp(0, 1).acos().to(heads.W_O)
    return angles.mean(0), angles.std(0)


@metric(
    title="Principal angles",
    formula="arccos of the singular values of Q_i Q_jᵀ",
    dims=("head", "head_b", "angle"),
    range=(0, "π/2"),
    null=_principal_angles_null,
    null_text="32 simulated pairs of Haar-random subspaces of dimension d, angle by angle",
    invariant=_SUBSPACE,
    reference="Björck & Golub 1973",
    unit="rad",
    default=False,
)
def principal_angles(
    heads: Heads, pairs: Sequence[tuple[int, int]] | None = None
) -> Float[Tensor, "*pair angle"]:
    """The angles between two heads' write subspaces, ascending, in radians.

    ``[head, head, min(d_head, d_model)]`` for all pairs, or ``[pair, …]`` for the given ones.
    Small angles come from sines, which keep the digits that the arccosine loses. Beyond the
    smaller of two ranks there is no angle: NaN. Even random subspaces of d = 64 in D = 768 have a
    smallest angle near 42°, so a small angle means little without its null.

    >>> import torch
    >>> blocks = torch.tensor([[[1.0, 0.0, 0.0]], [[1.0, 1.0, 0.0]]])
    >>> principal_angles(Heads(blocks), pairs=[(0, 1)])
    tensor([[0.7854]])
    """
    H, k, _ = heads.write_basis.Q.shape
    if pairs is not None:
        return torch.stack([_angles(heads.write_basis, i, j) for i, j in pairs])
    out = heads.W_O.new_empty(H, H, k)
    for i in range(H):
        for j in range(i, H):
            out[i, j] = out[j, i] = _angles(heads.write_basis, i, j)
    return out


def _angles(basis: linalg.Basis, i: int, j: int) -> Float[Tensor, "angle"]:
    small, large = (basis.Q[h, : int(basis.rank[h])] for h in (i, j))
    if len(small) > len(large):
        small, large = large, small
    out = small.new_full(basis.Q.shape[1:2], torch.nan)
    if len(small):
        inner = small @ large.T
        cosine = linalg.singular_values(inner)
        sine = linalg.singular_values(small - inner @ large).flip(0)
        out[: len(small)] = torch.atan2(sine, cosine)
    return out


def _head_frame_spectrum_null(heads: Heads) -> tuple[Tensor, None]:
    rank, D = heads.write_basis.rank, heads.d_model
    writing = int((rank > 0).sum())
    mean_rank = float(rank.sum()) / writing
    count = min(heads.n_heads * heads.d_head, D)
    filled = min(count, round(writing * mean_rank))
    out = heads.W_O.new_zeros(count)
    out[:filled] = nulls.frame_eigenvalues(writing, mean_rank, D, filled).to(out)
    return out, None


@metric(
    title="Spectrum of the head frame",
    formula="eigenvalues of F = Σ_h P_h",
    dims=("eigen",),
    range=(0, "H"),
    null=_head_frame_spectrum_null,
    null_text="quantiles of the free binomial law, edges (√((H−1)α) ± √(1−α))² with α = d/D",
    invariant=_SUBSPACE,
    reference="free probability: Voiculescu, Dykema & Nica 1992; fusion frames",
)
def head_frame_spectrum(heads: Heads) -> Float[Tensor, "eigen"]:
    """How many heads share each direction of the residual stream, descending.

    The ``min(Dc, D)`` largest eigenvalues of ``F = Σ_h P_h``: 1 is a direction owned by one head,
    H one written by all. For orthogonal heads all are 1.

    >>> import torch
    >>> head_frame_spectrum(Heads(torch.eye(4).reshape(2, 2, 4)))
    tensor([1., 1., 1., 1.])
    """
    return heads.frame_eigenvalues


def _joint_span_null(heads: Heads) -> tuple[Tensor, Tensor]:
    mean, sd = _haar_overlap(heads.write_basis)
    rank = heads.write_basis.rank
    off = ~torch.eye(len(rank), dtype=torch.bool, device=rank.device)
    total = rank.sum() + mean[off].sum()  # E tr F²
    # each unordered pair enters tr F² twice
    relative = (2 * sd[off].square().sum()).sqrt() / total
    span = rank.sum().square() / total
    return span, span * relative


@metric(
    title="Effective joint span",
    formula="PR(F) = (Σ_h d_h)² / Σ_ij tr(P_i P_j)",
    dims=(),
    range=(1, "min(Dc, D)"),
    null=_joint_span_null,
    null_text="Haar-random subspaces: H d D/(D + (H − 1) d); sd to first order",
    invariant=_SUBSPACE,
    reference="participation ratio of the head frame",
    unit="dimensions",
)
def joint_span(heads: Heads) -> Float[Tensor, ""]:
    """How many dimensions the heads together fill, counting shared ones less.

    The participation ratio of the eigenvalues of ``F = Σ_h P_h``: d when all heads write the same
    d-dimensional subspace, Hd when they are orthogonal.

    >>> import torch
    >>> joint_span(Heads(torch.eye(6).reshape(3, 2, 6)))
    tensor(6.)
    """
    return heads.write_basis.rank.sum().square() / _squared_overlap(heads.write_basis).sum()


def _joint_rank_null(heads: Heads) -> tuple[Tensor, Tensor]:
    expected = heads.write_basis.rank.sum().clamp(max=heads.d_model)
    return expected, torch.zeros_like(expected)


@metric(
    title="Rank of W_O",
    formula="rank W_O, beside min(Σ_h rank W_h, D)",
    dims=(),
    range=(0, "min(Dc, D)"),
    null=_joint_rank_null,
    null_text="subspaces in general position: min(Σ_h rank W_h, D), always",
    invariant=_SUBSPACE,
    reference="numerical rank, tolerance max(Dc, D)·ε·σ_max on the stacked bases",
    unit="dimensions",
)
def joint_rank(heads: Heads) -> Float[Tensor, ""]:
    """Dimension of the space that all heads together write to: the rank of W_O.

    Taken from orthonormal bases of the heads, not from W_O itself, so that a quiet head counts
    as much as a loud one.

    >>> import torch
    >>> joint_rank(Heads(torch.ones(3, 2, 8)))
    tensor(1.)
    """
    eigen = heads.frame_eigenvalues
    widest = max(heads.n_heads * heads.d_head, heads.d_model)
    # eigenvalues of a Gram matrix in float64 are known to n·ε of the largest
    known = widest * torch.finfo(torch.float64).eps * eigen[0]
    zero = linalg.tolerance(eigen.sqrt(), widest, widest).square().clamp(min=float(known))
    return (eigen > zero).sum().to(eigen.dtype)


def _group_basis(heads: Heads) -> linalg.Basis:
    """Write subspace of each KV group: all rows of its query heads; unequal groups are padded."""
    if heads.n_kv_heads == heads.n_heads:
        raise NotApplicable("each query head has its own KV head: see projection_kernel")
    if heads.n_kv_heads == 1:
        raise NotApplicable("all query heads share one KV head, so there are no pairs of groups")
    members = [heads.W_O[heads.kv_index == g].flatten(0, 1) for g in range(heads.n_kv_heads)]
    return linalg.row_space(torch.nn.utils.rnn.pad_sequence(members, batch_first=True))


def _group_overlap_null(heads: Heads) -> tuple[Tensor, Tensor]:
    basis = _group_basis(heads)
    mean, sd = _haar_overlap(basis)
    return mean / _pair_norm(basis), sd / _pair_norm(basis)


@metric(
    title="Write-subspace overlap of KV groups",
    formula="tr(P_a P_b) / √(d_a d_b), P_g over all query heads of KV head g",
    dims=("kv_head", "kv_head_b"),
    range=(0, 1),
    null=_group_overlap_null,
    null_text="Haar-random subspaces of the groups' ranks: mean √(d_a d_b)/D, exact variance",
    invariant=_SUBSPACE,
    reference="projection kernel of Yamagiwa 2026, by KV group",
)
def group_overlap(heads: Heads) -> Float[Tensor, "kv_head kv_head"]:
    """How far two KV groups write into the same directions of the residual stream.

    In grouped-query attention only a whole group frees memory when it goes, so redundancy has to
    be asked of groups. A group's subspace is the span of all its query heads' rows of W_O.

    >>> import torch
    >>> group_overlap(Heads(torch.eye(8).reshape(4, 2, 8), kv_of_head=(0, 0, 1, 1)))
    tensor([[1., 0.],
            [0., 1.]])
    """
    basis = _group_basis(heads)
    return _squared_overlap(basis) / _pair_norm(basis)
