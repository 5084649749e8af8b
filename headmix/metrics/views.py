"""What heads' outputs share with labels: variance, probe directions, and what erasing one costs."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from headmix import linalg, probes
from headmix.activity import INDEPENDENT
from headmix.heads import Heads
from headmix.readouts import ReadOuts
from headmix.registry import NotApplicable, metric


def _explained(
    heads: Heads, outs: ReadOuts, columns: list[int]
) -> tuple[Float[Tensor, "head"], int]:
    """``tr(Σ_hy Σ_yy⁺ Σ_yh) / tr Σ_hh`` of each head, and the rank of Σ_yy."""
    p = probes.place(heads, outs, "concat")
    assert p is not None
    w = p.width
    _, _, C = p.moments(outs.used)
    own, cross = probes.of_heads(heads, p, C)
    directions = probes.label_directions(C[w:, w:][columns][:, columns])
    white = cross[..., columns] @ directions
    total = own.diagonal(dim1=1, dim2=2).sum(1)
    return white.square().sum((1, 2)) / torch.where(total > 0, total, torch.nan), directions.shape[
        1
    ]


def _columns(outs: ReadOuts, names: list[str]) -> list[int]:
    chosen = [s for s in outs.labels if s.name in names]
    return [c for s in chosen for c in range(s.start, s.start + s.width)]


def _share(heads: Heads, outs: ReadOuts, names: list[str]) -> tuple[Float[Tensor, "head"], int]:
    """η² of some labels together, its bias taken off, and their directions."""
    if outs.n < 3:
        raise NotApplicable(f"{int(outs.n)} labelled tokens: at least three are needed")
    eta, q = _explained(heads, outs, _columns(outs, names))
    return eta - q / (outs.n - 1), q


def _spread(heads: Heads, outs: ReadOuts, q: int) -> Float[Tensor, "head"]:
    """The sd of η² where q directions of labels are unrelated to a head."""
    p = probes.place(heads, outs, "concat")
    assert p is not None
    _, _, C = p.moments(outs.used)
    own, _ = probes.of_heads(heads, p, C)
    square = own.diagonal(dim1=1, dim2=2).sum(1).square()
    PR = square / own.square().sum((1, 2))
    return (2 * q / PR).sqrt() / outs.n


def _share_null(heads: Heads, outs: ReadOuts) -> tuple[Tensor, Tensor]:
    q = [_share(heads, outs, [s.name])[1] for s in outs.labels]
    sd = torch.stack([_spread(heads, outs, n) for n in q])
    return torch.zeros_like(sd), sd


@metric(
    title="Share of a head's variance that a label explains",
    formula="η² = tr(Σ_oy Σ_yy⁺ Σ_yo) / tr Cov(o_h) − (C − 1)/(n − 1)",
    dims=("label", "head"),
    range=(-1, 1),
    null=_share_null,
    null_text="0 once the bias (C − 1)/(n − 1) is taken off; sd √(2(C − 1)/PR(Cov o_h))/n"
    + INDEPENDENT,
    invariant=("gauge", "rotation", "scale", "head_scale"),
    reference="correlation ratio η² (Fisher 1925); bias of unrelated classes",
)
def view_share(heads: Heads, read_outs: ReadOuts) -> Float[Tensor, "label head"]:
    """How much of the variance of what a head writes lies between a label's classes.

    Of a number, how much a line through it explains. The other way round from a probe: a probe may
    find a label in a direction that hardly varies. NaN for a head whose output does not vary.

    Raises:
        NotApplicable: fewer than three labelled tokens, or heads that write nothing.
    """
    return torch.stack([_share(heads, read_outs, [s.name])[0] for s in read_outs.labels])


def _unique(heads: Heads, outs: ReadOuts) -> list[tuple[Float[Tensor, "head"], int]]:
    names = [s.name for s in outs.labels]
    if len(names) < 2:
        raise NotApplicable("what one label explains alone needs another label beside it")
    whole, q = _share(heads, outs, names)
    found = []
    for name in names:
        others, fewer = _share(heads, outs, [n for n in names if n != name])
        found.append((whole - others, q - fewer))
    return found


def _unique_null(heads: Heads, outs: ReadOuts) -> tuple[Tensor, Tensor]:
    sd = torch.stack([_spread(heads, outs, q) for _, q in _unique(heads, outs)])
    return torch.zeros_like(sd), sd


@metric(
    title="Share of a head's variance that only this label explains",
    formula="η²(all labels) − η²(all but this one), each with its bias taken off (type III)",
    dims=("label", "head"),
    range=(-1, 1),
    null=_unique_null,
    null_text="0; sd √(2q/PR(Cov o_h))/n for the q directions that the label adds" + INDEPENDENT,
    invariant=("gauge", "rotation", "scale", "head_scale"),
    reference="type III sums of squares (Yates 1934)",
)
def view_share_unique(heads: Heads, read_outs: ReadOuts) -> Float[Tensor, "label head"]:
    """What is left of ``view_share`` when the other labels have explained all they can.

    Labels go together (words early in a sentence are often pronouns); what they share is in none of
    these.

    Raises:
        NotApplicable: a single label, or as for ``view_share``.
    """
    return torch.stack([share for share, _ in _unique(heads, read_outs)])


@probes.kept
def _parts(
    heads: Heads, outs: ReadOuts, folds: tuple[int, ...]
) -> Float[Tensor, "label head head"]:
    """``Σ_c Cov(o_i·w_c, o_j·w_c)`` for the probes w of each label on attention's output."""
    p = probes.place(heads, outs, "concat")
    assert p is not None
    _, Q, scale = probes.frames(heads, outs)
    H, k = Q.shape[:2]
    weights = probes.fit(heads, outs, "attn_out", folds).weights
    V = scale[:, None, None] * (Q @ weights)  # of the scaled x_h, [head, k, column]
    _, _, C = p.moments(folds)
    K = V.shape[2]
    spread = torch.zeros(H, k, H, K).to(V)
    spread[range(H), :, range(H)] = V
    moved = (C[: p.width, : p.width] @ spread.reshape(H * k, H * K)).reshape(H, k, H, K)
    G = torch.einsum("ikc,ikjc->cij", V, moved)
    return torch.stack([G[s.columns].sum(0) for s in outs.labels])


