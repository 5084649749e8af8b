"""Debiased CKA of all pairs of heads at 5,000 tokens: from kernels and from sums over tokens."""

import torch
from table import difference, seconds, show

import headmix as hm
from headmix.heads import Heads
from headmix.moments import Moments

TOKENS, HEADS, D_HEAD, D_MODEL, FOLDS = 5_000, 9, 64, 576, 5


def layer() -> tuple[Heads, torch.Tensor]:
    """A layer of SmolLM2-135M's shape and tokens on which its heads depend on each other."""
    stream = torch.Generator().manual_seed(0)
    W_O = torch.randn(HEADS, D_HEAD, D_MODEL, generator=stream)
    concat = HEADS * D_HEAD
    z = torch.randn(TOKENS, concat, generator=stream)
    return Heads(W_O), z @ torch.randn(concat, concat, generator=stream) / concat**0.5 + 1


def from_kernels(heads: Heads, z: torch.Tensor) -> torch.Tensor:
    """Kernels built and U-centred once a head, then every pair's inner product."""
    n = len(z)
    kernels = []
    for h in range(HEADS):
        o = z[:, h * D_HEAD : (h + 1) * D_HEAD].double() @ heads.W_O[h].double()
        K = (o @ o.T).fill_diagonal_(0)
        rows = K.sum(0) / (n - 2)
        total = K.sum() / ((n - 1) * (n - 2))
        kernels.append(K.sub_(rows).sub_(rows[:, None]).add_(total).fill_diagonal_(0).flatten())
    hsic = torch.empty(HEADS, HEADS, dtype=torch.float64)
    for i in range(HEADS):
        for j in range(i, HEADS):
            hsic[i, j] = hsic[j, i] = kernels[i] @ kernels[j]
    own = hsic.diagonal()
    return hsic / torch.outer(own, own).sqrt()


def accumulated(heads: Heads, z: torch.Tensor, written: torch.Tensor | None = None) -> Moments:
    """The sums; ``written``, what all heads write together, comes from the model's own pass."""
    moments = Moments.zeros(heads.W_O, folds=FOLDS, pivot=z[:100].mean(0))
    for fold, where in enumerate(torch.arange(len(z)).chunk(FOLDS)):
        moments.update(z[where], None if written is None else written[where], fold=fold)
    return moments


def main() -> None:
    torch.set_num_threads(1)
    heads, z = layer()
    accumulated(heads, z)
    sums_time, moments = seconds(lambda: accumulated(heads, z), repeats=3)

    def ours() -> torch.Tensor:
        return hm.metrics.cka(heads, moments.select(range(FOLDS)))  # nothing derived beforehand

    ours()
    fast, value = seconds(ours, repeats=5)
    slow, expected = seconds(lambda: from_kernels(heads, z), repeats=2)
    apart = difference(value, expected)
    what = f"debiased CKA of {HEADS * (HEADS - 1) // 2} pairs, {TOKENS} tokens"
    show(
        what + ", from sums", f"{slow:.2f} s", f"{fast * 1e3:.0f} ms", f"{slow / fast:.0f}×",
        "≥ 20×", slow / fast >= 20 and apart <= 1e-8, apart,
    )  # fmt: skip
    together = fast + sums_time
    show(
        "… with the accumulation of the sums", f"{slow:.2f} s", f"{together * 1e3:.0f} ms",
        f"{slow / together:.1f}×", difference=apart,
    )  # fmt: skip


if __name__ == "__main__":
    main()
