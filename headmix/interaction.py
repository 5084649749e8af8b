"""interaction: whether the effects of two heads add up, read at places after their layer."""

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headmix.blocks import Block, find_blocks
from headmix.effects import MISSING, READ_OUTS, Interactions
from headmix.heads import NotApplicable
from headmix.model import AttentionModel, Enough
from headmix.stage import Stage

#: Numbers of attention logits that are kept of one pass.
LOGITS = 2**21

#: Codes of ``MISSING``.
NO_MLP_IN, NO_MLP_OUT, NO_NEXT, NO_PATTERN, REGROUPED = range(1, len(MISSING))


class Interaction:
    """Resamples pairs of heads and sums how far their effects do not add up.

    Args:
        stage: the pass in hand.
        folds: of documents.
        most_pairs: of a layer, drawn at random where there are more.
        seed: of the draw.
    """

    def __init__(self, stage: Stage, folds: int, most_pairs: int, seed: int) -> None:
        self.stage, self.folds = stage, folds
        self.blocks = find_blocks(stage.model, list(stage.heads))
        self.pairs = {n: _draw(h.n_heads, most_pairs, seed) for n, h in stage.heads.items()}
        self.following = {n: _next(stage.model, n) for n in stage.heads}
        self.missing = {n: [self._missing(n, r) for r in READ_OUTS] for n in stage.heads}

    def nothing(self, layer: str) -> Interactions:
        """Empty sums."""
        return Interactions.zeros(self.pairs[layer], self.missing[layer], folds=self.folds)

    def work(self, layer: str) -> list[tuple[int, ...]]:
        """The heads that are resampled in each pass over the layer."""
        pairs = [(int(i), int(j)) for i, j in self.pairs[layer].tril(-1).nonzero().tolist()]
        return [(), *((h,) for h in range(len(self.pairs[layer]))), *pairs]

    def _missing(self, layer: str, read_out: str) -> int:
        """The code of why a read-out cannot be had; 0 where it can, as far as is known."""
        if read_out in self.blocks[layer].absent:
            return NO_MLP_IN if read_out == "mlp_in" else NO_MLP_OUT
        if read_out != "next_logits":
            return 0
        following = self.following[layer]
        if following is None:
            return NO_NEXT
        try:
            with self.stage.model.sites[following].watch_attention(lambda pattern: None):
                return 0
        except NotApplicable:
            return NO_PATTERN

    def run(self, layer: str, ran: Callable[[], None]) -> Interactions:
        """One layer on the pass in hand; ``ran`` is called after each forward pass.

        Raises:
            NotApplicable: the layer's z cannot be resampled.
        """
        stage = self.stage
        stage.prove(layer)
        if stage.heads[layer].n_heads == 1:
            raise NotApplicable("a single head has no other to interact with")
        known = [r for r, code in zip(READ_OUTS, self.missing[layer], strict=True) if not code]
        reader = _Reader(stage, layer, known, self.blocks[layer], self.following[layer])
        moved: dict[tuple[int, ...], dict[str, Tensor]] = {}
        sums = self.nothing(layer)
        with reader.watching():
            for heads in self.work(layer):
                found = reader.read(heads)
                ran()
                if not heads:
                    clean = found
                    for r, code in reader.dropped.items():
                        self.missing[layer][list(READ_OUTS).index(r)] = code
                    sums = self.nothing(layer)
                    sums.clean(reader.fold["attn_out"], stage.run.documents)
                    for r, value in clean.items():
                        sums.add_clean(r, reader.fold[r], value)
                    continue
                change = {r: value - clean[r] for r, value in found.items()}
                if len(heads) == 1:
                    moved[heads] = change
                for r, value in change.items():
                    apart = value if len(heads) == 1 else value - sum(moved[h,][r] for h in heads)
                    sums.add(r, heads, reader.fold[r], apart)
        return sums


def _draw(H: int, most: int, seed: int) -> Bool[Tensor, "head head"]:
    every = [(i, j) for i in range(H) for j in range(i)]
    pairs = torch.zeros(H, H, dtype=torch.bool)
    for i, j in random.Random(seed).sample(every, min(most, len(every))):
        pairs[i, j] = pairs[j, i] = True
    return pairs


def _next(model: AttentionModel, layer: str) -> str | None:
    """The next layer whose queries and keys read the stream that this one writes to."""
    stream = layer.partition(".L")[0] if ".L" in layer else ""
    for name in model.layers[model.layers.index(layer) + 1 :]:
        same = (name.partition(".L")[0] if ".L" in name else "") == stream
        if same and not model.sites[name].attention.cross:
            return name
    return None


