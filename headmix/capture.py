"""capture: run text through a model once and keep the Moments of every layer."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headmix.attention import AttentionPatterns
from headmix.blocks import Block, ReadOutWatcher
from headmix.heads import ALL_LAYERS, Heads
from headmix.labelling import Labelling
from headmix.model import AttentionModel, Enough, PatternWatcher, Watcher
from headmix.moments import Moments
from headmix.readouts import ReadOuts
from headmix.registry import NotApplicable


@dataclass(frozen=True, eq=False)
class Batch:
    """One forward pass: its input, and which of its tokens count.

    Attributes:
        inputs: what the model's forward takes: keyword arguments, a tuple or one tensor.
        fold: the fold of all its documents; a batch never mixes folds.
        documents: how many documents begin in it.
        keep: for each residual stream ``[sequence, token]``, the tokens that count: no padding, no
            special tokens. A stream that is not named counts every token.
    """

    inputs: Any
    fold: int = 0
    documents: int = 1
    keep: Mapping[str, Bool[Tensor, "sequence token"]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens that count in the stream that has most of them; 0 where none are named."""
        return max((int(keep.sum()) for keep in self.keep.values()), default=0)

    @property
    def length(self) -> int:
        """Positions in its longest sequence; 0 where no tokens are named."""
        return max((keep.shape[-1] for keep in self.keep.values()), default=0)


class Regrouped(ValueError):
    """A layer sees tokens in another arrangement than the batch, so that they cannot be chosen."""


def capture(
    model: AttentionModel,
    batches: Iterable[Batch],
    heads: Mapping[str, Heads],
    moments: Mapping[str, Moments],
    patterns: Mapping[str, AttentionPatterns] = {},
    probes: "Probes | None" = None,
) -> dict[str, str]:
    """Run batches through a model and add what each layer's heads do to its sums, in place.

    The forward pass ends as soon as the last watched layer has been seen: neither what follows it
    nor the language-model head is run. Hooks are removed whatever happens.

    Args:
        model: a model that can be run.
        batches: what to run.
        heads: the weights of the layers, by name.
        moments: the Moments to add to, by layer; under ``ALL_LAYERS`` those of all heads side by
            side, if they are wanted.
        patterns: the AttentionPatterns to add to, by layer, in the same pass. With any, the model
            runs eager attention for the while.
        probes: the read-outs to add to, in the same pass, and the labels.

    Returns:
        The layers whose attention patterns cannot be had, with the reason.

    Raises:
        Regrouped: the batch names tokens that count, but a layer's rows are not its tokens.
    """
    unseen: dict[str, str] = {}
    for batch in batches:
        looked_at = {name: sums for name, sums in patterns.items() if name not in unseen}
        waiting = {(name, "z") for name in moments if name != ALL_LAYERS} | {
            (name, "pattern") for name in looked_at
        }
        labelled = None if probes is None else probes.of(batch)
        if probes is not None:
            waiting |= {(n, r) for n, outs in probes.read_outs.items() for r in outs.sums}
        joint = _Joint(moments[ALL_LAYERS], heads, batch) if ALL_LAYERS in moments else None
        with ExitStack() as stack:
            for name, sums in moments.items():
                if name == ALL_LAYERS:
                    continue
                adder = _adder(heads[name], sums, batch, waiting, joint)
                stack.enter_context(model.sites[name].watch(adder))
            for name, looks in looked_at.items():
                watcher = _pattern_adder(heads[name], looks, batch, waiting, unseen)
                try:
                    stack.enter_context(model.sites[name].watch_attention(watcher))
                except NotApplicable as reason:
                    unseen[name] = str(reason)
                    waiting.discard((name, "pattern"))
            if probes is not None and labelled is not None:
                probes.enter(stack, model, heads, batch, labelled, waiting)
            model.forward(batch.inputs)
        if waiting:
            missed = ", ".join(sorted({name for name, _ in waiting}))
            raise ValueError(
                f"{model.name}: the batch never reached {missed}; leave these layers out "
                "(layers=...) or pass batches that do reach them"
            )
        seen = [sums for name, sums in looked_at.items() if name not in unseen]
        probed = (
            [s for outs in probes.read_outs.values() for s in outs.sums.values()]
            if probes is not None
            else []
        )
        for total in [*moments.values(), *seen, *probed]:
            total.documents[batch.fold] += batch.documents
    return unseen


