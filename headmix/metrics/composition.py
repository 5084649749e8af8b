"""How strongly a later layer's heads read what earlier heads write.

A writer h is ``M_h = L_h Q_h`` with orthonormal rows Q_h (``Heads.ov_reader``,
``Heads.write_basis``); a reader g is a factor N_g of what it applies to the stream: its queries,
keys or values. The score ``‖L_h Q_h N_g‖ / (‖L_h‖ ‖N_g‖)`` comes in two equal forms, of which the
cheaper one is taken. Both work in blocks, so memory does not grow with the number of pairs.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from headmix import linalg, nulls
from headmix.heads import Heads
from headmix.registry import NotApplicable, metric

#: Memory for the working blocks, in bytes.
BLOCK = 64 * 2**20

#: A reader's factor [head, d_in, k], or None where the layer has none.
Reader = Callable[[Heads], Tensor | None]

_INVARIANT = ("gauge", "rotation", "scale", "head_scale")
_NULL = "Haar rotation between writer and reader: root mean square 1/√D exactly; sd to first order"
_REFERENCE = "Elhage et al. 2021"


def _queries(heads: Heads) -> Float[Tensor, "head d_in k"] | None:
    """W_Q R_Kᵀ with W_K = Q R_K: W_Q W_Kᵀ up to a rotation on its far side."""
    if heads.W_Q is None or heads.W_K is None:
        return None
    return heads.W_Q @ linalg.triangular_factor(heads.W_K).mT[heads.kv_index]


def _keys(heads: Heads) -> Float[Tensor, "head d_in k"] | None:
    """W_K R_Qᵀ with W_Q = Q R_Q."""
    if heads.W_Q is None or heads.W_K is None:
        return None
    return heads.W_K[heads.kv_index] @ linalg.triangular_factor(heads.W_Q).mT


def _values(heads: Heads) -> Float[Tensor, "head d_in k"] | None:
    return heads.ov_reader if _moves(heads) else None


def _moves(heads: Heads) -> bool:
    """Whether the layer has OV matrices that are not all zero."""
    return heads.W_V is not None and bool(heads.W_O.any())


class _Pairs:
    """Writers and readers of each residual stream, among the layers that have both."""

    def __init__(self, layers: Sequence[Heads], reader: Reader, reads_kv: bool) -> None:
        self.layers = layers
        self.width = max(heads.n_heads for heads in layers)
        self.streams: dict[tuple[str, int], tuple[list[int], dict[int, Tensor]]] = {}
        for i, heads in enumerate(layers):
            if _moves(heads):
                self._of(heads.stream, heads.d_model)[0].append(i)
            if (factor := reader(heads)) is not None:
                stream = (reads_kv and heads.kv_stream) or heads.stream
                self._of(stream, factor.shape[1])[1][i] = factor
        if not any(min(w) < max(r) for w, r in self.streams.values() if w and r):
            raise NotApplicable(
                "no layer reads what an earlier one writes, among those with weights W_V, W_Q, W_K"
            )

    def _of(self, stream: str, D: int) -> tuple[list[int], dict[int, Tensor]]:
        return self.streams.setdefault((stream, D), ([], {}))

    def spread(
        self, between: Callable[[list[Heads], list[Tensor], int], Tensor]
    ) -> Float[Tensor, "layer head layer_b head_b"]:
        """Fill ``between(writers, readers, D)`` [writer, reader] in; NaN where nothing composes."""
        L, H = len(self.layers), self.width
        some = self.layers[0].W_O
        out = some.new_full((L, H, L, H), torch.nan)
        for (_, D), (writers, readers) in self.streams.items():
            if not writers or not readers:
                continue
            values = between([self.layers[i] for i in writers], list(readers.values()), D)
            row = 0
            for i in writers:
                n, column = self.layers[i].n_heads, 0
                for j, factor in readers.items():
                    if i < j:
                        block = values[row : row + n, column : column + len(factor)]
                        out[i, :n, j, : len(factor)] = block
                    column += len(factor)
                row += n
        return out


def _scores(writers: list[Heads], readers: list[Tensor], D: int) -> Float[Tensor, "writer reader"]:
    k = writers[0].write_basis.Q.shape[1]
    # multiplications a pair: D²/2 for half a Gram matrix each, k²D for the product of factors
    squared = (_squares_by_factors if 2 * k * k < D else _squares_by_grams)(writers, readers, D)
    norm_w = torch.cat([h.ov_reader.square().sum((1, 2)) for h in writers])
    norm_r = torch.cat([n.square().sum((1, 2)) for n in readers])
    return (squared.clamp(min=0) / (norm_w[:, None] * norm_r[None, :])).sqrt()


def _squares_by_grams(
    writers: list[Heads], readers: list[Tensor], D: int
) -> Float[Tensor, "writer reader"]:
    """‖L Q N‖²_F = ⟨Qᵀ(LᵀL)Q, N Nᵀ⟩, over one triangle of the two symmetric [D, D] matrices."""
    cores = [h.ov_reader.mT @ h.ov_reader for h in writers]
    n = sum(map(len, cores)) + sum(map(len, readers))
    out = readers[0].new_zeros(sum(map(len, cores)), sum(map(len, readers)))
    step = max(1, BLOCK // (n * D * out.element_size()))
    for a in range(0, D, step):
        b = min(a + step, D)
        left = torch.cat(
            [
                (h.write_basis.Q[:, :, a:b].mT @ core) @ h.write_basis.Q[:, :, a:]
                for h, core in zip(writers, cores, strict=True)
            ]
        )
        left[:, :, b - a :] *= 2  # stands for the mirrored part below the diagonal as well
        right = torch.cat([N[:, a:b] @ N[:, a:].mT for N in readers])
        out.addmm_(left.flatten(1), right.flatten(1).T)
    return out


def _squares_by_factors(
    writers: list[Heads], readers: list[Tensor], D: int
) -> Float[Tensor, "writer reader"]:
    """‖L Q N‖²_F = ‖R (Q N)‖²_F with L = Q' R: one [k, k] product a pair, where D is large."""
    rows = []
    for heads in writers:
        for R, Q in zip(
            linalg.triangular_factor(heads.ov_reader), heads.write_basis.Q, strict=True
        ):
            rows.append(torch.cat([(R @ Q @ N).square().sum((1, 2)) for N in readers]))
    return torch.stack(rows)


