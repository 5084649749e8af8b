"""From an attention layer and a way to read its weights to Heads: live module or file alike."""

from collections.abc import Callable
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headmix.heads import Heads
from headmix.layouts import Attention, Projection


def build_heads(
    attention: Attention,
    weight: Callable[[str], Tensor],
    bias: Callable[[str], Tensor | None],
    *,
    streams: tuple[str, str],
    values: str = "exact",
    processing: str = "raw",
) -> Heads:
    """Read one layer's projections and take them apart per head.

    Args:
        attention: where the projections are and which features belong to which head.
        weight: reads a projection's weight ``[out, in]`` by path, into memory of its own.
        bias: reads its bias ``[out]`` likewise, or None.
        streams: the residual stream that queries read, and the one that keys and values read.
        values: a key of ``headmix.model.VALUES``; W_V and b_V are left out where "not linear".
        processing: "raw" or "folded".
    """
    a = attention
    last = lru_cache(maxsize=1)(weight)  # a fused weight is read once, and only one is held

    def per_head(projection: Projection | None) -> Float[Tensor, "head in feature"] | None:
        if projection is None:
            return None
        return _rows(last(projection.path), projection.features).mT

    v = None if values == "not linear" else a.v
    b_V, b_O = None if v is None else bias(v.path), bias(a.o.path)
    return Heads(
        # row by row, as decompositions want it: the one projection that is stored the other way
        W_O=_rows(last(a.o.path).T, a.o.features).contiguous(),
        W_V=per_head(v),
        W_Q=per_head(a.q),
        W_K=per_head(a.k),
        b_V=None if b_V is None or v is None else _rows(b_V, v.features),
        b_O=b_O,
        kv_of_head=a.kv_of_head,
        layer=a.name,
        processing=processing,
        stream=streams[0],
        kv_stream=streams[1],
    )


def _rows(
    weight: Float[Tensor, "out *rest"], features: Int[Tensor, "head feature"]
) -> Float[Tensor, "head feature *rest"]:
    """The rows of each head: a view where they follow one another, a copy where interleaved."""
    first, count = int(features[0, 0]), features.numel()
    if torch.equal(features.flatten(), torch.arange(first, first + count)):
        return weight[first : first + count].unflatten(0, features.shape)
    return weight[features]


def streams_of(a: Attention) -> tuple[str, str]:
    """Which residual stream a layer's queries read, and which its keys and values read."""
    tower = a.name.rpartition(".L")[0] or "residual"
    if a.layout.order == "latent":
        return tower, f"{tower}.latent"
    return (tower, "encoder") if a.cross else (tower, tower)
