"""Random layers of every kind, what may be done to them, and metrics called by what they need."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from headmix.heads import Heads
from headmix.neighbours import NeuronReads, Vocabulary
from headmix.registry import Metric, catalogue

#: headmix's own metrics, without what other tests may register.
OWN = {n: m for n, m in catalogue().items() if m.function.__module__.startswith("headmix.")}


@dataclass(frozen=True)
class Example:
    """Three layers on one residual stream, with a vocabulary and feed-forward neurons."""

    layers: tuple[Heads, ...]
    vocabulary: Vocabulary
    reads: NeuronReads

    def arguments(self, metric: Metric) -> list[Any]:
        given = {"heads": self.layers[0], "layers": self.layers}
        given |= {"vocabulary": self.vocabulary, "reads": self.reads}
        return [given[need] for need in metric.needs]

    def value(self, metric: Metric) -> np.ndarray:
        return np.asarray(metric(*self.arguments(metric)))

    def null(self, metric: Metric) -> tuple[np.ndarray, np.ndarray | None]:
        mean, sd = metric.null(*self.arguments(metric))
        return np.asarray(mean), None if sd is None else np.asarray(sd)


def example(
    H: int = 6,
    KV: int = 3,
    d: int = 4,
    D: int = 32,
    rank: int | None = None,
    layers: int = 3,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Example:
    """Gaussian weights; with ``rank`` the blocks of W_O lack rank."""
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
    return Example(tuple(layer(n) for n in range(layers)), vocabulary, NeuronReads(normal(D, 40)))


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


def each_layer(e: Example, change) -> Example:
    return replace(e, layers=tuple(change(heads) for heads in e.layers))


def regauged(e: Example, stream: torch.Generator) -> Example:
    """W_V → W_V A, W_O → A⁻¹ W_O with one random A a KV head."""

    def change(h: Heads) -> Heads:
        A = torch.randn(h.n_kv_heads, h.d_head, h.d_head, generator=stream, dtype=h.W_O.dtype)
        A = A + 3 * torch.eye(h.d_head, dtype=A.dtype)
        return replace(
            h,
            W_O=torch.linalg.solve(A[h.kv_index], h.W_O),
            W_V=h.W_V @ A,
            b_V=(h.b_V[:, None] @ A)[:, 0],
        )

    return each_layer(e, change)


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
