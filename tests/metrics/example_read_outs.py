"""What labels can be read around the first layer of an example, on the same text as its heads."""

from typing import Any

import torch

from headmix.labelling import LabelSet
from headmix.readouts import LabelledSums, ReadOuts

#: Two labels and their control tasks.
SETS = (
    LabelSet("kind", ("a", "b", "c"), 0, (1 / 3, 1 / 3, 1 / 3)),
    LabelSet("kind control", ("a", "b", "c"), 3, (1 / 3, 1 / 3, 1 / 3), control=True),
    LabelSet("side", ("left", "right"), 6, (0.5, 0.5)),
    LabelSet("side control", ("left", "right"), 8, (0.5, 0.5), control=True),
)


def codes_of(z: torch.Tensor) -> torch.Tensor:
    """Classes [token, set]: by thirds and halves of two directions of z, controls at random."""
    stream = torch.Generator().manual_seed(11)
    scores = z.double() @ torch.randn(z.shape[1], 2, generator=stream, dtype=torch.float64)
    scores += scores.std(0) * torch.randn(len(z), 2, generator=stream, dtype=torch.float64) / 2
    rank = scores.argsort(0).argsort(0)
    kind, side = rank[:, 0] * 3 // len(z), rank[:, 1] * 2 // len(z)
    dealt = [torch.randint(n, (len(z),), generator=stream) for n in (3, 2)]
    return torch.stack([kind, dealt[0], side, dealt[1]], 1)


def one_hot(codes: torch.Tensor) -> torch.Tensor:
    """The label columns [token, column]."""
    parts = [torch.eye(s.width)[codes[:, n]] for n, s in enumerate(SETS)]
    return torch.cat(parts, 1).double()


def stream_of(e: Any) -> dict[str, torch.Tensor]:
    """Every read-out of a block without biases that reads tokens at random: its norm is RMS, its
    feed-forward writes with the transpose of what it reads with."""
    heads, W_in = e.layers[0], e.reads.W_in
    ids = torch.randint(
        len(e.vocabulary.W_E), (len(e.z),), generator=torch.Generator().manual_seed(2)
    )
    pre = e.vocabulary.W_E[ids].to(e.z)
    mid = pre + e.z @ heads.W_O.flatten(0, 1)
    read = mid / mid.square().mean(1, keepdim=True).sqrt()
    out = (read @ W_in).relu() @ W_in.T / W_in.shape[1] ** 0.5
    return {
        "concat": e.z,
        "resid_pre": pre,
        "resid_mid": mid,
        "mlp_in": read,
        "mlp_out": out,
        "resid_post": mid + out,
    }


def read_outs_of(e: Any, *, folds: int = 5, document: int = 8) -> ReadOuts:
    """Sums over tokens dealt out to the folds in documents; every token is in the sample."""
    return sums_of(stream_of(e), one_hot(e.codes), SETS, folds=folds, document=document)


def sums_of(
    stream: dict[str, torch.Tensor],
    Y: torch.Tensor,
    sets: tuple[LabelSet, ...],
    *,
    folds: int = 5,
    document: int = 1,
) -> ReadOuts:
    """Sums of any read-outs [token, width] and label columns [token, column]."""
    fold_of = torch.arange(len(Y)) // document % folds
    rows = int(torch.bincount(fold_of).max())
    sums = {}
    for name, x in stream.items():
        sums[name] = LabelledSums.zeros(x.shape[1], Y.shape[1], folds=folds, rows=rows)
        for fold in range(folds):
            mine = fold_of == fold
            row = torch.arange(int(mine.sum()))
            sums[name].update(x[mine], Y[mine], fold=fold, row=row)
    return ReadOuts(sets, sums)