def _null(layers: Sequence[Heads], reader: Reader, reads_kv: bool) -> tuple[Tensor, Tensor]:
    """1/√D, and the spread of CS around it from the exact variance of CS²."""
    pairs = _Pairs(layers, reader, reads_kv)
    widths = {D for _, D in pairs.streams}
    sd = pairs.spread(_null_sd)
    if len(widths) == 1:
        return sd.new_tensor(widths.pop() ** -0.5), sd
    return pairs.spread(lambda w, r, D: torch.full_like(_null_sd(w, r, D), D**-0.5)), sd


def _null_sd(writers: list[Heads], readers: list[Tensor], D: int) -> Float[Tensor, "writer reader"]:
    left = torch.cat([_purity(h.ov_reader) for h in writers])[:, None]
    right = torch.cat([_purity(N) for N in readers])[None, :]
    one = left.new_ones(())
    _, of_square = nulls.haar_inner_product(one, left, one, right, D)
    return of_square * D**0.5 / 2


def _purity(N: Float[Tensor, "head d_in k"]) -> Float[Tensor, "head"]:
    """tr A² / (tr A)² of ``A = N Nᵀ``, from the small Gram matrix."""
    return (N.mT @ N).square().sum((1, 2)) / N.square().sum((1, 2)).square()


@metric(
    title="Q-composition",
    formula="‖M_1 W_Q W_Kᵀ‖ / (‖M_1‖ ‖W_Q W_Kᵀ‖)",
    dims=("layer", "head", "layer_b", "head_b"),
    range=(0, 1),
    null=lambda layers: _null(layers, _queries, reads_kv=False),
    null_text=_NULL,
    invariant=_INVARIANT,
    reference=_REFERENCE,
)
def composition_q(layers: Sequence[Heads]) -> Float[Tensor, "layer head layer_b head_b"]:
    """How much of what an earlier head writes can steer where a later head looks *from*.

    Writer first, reader second; NaN where the reader is not later, or reads another stream.
    ``√D · CS`` is 1 for unrelated heads. Rotary embeddings and norms on queries and keys stand
    between W_Q and W_K in many models: this is the product without them. Scores below about
    √ε (3e-4 in float32) are rounding.
    """
    return _Pairs(layers, _queries, reads_kv=False).spread(_scores)


@metric(
    title="K-composition",
    formula="‖M_1 W_K W_Qᵀ‖ / (‖M_1‖ ‖W_K W_Qᵀ‖)",
    dims=("layer", "head", "layer_b", "head_b"),
    range=(0, 1),
    null=lambda layers: _null(layers, _keys, reads_kv=True),
    null_text=_NULL,
    invariant=_INVARIANT,
    reference=_REFERENCE,
)
def composition_k(layers: Sequence[Heads]) -> Float[Tensor, "layer head layer_b head_b"]:
    """How much of what an earlier head writes can steer where a later head looks *at*.

    Writer first, reader second; NaN where the reader is not later, or its keys read another
    stream. In cross-attention the writers are the encoder's heads. The caveats of
    ``composition_q`` hold here too.
    """
    return _Pairs(layers, _keys, reads_kv=True).spread(_scores)


@metric(
    title="V-composition",
    formula="‖M_1 M_2‖ / (‖M_1‖ ‖M_2‖)",
    dims=("layer", "head", "layer_b", "head_b"),
    range=(0, 1),
    null=lambda layers: _null(layers, _values, reads_kv=True),
    null_text=_NULL,
    invariant=_INVARIANT,
    reference=_REFERENCE,
)
def composition_v(layers: Sequence[Heads]) -> Float[Tensor, "layer head layer_b head_b"]:
    """How much of what an earlier head writes a later head moves on: two heads act as one.

    Writer first, reader second; NaN where the reader is not later, or its values read another
    stream. Norms between the layers are left out, as everywhere in weight-only scores.

    >>> import torch
    >>> block, other = torch.eye(4).reshape(2, 1, 2, 4)  # heads on coordinates 0, 1 and 2, 3
    >>> first = Heads(block, W_V=block.mT)
    >>> composition_v([first, Heads(block, W_V=block.mT)])[0, 0, 1, 0]
    tensor(0.7071)
    >>> composition_v([first, Heads(other, W_V=other.mT)])[0, 0, 1, 0]
    tensor(0.)
    """
    return _Pairs(layers, _values, reads_kv=True).spread(_scores)
