"""Activations: text through the model once, layer groups that fit in memory, resume, interrupts."""

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from torch import Tensor

from headmix import checkpoints
from headmix.attention import AttentionPatterns
from headmix.blocks import find_blocks
from headmix.capture import Batch, Probes, capture
from headmix.checkpoints import Parts
from headmix.heads import ALL_LAYERS, Heads
from headmix.labels import parse
from headmix.model import AttentionModel
from headmix.moments import Moments
from headmix.packing import SAMPLE, Batches
from headmix.packing import batches as make_batches
from headmix.readouts import LADDER, WATCHED, ReadOuts, empty, fill, nbytes, tensors


@dataclass(frozen=True)
class Plan:
    """What a pass over text will keep in memory, known before it starts.

    Attributes:
        groups: the layers of each pass; several where all do not fit.
        layer_bytes: the size of one layer's sums.
        batches: forward passes for each group; None where a user's batches do not say.
        tokens: tokens that count; None likewise.
        joint_bytes: the size of the sums over all layers' heads side by side, where kept.
        derived_bytes: what metrics may take beside the sums: a dozen copies of one layer's, or of
            one fold of the joint.
    """

    groups: tuple[tuple[str, ...], ...]
    layer_bytes: Mapping[str, int]
    batches: int | None
    tokens: int | None
    joint_bytes: int = 0
    derived_bytes: int = 0

    @property
    def sums_bytes(self) -> int:
        """The size of all sums that are held at a time."""
        return self.joint_bytes + max(
            sum(self.layer_bytes[n] for n in group) for group in self.groups
        )

    @property
    def most_bytes(self) -> int:
        """With what metrics derive from them."""
        return self.sums_bytes + self.derived_bytes

    def __str__(self) -> str:
        passes = f" in {len(self.groups)} passes over the text" if len(self.groups) > 1 else ""
        return (
            f"{self.tokens or '?'} tokens in {self.batches or '?'} batches; the sums of "
            f"{sum(map(len, self.groups))} layers take {self.sums_bytes / 2**20:.0f} MiB{passes}"
        )


