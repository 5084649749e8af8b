"""What linear probes read of labels, from each head to the block's output, on held-out documents.

Probes are ridge regressions from sums (``headmix.probes``). A probe says that a label *can* be
read, not that the model uses it; and what a probe of the residual stream finds, attention need not
have written.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from headmix import probes
from headmix.activity import INDEPENDENT
from headmix.heads import Heads
from headmix.labelling import LabelSet
from headmix.readouts import LADDER, ReadOuts
from headmix.registry import NotApplicable, metric

#: Points at which distribution functions are integrated.
POINTS = 4096

_NOISE = (
    "labels of Gaussian noise, given the activations: mean and sd of the quadratic form that R² "
    "is; fitting noise costs, so that the mean lies below 0" + INDEPENDENT
)


def _ladder(
    heads: Heads, outs: ReadOuts, value: Callable[[str], Float[Tensor, "label"]]
) -> Float[Tensor, "label read_out"]:
    """A value of each label at each read-out; NaN where the block has none."""
    probes.frames(heads, outs)
    columns = []
    for name in LADDER:
        there = probes.place(heads, outs, name)
        if there is None:
            columns.append(torch.full((len(outs.labels),), torch.nan, dtype=torch.float64))
            continue
        probes.require_tokens(outs, name, there.width)
        columns.append(value(name).to("cpu"))
    return torch.stack(columns, dim=1)


def _noise(
    heads: Heads, outs: ReadOuts, name: str
) -> tuple[Float[Tensor, "label *unit"], Float[Tensor, "label *unit"]]:
    """The null of held-out R² at a read-out, or of each head."""
    mean, variance = probes.noise(heads, outs, name, tuple(outs.used))
    p = probes.place(heads, outs, "concat" if name == "heads" else name)
    assert p is not None
    _, _, C = p.moments(outs.used)
    dimensions = probes.label_dimensions(outs.labels, C[p.width :, p.width :])
    sd = torch.stack([(variance / d).sqrt() for d in dimensions])
    return mean.expand_as(sd), sd


def _ladder_null(heads: Heads, outs: ReadOuts) -> tuple[Tensor, Tensor]:
    mean = _ladder(heads, outs, lambda name: _noise(heads, outs, name)[0])
    return mean, _ladder(heads, outs, lambda name: _noise(heads, outs, name)[1])


@metric(
    title="Held-out R² of labels",
    formula="1 − Σ‖y − ŷ‖² / Σ‖y − ȳ‖², ŷ ridge regression on a read-out, K-fold",
    dims=("label", "read_out"),
    range=(float("-inf"), 1),
    null=_ladder_null,
    null_text=_NOISE,
    invariant=("gauge", "rotation"),
    reference="Alain & Bengio 2017; ridge regression, K-fold over documents",
)
def probe_r2(heads: Heads, read_outs: ReadOuts) -> Float[Tensor, "label read_out"]:
    """How much of a label's variance a linear probe explains at each read-out of the block.

    Of classes it is the variance of their indicators, all together. With text without end nothing
    can be gained from the concatenation of heads to attention's output, which is a linear map of
    it. On little text the two ridges shrink differently: attention's output, or a single head, may
    then do better, which says that the text was too little for the concatenation, not that W_O
    added anything. NaN where the block has no such read-out.

    Raises:
        NotApplicable: one fold, too few labelled tokens, or heads that write nothing.
    """
    return _ladder(heads, read_outs, lambda name: probes.held_out_r2(heads, read_outs, name))


def _of_heads(heads: Heads, outs: ReadOuts) -> Float[Tensor, "label head"]:
    probes.frames(heads, outs)
    concat = probes.place(heads, outs, "concat")
    assert concat is not None
    probes.require_tokens(outs, "the heads", concat.width)
    return probes.held_out_r2_of_heads(heads, outs)


def _of_heads_null(heads: Heads, outs: ReadOuts) -> tuple[Tensor, Tensor]:
    mean, sd = _noise(heads, outs, "heads")
    varies = probes.frames(heads, outs)[2] > 0
    return torch.where(varies, mean, torch.nan), torch.where(varies, sd, torch.nan)


@metric(
    title="Held-out R² of labels from one head",
    formula="1 − Σ‖y − ŷ‖² / Σ‖y − ȳ‖², ŷ ridge regression on o_h, K-fold",
    dims=("label", "head"),
    range=(float("-inf"), 1),
    null=_of_heads_null,
    null_text=_NOISE,
    invariant=("gauge", "rotation", "scale", "head_scale"),
    reference="Alain & Bengio 2017; ridge regression, K-fold over documents",
)
def head_probe_r2(heads: Heads, read_outs: ReadOuts) -> Float[Tensor, "label head"]:
    """How much of a label's variance a linear probe explains on what one head writes.

    NaN for a head whose output does not vary.

    Raises:
        NotApplicable: one fold, too few labelled tokens, or heads that write nothing.
    """
    return _of_heads(heads, read_outs)


def _together(heads: Heads, outs: ReadOuts) -> Float[Tensor, "label"]:
    """Held-out R² of the concatenation."""
    if heads.n_heads == 1:
        raise NotApplicable("a single head is all heads")
    return probes.held_out_r2(heads, outs, "concat")


def _subspace(heads: Heads) -> tuple[float, float]:
    """Parameters of the Beta law of the share that a random head's subspace holds."""
    k = min(heads.d_head, heads.d_model)
    return k / 2, (heads.n_heads - 1) * k / 2