class _Reader:
    """Passes that start at one layer and end when all that is to be read has been read."""

    def __init__(
        self,
        stage: Stage,
        layer: str,
        read_outs: Sequence[str],
        block: Block,
        following: str | None,
    ) -> None:
        self.stage, self.layer, self.read_outs = stage, layer, list(read_outs)
        self.block, self.following = block, following
        self.members = torch.zeros(stage.heads[layer].n_heads, dtype=torch.bool)
        self.seen: dict[str, Tensor] = {}
        self.fold: dict[str, Tensor] = {}
        self.visible: Tensor | None = None
        self.dropped: dict[str, int] = {}

    def watching(self) -> AbstractContextManager[Any]:
        """Watch all that is read; heads are resampled as ``read`` says."""
        stage, sites = self.stage, self.stage.model.sites
        shared = stage.replay.skipped(self.layer) > 0  # watchers count a module's calls
        with ExitStack() as stack:
            resampled = stage.replaced(self.layer, self.members, "resample", whole=shared)
            stack.enter_context(resampled)
            if "next_logits" in self.read_outs and self.following is not None:
                stack.enter_context(sites[self.following].watch_attention(self._see_pattern))
            inside = [r for r in self.read_outs if r.startswith("mlp")]
            if inside:
                stack.enter_context(self.block.watch(stage.model, self._see, inside))
            written = sites[self.layer].watch(lambda z, out: self._see("attn_out", out))
            stack.enter_context(written)
            return stack.pop_all()

    def read(self, heads: Sequence[int]) -> Mapping[str, Float[Tensor, "token *feature"]]:
        """Each read-out, a row a token that counts, with these heads resampled."""
        self.members[:] = False
        self.members[list(heads)] = True
        self.seen = {}
        self.stage.model.forward(self.stage.run.inputs)
        if missed := [r for r in self.read_outs if r not in self.seen]:
            raise NotApplicable(f"a pass never reached {', '.join(missed)}")
        return self.seen

    def _end(self) -> None:
        if set(self.read_outs) <= set(self.seen):
            raise Enough

    def _drop(self, name: str, code: int) -> None:
        """A read-out turns out not to be had; the others go on."""
        self.dropped[name] = code
        self.read_outs.remove(name)
        self._end()

    def _see(self, name: str, value: Tensor) -> None:
        if name in self.dropped:
            return
        run, stream = self.stage.run, self.stage.heads[self.layer].stream
        value = _by_row(value, run.keep.get(stream))
        try:
            keep = run.kept(stream, tuple(value.shape))
        except NotApplicable:
            if name == "attn_out":
                raise
            self._drop(name, REGROUPED)
            return
        self.fold[name] = run.folds_of(keep)
        self.seen[name] = value[keep.to(value.device)]
        self._end()

    def _see_pattern(self, pattern: Tensor | NotApplicable) -> None:
        if "next_logits" in self.dropped:
            return
        if isinstance(pattern, NotApplicable):
            self._drop("next_logits", NO_PATTERN)
            return
        run, stream = self.stage.run, self.stage.heads[self.layer].stream
        keep = run.kept(stream, (pattern.shape[0], pattern.shape[2], 1))
        rows = pattern.transpose(1, 2)[keep.to(pattern.device)]
        every = max(1, rows.numel() // LOGITS)  # of so many queries, one is read
        rows = rows[::every]
        if self.visible is None:
            self.visible = rows > 0
        self.fold["next_logits"] = run.folds_of(keep)[::every]
        self.seen["next_logits"] = logits(rows, self.visible)
        self._end()


def _by_row(value: Tensor, keep: Bool[Tensor, "row token"] | None) -> Tensor:
    """``[row, token, feature]``, where all rows come behind one another, or under more axes."""
    plain = value.reshape([n for n in value.shape[:-1] if n != 1] + [value.shape[-1]])
    if keep is not None and plain.ndim == 2 and len(plain) == keep.numel():
        return plain.unflatten(0, tuple(keep.shape))
    return plain if keep is not None and plain.shape[:-1] == keep.shape else value


def logits(
    rows: Float[Tensor, "query head key"], visible: Bool[Tensor, "query head key"]
) -> Float[Tensor, "query head key"]:
    """Attention logits less their mean over the keys that are seen; 0 at the others.

    >>> weights = torch.tensor([[[1.0, 3.0, 0.0]], [[2.0, 2.0, 0.0]]])
    >>> logits(weights.softmax(-1), torch.tensor([[[True, True, False]]] * 2))
    tensor([[[-1.,  1.,  0.]],
    <BLANKLINE>
            [[ 0.,  0.,  0.]]])
    """
    logarithm = rows.double().clamp(min=torch.finfo(rows.dtype).tiny).log()
    logarithm = logarithm.masked_fill(~visible, 0.0)
    mean = logarithm.sum(-1, keepdim=True) / visible.sum(-1, keepdim=True).clamp(min=1)
    return (logarithm - mean).masked_fill(~visible, 0.0).to(rows)
