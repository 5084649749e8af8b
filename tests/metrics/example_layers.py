"""Random layers of every kind, what may be done to them, and metrics called by what they need."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from example_effects import effects_of, interactions_of
from example_read_outs import codes_of, read_outs_of

from headmix.attention import AttentionPatterns
from headmix.effects import Effects, Interactions
from headmix.heads import Heads
from headmix.moments import Moments
from headmix.neighbours import NeuronReads, Vocabulary
from headmix.readouts import ReadOuts
from headmix.registry import Metric, catalogue

#: Tokens of an example's text, in documents of eight.
TOKENS = 240

#: headmix's own metrics, without what other tests may register.
OWN = {n: m for n, m in catalogue().items() if m.function.__module__.startswith("headmix.")}


@dataclass(frozen=True)
class Example:
    """Three layers on one residual stream, with a vocabulary and feed-forward neurons, and what
    the heads of the first layer did on text: ``z`` [token, concat], where they looked:
    ``pattern`` [sequence, head, query, key], z of the layers after it: ``deeper``, and labels of
    the tokens: ``codes`` [token, set]."""

    layers: tuple[Heads, ...]
    vocabulary: Vocabulary
    reads: NeuronReads
    z: torch.Tensor
    pattern: torch.Tensor
    deeper: tuple[torch.Tensor, ...]
    codes: torch.Tensor
    within_position: bool = False

    @cached_property
    def moments(self) -> Moments:
        sums = moments_of(self.z, self.layers[0].W_O, positions=8)
        return sums.within_positions if self.within_position else sums

    @cached_property
    def joint(self) -> Moments:
        W_O = Heads.side_by_side(self.layers).W_O
        return moments_of(torch.cat([self.z, *self.deeper], dim=1), W_O, positions=8)

    @cached_property
    def attention(self) -> AttentionPatterns:
        folds = len(self.pattern)
        sums = AttentionPatterns.zeros(self.pattern.shape[1], folds=folds)
        for fold in range(folds):
            sums.update(self.pattern[fold : fold + 1], fold=fold)
        return sums

    def arguments(self, metric: Metric) -> list[Any]:
        return [getattr(self, need) for need in metric.needs]

    @property
    def heads(self) -> Heads:
        return self.layers[0]

    @cached_property
    def effects(self) -> Effects:
        return effects_of(self)

    @cached_property
    def interactions(self) -> Interactions:
        return interactions_of(self)

    @cached_property
    def read_outs(self) -> ReadOuts:
        return read_outs_of(self)

    def value(self, metric: Metric) -> np.ndarray:
        return np.asarray(metric(*self.arguments(metric)))

    def null(self, metric: Metric) -> tuple[np.ndarray, np.ndarray | None]:
        mean, sd = metric.null(*self.arguments(metric))
        return np.asarray(mean), None if sd is None else np.asarray(sd)


def moments_of(
    z: torch.Tensor,
    W_O: torch.Tensor,
    *,
    folds: int = 5,
    positions: int = 0,
    pivot: torch.Tensor | None = None,
) -> Moments:
    """Sums over tokens dealt out to the folds in turn, documents of ``positions`` tokens."""
    sums = Moments.zeros(W_O, folds=folds, positions=positions, pivot=pivot)
    token = torch.arange(len(z))
    fold_of = token // max(positions, 1) % folds
    for fold in range(folds):
        mine = fold_of == fold
        position = token[mine] % positions if positions else None
        sums.update(z[mine], z[mine] @ W_O.flatten(0, 1), fold=fold, position=position)
    return sums


def example(
    H: int = 6,
    KV: int = 3,
    d: int = 4,
    D: int = 32,
    rank: int | None = None,
    layers: int = 3,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    independent: bool = False,
) -> Example:
    """Gaussian weights; with ``rank`` the blocks of W_O lack rank. Head outputs depend on each
    other and on position, unless they are to be independent noise."""
    stream = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=stream, dtype=torch.float64).to(dtype)

    def layer(n: int) -> Heads:
        W_O = normal(H, d, D) if rank is None else normal(H, d, rank) @ normal(H, rank, D)
        return Heads(
            W_O=W_O,
            W_V=normal(KV, D, d),
            W_Q=normal(H, D, d + 1),
            W_K=normal(KV, D, d + 1),
            b_V=normal(KV, d),
            b_O=normal(D),
            layer=f"L{n}",
        )

    vocabulary = Vocabulary(normal(50, D), normal(D, 50), token=lambda t: f"token {t}")
    stack, reads = tuple(layer(n) for n in range(layers)), NeuronReads(normal(D, 40))
    z = normal(TOKENS, H * d)
    if not independent:
        mixing = normal(H * d, H * d) / (H * d) ** 0.5 + torch.eye(H * d).to(z)
        z = z @ mixing + normal(8, H * d).repeat(TOKENS // 8, 1) / 2 + 1
    pattern = causal(normal(5, H, 12, 12))
    deeper = tuple(normal(TOKENS, H * d) + z * (not independent) for _ in range(layers - 1))
    return Example(stack, vocabulary, reads, z, pattern, deeper, codes_of(z))


def causal(scores: torch.Tensor) -> torch.Tensor:
    """Attention weights over each query's own key and those before it."""
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(-1)


