"""Live modules whose projections are modules of their own: hooked, read, never changed."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headmix.heads import Heads
from headmix.layouts import Attention, Layout, Projection, Shapes, find_attention
from headmix.model import (
    VALUES,
    AttentionModel,
    PatternWatcher,
    Replacer,
    Watcher,
    token_factors,
)
from headmix.registry import NotApplicable
from headmix.sources.assembly import build_heads, streams_of
from headmix.sources.patterns import watch_module

#: On layers of a module nobody knows, until the laws have held.
UNPROVEN = "not proven: pass inputs= to load, a batch on which the two laws can be run"


class UnreadableWeight(ValueError):
    """A weight that is not there as plain numbers: quantised, on the meta device, or offloaded."""


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is stored [in, out], as in GPT-2's Conv1D, against [out, in] in Linear."""
    return type(module).__name__ == "Conv1D"


def weight_shapes(module: nn.Module) -> Shapes:
    """(out features, in features) of every projection inside a module, by path."""
    shapes: dict[str, tuple[int, int]] = {}
    for path, child in module.named_modules():
        if isinstance(child, nn.Embedding):
            continue
        out, into = getattr(child, "out_features", None), getattr(child, "in_features", None)
        weight = getattr(child, "weight", None)
        if isinstance(out, int) and isinstance(into, int):
            shapes[path] = (out, into)
        elif isinstance(weight, Tensor) and weight.ndim == 2:
            rows, columns = weight.shape
            shapes[path] = (columns, rows) if is_transposed(child) else (rows, columns)
    return shapes


def read_weight(module: nn.Module, path: str, dtype: torch.dtype) -> Float[Tensor, "out in"]:
    """A projection's weight as [out, in], converted, on the CPU, in memory of its own.

    Raises:
        UnreadableWeight: it is quantised, meta or offloaded; the message says what to do.
    """
    weight: Any = module.weight
    if weight.is_meta:
        raise UnreadableWeight(
            f"{path}.weight is on the meta device (offloaded or never loaded): load the model "
            "with its weights in memory (no device_map offloading), or read the checkpoint alone "
            "with weights_only=True"
        )
    if not weight.is_floating_point() or weight.ndim != 2:
        raise UnreadableWeight(
            f"{path}.weight is quantised ({type(module).__name__}, {weight.dtype}, shape "
            f"{tuple(weight.shape)}): dequantise this layer first, or load the model unquantised"
        )
    plain: Tensor = weight.detach().to("cpu", dtype, copy=True)
    return plain.T if is_transposed(module) else plain


@dataclass(eq=False)
class ModuleSite:
    """One attention layer inside a live model."""

    attention: Attention
    root: nn.Module
    dtype: torch.dtype = torch.float32
    processing: str = "raw"
    streams: tuple[str, str] = ("residual", "residual")
    values: str = "exact"
    notes: tuple[str, ...] = ()

    def _module(self, projection: Projection) -> nn.Module:
        return self.root.get_submodule(projection.path)

    def _weight(self, path: str) -> Tensor:
        return read_weight(self.root.get_submodule(path), path, self.dtype)

    def _bias(self, path: str) -> Tensor | None:
        bias = getattr(self.root.get_submodule(path), "bias", None)
        return None if bias is None else bias.detach().to("cpu", self.dtype, copy=True)

    def heads(self) -> Heads:
        return build_heads(
            self.attention,
            self._weight,
            self._bias,
            streams=self.streams,
            values=self.values,
            processing=self.processing,
        )

    @contextmanager
    def _hooked(
        self, projection: Projection, hook: Callable[[Tensor, Tensor], Any]
    ) -> Iterator[None]:
        """Run ``hook(input, output)`` at this layer's own call of a projection in each pass."""
        calls = 0

        def on_call(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Any:
            nonlocal calls
            calls += 1
            return hook(inputs[0], output) if calls == self.attention.call + 1 else None

        def restart(module: nn.Module, inputs: object) -> None:
            nonlocal calls
            calls = 0

        handles = [
            self.root.register_forward_pre_hook(restart),
            self._module(projection).register_forward_hook(on_call),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def watch(self, watcher: Watcher) -> AbstractContextManager[None]:
        return self._hooked(self.attention.o, watcher)

    def watch_attention(self, watcher: PatternWatcher) -> AbstractContextManager[None]:
        if self.values == "scaled":
            raise NotApplicable(f"there is no pattern over keys alone: {VALUES['scaled']}")
        return watch_module(self.root, self.attention, watcher)

    @contextmanager
    def replace_z(self, replacer: Replacer, *, skipped: int = 0) -> Iterator[None]:
        calls = 0

        def on_call(module: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
            nonlocal calls
            calls += 1
            mine = calls + skipped == self.attention.call + 1
            return (replacer(inputs[0]), *inputs[1:]) if mine else None

        def restart(module: nn.Module, inputs: object) -> None:
            nonlocal calls
            calls = 0

        handles = [
            self.root.register_forward_pre_hook(restart),
            self._module(self.attention.o).register_forward_pre_hook(on_call),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def shift_values(
        self, shift: Float[Tensor, "kv_head d_head"], *, uneven: bool = False
    ) -> AbstractContextManager[None]:
        def add(inputs: Tensor, output: Tensor) -> Tensor:
            added = torch.zeros(output.shape[-1]).to(output)
            added[self.attention.v.features] = shift.to(added)
            return output + (token_factors(output) * added if uneven else added)

        return self._hooked(self.attention.v, add)


def head_lookup(root: nn.Module) -> Callable[[str, Iterable[str]], int | None]:
    """Find the number of heads: on the module that holds a path, upwards, then in its config."""

    def lookup(path: str, names: Iterable[str]) -> int | None:
        owners = []
        while path:
            path = path.rpartition(".")[0]
            owners.append(root.get_submodule(path))
        owners = owners or [root]
        for owner in [*owners, *(getattr(o, "config", None) for o in owners)]:
            for name in names:
                value = getattr(owner, name, None)
                if isinstance(value, int) and not isinstance(value, bool):
                    return value
        return None

    return lookup


def find_sites(
    root: nn.Module,
    *,
    layout: Layout | None = None,
    model_type: str = "",
    order: str | None = None,
    dtype: torch.dtype = torch.float32,
    processing: str = "raw",
) -> Mapping[str, ModuleSite]:
    """The attention layers of a live module whose projections are modules of their own."""
    found = find_attention(
        weight_shapes(root), head_lookup(root), layout=layout, model_type=model_type, order=order
    )
    return {a.name: ModuleSite(a, root, dtype, processing, streams=streams_of(a)) for a in found}


def from_module(
    module: nn.Module,
    *,
    layout: Layout | None = None,
    name: str | None = None,
    tokenizer: Any = None,
    dtype: torch.dtype = torch.float32,
) -> AttentionModel:
    """Any module, its projections named by ``layout`` or recognised by their usual names."""
    sites = find_sites(module, layout=layout, dtype=dtype)
    for site in sites.values():
        site.notes += (UNPROVEN,)
    return AttentionModel(
        name=name or type(module).__name__,
        sites=sites,
        module=module,
        provenance={"source": "module", "class": type(module).__name__},
        tokenizer=tokenizer,
    )
