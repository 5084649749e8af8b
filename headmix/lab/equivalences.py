"""When W_O can be absorbed elsewhere: exact changes of weights that leave the function as it was.

1. A block-diagonal W_O goes into W_V: identity can do all that it can.
2. In one layer of attention alone, without skip, W_O goes into the read-out:
   (W_O, W_U) ≡ (I, W_O W_U).
3. With skips the stream itself may change basis, x → x S: every W_O becomes W_O S at once. S can
   make one of them identity; another is then W_O' W_O⁻¹, which no W_V absorbs unless it happens to
   be block-diagonal. So at most one layer's W_O goes away.
"""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from headmix.lab.outputs import blocks, set_weight
from headmix.lab.transformer import Transformer


@torch.no_grad()
def absorb_blocks(model: Transformer) -> Transformer:
    """The same function with identity as W_O: each block of a block-diagonal one goes into W_V.

    Raises:
        ValueError: W_O is not block-diagonal, or heads are wider than the stream.
    """
    c = model.config
    twin = _twin(model, "identity")
    mask = blocks(c.n_heads, c.d_head, c.d_model)
    if c.d_head > c.d_model:
        raise ValueError(f"heads of width {c.d_head} do not fit in a stream of {c.d_model}")
    for number, (layer, other) in enumerate(_layers(model, twin)):
        W_O = layer.attention.o_proj.weight.T
        if (outside := float(W_O[~mask].abs().max()) if (~mask).any() else 0.0) > 0:
            raise ValueError(
                f"layer {number}: W_O is not block-diagonal: {outside:.1e} outside the blocks"
            )
        for h in range(c.n_heads):
            rows = torch.arange(h * c.d_head, (h + 1) * c.d_head)
            block = W_O[rows][:, rows % c.d_model]  # [d, d]
            other.attention.v_proj.weight[rows] = block.T @ layer.attention.v_proj.weight[rows]
            other.attention.v_proj.bias[rows] = layer.attention.v_proj.bias[rows] @ block
    return twin


@torch.no_grad()
def absorb_output(model: Transformer) -> Transformer:
    """The same function with identity as W_O: of one bare layer, it goes into the read-out.

    Raises:
        ValueError: there are several layers, skips, norms or a feed-forward, or Dc ≠ D.
    """
    c = model.config
    if c.n_layers > 1 or c.skip or c.norm or c.mlp or c.n_heads * c.d_head != c.d_model:
        raise ValueError(
            "only one layer of attention alone, with heads × d_head = d_model, has nothing between "
            f"W_O and the read-out; this has {c.n_layers} layers, skip={c.skip}, norm={c.norm}, "
            f"mlp={c.mlp}, heads × d_head = {c.n_heads * c.d_head}, d_model = {c.d_model}"
        )
    twin = _twin(model, "identity")
    [(layer, other)] = _layers(model, twin)
    projection = layer.attention.o_proj
    other.attention.o_proj.bias.zero_()
    twin.lm_head.weight.copy_(model.lm_head.weight @ projection.weight)
    twin.lm_head.bias.copy_(model.lm_head.bias + model.lm_head.weight @ projection.bias)
    return twin


@torch.no_grad()
def change_basis(model: Transformer, S: Float[Tensor, "d_model d_model"]) -> Transformer:
    """The same function with a stream x S in place of x: writers times S, readers times S⁻¹.

    Raises:
        ValueError: there are norms, with which only some S commute.
    """
    if model.config.norm:
        raise ValueError("a norm does not commute with a change of basis: build without norms")
    twin, back = _twin(model, "full"), S.inverse()
    for name in ("embed_tokens", "embed_positions"):
        getattr(twin, name).weight.copy_(getattr(model, name).weight @ S)
    readers: list[Any] = [twin.lm_head]
    writers: list[Any] = []
    for _, layer in _layers(model, twin):
        attention = layer.attention
        readers += [attention.q_proj, attention.k_proj, attention.v_proj]
        writers.append(attention.o_proj)
        if layer.mlp is not None:
            readers.append(layer.mlp.fc1)
            writers.append(layer.mlp.fc2)
    for linear in readers:
        linear.weight.copy_(linear.weight @ back.T)
    for linear in writers:
        linear.weight.copy_(S.T @ linear.weight)
        linear.bias.copy_(linear.bias @ S)
    return twin


def _twin(model: Transformer, output: str) -> Transformer:
    """A copy whose W_O is of another kind; a free one begins with the weight it had."""
    with torch.random.fork_rng():
        twin = Transformer(replace(model.config, output=output)).to(model.lm_head.weight)
    theirs = dict(model.named_parameters())
    for name, parameter in twin.named_parameters():
        if name in theirs:
            parameter.copy_(theirs[name])
    if output == "full":
        for layer, other in _layers(model, twin):
            set_weight(other.attention.o_proj, deepcopy(layer.attention.o_proj.weight.detach()))
    return twin


def _layers(model: Transformer, twin: Transformer) -> list[tuple[Any, Any]]:
    return list(zip(model.layers, twin.layers, strict=True))
