"""capture: run text through a model once and keep the Moments of every layer."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headmix.heads import Heads
from headmix.model import AttentionModel, Enough, Watcher
from headmix.moments import Moments


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
) -> None:
    """Run batches through a model and add what each layer's heads do to its Moments, in place.

    The forward pass ends as soon as the last watched layer has been seen: neither what follows it
    nor the language-model head is run. Hooks are removed whatever happens.

    Args:
        model: a model that can be run.
        batches: what to run.
        heads: the weights of the layers, by name.
        moments: the Moments to add to, by layer.

    Raises:
        Regrouped: the batch names tokens that count, but a layer's rows are not its tokens.
    """
    for batch in batches:
        waiting = set(moments)
        with ExitStack() as stack:
            for name, sums in moments.items():
                adder = _adder(heads[name], sums, batch, waiting)
                stack.enter_context(model.sites[name].watch(adder))
            model.forward(batch.inputs)
        if waiting:
            raise ValueError(
                f"{model.name}: the batch never reached {', '.join(sorted(waiting))}; leave these "
                "layers out (layers=...) or pass batches that do reach them"
            )
        for sums in moments.values():
            sums.documents[batch.fold] += batch.documents


def _adder(heads: Heads, sums: Moments, batch: Batch, waiting: set[str]) -> Watcher:
    """Adds one pass of one layer, and ends the pass once no layer is waited for."""
    layer, b_O, keep = heads.layer, heads.b_O, batch.keep.get(heads.stream)

    def add(z: Float[Tensor, "*token concat"], out: Float[Tensor, "*token d_model"]) -> None:
        position = None
        if keep is not None:
            if z.shape[:-1] != keep.shape:
                raise Regrouped(
                    f"{layer}: its rows have shape {list(z.shape[:-1])}, the batch's tokens "
                    f"{list(keep.shape)}: tokens are regrouped on the way (windows, packing), so "
                    "that padding cannot be told from text. Pass batches without keep="
                )
            position = torch.arange(keep.shape[-1]).expand_as(keep)[keep]
            where = keep.to(z.device)
            z, out = z[where], out[where]
        else:
            z, out = z.flatten(0, -2), out.flatten(0, -2)
        written = out if b_O is None else out - b_O.to(out)
        sums.update(z, written, fold=batch.fold, position=position)
        waiting.discard(layer)
        if not waiting:
            raise Enough

    return add
