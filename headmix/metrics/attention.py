"""Where heads look: how widely, how much at the start of the sequence, how differently.

These need the attention weights themselves, which only eager attention has, in memory that grows
with the square of the window. So they are computed when asked for by name.
"""

import math

from jaxtyping import Float
from torch import Tensor

from headmix.attention import AttentionPatterns
from headmix.registry import NotApplicable, metric

#: A pattern is what a head reads; nothing that happens to W_O afterwards changes it.
_UNTOUCHED = ("gauge", "rotation", "scale", "head_scale")


def _mean(attention: AttentionPatterns, sums: Float[Tensor, "fold *rest"]) -> Tensor:
    """The mean over query rows."""
    if not attention.n:
        raise NotApplicable("no query rows were seen")
    return sums.sum(0) / attention.n


@metric(
    title="Attention entropy",
    formula="mean over queries of −Σ_k A[q, k] ln A[q, k]",
    dims=("head",),
    range=(0, float("inf")),
    null=lambda attention: (_mean(attention, attention.uniform_entropy), None),
    null_text="attention spread evenly over the t keys that each query sees: the mean of ln t",
    invariant=_UNTOUCHED,
    reference="Clark et al. 2019",
    unit="nats",
    default=False,
)
def attention_entropy(attention: AttentionPatterns) -> Float[Tensor, "head"]:
    """How widely a head looks: 0 at one key only, ln t at all t keys alike.

    ``H(a) = −Σ_k a_k ln a_k`` of each row of attention weights, in nats, mean over query rows. The
    null is also the largest possible value. e to this power counts keys.
    """
    return _mean(attention, attention.entropy)


@metric(
    title="Attention to the first token",
    formula="mean over queries of A[q, 0]",
    dims=("head",),
    range=(0, 1),
    null=lambda attention: (_mean(attention, attention.uniform_first), None),
    null_text="attention spread evenly over the t keys that each query sees: the mean of 1/t",
    invariant=_UNTOUCHED,
    reference="Xiao et al. 2024 (attention sinks); Clark et al. 2019",
    default=False,
)
def sink_mass(attention: AttentionPatterns) -> Float[Tensor, "head"]:
    """How much of its attention a head gives to the first key of the sequence.

    In many models that key is a sink: heads that have nothing to say look there, because rows of
    attention must sum to one. It is the start token where the model has one, else the first token
    of the window; in cross-attention that of the other sequence.
    """
    return _mean(attention, attention.first)


def _attention_js_null(attention: AttentionPatterns) -> tuple[Tensor, None]:
    return _mean(attention, attention.shifted_divergence), None


@metric(
    title="Divergence of attention patterns",
    formula="mean over queries of H((a_i + a_j)/2) − (H(a_i) + H(a_j))/2",
    dims=("head", "head_b"),
    range=(0, "ln 2"),
    null=_attention_js_null,
    null_text="heads as sharp as these that look at unrelated keys: head j's row moved on, "
    "cyclically and by all distances alike, along the keys that the query sees; measured, no sd",
    invariant=_UNTOUCHED,
    reference="Jensen–Shannon divergence: Lin 1991; between heads: Clark et al. 2019",
    unit="nats",
    default=False,
)
def attention_js(attention: AttentionPatterns) -> Float[Tensor, "head head"]:
    """How differently two heads look at the same text: 0 alike, ln 2 at no key in common.

    The Jensen–Shannon divergence, in nats, of their two rows of attention weights for the same
    query, mean over query rows. Heads that spread their attention widely are close to each other
    wherever they look, and heads with the same sink are too: compare with the null.
    """
    return _mean(attention, attention.divergence).clamp(max=math.log(2))


__all__ = ["attention_entropy", "attention_js", "sink_mass"]
