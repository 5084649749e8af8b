"""Find, by experiment, which feed-forward weights read what attention wrote."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headmix.layouts import Attention
from headmix.model import AttentionModel
from headmix.neighbours import NeuronReads
from headmix.registry import NotApplicable
from headmix.sources.modules import read_weight, weight_shapes

#: Names of the modules that hold feed-forward read weights.
FEED_FORWARD = frozenset(
    (
        "gate_proj", "up_proj", "gate_up_proj", "c_fc", "fc1", "fc_in", "lin1", "wi", "wi_0",
        "wi_1", "w1", "w3", "linear1", "Wi", "dense", "dense_h_to_4h", "intermediate_dense", "fc",
        "ff_in", "in_layer",
    )
)  # fmt: skip


class Parallel(NotApplicable):
    """The block's feed-forward does not read what its attention writes."""


class StandsBetween(NotApplicable):
    """What attention writes reaches the feed-forward through a norm or a scale."""


@dataclass(frozen=True)
class _Read:
    """The norm whose output a feed-forward weight read, and what that norm (or it) saw."""

    norm: str | None
    seen: Tensor


def find_reads(model: AttentionModel, layer: str) -> NeuronReads:
    """The read weights of the feed-forward that follows a layer's attention, norm folded in.

    Nothing is taken from names alone. On a tiny batch: the norm is the module whose output *is*
    the feed-forward's input; a constant added to the output projection must arrive at that norm's
    input unchanged, or something stands between and the weights are refused.

    Raises:
        NotApplicable: no such feed-forward was found, or it runs in parallel with attention
            (``Parallel``), or a norm or scale stands between (``StandsBetween``).
    """
    site: Any = model.sites[model.layer_name(layer)]
    if model.module is None or model.example is None or not hasattr(site, "attention"):
        raise NotApplicable("finding the feed-forward needs a model that can be run")
    attention = site.attention
    same_kind = (
        a.path
        for s in model.sites.values()
        if (a := s.attention).cross == attention.cross and a.path != attention.path
    )
    block = block_of(model.module, attention, list(same_kind))
    bump = torch.linspace(-1, 1, site.heads().d_model)
    batch = model.example()
    plain, bumped = (_record(model, batch, block, attention, added) for added in (None, bump))
    moved = {p: bumped[p].seen - plain[p].seen for p in plain if p in bumped}
    reached = [p for p, change in moved.items() if change.abs().max() > 1e-6]
    if not reached:
        raise Parallel(
            f"{layer}: attention and feed-forward run in parallel: the block's neurons do not "
            "read its heads"
        )
    first = reached[0]
    # of one stream entry in ten thousand times the rest, rounding alone is more than the bump
    rounding = 4 * torch.finfo(moved[first].dtype).eps * plain[first].seen.abs()
    if ((moved[first] - bump.to(moved[first])).abs() > 1e-3 + rounding).any():
        raise StandsBetween(
            f"{layer}: a norm, a scale or another attention layer stands between the output "
            "projection and what the feed-forward reads"
        )
    readers = [p for p in reached if plain[p].norm == plain[first].norm]
    return _folded(model.module, plain[first].norm, readers)


def block_of(root: nn.Module, attention: Attention, others: Iterable[str]) -> str:
    """The smallest module around an attention layer that also holds a feed-forward read.

    It may hold a layer of the other kind (self or cross), but no second one of the same kind.
    """
    reads = [p for p in weight_shapes(root) if p.rpartition(".")[2] in FEED_FORWARD]
    block = attention.path
    while block:
        block = block.rpartition(".")[0]
        inside = block + "." if block else ""
        if any(p.startswith(inside) for p in others):
            break
        if any(p.startswith(inside) and not p.startswith(attention.path + ".") for p in reads):
            return block
    raise NotApplicable("no feed-forward was found beside this attention layer")


def _record(
    model: AttentionModel, batch: Any, block: str, attention: Attention, bump: Tensor | None
) -> dict[str, _Read]:
    """What each feed-forward read of the block saw in one pass, ``bump`` added to attention."""
    norms: list[tuple[str, Tensor, Tensor]] = []
    reads: dict[str, _Read] = {}

    def on_norm(path: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and inputs and isinstance(inputs[0], Tensor):
                norms.append((path, inputs[0], output))

        return hook

    def on_read(path: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            before = [(p, seen) for p, seen, out in norms if _same(out, inputs[0])]
            reads.setdefault(path, _Read(*before[-1]) if before else _Read(None, inputs[0]))

        return hook

    def on_output(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        return None if bump is None else output + bump.to(output)

    root = model.module
    assert root is not None
    inside = block + "." if block else ""
    shapes = weight_shapes(root)
    with ExitStack() as stack:
        for path, module in root.named_modules():
            if not path.startswith(inside):
                continue
            weight = getattr(module, "weight", None)
            if "norm" in type(module).__name__.lower() and (weight is None or weight.ndim == 1):
                stack.callback(module.register_forward_hook(on_norm(path)).remove)
            elif (
                path in shapes
                and path.rpartition(".")[2] in FEED_FORWARD
                and not path.startswith(attention.path + ".")
            ):
                stack.callback(module.register_forward_hook(on_read(path)).remove)
        stack.callback(root.get_submodule(attention.o.path).register_forward_hook(on_output).remove)
        model.forward(batch)
    return reads


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.numel() == b.numel() and torch.equal(a.flatten(), b.flatten()))


def _folded(root: nn.Module, norm_path: str | None, readers: list[str]) -> NeuronReads:
    parts = [read_weight(root.get_submodule(p), p, torch.float32).T for p in readers]
    W_in = torch.cat(parts, dim=1)
    if norm_path is None:
        return NeuronReads(W_in)
    gain, centred = norm_gain(root.get_submodule(norm_path))
    W_in = gain[:, None] * W_in
    return NeuronReads(W_in - W_in.mean(0) if centred else W_in, folded=norm_path)


def norm_gain(norm: nn.Module) -> tuple[Tensor, bool]:
    """A norm's gain, and whether it centres, found by running it on a constant vector.

    A layer norm maps a constant to its bias alone; an RMS norm maps ones to its gain, whether it
    multiplies by its weight or, as Gemma does, by one more than it.
    """
    layer: Any = norm
    if getattr(norm, "weight", None) is None:
        weight = torch.ones(layer.normalized_shape[-1])
    else:
        weight = layer.weight.detach()
    ones = torch.ones(1, weight.shape[0]).to(weight)
    with torch.inference_mode():
        odd = (norm(ones) - norm(-ones))[0].to("cpu", torch.float32) / 2
    centred = bool(odd.abs().max() < 1e-3)
    return (weight.to("cpu", torch.float32) if centred else odd.clone()), centred