def plan(
    heads: Mapping[str, Heads],
    batches: Batches,
    *,
    folds: int,
    positions: int = 0,
    memory: float | None = None,
    kinds: Collection[str] = ("moments",),
) -> Plan:
    """Which layers to take together.

    Args:
        heads: the weights of the layers to watch.
        batches: what will be run.
        folds: folds of documents.
        positions: positions whose means are kept.
        memory: bytes that the sums may take. Where None all layers go together, if the machine has
            room for them and what metrics derive from them.
        kinds: which sums are kept: "moments", "attention", "read_outs", "joint" (of all layers'
            heads side by side, which then go together).

    Raises:
        ValueError: not even one layer fits, joint sums do not, several passes are needed over
            batches that can be read once, or the machine has too little memory free; the message
            says how much it takes.
    """
    sizes = {}
    for name, h in heads.items():
        H, concat = h.n_heads, h.n_heads * h.d_head
        sums = concat * (1 + concat + H + positions) + H * (2 + H) + positions + 3
        patterns = 2 * H * (1 + H) + 4
        with_moments = bool({"moments", "joint"} & {*kinds})
        sizes[name] = 8 * folds * (sums * with_moments + patterns * ("attention" in kinds))
        if "read_outs" in kinds and batches.labelling is not None:
            sizes[name] += nbytes(batches.labelling, concat, h.d_model, WATCHED, folds)
    together = 0
    if "joint" in kinds:
        concat = sum(h.n_heads * h.d_head for h in heads.values())
        H = sum(h.n_heads for h in heads.values())
        together = 8 * folds * (concat * (1 + concat + H) + H * (2 + H) + 3)
        if memory is not None and together + sum(sizes.values()) > memory:
            raise ValueError(
                f"sums over the heads of all layers together take {together / 2**30:.2f} "
                f"GiB, with those of each layer more than the {memory / 2**30:.2f} GiB of memory "
                "allowed: allow more, choose fewer layers or use fewer folds"
            )
    groups: list[list[str]] = [[]]
    for name, size in sizes.items():
        if memory is not None and size > memory:
            raise ValueError(
                f"the sums of {name} alone take {size / 2**30:.2f} GiB, more than the "
                f"{memory / 2**30:.2f} GiB of memory allowed: allow more, or use fewer folds"
            )
        if memory is not None and sum(sizes[n] for n in groups[-1]) + size > memory:
            groups.append([])
        groups[-1].append(name)
    if batches.once and len(groups) > 1:
        raise ValueError(
            f"the sums of all layers take {sum(sizes.values()) / 2**30:.2f} GiB, more than the "
            f"{(memory or 0) / 2**30:.2f} GiB of memory allowed, and these batches can be read "
            "only once: pass them as a list, or allow more memory"
        )
    planned = Plan(
        tuple(map(tuple, groups)),
        sizes,
        batches.n_batches,
        batches.n_tokens,
        joint_bytes=together,
        derived_bytes=12 * max(*sizes.values(), together // folds),
    )
    free = psutil.virtual_memory().available
    if memory is None and planned.most_bytes > free:
        raise ValueError(
            f"the sums and what metrics derive from them may take {planned.most_bytes / 2**30:.1f} "
            f"GiB, and {free / 2**30:.1f} GiB of memory are free: say how much the sums may take "
            "(memory), or choose fewer layers"
            + (", or leave out metrics across layers" if together else "")
        )
    return planned


@dataclass
class Seen:
    """What is known of each layer from a pass over text.

    Attributes:
        moments: what its heads did, where that is kept.
        attention: where its heads looked, where that is kept and can be had.
        unseen: why it cannot be had, for the other layers.
        read_outs: what labels can be read of its block, where that is kept.
        probes: how that is added to.
    """

    moments: dict[str, Moments] = field(default_factory=dict)
    attention: dict[str, AttentionPatterns] = field(default_factory=dict)
    unseen: dict[str, str] = field(default_factory=dict)
    read_outs: dict[str, ReadOuts] = field(default_factory=dict)
    probes: Probes | None = None

    def add(self, model: AttentionModel, heads: Mapping[str, Heads], batch: Batch) -> None:
        """Run one more batch."""
        reasons = capture(model, [batch], heads, self.moments, self.attention, self.probes)
        self.unseen |= reasons
        for layer in reasons:
            del self.attention[layer]

    def forget(self, layer: str) -> None:
        """Let go of a layer's sums, and of all that was derived from them."""
        self.moments.pop(layer, None)
        self.attention.pop(layer, None)
        self.read_outs.pop(layer, None)

    def counts(self, layer: str) -> tuple[float, float]:
        """Tokens and documents that were seen."""
        of_labelled = self.read_outs.get(layer)
        labelled = None if of_labelled is None else of_labelled.concat
        for sums in (self.moments.get(layer), self.attention.get(layer), labelled):
            if sums is not None:
                return sums.n, float(sums.documents.sum())
        return 0.0, 0.0


def accumulate(
    model: AttentionModel,
    heads: Mapping[str, Heads],
    batches: Batches,
    *,
    folds: int,
    positions: int = 0,
    kinds: Collection[str] = ("moments",),
    checkpoint: Path | None = None,
    seconds: float = 30.0,
    done: Callable[[int, int], None] | None = None,
) -> tuple[Seen, bool]:
    """The sums of a group of layers over all batches, of all kinds in one pass.

    With a checkpoint, the sums are written there every so often, whole or not at
    all; a later call with the same model, layers and batches goes on from it and ends with the
    very same sums, since batches are added one after the other in the same order. That they are
    the same is checked on the batches that the checkpoint holds.

    SIGINT (in the main thread) ends the pass after the batch in hand; a second one at once.

    Args:
        model: a model that can be run.
        heads: the weights of the layers to watch.
        batches: what to run.
        folds: folds of documents.
        positions: positions whose means are kept.
        kinds: which sums are kept: "moments", "attention", "joint", "read_outs".
        checkpoint: where to keep the state; None keeps none.
        seconds: between two checkpoints.
        done: called with (tokens seen, tokens in all) after each batch.

    Returns:
        The sums by layer, and whether a SIGINT ended the pass.

    Raises:
        ValueError: no batches, or a checkpoint that is none or is of another run.
        OSError: the checkpoint cannot be written.
    """
    identity = checkpoints.identity_of(model, heads, folds, positions, kinds, batches)
    state = _State.read(checkpoint, identity) if checkpoint else None
    seen, digest = 0, ""
    saved = time.monotonic()
    with checkpoints.interruptible() as interrupted:
        for number, batch in enumerate(batches):
            seen += batch.tokens
            digest = checkpoints.chained(digest, batch)
            if state is None:
                nothing = _nothing_yet(model, heads, batch, folds, positions, kinds)
                state = _State(identity, nothing)
            if "read_outs" in kinds and state.seen.probes is None:
                _probe(model, heads, batch, batches, folds, state)
            if number + 1 == state.batches and digest != state.digest:
                raise checkpoints.another_run(checkpoint)
            if number < state.batches:
                continue
            state.seen.add(model, heads, batch)
            state.batches, state.digest = number + 1, digest
            if done:
                done(seen, batches.n_tokens or 0)
            if interrupted():
                break
            if checkpoint and time.monotonic() - saved > seconds:
                state.write(checkpoint)
                saved = time.monotonic()
    if state is None:
        raise ValueError("there is not one batch to run")
    if state.digest != digest:
        raise checkpoints.another_run(checkpoint)  # it holds more batches than there are
    if checkpoint:
        state.write(checkpoint)
    return state.seen, interrupted()


def read_outs(
    model: AttentionModel,
    labels: Any,
    text: Any = None,
    *,
    layers: Sequence[str | int] | None = None,
    folds: int = 5,
    max_tokens: int | None = None,
    sample: int = SAMPLE,
    seed: int = 0,
) -> dict[str, ReadOuts]:
    """Sums of what labels can be read around each layer: what the metrics of probes take.

    For work of one's own on the same sums; ``measure`` does this by itself.

    Args:
        model: a model that can be run.
        labels, text, folds, max_tokens, seed: as for ``measure``.
        layers: names or positions; all by default.
        sample: labelled tokens that are kept themselves, and not only in sums.

    Returns:
        By layer, to be called as ``hm.metrics.probe_r2(model.heads(layer), found[layer])``.

    Raises:
        ValueError: text or labels that cannot be used.
    """
    names = model.layers if layers is None else [model.layer_name(n) for n in layers]
    asked, text = parse(labels, text)
    feed = make_batches(
        model, text, folds=folds, max_tokens=max_tokens, labels=asked, sample=sample, seed=seed
    )
    heads = {name: model.heads(name) for name in names}
    return accumulate(model, heads, feed, folds=folds, kinds=("read_outs",))[0].read_outs


def _nothing_yet(
    model: AttentionModel,
    heads: Mapping[str, Heads],
    batch: Batch,
    folds: int,
    positions: int,
    kinds: Collection[str],
) -> Seen:
    """Empty sums, about each layer's mean of z over one batch: near enough to that over all."""
    seen = Seen()
    if "attention" in kinds:
        seen.attention = {
            name: AttentionPatterns.zeros(h.n_heads, folds=folds) for name, h in heads.items()
        }
    if not {"moments", "joint"} & {*kinds}:
        return seen
    watched = dict(heads)
    if "joint" in kinds:
        watched[ALL_LAYERS] = Heads.side_by_side(list(heads.values()))
    once = {name: Moments.zeros(h.W_O, folds=batch.fold + 1) for name, h in watched.items()}
    capture(model, [batch], heads, once)
    for name, h in watched.items():
        pivot = once[name].mean if once[name].n else None
        kept = 0 if name == ALL_LAYERS else positions
        seen.moments[name] = Moments.zeros(h.W_O, folds=folds, pivot=pivot, positions=kept)
    return seen


def _probe(
    model: AttentionModel,
    heads: Mapping[str, Heads],
    batch: Batch,
    batches: Batches,
    folds: int,
    state: "_State",
) -> None:
    """Get ready to read labels: find the blocks, and empty sums or those of the checkpoint."""
    labelling = batches.labelling
    assert labelling is not None
    blocks = find_blocks(model, list(heads), None if model.example else batch.inputs)

    def nothing(folds: int, pivots: Mapping[str, Mapping[str, Tensor]] = {}) -> dict[str, ReadOuts]:
        made = {}
        for name, h in heads.items():
            has = [r for r in WATCHED if r == "concat" or r in blocks[name].read_outs]
            widths = {r: h.n_heads * h.d_head if r == "concat" else h.d_model for r in has}
            absent = {r: blocks[name].absent[r] for r in LADDER if r in blocks[name].absent}
            made[name] = empty(
                labelling, widths, folds=folds, absent=absent, pivots=pivots.get(name)
            )
        return made

    if state.read_outs:
        found = nothing(folds)
        for name, outs in found.items():
            fill(outs, state.read_outs[name])
    else:
        once = nothing(batch.fold + 1)
        capture(model, [batch], heads, {}, probes=Probes(labelling, blocks, once))
        means = {
            name: {r: s.first.sum(0)[: s.width] / s.n for r, s in outs.sums.items() if s.n}
            for name, outs in once.items()
        }
        found = nothing(folds, means)
    state.seen.read_outs = found
    state.seen.probes = Probes(labelling, blocks, found)


@dataclass
class _State:
    """What a checkpoint holds: the sums, how many batches are in them, and a hash of these."""

    identity: str
    seen: Seen
    batches: int = 0
    digest: str = ""
    read_outs: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        seen = self.seen
        parts: Parts = {
            kind: {
                layer: {f.name: getattr(sums, f.name) for f in fields(sums)}
                for layer, sums in layers.items()
            }
            for kind, layers in (("moments", seen.moments), ("attention", seen.attention))
        }
        parts["read_outs"] = {layer: tensors(outs) for layer, outs in seen.read_outs.items()}
        about = {
            "batches": str(self.batches),
            "digest": self.digest,
            "unseen": json.dumps(seen.unseen),
        }
        checkpoints.write(path, self.identity, parts, about)

    @classmethod
    def read(cls, path: Path, identity: str) -> "_State | None":
        """The state in a file; None where there is none.

        Raises:
            ValueError: the file is no checkpoint, or one of another run.
        """
        kept = checkpoints.read(path, identity)
        if kept is None:
            return None
        parts, about = kept
        seen = Seen(
            {layer: Moments(**t) for layer, t in parts.get("moments", {}).items()},
            {layer: AttentionPatterns(**t) for layer, t in parts.get("attention", {}).items()},
            json.loads(about["unseen"]),
        )
        read_outs = parts.get("read_outs", {})
        return cls(identity, seen, int(about["batches"]), about["digest"], read_outs=read_outs)
