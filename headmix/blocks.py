"""blocks: the residual stream around an attention layer, found by experiment, and how to watch it.

What passes where is told by what adds up on a tiny batch (see ``headmix.streams``), never by names;
a read-out that no test proves is absent, with the reason.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from headmix.layouts import Attention
from headmix.model import AttentionModel
from headmix.registry import NotApplicable
from headmix.sources.reads import block_of
from headmix.streams import READ_OUTS, Point, Run, identify

#: Called with the name of a read-out and what passes there.
ReadOutWatcher = Callable[[str, Float[Tensor, "*token d_model"]], None]


@dataclass(frozen=True, eq=False)
class Block:
    """The block around one attention layer.

    Attributes:
        layer: the attention layer's name.
        path: the block's module; "" is the whole model.
        call: which of the block's calls in a forward pass, where layers share it.
        points: where the read-outs are that are modules' inputs or outputs.
        absent: why the others cannot be had.
    """

    layer: str
    path: str
    call: int
    points: Mapping[str, Point]
    absent: Mapping[str, str]

    @property
    def read_outs(self) -> list[str]:
        """Those that can be watched, in the order of ``READ_OUTS``."""
        return [name for name in READ_OUTS if name not in self.absent]

    @contextmanager
    def watch(
        self, model: AttentionModel, watcher: ReadOutWatcher, only: Iterable[str] | None = None
    ) -> Iterator[None]:
        """Call ``watcher(name, tensor)`` on every forward pass inside the context.

        ``watcher`` may raise ``Enough`` to end the pass. Hooks are removed whatever happens.

        Raises:
            NotApplicable: one of the read-outs asked for is absent; the message says why.
        """
        names = self.read_outs if only is None else list(only)
        for name in names:
            if name not in READ_OUTS:
                raise ValueError(f"{name!r} is no read-out; those are {', '.join(READ_OUTS)}")
            if name in self.absent:
                raise NotApplicable(f"{self.layer} has no {name}: {self.absent[name]}")
        wanted: dict[tuple[str, str, int], list[str]] = {}
        for name in names:
            if name in self.points:
                p = self.points[name]
                wanted.setdefault((p.path, p.side, p.call), []).append(name)

        def on_call(block_call: int, path: str, side: str, call: int, value: Tensor) -> None:
            if block_call == self.call:
                for name in wanted.get((path, side, call), ()):
                    watcher(name, value)

        with ExitStack() as stack:
            if "attn_out" in names:
                site = model.sites[self.layer]
                stack.enter_context(site.watch(lambda z, out: watcher("attn_out", out)))
            if wanted:
                assert model.module is not None
                paths = {path for path, _, _ in wanted}
                stack.enter_context(_listen(model.module, self.path, paths, on_call))
            yield


def find_block(model: AttentionModel, layer: str | int, inputs: Any = None) -> Block:
    """The block around one layer; see ``find_blocks``."""
    name = model.layer_name(layer)
    return find_blocks(model, [name], inputs)[name]


def find_blocks(
    model: AttentionModel, layers: Sequence[str] | None = None, inputs: Any = None
) -> dict[str, Block]:
    """The blocks around attention layers, by one forward pass on a tiny batch.

    Args:
        model: any; of one that cannot be run, nothing but the reason is found.
        layers: names; all by default.
        inputs: a batch for ``model.module``; by default the model's own example.
    """
    names = model.layers if layers is None else list(layers)
    if inputs is None and model.module is not None and model.example is not None:
        try:
            inputs = model.example()
        except NotApplicable:
            inputs = None
    if model.module is None or inputs is None:
        what = "cannot be run" if model.module is None else "brought no example input to try"
        absent = {n: f"the model {what}, so that its blocks are not known" for n in READ_OUTS}
        if model.module is not None:
            del absent["attn_out"]
        return {name: Block(name, "", 0, {}, absent) for name in names}
    attentions = {name: site.attention.path for name, site in model.sites.items()}
    runs = {
        name: Run(
            block_path(model, name),
            tuple(path for path in attentions.values() if path != attentions[name]),
        )
        for name in names
    }
    with ExitStack() as stack:
        for name, run in runs.items():
            root = model.module.get_submodule(run.path)
            inside = [path for path, _ in root.named_modules(prefix=run.path)]
            stack.enter_context(_listen(model.module, run.path, inside, run.on_call))
            stack.enter_context(model.sites[name].watch(run.on_attention))
        model.forward(inputs)
    return {
        name: Block(name, run.path, run.call, *identify(run, model.module))
        for name, run in runs.items()
    }


def block_path(model: AttentionModel, layer: str) -> str:
    """The module of the block around an attention layer.

    The smallest one that holds a feed-forward too (see ``block_of``); where none is known by its
    names, the numbered item of a list of blocks, and else the module around attention.
    """
    assert model.module is not None
    attention: Attention = model.sites[layer].attention
    others = [
        a.path
        for s in model.sites.values()
        if (a := s.attention).cross == attention.cross and a.path != attention.path
    ]
    try:
        path = block_of(model.module, attention, others)
    except NotApplicable:
        parts = attention.path.split(".")[:-1]
        numbered = [n for n, part in enumerate(parts) if part.isdigit()]
        path = ".".join(parts[: numbered[-1] + 1] if numbered else parts)
    while path and isinstance(model.module.get_submodule(path), nn.ModuleList | nn.ModuleDict):
        path = path.rpartition(".")[0]  # a list is never called
    return path


def _stream(values: Any) -> Tensor | None:
    """The first tensor among a module's arguments, or of what it returned."""
    if isinstance(values, Tensor):
        return values if values.is_floating_point() else None
    if isinstance(values, Mapping):
        values = list(values.values())
    if isinstance(values, tuple | list):
        return next((t for v in values if (t := _stream(v)) is not None), None)
    return None


@contextmanager
def _listen(
    root: nn.Module,
    block: str,
    paths: Iterable[str],
    heard: Callable[[int, str, str, int, Tensor], None],
) -> Iterator[None]:
    """Call ``heard(call of the block, path, "in" or "out", call within it, tensor)``."""
    state: dict[str, Any] = {"block": -1, "inside": False, "calls": {}}

    def restart(module: nn.Module, inputs: Any) -> None:
        state.update(block=-1, inside=False)

    def enter(module: nn.Module, inputs: Any) -> None:
        state.update(block=state["block"] + 1, inside=True, calls={})

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        state["inside"] = False

    def before(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if state["inside"]:
                state["calls"][path] = state["calls"].get(path, -1) + 1
                if (value := _stream((args, kwargs))) is not None:
                    heard(state["block"], path, "in", state["calls"][path], value)

        return hook

    def after(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if state["inside"] and (value := _stream(output)) is not None:
                heard(state["block"], path, "out", state["calls"][path], value)

        return hook

    outer = root.get_submodule(block)
    with ExitStack() as stack:
        stack.callback(root.register_forward_pre_hook(restart).remove)
        stack.callback(outer.register_forward_pre_hook(enter).remove)
        for path in paths:
            module = root.get_submodule(path)
            pre = module.register_forward_pre_hook(before(path), with_kwargs=True)
            stack.callback(pre.remove)
            stack.callback(module.register_forward_hook(after(path)).remove)
        stack.callback(outer.register_forward_hook(leave).remove)
        yield
