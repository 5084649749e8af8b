"""Linear probes from sums alone: fitted on some folds of documents, tested on another.

Everything is ridge regression of label columns on a read-out's coordinates. Heads are read in
``x_h``, the isometric copy of what head h writes (see ``headmix.activity``), each scaled to
variance 1, so that no gauge of the weights and no loud head has a say in what the ridge shrinks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from headmix.heads import Heads, NotApplicable
from headmix.labelling import LabelSet
from headmix.readouts import ReadOuts
from headmix.sums import symmetric

#: The ridge, in mean variances of a read-out's coordinates. Between 1e-5 and 1, a tenth read parts
#: of speech and position best, or near it, at all read-outs of a small BERT and a small Llama, on
#: documents that were held out; less than a hundredth fits what single documents are about.
RIDGE = 0.1

T = TypeVar("T")


def kept(function: Callable[..., T]) -> Callable[..., T]:
    """Compute once for all choices of folds: kept with the sums, whose ``forget`` drops it."""

    @wraps(function)
    def cached(heads: Heads, outs: ReadOuts, *key: Any) -> T:
        whole = (function, heads, *key)
        if whole not in outs.derived:
            outs.derived[whole] = function(heads, outs, *key)
        return outs.derived[whole]  # type: ignore[return-value]

    return cached


@dataclass(frozen=True, eq=False)
class Place:
    """A read-out's sums by fold, in its own coordinates; ``u = [x, Y]`` about the pivot.

    Attributes:
        width: coordinates of x.
        count, first, second: as in ``LabelledSums``; ``second`` whole.
        sample, filled: the tokens kept themselves, likewise.
    """

    width: int
    count: Float[Tensor, "fold"]
    first: Float[Tensor, "fold u"]
    second: Float[Tensor, "fold u u"]
    sample: Float[Tensor, "fold row u"]
    filled: Float[Tensor, "fold row"]

    def moments(
        self, folds: Sequence[int]
    ) -> tuple[float, Float[Tensor, "u"], Float[Tensor, "u u"]]:
        """Tokens, mean and covariance of u over some folds."""
        index = list(folds)
        n = float(self.count[index].sum())
        mean = self.first[index].sum(0) / n
        second = self.second[index[0]].clone()
        for fold in index[1:]:
            second += self.second[fold]
        return n, mean, second.div_(n).addr_(mean, mean, alpha=-1)

    def about(self, fold: int, mean: Float[Tensor, "u"]) -> Float[Tensor, "u u"]:
        """The scatter of one fold about a given point."""
        outer = torch.outer(self.first[fold], mean)
        square = self.count[fold] * torch.outer(mean, mean)
        return self.second[fold] - outer - outer.T + square


@kept
def frames(
    heads: Heads, outs: ReadOuts
) -> tuple[Float[Tensor, "head d_head k"], Float[Tensor, "head k d_model"], Float[Tensor, "head"]]:
    """``W_O[h] = A_h Q_h`` with orthonormal rows of Q_h, and the scale of ``x_h = z_h A_h``: the
    root of its variance over all tokens, 0 for a head that writes the same always.

    Raises:
        NotApplicable: no head's output varies, or activations are not finite.
    """
    sums = outs.concat
    H, d = heads.n_heads, heads.d_head
    if sums.width != H * d:
        raise ValueError(
            f"{heads.layer}: the read-outs are of heads {sums.width} wide in all, the weights of "
            f"{H} of width {d}"
        )
    if not all(s.first.isfinite().all() for s in outs.sums.values()):
        raise NotApplicable("the activations hold NaN or infinity")
    Q, R = torch.linalg.qr(heads.W_O.to(sums.first).mT)
    A = R.mT
    second = symmetric(sums.second.sum(0))[: H * d, : H * d]
    mean = sums.first.sum(0)[: H * d] / sums.n
    Sigma = second / sums.n - torch.outer(mean, mean)
    own = torch.stack([Sigma[h * d : (h + 1) * d, h * d : (h + 1) * d] for h in range(H)])
    variance = torch.einsum("hdk,hde,hek->h", A, own, A)
    loudest = variance.max()
    if loudest <= 0:
        raise NotApplicable("the variance of what each head writes is zero")
    scale = torch.where(variance > 1e-12 * loudest, variance.clamp_min(0).sqrt(), 0)
    return A, Q.mT, scale


@kept
def place(heads: Heads, outs: ReadOuts, name: str) -> Place | None:
    """One read-out in its coordinates; None where the block has none.

    ``concat``: the scaled x_h side by side; ``attn_out``: by the output projection from those.
    """
    source = "concat" if name == "attn_out" else name
    if source not in outs.sums:
        return None
    sums = outs.sums[source]
    second = symmetric(sums.second)
    if name not in ("concat", "attn_out"):
        return Place(sums.width, sums.count, sums.first, second, sums.sample, sums.filled)
    A, _, scale = frames(heads, outs)
    if name == "attn_out":
        map = heads.W_O.to(sums.first).flatten(0, 1)
    else:
        unscale = torch.where(scale > 0, 1 / scale, 0)
        map = torch.block_diag(*(A * unscale[:, None, None]))
    labels = sums.first.shape[1] - sums.width
    B = torch.block_diag(map, torch.eye(labels).to(map))
    return Place(
        map.shape[1],
        sums.count,
        sums.first @ B,
        B.T @ second @ B,
        sums.sample @ B.to(sums.sample),
        sums.filled,
    )


@dataclass(frozen=True, eq=False)
class Fit:
    """Ridge regression of every label column on a read-out, from some folds.

    Attributes:
        weights: ``[width, column]``.
        mean: ``[u]``, of the folds fitted on.
        cross: ``[width, column]``, the covariance of x and labels.
        share: ``[column]``, mean of each label column.
    """

    weights: Float[Tensor, "width column"]
    mean: Float[Tensor, "u"]
    cross: Float[Tensor, "width column"]


@kept
def fit(heads: Heads, outs: ReadOuts, name: str, folds: tuple[int, ...]) -> Fit:
    """A read-out's probes."""
    p = place(heads, outs, name)
    assert p is not None
    w = p.width
    _, mean, C = p.moments(folds)
    L = torch.linalg.cholesky(ridged(C[:w, :w]))
    return Fit(torch.cholesky_solve(C[:w, w:], L), mean, C[:w, w:])