@dataclass(frozen=True, eq=False)
class Probes:
    """What probes add to while text runs.

    Attributes:
        labelling: every token's labels.
        blocks: the block around each layer.
        read_outs: the sums by layer.
    """

    labelling: Labelling
    blocks: Mapping[str, Block]
    read_outs: Mapping[str, ReadOuts]

    def of(self, batch: Batch) -> "_Labelled":
        """A batch's labels, in the order of its tokens that count."""
        windows = getattr(batch, "windows", ())
        return _Labelled(*map(torch.from_numpy, self.labelling.of(windows)))

    def enter(
        self,
        stack: ExitStack,
        model: AttentionModel,
        heads: Mapping[str, Heads],
        batch: Batch,
        labelled: "_Labelled",
        waiting: set[tuple[str, str]],
    ) -> None:
        """Watch every read-out for one pass."""
        for layer, outs in self.read_outs.items():
            add = _read_out_adder(heads[layer], outs, batch, labelled, waiting)
            stack.enter_context(
                model.sites[layer].watch(lambda z, out, add=add: add("concat", z))  # type: ignore[misc]
            )
            rest = [name for name in outs.sums if name != "concat"]
            stack.enter_context(self.blocks[layer].watch(model, add, rest))


@dataclass(frozen=True, eq=False)
class _Labelled:
    """Which of a batch's tokens that count are labelled, their columns, and rows in the sample."""

    chosen: Bool[Tensor, "counted"]
    Y: Float[Tensor, "token column"]
    row: Int[Tensor, "token"]


def _read_out_adder(
    heads: Heads,
    outs: ReadOuts,
    batch: Batch,
    labelled: _Labelled,
    waiting: set[tuple[str, str]],
) -> ReadOutWatcher:
    """Adds one pass of one layer's read-outs."""
    layer, keep = heads.layer, batch.keep[heads.stream]

    def add(name: str, x: Float[Tensor, "*token width"]) -> None:
        _require_tokens(layer, x.shape[:-1], keep)
        outs.forget()
        chosen = keep.clone()
        chosen[keep] = labelled.chosen
        rows = x[chosen.to(x.device)]
        outs.sums[name].update(rows, labelled.Y, fold=batch.fold, row=labelled.row)
        _seen(waiting, layer, name)

    return add


class _Joint:
    """Collects z of all layers of one pass, and adds them side by side when all are there."""

    def __init__(self, sums: Moments, heads: Mapping[str, Heads], batch: Batch) -> None:
        self.sums, self.batch = sums, batch
        self.order = [name for name in heads if name != ALL_LAYERS]
        self.parts: dict[str, Float[Tensor, "token concat"]] = {}

    def add(self, layer: str, z: Float[Tensor, "token concat"]) -> None:
        self.parts[layer] = z.to(self.sums.first)
        if len(self.parts) < len(self.order):
            return
        rows = {name: len(z) for name, z in self.parts.items()}
        if len(set(rows.values())) > 1:
            raise Regrouped(f"layers see different numbers of tokens, {rows}: no joint sums")
        whole = torch.cat([self.parts[name] for name in self.order], dim=-1)
        self.sums.update(whole, fold=self.batch.fold)


def _adder(
    heads: Heads,
    sums: Moments,
    batch: Batch,
    waiting: set[tuple[str, str]],
    joint: _Joint | None,
) -> Watcher:
    """Adds one pass of one layer, and ends the pass once no layer is waited for."""
    layer, b_O, keep = heads.layer, heads.b_O, batch.keep.get(heads.stream)

    def add(z: Float[Tensor, "*token concat"], out: Float[Tensor, "*token d_model"]) -> None:
        position = None
        if keep is not None:
            _require_tokens(layer, z.shape[:-1], keep)
            position = torch.arange(keep.shape[-1]).expand_as(keep)[keep]
            where = keep.to(z.device)
            z, out = z[where], out[where]
        else:
            z, out = z.flatten(0, -2), out.flatten(0, -2)
        written = out if b_O is None else out - b_O.to(out)
        sums.update(z, written, fold=batch.fold, position=position)
        if joint is not None:
            joint.add(layer, z)
        _seen(waiting, layer, "z")

    return add


def _pattern_adder(
    heads: Heads,
    sums: AttentionPatterns,
    batch: Batch,
    waiting: set[tuple[str, str]],
    unseen: dict[str, str],
) -> PatternWatcher:
    """Adds one pass of one layer's attention patterns, or notes why there are none."""
    layer, keep = heads.layer, batch.keep.get(heads.stream)

    def add(pattern: Float[Tensor, "sequence head query key"] | NotApplicable) -> None:
        try:
            if isinstance(pattern, NotApplicable):
                raise pattern
            if keep is not None:
                _require_tokens(layer, (pattern.shape[0], pattern.shape[2]), keep)
            sums.update(pattern, keep, fold=batch.fold)
        except NotApplicable as reason:
            unseen[layer] = str(reason)
        _seen(waiting, layer, "pattern")

    return add


def _seen(waiting: set[tuple[str, str]], layer: str, what: str) -> None:
    waiting.discard((layer, what))
    if not waiting:
        raise Enough


def _require_tokens(
    layer: str, rows: tuple[int, ...], keep: Bool[Tensor, "sequence token"]
) -> None:
    if rows != keep.shape:
        raise Regrouped(
            f"{layer}: its rows have shape {list(rows)}, the batch's tokens {list(keep.shape)}: "
            "tokens are regrouped on the way (windows, packing), so that padding cannot be told "
            "from text. Pass batches without keep="
        )
