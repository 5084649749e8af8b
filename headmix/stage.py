"""stage: one pass as it is, and passes that start from it with some heads' z replaced."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headmix import outcomes
from headmix.excerpt import Pass
from headmix.heads import Heads, NotApplicable
from headmix.model import AttentionModel, Enough, Replacer
from headmix.outcomes import Outcome, Outcomes, Task
from headmix.replay import Replay

#: Special tokens before and after the text of a row that have a mean of their own.
ENDS = 8

#: A replayed pass is the pass itself: outputs may differ by so many roundings of the largest.
ROUNDINGS = 64


class Stage:
    """What is shared by all passes in which something is replaced.

    Args:
        model: a model that can be run.
        heads: the weights of the layers, by name.
        read: how the model's outcome is read.

    Attributes:
        replay: leaves out the blocks before a layer.
        run, task, clean: the pass in hand, what is to be predicted in it, and its outcome as it is.
        losses: of its predictions, where it has any.
        fold: ``[token]``, of the tokens of its output that count.
    """

    run: Pass
    task: Task
    clean: Outcome
    losses: Tensor | None
    fold: Tensor

    def __init__(self, model: AttentionModel, heads: Mapping[str, Heads], read: Outcomes) -> None:
        self.model, self.heads, self.read = model, heads, read
        self.replay = Replay(model, list(heads))
        self.means: dict[str, Tensor] = {}
        self._donors: dict[str, Tensor] = {}
        self._proven: set[str] = set()

    def enter(self, run: Pass) -> None:
        """Run a pass as it is, and the pass of other documents that it is resampled from.

        Raises:
            NotApplicable: the output cannot be read, token by token.
        """
        self.task = self.read.task(run)
        self.run = self.task.run
        with self.replay.record():
            self.clean = self.read.run(self.task)
        self.losses = None
        if self.clean.logits is not None and self.task.answers is not None:
            self.losses = outcomes.losses(self.clean.logits, self.task.answers)
        self.fold = self.run.folds_of(self.clean.keep)
        self._donors = {}
        if self.run.donor is not None:
            self._watch(self.run.donor, self._donors.__setitem__)

    def _watch(self, inputs: Any, see: Callable[[str, Tensor], None]) -> None:
        """Call ``see(layer, z)`` for every layer in one pass, which ends at the last."""
        waiting = set(self.heads)

        def watcher(layer: str) -> Callable[[Tensor, Tensor], None]:
            def watch(z: Tensor, out: Tensor) -> None:
                see(layer, z.clone())
                waiting.discard(layer)
                if not waiting:
                    raise Enough

            return watch

        with ExitStack() as stack:
            for layer in self.heads:
                stack.enter_context(self.model.sites[layer].watch(watcher(layer)))
            self.model.forward(inputs)

    def find_means(self, runs: Iterable[Pass]) -> None:
        """The mean of z over the tokens that count, and over each special token around them."""
        sums: dict[str, Tensor] = {}
        counts: dict[str, Tensor] = {}
        for run in runs:
            run = self.read.task(run).run

            def see(layer: str, z: Tensor, run: Pass = run) -> None:
                try:
                    keep = run.kept(self.heads[layer].stream, tuple(z.shape))
                except NotApplicable:
                    return  # said when the layer's turn comes
                rows = z.flatten(0, -2).double().cpu()
                kind = kinds(keep).flatten().repeat_interleave(len(rows) // keep.numel())
                sums.setdefault(layer, rows.new_zeros(1 + 2 * ENDS, rows.shape[1]))
                counts.setdefault(layer, rows.new_zeros(1 + 2 * ENDS, 1))
                sums[layer].index_add_(0, kind, rows)
                counts[layer].index_add_(0, kind, rows.new_ones(len(rows), 1))

            self._watch(run.inputs, see)
        self.means = {layer: total / counts[layer].clamp(min=1) for layer, total in sums.items()}

    def prove(self, layer: str) -> None:
        """See, once, that a pass from a layer's block on gives what the whole pass gave.

        Where it does not, the layer is run whole from then on.
        """
        if layer in self._proven or layer in self.replay.refused:
            return
        self._proven.add(layer)
        with self.replay.start_at(layer):
            again = self.read.run(self.task).output
        clean = self.clean.output
        allowed = ROUNDINGS * torch.finfo(clean.dtype).eps * float(clean.abs().max())
        off = float((again - clean).abs().max()) if again.shape == clean.shape else float("inf")
        if not off <= allowed:
            self.replay.refused[layer] = (
                f"from its block on, the output differs by {off:.1e}: something passes it by"
            )

    def new_z(self, layer: str, replacement: str) -> Replacer:
        """What z of all heads of a layer is replaced by, given z.

        Raises:
            NotApplicable: there is none.
        """
        if replacement == "zero":
            return torch.zeros_like
        if replacement == "resample":
            if layer not in self._donors:
                raise NotApplicable("no pass of another document reached this layer")
            donor = self._donors[layer]
            return lambda z: donor
        if layer not in self.means:
            raise NotApplicable("tokens are regrouped on the way: z has no mean over the text's")
        table, run, stream = self.means[layer], self.run, self.heads[layer].stream
        return lambda z: table.to(z)[kinds(run.kept(stream, tuple(z.shape))).to(z.device)]

    def replaced(
        self, layer: str, members: Bool[Tensor, "head"], replacement: str, *, whole: bool = False
    ) -> AbstractContextManager[Any]:
        """Passes inside the context start at the layer, with z of its ``members`` replaced.

        ``members`` is looked at in each pass anew. ``whole``: passes start at the beginning.
        """
        site, new = self.model.sites[layer], self.new_z(layer, replacement)
        features = site.attention.o.features

        def replacer(z: Float[Tensor, "*token concat"]) -> Float[Tensor, "*token concat"]:
            other = new(z)
            if other.shape != z.shape:
                raise NotApplicable(
                    f"z of another document has shape {list(other.shape)}, this one "
                    f"{list(z.shape)}: positions have no counterparts"
                )
            where = features[members].flatten().to(z.device)
            out = z.clone()
            out[..., where] = other[..., where].to(out)
            return out

        with ExitStack() as stack:
            skipped = 0 if whole else self.replay.skipped(layer)
            stack.enter_context(site.replace_z(replacer, skipped=skipped))
            if not whole:
                stack.enter_context(self.replay.start_at(layer))
            return stack.pop_all()


def kinds(keep: Bool[Tensor, "row token"]) -> Int[Tensor, "row token"]:
    """0 for the text of a row; 1 … for what stands before it; ``ENDS`` + 1 … for what is after.

    >>> kinds(torch.tensor([[False, True, False, True, False, False]]))
    tensor([[ 1,  0,  0,  0,  9, 10]])
    """
    T = keep.shape[1]
    at = torch.arange(T, device=keep.device).expand(keep.shape)
    counted = keep.long()
    first = counted.argmax(1, keepdim=True)
    last = T - 1 - counted.flip(1).argmax(1, keepdim=True)
    before, after = (at + 1).clamp(max=ENDS), ENDS + (at - last).clamp(max=ENDS)
    kind = torch.where(at < first, before, torch.where(at > last, after, 0))
    return torch.where(keep.any(1, keepdim=True), kind, 0)