def _pulled_back(heads: Heads, outs: ReadOuts) -> Float[Tensor, "label head head"]:
    if heads.n_heads == 1:
        raise NotApplicable("a single head is all heads")
    there = probes.place(heads, outs, "attn_out")
    assert there is not None
    probes.require_tokens(outs, "attn_out", there.width)
    return _parts(heads, outs, tuple(outs.used))


def _dirichlet(heads: Heads) -> tuple[float, float]:
    """Mean and sd of the share of one head in a random direction's variance."""
    k, H = min(heads.d_head, heads.d_model), heads.n_heads
    return 1 / H, math.sqrt((H - 1) / (H**2 * (H * k / 2 + 1)))


def _shares_null(heads: Heads, outs: ReadOuts) -> tuple[Tensor, Tensor]:
    mean, sd = _dirichlet(heads)
    return torch.tensor(mean, dtype=torch.float64), torch.tensor(sd, dtype=torch.float64)


@metric(
    title="Share of a probe that one head writes",
    formula="s_h = Cov(o_h·w, o·w) / Var(o·w), w the probe on attn_out",
    dims=("label", "head"),
    range=(float("-inf"), float("inf")),
    null=_shares_null,
    null_text="a random direction of heads that write independently and alike: Dirichlet(d/2, …), "
    "mean 1/H",
    invariant=("gauge", "rotation", "scale"),
    reference="exact decomposition of a probe's variance over heads, as variance_share",
)
def probe_share(heads: Heads, read_outs: ReadOuts) -> Float[Tensor, "label head"]:
    """How much of what a probe on attention's output reads each head wrote.

    The shares of a label sum to one; one is negative where a head works against the others. Of
    several classes the probe's directions are taken together.

    Raises:
        NotApplicable: one head, too few labelled tokens, or heads that write nothing.
    """
    G = _pulled_back(heads, read_outs)
    share = G.sum(2) / G.sum((1, 2))[:, None]
    return torch.where(probes.frames(heads, read_outs)[2] > 0, share, torch.nan)


def _participation_null(heads: Heads, outs: ReadOuts) -> tuple[Tensor, None]:
    k, H = min(heads.d_head, heads.d_model), heads.n_heads
    return torch.tensor((H * k + 2) / (k + 2), dtype=torch.float64), None


@metric(
    title="Heads that take part in a probe",
    formula="N_eff = (Σ_h v_h)² / Σ_h v_h², v_h = Var(o_h·w), w the probe on attn_out",
    dims=("label",),
    range=(1, "H"),
    null=_participation_null,
    null_text="a random direction of heads that write independently and alike: about "
    "(Dc + 2)/(d + 2)",
    invariant=("gauge", "rotation", "scale"),
    reference="participation ratio over heads of a probe pulled back through W_O",
)
def probe_participation(heads: Heads, read_outs: ReadOuts) -> Float[Tensor, "label"]:
    """Over how many heads a probe's reading of attention's output is spread.

    1 where one head writes all that the probe reads, H where all write as much. Of several classes
    the probe's directions are taken together.

    Raises:
        NotApplicable: one head, too few labelled tokens, or heads that write nothing.
    """
    v = _pulled_back(heads, read_outs).diagonal(dim1=1, dim2=2)
    return v.sum(1).square() / v.square().sum(1)


