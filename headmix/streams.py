"""streams: which of the tensors that pass through a block are its read-outs, by what adds up.

A tensor is ``resid_mid`` because it *is* the block's input plus what attention returned; names say
only which modules are norms. The same test works before and after norms, in fused and hand-built
blocks.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

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


@dataclass(frozen=True)
class Point:
    """Where a read-out passes: the input or output of a module, at its n-th call in the block."""

    path: str
    side: str
    call: int = 0


@dataclass
class Run:
    """What passed through one block: rows of every tensor as wide as the stream, in order."""

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


def identify(run: Run, root: nn.Module) -> tuple[dict[str, Point], dict[str, str]]:
    """Name what was heard: where the read-outs are, and why the others cannot be had."""
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
        return {}, {n: reason for n in READ_OUTS if n != "attn_out"}
    whole = run.heard[run.call][: run.at]
    before = [(p, t) for p, t in whole if t.shape == attention.shape]
    n_before = len([p for p, _ in before if p != Point(run.path, "in")])
    return _Found(run, root, pre, post, attention, before, heard[n_before:]).named()


@dataclass
class _Found:
    """The tensors of one block: its ends, attention's output, and the rest, in order."""

    run: Run
    root: nn.Module
    pre: Tensor
    post: Tensor
    attention: Tensor
    before: list[tuple[Point, Tensor]]
    after: list[tuple[Point, Tensor]]

    def named(self) -> tuple[dict[str, Point], dict[str, str]]:
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
        return points, absent

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


def _within(path: str, parent: str) -> bool:
    return path == parent or path.startswith(parent + ".")
