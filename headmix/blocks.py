"""blocks: the residual stream around an attention layer, found by experiment, and how to watch it.

What passes where is told by what adds up on a tiny batch, never by names: a tensor is ``resid_mid``
because it *is* the block's input plus what attention returned. The same test works before and after
norms, in fused and hand-built blocks; a read-out that no test proves is absent, with the reason.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headmix.layouts import Attention
from headmix.model import AttentionModel
from headmix.registry import NotApplicable
from headmix.sources.reads import block_of

#: The read-outs of a block, in the order in which information passes through them.
READ_OUTS = {
    "resid_pre": "the block's input",
    "attn_out": "what the output projection returns",
    "resid_mid": "the residual stream with attention's contribution, before the next norm",
    "mlp_in": "what the feed-forward reads: the norm of resid_mid, or itself without a norm",
    "mlp_out": "what the feed-forward adds to the stream, but for a constant factor",
    "resid_post": "the block's output",
}

#: Rows of a batch that are looked at, and how many roundings two equal sums may differ by.
ROWS, ROUNDINGS = 64, 16

#: Called with the name of a read-out and what passes there.
ReadOutWatcher = Callable[[str, Float[Tensor, "*token d_model"]], None]


@dataclass(frozen=True)
class Point:
    """Where a read-out passes: the input or output of a module, at its n-th call in the block."""

    path: str
    side: str
    call: int = 0


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
        name: _Run(
            name,
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
    return {name: _identify(run, model.module) for name, run in runs.items()}


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


def _within(path: str, parent: str) -> bool:
    return path == parent or path.startswith(parent + ".")


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


@dataclass
class _Run:
    """What passed through one block: rows of every tensor as wide as the stream, in order."""

    layer: str
    path: str
    others: tuple[str, ...]  # attention layers that are not this one
    attention: Tensor | None = None
    call: int = 0
    heard: dict[int, list[tuple[Point, Tensor]]] = field(default_factory=dict)
    at: int = 0  # how many were heard before attention returned

    def on_call(self, block_call: int, path: str, side: str, call: int, value: Tensor) -> None:
        rows = value.detach().flatten(0, -2)[:ROWS].clone()
        self.heard.setdefault(block_call, []).append((Point(path, side, call), rows))

    def on_attention(self, z: Tensor, out: Tensor) -> None:
        self.attention = out.detach().flatten(0, -2)[:ROWS].clone()
        self.call = max(self.heard, default=0)
        self.at = len(self.heard.get(self.call, ()))


class _Equal:
    """Whether two sums of activations are the same but for rounding."""

    def __init__(self, scale: Tensor) -> None:
        self.allowed = ROUNDINGS * torch.finfo(scale.dtype).eps * float(scale.double().norm())

    def __call__(self, a: Tensor, b: Tensor) -> bool:
        return float((a.double() - b.double()).norm()) <= self.allowed


def _identify(run: _Run, root: nn.Module) -> Block:
    """Name what was heard."""
    attention = run.attention
    heard = [
        (p, t)
        for p, t in run.heard.get(run.call, [])
        if attention is not None and t.shape == attention.shape and p != Point(run.path, "in")
    ]
    ends = {p: t for p, t in run.heard.get(run.call, []) if p.path == run.path}
    pre, post = ends.get(Point(run.path, "in")), ends.get(Point(run.path, "out"))
    if (
        attention is None
        or pre is None
        or post is None
        or not (pre.shape == attention.shape == post.shape)
    ):
        reason = f"no residual stream passes through {run.path or 'the model'} as one tensor"
        absent = {n: reason for n in READ_OUTS if n != "attn_out"}
        return Block(run.layer, run.path, run.call, {}, absent)
    whole = run.heard[run.call][: run.at]
    before = [(p, t) for p, t in whole if t.shape == attention.shape]
    n_before = len([p for p, _ in before if p != Point(run.path, "in")])
    return _Found(run, root, pre, post, attention, before, heard[n_before:]).block()


@dataclass
class _Found:
    """The tensors of one block: its ends, attention's output, and the rest, in order."""

    run: _Run
    root: nn.Module
    pre: Tensor
    post: Tensor
    attention: Tensor
    before: list[tuple[Point, Tensor]]
    after: list[tuple[Point, Tensor]]

    def block(self) -> Block:
        run, equal = self.run, _Equal(self.post)
        self.equal = equal
        points = {"resid_pre": Point(run.path, "in"), "resid_post": Point(run.path, "out")}
        absent: dict[str, str] = {}
        parallel = self._parallel()
        mid = None if parallel else self._mid()
        if mid is not None:
            points["resid_mid"] = self.after[mid][0]
        else:
            absent["resid_mid"] = (
                "attention and feed-forward run in parallel: the feed-forward does not read what "
                "attention wrote"
                if parallel
                else "no module sees the residual stream plus what attention returned"
            )
        out = parallel if parallel else None if mid is None else self._out(mid)
        if out is not None:
            points["mlp_out"] = out
        elif mid is not None and self._same_stream(mid):
            absent["mlp_out"] = "the block has no feed-forward"
        else:
            absent["mlp_out"] = "no module's output is what the block adds after attention"
        entry = None if mid is None or out is None else self._in(mid, out)
        if entry is not None:
            points["mlp_in"] = entry
        else:
            absent["mlp_in"] = absent.get("resid_mid") or absent.get(
                "mlp_out",
                "another attention layer, or something else that is no norm, stands between "
                "attention and feed-forward",
            )
        return Block(run.layer, run.path, run.call, points, absent)

    def _large(self, t: Tensor) -> bool:
        return float(t.double().norm()) > 10 * self.equal.allowed

    def _ends(self) -> list[Tensor]:
        """The block's output, and what a norm made it from."""
        made_from = [
            before
            for p, t in self.after
            if p.side == "out" and self._is_norm(p.path) and self.equal(t, self.post)
            and (before := self._tensor(Point(p.path, "in", p.call))) is not None
        ]  # fmt: skip
        return [self.post, *made_from]

    def _tensor(self, point: Point) -> Tensor | None:
        return next((t for p, t in self.after if p == point), None)

    def _is_norm(self, path: str) -> bool:
        return "norm" in type(self.root.get_submodule(path)).__name__.lower()

    def _parallel(self) -> Point | None:
        """The output that, with attention's, makes the block's: both read the same."""
        rest = self.post.double() - self.pre.double() - self.attention.double()
        if not self._large(rest):
            return None
        for p, t in [*self.before, *self.after]:
            if p.side == "out" and p.path != self.run.path and self.equal(rest, t):
                return p if not self._sequential() else None
        return None

    def _sequential(self) -> bool:
        total = self.pre.double() + self.attention.double()
        return any(self.equal(total, t) for p, t in self.after if p.path != self.run.path)

    def _mid(self) -> int | None:
        """Where the stream first holds what attention wrote."""
        earlier = [self.pre, *(t for _, t in self.before)]
        for base in earlier:
            total = base.double() + self.attention.double()
            for n, (_, t) in enumerate(self.after):
                if self.equal(t, total) and self._large(base):
                    return n
        written: list[Tensor] = []  # what a norm or a factor has made of it
        for n, (p, t) in enumerate(self.after):
            change = t.double() - self.pre.double()
            if p.path != self.run.path and any(self.equal(change, w) for w in written):
                return n
            if self._large(change) and self._proportional(change):
                return n
            if p.side == "out" and self._is_norm(p.path):
                entered = self._tensor(Point(p.path, "in", p.call))
                if entered is not None and self.equal(entered, self.attention):
                    written.append(t)
        for n, (p, t) in enumerate(self.after):  # no skip: attention's output is the stream
            last = p.path == self.run.path
            if self.equal(t, self.attention) and (
                last or (p.side == "in" and self._weighs(p.path))
            ):
                return n
        return None

    def _proportional(self, change: Tensor) -> bool:
        a = self.attention.double()
        factor = float((change * a).sum() / a.square().sum())
        return self.equal(change, factor * a)

    def _weighs(self, path: str) -> bool:
        return next(self.root.get_submodule(path).parameters(), None) is not None

    def _same_stream(self, mid: int) -> bool:
        return any(self.equal(end, self.after[mid][1]) for end in self._ends())

    def _out(self, mid: int) -> Point | None:
        """The first output that, added to a stream that was there before it, makes the end."""
        if self._same_stream(mid):
            return None
        for end in self._ends():
            for n in range(mid, len(self.after)):
                p, t = self.after[n]
                if p.side == "in" or p.path == self.run.path or not self._large(t):
                    continue
                rest = end.double() - t.double()
                if any(self.equal(rest, s) and self._large(s) for _, s in self.after[mid:n]):
                    return p
        made = [(p, t) for p, t in self.after[mid:] if p.side == "out" and p.path != self.run.path]
        change = self.post.double() - self.after[mid][1].double()
        for p, t in made:  # scaled before it is added
            factor = float((change * t).sum() / t.double().square().sum().clamp_min(1e-300))
            if self._large(t) and self.equal(change, factor * t.double()):
                return p
        if self.equal(self.after[mid][1], self.attention):  # no skip
            for p, t in made:
                if not self._is_norm(p.path) and any(self.equal(t, end) for end in self._ends()):
                    return p
        return None

    def _in(self, mid: int, out: Point) -> Point | None:
        """What a module other than a norm reads after the stream: a norm of it, or itself."""
        stream = self.after[mid][1]
        last = [p for p, _ in self.after].index(out)
        made = [stream]
        for p, t in self.after[mid:last]:
            if p.side == "out" and self._is_norm(p.path):
                entered = self._tensor(Point(p.path, "in", p.call))
                if entered is not None and self.equal(entered, stream):
                    made.append(t)
        for p, t in self.after[mid : last + 1]:
            reads = p.side == "in" and self._weighs(p.path) and not self._is_norm(p.path)
            attends = any(_within(p.path, a) or _within(a, p.path) for a in self.run.others)
            if reads and not attends and any(self.equal(t, m) for m in made[::-1]):
                return p
        return None