def _largest_share(heads: Heads) -> tuple[float, float]:
    """Mean and sd of the largest of H independent shares of random subspaces."""
    from scipy.stats import beta  # a second of import that most uses never need

    x = (torch.arange(POINTS, dtype=torch.float64) + 0.5) / POINTS
    survival = 1 - torch.from_numpy(beta(*_subspace(heads)).cdf(x.numpy())) ** heads.n_heads
    mean = float(survival.mean())
    square = float((2 * x * survival).mean())
    return mean, math.sqrt(max(0.0, square - mean**2))


def _gain_null(heads: Heads, outs: ReadOuts) -> tuple[Tensor, Tensor]:
    whole = _together(heads, outs).clamp_min(0)
    mean, sd = _largest_share(heads)
    return whole * (1 - mean), whole * sd


@metric(
    title="Gain of all heads over the best one",
    formula="R²(concat) − max_h R²(o_h)",
    dims=("label",),
    range=(float("-inf"), float("inf")),
    null=_gain_null,
    null_text="what is read lies in a random direction: R²(concat)(1 − E max of H Beta(d/2, "
    "(Dc − d)/2)), heads taken to be independent",
    invariant=("gauge", "rotation", "scale", "head_scale"),
    reference="probes on held-out documents; Beta law of a random subspace",
)
def multi_head_gain(heads: Heads, read_outs: ReadOuts) -> Float[Tensor, "label"]:
    """How much more of a label all heads together say than the one that says most.

    Near zero where one head holds the label alone, as if it were its own view.

    Raises:
        NotApplicable: one head, or as for ``head_probe_r2``.
    """
    best = _of_heads(heads, read_outs).nan_to_num(-torch.inf).amax(1)
    return _together(heads, read_outs) - best


def _concentration_null(heads: Heads, outs: ReadOuts) -> tuple[Tensor, Tensor]:
    a, b = _subspace(heads)
    mean = torch.tensor(a / (a + b), dtype=torch.float64)
    return mean, torch.tensor(math.sqrt(a * b / ((a + b) ** 2 * (a + b + 1))), dtype=torch.float64)