def eraser(
    Sigma: Float[Tensor, "width width"], cross: Float[Tensor, "width column"]
) -> tuple[Float[Tensor, "width rank"], Float[Tensor, "rank width"]]:
    """LEACE in closed form (Belrose et al. 2023): factors of what is taken from ``x − E x``.

    ``x ↦ x − (x − E x) R L`` with ``R L = W P W⁺``, W = (Σ^½)⁺ and P the projector on the column
    space of ``W Σ_xy``: the least change after which no linear probe finds anything of y.

    Returns:
        R and L; their product is a projection.
    """
    W, back = _whiteners(Sigma)
    U = _image(W @ cross)
    return W @ U, U.T @ back


def _whiteners(
    Sigma: Float[Tensor, "width width"],
) -> tuple[Float[Tensor, "width width"], Float[Tensor, "width width"]]:
    """(Σ^½)⁺ and Σ^½; sums in single precision say nothing of smaller directions."""
    variance, V = torch.linalg.eigh(Sigma)
    seen = variance > variance.max() * len(variance) * torch.finfo(torch.float32).eps
    root = torch.where(seen, variance.clamp_min(0).sqrt(), 0)
    inverse = torch.where(seen, 1 / root, 0)
    return (V * inverse) @ V.T, (V * root) @ V.T


def _image(M: Float[Tensor, "width column"]) -> Float[Tensor, "width rank"]:
    """An orthonormal basis of the column space."""
    U, sigma, _ = linalg.svd(M)
    return U[:, sigma > 1e-6 * sigma.max()]


def _damages(
    heads: Heads, outs: ReadOuts
) -> tuple[Float[Tensor, "label label_b"], Float[Tensor, "label"], int]:
    """Damage, the directions erased, and those there are."""
    if len(outs.labels) < 2:
        raise NotApplicable("what erasing one label costs another needs two labels")
    p = probes.place(heads, outs, "attn_out")
    assert p is not None
    probes.frames(heads, outs)
    probes.require_tokens(outs, "attn_out", p.width)
    w = p.width
    _, _, C = p.moments(outs.used)
    W, _ = _whiteners(C[:w, :w])
    white = [W @ C[:w, w:][:, s.columns] for s in outs.labels]
    bases = [  # rounding of what classes sum to is no direction
        _image(M @ probes.label_directions(C[w:, w:][s.columns, s.columns]))
        for s, M in zip(outs.labels, white, strict=True)
    ]
    damage = torch.stack(
        [torch.stack([(U.T @ M).square().sum() / M.square().sum() for M in white]) for U in bases]
    )
    rank = torch.tensor([U.shape[1] for U in bases], dtype=torch.float64)
    return damage, rank, int(torch.linalg.matrix_rank(W, hermitian=True))


def _damage_null(heads: Heads, outs: ReadOuts) -> tuple[Tensor, Tensor]:
    damage, rank, width = _damages(heads, outs)
    a, b = rank / 2, (width - rank) / 2
    mean, sd = a / (a + b), (a * b / ((a + b) ** 2 * (a + b + 1))).clamp_min(0).sqrt()
    return mean[:, None].expand_as(damage), sd[:, None].expand_as(damage)


@metric(
    title="What erasing one label costs another",
    formula="1 − R²(b | a erased) / R²(b) at attn_out, a erased by LEACE",
    dims=("label", "label_b"),
    range=(0, 1),
    null=_damage_null,
    null_text="a random subspace of as many directions is erased: Beta(r/2, (p − r)/2), r of the p "
    "directions, for what lies in one direction",
    invariant=("gauge", "rotation", "scale"),
    reference="Belrose et al. 2023: LEACE, perfect linear concept erasure in closed form",
)
def leace_damage(heads: Heads, read_outs: ReadOuts) -> Float[Tensor, "label label_b"]:
    """How much of label b no linear probe finds any more once label a is erased.

    Rows: the label erased; columns: the one that is then looked for. 1 on the diagonal, 0 where the
    two lie in directions that are uncorrelated. In sample: with few tokens, noise makes any two
    labels share something.

    Raises:
        NotApplicable: a single label, too few labelled tokens, or heads that write nothing.
    """
    return _damages(heads, read_outs)[0]
