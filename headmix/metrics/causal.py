"""What heads do, found by replacing them: the effect on the output, and how two effects interact.

Unlike all other metrics these are not about what a head holds but about what the model does with
it. Each forward pass replaces what chosen heads give to the output projection, their z. Main is
**resampling**: z of another document at the same position keeps everything about a head but what it
says of this text. The **mean** is no value that the head ever takes, and **zero** less so: models
were not trained on either, so that some of the effect is that of something unheard of.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from headmix import activity
from headmix.effects import READ_OUTS, REPLACEMENTS, Effects, Interactions
from headmix.heads import Heads
from headmix.registry import Metric, NotApplicable, metric

#: Replacing z by z of another document gives the same whatever basis z is written in.
_SAME_MODEL = ("gauge", "rotation")

_NO_EFFECT = "a head that the output does not depend on: 0"
_WHERE = "Michel et al. 2019 (zero); Chan et al. 2022 (resampling); Zhang & Nanda 2024"


def _effect(effects: Effects, what: str, replacement: str) -> Float[Tensor, "unit"]:
    """The mean over tokens for every unit.

    Raises:
        NotApplicable: nothing was counted, or not with this replacement.
    """
    count = effects.count if what == "distance" else effects.predictions
    if not effects.count.sum():
        raise NotApplicable("no token was seen")
    if not count.sum():
        raise NotApplicable(
            "no token of this model is predicted: it is neither a causal nor a masked language "
            "model, so that it has no loss"
        )
    total = getattr(effects, what)[:, list(REPLACEMENTS).index(replacement)].sum(0)
    if total.isnan().all():
        raise NotApplicable(f"not run: replacement {replacement}")
    return total / count.sum()


def _of_heads(effects: Effects, what: str, replacement: str) -> Float[Tensor, "head"]:
    return _effect(effects, what, replacement)[: effects.n_heads]


def _of_groups(
    heads: Heads, effects: Effects, what: str, replacement: str
) -> Float[Tensor, "kv_head"]:
    groups = activity.kv_groups(heads)
    value = _effect(effects, what, replacement)
    return value[[_unit(effects, group) for group in groups]]


def _unit(effects: Effects, heads: list[int]) -> int:
    unit = effects.unit(heads)
    if unit is None:
        raise NotApplicable(f"heads {heads} were not replaced together")
    return unit


def _none_per_head(effects: Effects) -> tuple[Tensor, None]:
    return torch.zeros(effects.n_heads, dtype=torch.float64), None


def _none_per_group(heads: Heads, effects: Effects) -> tuple[Tensor, None]:
    return torch.zeros(heads.n_kv_heads, dtype=torch.float64), None


def _ablation(title: str, formula: str, low: int | float, unit: str) -> Callable[..., Metric]:
    return metric(
        title=title,
        formula=formula,
        dims=("head",),
        range=(low, float("inf")),
        null=_none_per_head,
        null_text=_NO_EFFECT,
        invariant=_SAME_MODEL,
        reference=_WHERE,
        unit=unit,
    )


_ANY = float("-inf")
_DISTANCE = "mean over tokens of ‖y′ − y‖ / ‖y‖, y the model's output, y′ with z_h "
_LOSS = "mean over predictions of loss′ − loss, loss′ with z_h "


@_ablation("Output change when resampled", _DISTANCE + "of another document", 0, "")
def head_ablation(effects: Effects) -> Float[Tensor, "head"]:
    """How far the model's output moves when a head says what it says of another document.

    Relative Euclidean distance of the output of each token, mean over tokens; z_h is replaced by z
    of another document at the same position. The output is the last hidden state, before any head
    for a task; of a module of one's own, what it returns. 0 for a head on which nothing depends;
    two unrelated outputs of the same length are about √2 apart.
    """
    return _of_heads(effects, "distance", "resample")


@_ablation("Output change at the mean", _DISTANCE + "at its mean over the text", 0, "")
def head_ablation_mean(effects: Effects) -> Float[Tensor, "head"]:
    """How far the model's output moves when a head always gives its mean.

    As ``head_ablation``; the mean is that over the tokens that count; the start and end tokens of
    a window keep a mean of their own.
    """
    return _of_heads(effects, "distance", "mean")


@_ablation("Output change at zero", _DISTANCE + "= 0", 0, "")
def head_ablation_zero(effects: Effects) -> Float[Tensor, "head"]:
    """How far the model's output moves when a head gives nothing.

    As ``head_ablation``; to compare with older work. It takes away what a head always adds, too,
    which the rest of the model counts on.
    """
    return _of_heads(effects, "distance", "zero")


@_ablation("Loss added when resampled", _LOSS + "of another document", _ANY, "nats")
def head_ablation_loss(effects: Effects) -> Float[Tensor, "head"]:
    """How much worse the model predicts when a head says what it says of another document.

    ``−ln p′ + ln p`` of the right token, in nats, mean over predictions: the next token for causal
    models, masked ones for masked models. Negative where the head was in the way.
    """
    return _of_heads(effects, "loss", "resample")


@_ablation("Loss added at the mean", _LOSS + "at its mean over the text", _ANY, "nats")
def head_ablation_loss_mean(effects: Effects) -> Float[Tensor, "head"]:
    """How much worse the model predicts when a head always gives its mean.

    As ``head_ablation_loss``, in nats; negative where the head was in the way.
    """
    return _of_heads(effects, "loss", "mean")


@_ablation("Loss added at zero", _LOSS + "= 0", _ANY, "nats")
def head_ablation_loss_zero(effects: Effects) -> Float[Tensor, "head"]:
    """How much worse the model predicts when a head gives nothing.

    As ``head_ablation_loss``, in nats; only to compare with older work.
    """
    return _of_heads(effects, "loss", "zero")


@_ablation(
    "Prediction change when resampled",
    "mean over predictions of Σ_v p_v ln(p_v / p′_v), p′ with z_h of another document",
    0,
    "nats",
)
def head_ablation_kl(effects: Effects) -> Float[Tensor, "head"]:
    """How far the model's predictions move when a head says what it says of another document.

    ``KL(p ‖ p′)`` in nats, mean over predictions: also counts changes that make no prediction
    better or worse.
    """
    return _of_heads(effects, "divergence", "resample")


@metric(
    title="Output change when a KV group is resampled",
    formula=_DISTANCE + "of another document for all h of a group",
    dims=("kv_head",),
    range=(0, float("inf")),
    null=_none_per_group,
    null_text=_NO_EFFECT,
    invariant=_SAME_MODEL,
    reference=_WHERE,
)
def group_ablation(heads: Heads, effects: Effects) -> Float[Tensor, "kv_head"]:
    """How far the output moves when all query heads of a KV head are resampled at once.

    As ``head_ablation``. Only a whole group frees its keys and values, so this is the number to
    ask before one goes.

    Raises:
        NotApplicable: groups are heads, or there is one group.
    """
    return _of_groups(heads, effects, "distance", "resample")


@metric(
    title="Loss added when a KV group is resampled",
    formula=_LOSS + "of another document for all h of a group",
    dims=("kv_head",),
    range=(float("-inf"), float("inf")),
    null=_none_per_group,
    null_text=_NO_EFFECT,
    invariant=_SAME_MODEL,
    reference=_WHERE,
    unit="nats",
)
def group_ablation_loss(heads: Heads, effects: Effects) -> Float[Tensor, "kv_head"]:
    """How much worse the model predicts when all query heads of a KV head are resampled at once.

    As ``head_ablation_loss``, in nats.

    Raises:
        NotApplicable: groups are heads, there is one group, or the model predicts no tokens.
    """
    return _of_groups(heads, effects, "loss", "resample")


def _no_interaction(effects: Effects) -> tuple[Tensor, None]:
    return torch.zeros(effects.n_heads, effects.n_heads, dtype=torch.float64), None


@metric(
    title="Loss that two heads' removal shares",
    formula="ΔL_ij − ΔL_i − ΔL_j, ΔL the loss added by resampling",
    dims=("head", "head_b"),
    range=(float("-inf"), float("inf")),
    null=_no_interaction,
    null_text="effects that add up: 0",
    invariant=_SAME_MODEL,
    reference="interaction of two factors; Merullo et al. 2024 on heads that work together",
    unit="nats",
)
def ablation_interaction(effects: Effects) -> Float[Tensor, "head head"]:
    """How much more two heads cost together than the sum of what each costs alone, in nats.

    Positive where one stands in for the other (either alone may go, not both), negative where they
    need each other (what the second did is lost with the first). Only of pairs that were chosen;
    the others are NaN.

    Raises:
        NotApplicable: no pair was chosen, or the model predicts no tokens.
    """
    loss = _effect(effects, "loss", "resample")
    H = effects.n_heads
    out = loss.new_full((H, H), torch.nan).fill_diagonal_(0.0)
    for i in range(H):
        for j in range(i):
            if (unit := effects.unit([i, j])) is not None:
                out[i, j] = out[j, i] = loss[unit] - loss[i] - loss[j]
    if out.isnan().sum() == H * (H - 1) > 0:
        raise NotApplicable("no pair was chosen: pass causal=Interventions(pairs=...)")
    return out


def _interaction(interactions: Interactions, read_out: str) -> Float[Tensor, "head head"]:
    """RMS of Δ_ij over the RMS that δ_i and δ_j have together.

    0 of a head with itself and of two without any effect, NaN of pairs that were not run.
    """
    at = interactions.require(read_out)
    if not interactions.n:
        raise NotApplicable("no token was seen")
    if interactions.n_heads == 1:
        raise NotApplicable("a single head has no other to interact with")
    single = interactions.single[:, at].sum(0)
    rounding = interactions.rounding[:, at].sum()
    if (single <= rounding).all():
        raise NotApplicable(
            f"the effect of every head at {read_out} is zero: what is read there does not depend "
            "on them"
        )
    both = single[:, None] + single
    ratio = (interactions.joint[:, at].sum(0) / both).sqrt()
    ratio = ratio.masked_fill(both <= 2 * rounding, 0.0)
    return ratio.masked_fill(~interactions.pairs, torch.nan).fill_diagonal_(0.0)


def _additive(interactions: Interactions) -> tuple[Tensor, None]:
    H = interactions.n_heads
    return torch.zeros(H, H, dtype=torch.float64), None


def _interacting(at: str, null_text: str, invariant: tuple[str, ...]) -> Callable[..., Metric]:
    return metric(
        title=f"Interaction of two heads at {at}",
        formula="RMS(Δ_ij) / √(RMS(δ_i)² + RMS(δ_j)²), Δ_ij = f(ij) − f(i) − f(j) + f(∅), "
        f"δ_i = f(i) − f(∅), f read at {READ_OUTS[at]}",
        dims=("head", "head_b"),
        range=(0, float("inf")),
        null=_additive,
        null_text=null_text,
        invariant=invariant,
        reference="interaction of two factors (second difference)",
    )


_LINEAR = "a linear way to what is read: 0"


@_interacting("attn_out", "exactly linear: 0 up to rounding", (*_SAME_MODEL, "scale", "head_scale"))
def cross_head_interaction_attn_out(
    interactions: Interactions,
) -> Float[Tensor, "head head"]:
    """Whether two heads' effects add up where the output projection has mixed them: they do.

    The projection is linear, so that this is rounding, some 1e-7 in single precision. Anything
    else would mean that it is not what headmix takes it for.

    Raises:
        NotApplicable: one head, or nothing that is read depends on them.
    """
    return _interaction(interactions, "attn_out")


@_interacting("mlp_in", _LINEAR, _SAME_MODEL)
def cross_head_interaction_mlp_in(
    interactions: Interactions,
) -> Float[Tensor, "head head"]:
    """How far two heads' effects do not add up after the next norm, where the feed-forward reads.

    A norm divides by the length of all that was written, so that heads interact before any neuron
    is reached.

    Raises:
        NotApplicable: it could not be read, or does not depend on the heads (parallel blocks).
    """
    return _interaction(interactions, "mlp_in")


@_interacting("mlp_out", _LINEAR, _SAME_MODEL)
def cross_head_interaction_mlp_out(
    interactions: Interactions,
) -> Float[Tensor, "head head"]:
    """How far two heads' effects do not add up in what the feed-forward makes of them.

    0 for a feed-forward that is linear in what heads write, 1 for one that computes the product of
    two signs, one from each head. Compare with ``cross_head_interaction_mlp_in``: what the norm
    does is in both.

    Raises:
        NotApplicable: it could not be read, or does not depend on the heads (parallel blocks).
    """
    return _interaction(interactions, "mlp_out")


@_interacting("next_logits", _LINEAR, _SAME_MODEL)
def cross_head_interaction_next_logits(
    interactions: Interactions,
) -> Float[Tensor, "head head"]:
    """How far two heads' effects do not add up in the next layer's attention logits.

    Logits are products of queries and keys, both of which read the stream: heads can interact there
    without any neuron. Read as the logarithm of the attention weights less its mean over the keys
    that a query sees: the logits but for a constant a query, which attention forgets.

    Raises:
        NotApplicable: there is no next layer in the same stream, or its weights cannot be had.
    """
    return _interaction(interactions, "next_logits")


__all__ = [
    "ablation_interaction",
    "cross_head_interaction_attn_out",
    "cross_head_interaction_mlp_in",
    "cross_head_interaction_mlp_out",
    "cross_head_interaction_next_logits",
    "group_ablation",
    "group_ablation_loss",
    "head_ablation",
    "head_ablation_kl",
    "head_ablation_loss",
    "head_ablation_loss_mean",
    "head_ablation_loss_zero",
    "head_ablation_mean",
    "head_ablation_zero",
]