@metric(
    title="One head's R² as a multiple of all heads'",
    formula="κ_h = R²(o_h) / R²(concat)",
    dims=("label", "head"),
    range=(float("-inf"), float("inf")),
    null=_concentration_null,
    null_text="Beta(d/2, (Dc − d)/2): a random d-dimensional subspace of the Dc-dimensional one, "
    "for what lies in one direction; labels of several average over them: their sd is less",
    invariant=("gauge", "rotation", "scale", "head_scale"),
    reference="probes on held-out documents; Beta law of a random subspace",
)
def head_concentration(heads: Heads, read_outs: ReadOuts) -> Float[Tensor, "label head"]:
    """How much of what all heads together say of a label one head says alone.

    Redundant heads can each say all of it, so that the multiples need not sum to one; below 0
    where a head's probe is worse than the mean, above 1 where it is better than that of all heads,
    as on little text. NaN where the concatenation says nothing (R² no higher than its null by two
    standard deviations), or for a head whose output does not vary. It says as little where the
    interval of ``probe_r2`` of the concatenation over documents reaches that null.

    Raises:
        NotApplicable: one head, or as for ``head_probe_r2``.
    """
    whole = _together(heads, read_outs)
    said = whole > _floor(heads, read_outs)
    return _of_heads(heads, read_outs) / torch.where(said, whole, torch.nan)[:, None]


def _floor(heads: Heads, outs: ReadOuts) -> Float[Tensor, "label"]:
    """What the concatenation must exceed to have said anything."""
    mean, sd = _noise(heads, outs, "concat")
    return (mean + 2 * sd).clamp_min(0)


def _classes(outs: ReadOuts) -> None:
    if not any(s.classes for s in outs.labels):
        raise NotApplicable("accuracy needs a label with classes; these are numbers")
    if not outs.concat.filled.any():
        raise NotApplicable("no sample of tokens was kept, on which accuracy could be counted")


def _accuracies(
    heads: Heads, outs: ReadOuts, name: str, of: Callable[[LabelSet], LabelSet | None]
) -> tuple[Float[Tensor, "label"], float]:
    """Accuracy of each label with classes, and the tokens counted."""
    found, n = [], 0.0
    for s in outs.labels:
        chosen = of(s)
        value = float("nan")
        if chosen is not None:
            value, n = probes.accuracy(heads, outs, name, chosen)
        found.append(value)
    return torch.tensor(found, dtype=torch.float64), n


def _accuracy_null(heads: Heads, outs: ReadOuts) -> tuple[Tensor, Tensor]:
    n = float(outs.concat.filled[outs.used].sum())
    share = torch.tensor(
        [max(s.share) if s.classes else math.nan for s in outs.labels], dtype=torch.float64
    )
    sd = (share * (1 - share) / max(n, 1)).sqrt()
    empty = torch.zeros(len(share), dtype=torch.float64)
    there = _ladder(heads, outs, lambda name: empty)
    return there + share[:, None], there + sd[:, None]


def _real(s: LabelSet) -> LabelSet | None:
    return s if s.classes else None


@metric(
    title="Held-out accuracy of labels",
    formula="share of tokens whose class has the largest score, LDA on a read-out, K-fold",
    dims=("label", "read_out"),
    range=(0, 1),
    null=_accuracy_null,
    null_text="always the most frequent class; sd of a share of the tokens counted" + INDEPENDENT,
    invariant=("gauge", "rotation"),
    reference="Fisher 1936: linear discriminant analysis; K-fold over documents",
)
def probe_accuracy(heads: Heads, read_outs: ReadOuts) -> Float[Tensor, "label read_out"]:
    """How often linear discriminant analysis finds a token's class, on documents not fitted on.

    Fitted on all labelled tokens by their sums, counted on a random sample of them. NaN for labels
    that are numbers, and where the block has no such read-out.

    Raises:
        NotApplicable: no label has classes, one fold, too few labelled tokens, or heads that write
            nothing.
    """
    _classes(read_outs)
    return _ladder(heads, read_outs, lambda name: _accuracies(heads, read_outs, name, _real)[0])


def _selectivity_null(heads: Heads, outs: ReadOuts) -> tuple[Tensor, Tensor]:
    sd = _ladder(heads, outs, lambda name: _selectivity(heads, outs, name)[1])
    return torch.zeros_like(sd) + 0 * sd, sd