EXAMPLES = {
    "own values": {"H": 4, "KV": 4},
    "grouped": {},
    "one value head": {"KV": 1},
    "Dc > D": {"D": 12},
    "Dc = D": {"D": 24},
    "lacking rank": {"rank": 2},
    "wide heads": {"H": 3, "KV": 3, "d": 9, "D": 6},
    "one head": {"H": 1, "KV": 1},
    "thin heads": {"d": 1},
}


def each_layer(e: Example, change: Callable[[Heads], Heads]) -> Example:
    return replace(e, layers=tuple(change(heads) for heads in e.layers))


def each_head(z: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor], H: int):
    """Change ``[token, head, d_head]``, where the concatenation is given and wanted."""
    return change(z.unflatten(1, (H, -1))).flatten(1)


def regauged(e: Example, stream: torch.Generator) -> Example:
    """W_V → W_V A, so that z_h → z_h A, and W_O → A⁻¹ W_O, with one random A a KV head."""
    used = []

    def change(h: Heads) -> Heads:
        A = torch.randn(h.n_kv_heads, h.d_head, h.d_head, generator=stream, dtype=h.W_O.dtype)
        A = A + 3 * torch.eye(h.d_head, dtype=A.dtype)
        used.append(A[h.kv_index])
        return replace(
            h,
            W_O=torch.linalg.solve(A[h.kv_index], h.W_O),
            W_V=h.W_V @ A,
            b_V=(h.b_V[:, None] @ A)[:, 0],
        )

    changed = each_layer(e, change)
    z, *deeper = (
        each_head(z, lambda z, A=A: torch.einsum("thd,hde->the", z, A), len(A))
        for z, A in zip((e.z, *e.deeper), used, strict=True)
    )
    return replace(changed, z=z, deeper=tuple(deeper))


def rotated(e: Example, stream: torch.Generator) -> Example:
    """Everything that reads or writes the stream, turned by one orthogonal matrix."""
    W_E, W_U = e.vocabulary.W_E, e.vocabulary.W_U
    R = torch.linalg.qr(torch.randn(len(W_U), len(W_U), generator=stream, dtype=W_U.dtype)).Q

    def change(h: Heads) -> Heads:
        reads = {n: R.T @ getattr(h, n) for n in ("W_V", "W_Q", "W_K")}
        return replace(h, W_O=h.W_O @ R, b_O=h.b_O @ R, **reads)

    vocabulary = Vocabulary(W_E @ R, R.T @ W_U, e.vocabulary.token)
    turned = replace(e, vocabulary=vocabulary, reads=NeuronReads(R.T @ e.reads.W_in))
    return each_layer(turned, change)


def scaled(e: Example, stream: torch.Generator) -> Example:
    return each_layer(e, lambda h: replace(h, W_O=h.W_O * 3.7))


def heads_scaled(e: Example, stream: torch.Generator) -> Example:
    def change(h: Heads) -> Heads:
        factor = torch.rand(h.n_heads, 1, 1, generator=stream, dtype=h.W_O.dtype) * 3 + 0.5
        return replace(h, W_O=h.W_O * factor)

    return each_layer(e, change)


TRANSFORM = {
    "gauge": regauged,
    "rotation": rotated,
    "scale": scaled,
    "head_scale": heads_scaled,
}
