"""Find, by experiment, which feed-forward weights read what attention wrote."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from headmix.model import AttentionModel
from headmix.neighbours import NeuronReads
from headmix.registry import NotApplicable
from headmix.sources.modules import read_weight, weight_shapes

#: Names of the modules that hold feed-forward read weights.
FEED_FORWARD = frozenset(
    "gate_proj up_proj gate_up_proj c_fc fc1 fc_in lin1 wi wi_0 wi_1 w1 w3 linear1 Wi dense "
    "dense_h_to_4h intermediate_dense fc ff_in in_layer".split()
)


def find_reads(model: AttentionModel, layer: str) -> NeuronReads:
    """The read weights of the feed-forward that follows a layer's attention, norm folded in.

    Nothing is taken from names alone. On a tiny batch: the norm is the module whose output *is*
    the feed-forward's input; a constant added to the output projection must arrive at the norm's
    input unchanged, or another norm stands between and the weights are refused.

    Raises:
        NotApplicable: no such feed-forward: it runs in parallel with attention, is a mixture of
            experts, or another norm stands between; the message says which.
    """
    site: Any = model.sites[model.layer_name(layer)]
    if model.module is None or model.example is None or not hasattr(site, "attention"):
        raise NotApplicable("finding the feed-forward needs a model that can be run")
    root = model.module
    o_path = site.attention.o.path
    block = _block(root, o_path)
    plain = _record(model, root, block, o_path, None)
    bump = torch.linspace(-1, 1, site.heads().d_model)
    bumped = _record(model, root, block, o_path, bump)
    for path, (norm_path, norm_in) in plain.items():
        if norm_path is None or path not in bumped:
            continue
        moved = bumped[path][1] - norm_in
        if moved.abs().max() < 1e-6:
            continue  # reads the stream from before attention: parallel blocks
        if not torch.allclose(moved, bump.to(moved).expand_as(moved), atol=1e-3):
            raise NotApplicable(f"{layer}: a norm or scale stands between attention and the stream")
        readers = [p for p, (n, _) in plain.items() if n == norm_path]
        return _folded(root, norm_path, readers)
    raise NotApplicable(
        f"{layer}: no feed-forward in {block or 'the model'} reads what attention writes through "
        "one norm (parallel blocks, mixtures of experts and bare modules have none)"
    )


def _block(root: nn.Module, o_path: str) -> str:
    """The smallest module that holds the output projection and a feed-forward read."""
    shapes = weight_shapes(root)
    block = o_path
    while block:
        block = block.rpartition(".")[0]
        inside = block + "." if block else ""
        attention = o_path[len(inside) :].split(".")[0]
        if any(
            p.startswith(inside)
            and p.rpartition(".")[2] in FEED_FORWARD
            and p[len(inside) :].split(".")[0] != attention
            for p in shapes
        ):
            return block
    raise NotApplicable("no feed-forward was found beside this attention layer")


def _record(
    model: AttentionModel, root: nn.Module, block: str, o_path: str, bump: Tensor | None
) -> dict[str, tuple[str | None, Tensor]]:
    """For each feed-forward read of the block: the norm before it, and that norm's input."""
    norms: list[tuple[str, Tensor, Tensor]] = []
    reads: dict[str, tuple[str | None, Tensor]] = {}

    def on_norm(path: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
            if isinstance(output, Tensor) and inputs:
                norms.append((path, inputs[0], output))

        return hook

    def on_read(path: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
            if path not in reads:
                same = [n for n in norms if _same(n[2], inputs[0])]
                reads[path] = (same[-1][0], same[-1][1]) if same else (None, inputs[0])

        return hook

    def on_output(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        return None if bump is None else output + bump.to(output)

    shapes = weight_shapes(root)
    with ExitStack() as stack:
        for path, module in root.named_modules():
            if not path.startswith(block + "." if block else "") or path == o_path:
                continue
            weight = getattr(module, "weight", None)
            if isinstance(weight, Tensor) and weight.ndim == 1:
                stack.callback(module.register_forward_hook(on_norm(path)).remove)
            elif path in shapes and path.rpartition(".")[2] in FEED_FORWARD:
                stack.callback(module.register_forward_hook(on_read(path)).remove)
        o = root.get_submodule(o_path)
        stack.callback(o.register_forward_hook(on_output).remove)
        model.forward(model.example())
    return reads


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.numel() == b.numel() and torch.equal(a.flatten(), b.flatten()))


def _folded(root: nn.Module, norm_path: str, readers: list[str]) -> NeuronReads:
    norm = root.get_submodule(norm_path)
    parts = [read_weight(root.get_submodule(p), p, torch.float32).T for p in readers]
    W_in = torch.cat(parts, dim=1)
    gain, centred = _gain(norm)
    W_in = gain[:, None] * W_in
    return NeuronReads(W_in - W_in.mean(0) if centred else W_in, folded=norm_path)


def _gain(norm: nn.Module) -> tuple[Tensor, bool]:
    """A norm's gain, and whether it centres, found by running it on a constant vector.

    A layer norm maps a constant to its bias alone; an RMS norm maps ones to its gain, whether it
    multiplies by its weight or, as Gemma does, by one more than it.
    """
    weight = norm.weight.detach()
    ones = torch.ones(1, weight.shape[0]).to(weight)
    with torch.inference_mode():
        odd = (norm(ones) - norm(-ones))[0].to("cpu", torch.float32) / 2
    centred = bool(odd.abs().max() < 1e-3)
    return (weight.to("cpu", torch.float32) if centred else odd.clone()), centred