def _selectivity(heads: Heads, outs: ReadOuts, name: str) -> tuple[Tensor, Tensor]:
    real, n = _accuracies(heads, outs, name, _real)
    dealt, _ = _accuracies(heads, outs, name, outs.control_of)
    return real - dealt, ((real * (1 - real) + dealt * (1 - dealt)) / max(n, 1)).sqrt()


@metric(
    title="Selectivity of probes",
    formula="accuracy − accuracy on the control task",
    dims=("label", "read_out"),
    range=(-1, 1),
    null=_selectivity_null,
    null_text="0: the label is no easier than classes dealt at random to types of words; sd of two "
    "shares of the tokens counted" + INDEPENDENT + ", up to a fifth too small, since folds share "
    "the tokens that they are fitted on",
    invariant=("gauge", "rotation"),
    reference="Hewitt & Liang 2019: Designing and interpreting probes with control tasks",
)
def probe_selectivity(heads: Heads, read_outs: ReadOuts) -> Float[Tensor, "label read_out"]:
    """How much better a probe finds a label than a random class of each word type.

    The control task has the label's own frequencies; it can be learnt only by knowing the words, so
    that a probe which merely memorises them has a selectivity near 0. NaN where accuracy is.

    Raises:
        NotApplicable: as for ``probe_accuracy``.
    """
    _classes(read_outs)
    return _ladder(heads, read_outs, lambda name: _selectivity(heads, read_outs, name)[0])


def _saved(heads: Heads, outs: ReadOuts, name: str) -> Float[Tensor, "label"]:
    """Nats a token that the read-out saves in describing each label."""
    p = probes.place(heads, outs, name)
    assert p is not None
    w = p.width
    n, _, C = p.moments(outs.used)
    prior = C[:w, :w].trace()
    if prior <= 0:
        return torch.zeros(len(outs.labels), dtype=torch.float64)
    scaled = C[:w, :w] * (n / prior)  # Λ_n = prior (I + scaled)
    L = torch.linalg.cholesky(scaled + torch.eye(w).to(scaled))
    complexity = L.diagonal().log().sum()
    found = []
    for s in outs.labels:
        columns = slice(w + s.start, w + s.start + s.width)
        y = probes.label_directions(C[columns, columns])
        V = C[:w, columns] @ y * (n / prior.sqrt())
        explained = torch.linalg.solve_triangular(L, V, upper=False).square().sum(0)
        before, after = (n + 1) / 2, (n + 1 - explained) / 2
        gain = (n + 1) / 2 * (before / after).log() - complexity
        found.append(gain.sum() / n)
    return torch.stack(found)


def _saved_null(heads: Heads, outs: ReadOuts) -> tuple[Tensor, None]:
    return torch.zeros((), dtype=torch.float64), None


@metric(
    title="Description length saved by a read-out",
    formula="(1/n) Σ_t ln p(y_t | x_t, earlier pairs) − ln p(y_t | earlier y), Gaussian codes",
    dims=("label", "read_out"),
    range=(float("-inf"), float("inf")),
    null=_saved_null,
    null_text="at most 0: for a label that the read-out says nothing of, more than t nats in all "
    "are saved with probability below e^−t in each direction of the label" + INDEPENDENT,
    invariant=("gauge", "rotation"),
    reference="Voita & Titov 2020 (online codes); evidence of Bayesian linear regression, which is "
    "the prequential code of Dawid 1984 in closed form, the same for any order of tokens",
    unit="nats/token",
)
def probe_mdl(heads: Heads, read_outs: ReadOuts) -> Float[Tensor, "label read_out"]:
    """How much shorter a label's description is for those who know the read-out, a token.

    Both codes are Gaussian, of the label's whitened columns (C − 1 for C classes), and pay for what
    must be learnt: the ratio of evidences of a normal-inverse-gamma model with and without x. The
    prior expects the read-out to explain as much as it leaves. Negative where learning costs more
    than it saves.

    Raises:
        NotApplicable: too few labelled tokens, or heads that write nothing.
    """
    return _ladder(heads, read_outs, lambda name: _saved(heads, read_outs, name))