@kept
def fit_heads(
    heads: Heads, outs: ReadOuts, folds: tuple[int, ...]
) -> Float[Tensor, "head k column"]:
    """Each head's own probes, from its part of the concatenation."""
    p = place(heads, outs, "concat")
    assert p is not None
    _, _, C = p.moments(folds)
    own, cross = of_heads(heads, p, C)
    return torch.cholesky_solve(cross, torch.linalg.cholesky(ridged(own)))


def of_heads(
    heads: Heads, p: Place, C: Float[Tensor, "u u"]
) -> tuple[Float[Tensor, "head k k"], Float[Tensor, "head k column"]]:
    """Each head's own block of a covariance or scatter of ``concat``, and its block with labels."""
    H, w = heads.n_heads, p.width
    own = C[:w, :w].reshape(H, w // H, H, w // H).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    return own, C[:w, w:].reshape(H, w // H, -1)


def ridged(C: Float[Tensor, "*batch width width"]) -> Float[Tensor, "*batch width width"]:
    """With the ridge on its diagonal; 1 where nothing varies, which leaves the weights zero."""
    level = C.diagonal(dim1=-2, dim2=-1).mean(-1)
    level = torch.where(level > 0, RIDGE * level, 1)
    return C + level[..., None, None] * torch.eye(C.shape[-1]).to(C)


def splits(outs: ReadOuts) -> list[tuple[tuple[int, ...], int]]:
    """Folds to fit on and the fold to test on, for each.

    Raises:
        NotApplicable: fewer than two folds hold labelled tokens.
    """
    used = outs.used
    if len(used) < 2:
        raise NotApplicable(
            "a test on documents not fitted on needs labelled tokens in at least two folds, got "
            f"{len(used)}"
        )
    return [(tuple(f for f in used if f != test), test) for test in used]


def require_tokens(outs: ReadOuts, name: str, width: int) -> None:
    """Raises NotApplicable for fewer than two folds, or more directions than tokens to fit."""
    splits(outs)
    fewest = int(outs.n - outs.count.max())
    if fewest <= width + 2:
        raise NotApplicable(
            f"{fewest} labelled tokens outside one fold are too few for the {width} directions of "
            f"{name}"
        )


@kept
def errors(
    heads: Heads, outs: ReadOuts, name: str, train: tuple[int, ...], test: int
) -> tuple[Float[Tensor, "column"], Float[Tensor, "column"]]:
    """Squared error of a fold's labels, and their squares about the mean fitted on."""
    p = place(heads, outs, name)
    assert p is not None
    w, probe = p.width, fit(heads, outs, name, train)
    E, B = p.about(test, probe.mean), probe.weights
    left = (B * (E[:w, :w] @ B - 2 * E[:w, w:])).sum(0)
    total = E[w:, w:].diagonal()
    return total + left, total


@kept
def errors_of_heads(
    heads: Heads, outs: ReadOuts, train: tuple[int, ...], test: int
) -> tuple[Float[Tensor, "head column"], Float[Tensor, "column"]]:
    """The same for each head's own probes."""
    p = place(heads, outs, "concat")
    assert p is not None
    B = fit_heads(heads, outs, train)
    E = p.about(test, fit(heads, outs, "concat", train).mean)
    own, cross = of_heads(heads, p, E)
    total = E[p.width :, p.width :].diagonal()
    return total + (B * (own @ B - 2 * cross)).sum(1), total


def per_label(
    sets: Sequence[LabelSet], columns: Float[Tensor, "*batch column"]
) -> Float[Tensor, "label *batch"]:
    """Columns summed over the classes of each label."""
    return torch.stack([columns[..., s.columns].sum(-1) for s in sets])


def held_out_r2(heads: Heads, outs: ReadOuts, name: str) -> Float[Tensor, "label"]:
    """``1 − Σ(y − ŷ)²/Σ(y − ȳ)²`` over all folds, each tested on the fit without it."""
    parts = [errors(heads, outs, name, train, test) for train, test in splits(outs)]
    error, total = (torch.stack(list(part)).sum(0) for part in zip(*parts, strict=True))
    return 1 - per_label(outs.labels, error) / per_label(outs.labels, total)


def held_out_r2_of_heads(heads: Heads, outs: ReadOuts) -> Float[Tensor, "label head"]:
    """The same for each head alone; NaN for one whose output does not vary."""
    parts = [errors_of_heads(heads, outs, train, test) for train, test in splits(outs)]
    error, total = (torch.stack(list(part)).sum(0) for part in zip(*parts, strict=True))
    r2 = 1 - per_label(outs.labels, error) / per_label(outs.labels, total)[:, None]
    return torch.where(frames(heads, outs)[2] > 0, r2, torch.nan)


@kept
def noise(
    heads: Heads, outs: ReadOuts, name: str, folds: tuple[int, ...]
) -> tuple[Float[Tensor, "*unit"], Float[Tensor, "*unit"]]:
    """Mean and variance of held-out R² of a label of pure noise, given the activations.

    ``name``: a read-out, or "heads" for each head alone. With A the ridged covariance without fold
    f, n_f its tokens and E the scatter of fold f, R² n is ``yᵀMy`` for labels of variance 1, so
    that mean and variance are ``tr M`` and ``2 tr M²`` for Gaussian ones, and both are traces of
    products of such matrices. Documents unlike those fitted on (large E) cost what they cost.

    Every fit has a mean of its own, of labels too. All are forms in ``[x − x̄, 1]``: between the
    tokens of folds a and b, M is ``[x, 1] G_ab [x, 1]ᵀ``.
    """
    p = place(heads, outs, "concat" if name == "heads" else name)
    assert p is not None
    w, units = p.width, (heads.n_heads, -1) if name == "heads" else (-1,)

    def of(M: Float[Tensor, "u u"]) -> Float[Tensor, "*unit w w"]:
        return of_heads(heads, p, M)[0] if name == "heads" else M[:w, :w]

    def part(v: Float[Tensor, "u"]) -> Float[Tensor, "*unit w"]:
        return v[:w].reshape(units)

    n, centre, _ = p.moments(folds)
    inverse, cost, scatter = {}, {}, {}
    mean = torch.zeros((), dtype=torch.float64)
    for f in folds:
        n_f, mean_f, C = p.moments([g for g in folds if g != f])
        total = part(p.first[f] - p.count[f] * centre)
        scatter[f] = _bordered(of(p.about(f, centre)), total, p.count[f].expand(total.shape[:-1]))
        R = torch.cholesky_inverse(torch.linalg.cholesky(ridged(of(C)))) / n_f
        loss = R @ of(p.about(f, mean_f)) @ R
        mean = mean - _trace(loss, of(C)) * n_f / n
        inverse[f] = _form(R, part(mean_f - centre))
        cost[f] = _form(loss, part(mean_f - centre))
        off = (inverse[f] @ scatter[f])[..., -1] / n_f  # labels, too, are about their mean
        cost[f][..., -1, :] += off
        cost[f][..., -1] += off
    every = torch.stack(list(cost.values())).sum(0)
    square = torch.zeros((), dtype=torch.float64)
    for a in folds:
        for b in (b for b in folds if b <= a):
            G = cost[a] - every
            if a != b:
                G = G + cost[b] + inverse[a] + inverse[b]
            square = square + _trace(G @ scatter[b], G @ scatter[a]) * (1 if a == b else 2)
    return mean, 2 * square / n**2


def _bordered(
    M: Float[Tensor, "*unit w w"], v: Float[Tensor, "*unit w"], c: Float[Tensor, "*unit"]
) -> Float[Tensor, "*unit w+1 w+1"]:
    """``[[M, v], [vᵀ, c]]``."""
    last = torch.cat([v, c[..., None]], -1)
    return torch.cat([torch.cat([M, v[..., None]], -1), last[..., None, :]], -2)


def _form(
    M: Float[Tensor, "*unit w w"], point: Float[Tensor, "*unit w"]
) -> Float[Tensor, "*unit w+1 w+1"]:
    """``(x − point) M (x − point)ᵀ`` as a form in [x, 1]."""
    v = (M @ point[..., None])[..., 0]
    return _bordered(M, -v, (v * point).sum(-1))


def _trace(A: Float[Tensor, "*unit w w"], B: Float[Tensor, "*unit w w"]) -> Float[Tensor, "*unit"]:
    """``tr AB``."""
    return (A * B.mT).sum((-2, -1))


def label_directions(
    C_yy: Float[Tensor, "column column"],
) -> Float[Tensor, "column direction"]:
    """Directions in which labels have unit variance: of C classes C − 1, for they sum to one."""
    variance, U = torch.linalg.eigh(C_yy)
    seen = variance > 1e-9 * variance.max()
    return U[:, seen] / variance[seen].sqrt()


def label_dimensions(
    sets: Sequence[LabelSet], C_yy: Float[Tensor, "column column"]
) -> Float[Tensor, "label"]:
    """The participation ratio of each label's columns: what their errors average over."""
    blocks = [C_yy[s.columns, s.columns] for s in sets]
    return torch.stack([b.trace().square() / b.square().sum() for b in blocks])


@kept
def scores(
    heads: Heads, outs: ReadOuts, name: str, train: tuple[int, ...], s: LabelSet
) -> tuple[Float[Tensor, "width class"], Float[Tensor, "class"]]:
    """Linear discriminant analysis (Fisher 1936) from the ridge fit: slopes and offsets.

    With ``B = A⁻¹V`` the fit (A the ridged covariance, V that with the classes), π their shares and
    ``G = VᵀB``, the covariance within classes is ``A − V diag(1/π) Vᵀ`` and gives the slopes
    ``B (I − diag(1/π) G)⁻¹ diag(1/π)`` without another factorisation.
    """
    p = place(heads, outs, name)
    assert p is not None
    probe = fit(heads, outs, name, train)
    share = probe.mean[p.width :][s.columns]
    seen = share > 0
    inverse = torch.where(seen, 1 / share.clamp_min(1e-300), 0)
    B, V = probe.weights[:, s.columns], probe.cross[:, s.columns]
    inner = torch.eye(len(share)).to(B) - inverse[:, None] * (V.T @ B)
    slopes = torch.linalg.solve(inner.T, B.T).T * inverse
    offsets = torch.where(seen, share.log(), -torch.inf) - (V * inverse * slopes).sum(0) / 2
    return slopes, offsets


@kept
def hits(
    heads: Heads, outs: ReadOuts, name: str, train: tuple[int, ...], test: int, s: LabelSet
) -> tuple[float, float]:
    """Of a fold's sample, how many tokens have the class with the largest score, and how many
    there are."""
    p = place(heads, outs, name)
    assert p is not None
    slopes, offsets = scores(heads, outs, name, train, s)
    rows = p.sample[test][p.filled[test] > 0].to(slopes)
    mean = fit(heads, outs, name, train).mean
    guessed = ((rows[:, : p.width] - mean[: p.width]) @ slopes + offsets).argmax(1)
    right = guessed == rows[:, p.width :][:, s.columns].argmax(1)
    return float(right.sum()), float(len(rows))


def accuracy(heads: Heads, outs: ReadOuts, name: str, s: LabelSet) -> tuple[float, float]:
    """The share of held-out tokens of the sample whose class is found, and their number."""
    parts = [hits(heads, outs, name, train, test, s) for train, test in splits(outs)]
    right, n = map(sum, zip(*parts, strict=True))
    return (right / n if n else float("nan")), n
