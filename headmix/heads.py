"""Heads: the weights of one attention layer, taken apart head by head."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from headmix import linalg


class NotApplicable(Exception):
    """What was asked has no meaning for this layer or model; the message says why."""


#: Stands in for the name of a layer where the heads of all layers lie side by side.
ALL_LAYERS = "all layers"


@dataclass(frozen=True, eq=False, repr=False)
class Heads:
    """The weights of one attention layer per head, checked on construction.

    Row vectors multiply from the left: head ``h`` writes ``z_h @ W_O[h]`` and its output-value
    matrix is ``M_h = W_V[kv_of_head[h]] @ W_O[h]`` (Elhage et al. 2021).

    Attributes:
        W_O: ``[head, d_head, d_model]``, the rows of the output projection that head ``h`` owns.
        W_V: ``[kv_head, d_in, d_head]``, one a key-value head; None where values are not linear
            in what the layer reads.
        W_Q: ``[head, d_in, d_qk]``; d_qk may differ from d_head.
        W_K: ``[kv_head, d_in_k, d_qk]``.
        b_V: ``[kv_head, d_head]``.
        b_O: ``[d_model]``.
        kv_of_head: the key-value head that each query head uses; by default consecutive query
            heads share one, as in grouped-query attention.
        layer: the name of the layer, as in ``model.layers``.
        processing: what was done to the weights: "raw" or "folded".
        stream: the residual stream that queries read and heads write to.
        kv_stream: the stream that keys and values read: the same, another one in cross-attention,
            or a latent in multi-head latent attention.

    Raises:
        ValueError: a shape or ``kv_of_head`` does not fit; the message names both sides.
    """

    W_O: Float[Tensor, "head d_head d_model"]
    W_V: Float[Tensor, "kv_head d_in d_head"] | None = None
    W_Q: Float[Tensor, "head d_in_q d_qk"] | None = None
    W_K: Float[Tensor, "kv_head d_in_k d_qk"] | None = None
    b_V: Float[Tensor, "kv_head d_head"] | None = None
    b_O: Float[Tensor, "d_model"] | None = None
    kv_of_head: Sequence[int] | None = None
    layer: str = "L0"
    processing: str = "raw"
    stream: str = "residual"
    kv_stream: str | None = None

    def __post_init__(self) -> None:
        if self.W_O.ndim != 3 or 0 in self.W_O.shape:
            raise ValueError(
                f"{self.layer}: W_O must be [head, d_head, d_model] with no empty axis, "
                f"got shape {tuple(self.W_O.shape)}"
            )
        if self.kv_stream is None:
            object.__setattr__(self, "kv_stream", self.stream)
        object.__setattr__(self, "kv_of_head", self._checked_grouping())
        H, KV, d, D = self.n_heads, self.n_kv_heads, self.d_head, self.d_model
        self._expect("W_V", self.W_V, (KV, None, d))
        self._expect("W_Q", self.W_Q, (H, None, None))
        self._expect("W_K", self.W_K, (KV, None, None if self.W_Q is None else self.W_Q.shape[2]))
        self._expect("b_V", self.b_V, (KV, d))
        self._expect("b_O", self.b_O, (D,))

    def _checked_grouping(self) -> tuple[int, ...]:
        H = self.n_heads
        given = next((w for w in (self.W_V, self.W_K, self.b_V) if w is not None), None)
        if self.kv_of_head is None:
            n_kv = H if given is None else given.shape[0]
            if n_kv == 0 or H % n_kv:
                raise ValueError(
                    f"{self.layer}: {H} query heads do not divide evenly over {n_kv} KV heads; "
                    "pass kv_of_head"
                )
            return tuple(h // (H // n_kv) for h in range(H))
        grouping = tuple(int(g) for g in self.kv_of_head)
        n_kv = max(grouping, default=-1) + 1 if given is None else given.shape[0]
        if len(grouping) != H or sorted(set(grouping)) != list(range(n_kv)):
            raise ValueError(
                f"{self.layer}: kv_of_head must give one of {n_kv} KV heads for each of {H} query "
                f"heads and use every one, got {grouping}"
            )
        return grouping

    def _expect(self, name: str, value: Tensor | None, shape: tuple[int | None, ...]) -> None:
        if value is None:
            return
        fits = value.ndim == len(shape) and all(
            want in (None, got) for want, got in zip(shape, value.shape, strict=True)
        )
        if not fits:
            wanted = ["any" if n is None else n for n in shape]
            raise ValueError(
                f"{self.layer}: {name} has shape {list(value.shape)}, expected {wanted} to fit "
                f"W_O {list(self.W_O.shape)}"
            )

    def __repr__(self) -> str:
        return (
            f"Heads({self.layer}: {self.n_heads} heads on {self.n_kv_heads} KV heads, "
            f"d_head={self.d_head}, d_model={self.d_model}, {self.processing})"
        )

    @property
    def n_heads(self) -> int:
        return self.W_O.shape[0]

    @property
    def n_kv_heads(self) -> int:
        return 1 + max(self.kv_of_head or ())

    @property
    def d_head(self) -> int:
        """Width of one head's values (queries and keys may be wider or narrower)."""
        return self.W_O.shape[1]

    @property
    def d_model(self) -> int:
        return self.W_O.shape[2]

    @cached_property
    def kv_index(self) -> Tensor:
        """``kv_of_head`` as an index tensor ``[head]``, on the weights' device."""
        return torch.tensor(self.kv_of_head, device=self.W_O.device)

    @cached_property
    def write_basis(self) -> linalg.Basis:
        """Orthonormal basis of each head's write subspace, the row space of ``W_O[h]``."""
        return linalg.row_space(self.W_O)

    @cached_property
    def frame_eigenvalues(self) -> Float[Tensor, "eigen"]:
        """The min(Dc, D) largest eigenvalues of ``Σ_h P_h``, descending; P_h projects on what
        head h can write to.

        In float64, because a Gram matrix squares the condition number.
        """
        Q = self.write_basis.Q.flatten(0, 1).double()
        gram = Q @ Q.T if Q.shape[0] < Q.shape[1] else Q.T @ Q
        return linalg.eigenvalues_symmetric(gram).flip(0).clamp(min=0).to(self.W_O)

    @property
    def write_factor(self) -> Float[Tensor, "head d_head k"]:
        """W_O in coordinates of its own basis: ``W_O[h] = write_factor[h] @ write_basis.Q[h]``."""
        return self.write_basis.factor

    @property
    def values(self) -> Float[Tensor, "kv_head d_in d_head"]:
        """W_V, for what means nothing without it.

        Raises:
            NotApplicable: this layer has none.
        """
        if self.W_V is None:
            raise NotApplicable("values are not linear in what the layer reads: there is no W_V")
        return self.W_V

    @cached_property
    def value_factor(self) -> Float[Tensor, "head k d_head"]:
        """``R_V`` of the QR factorisation ``W_V^h = Q R_V``: W_V up to a rotation of its input."""
        return linalg.triangular_factor(self.values)[self.kv_index]

    @cached_property
    def ov_reader(self) -> Float[Tensor, "head d_in k"]:
        """W_V in a gauge that makes W_O orthonormal: ``M_h = ov_reader[h] @ write_basis.Q[h]``."""
        return self.values[self.kv_index] @ self.write_factor

    @cached_property
    def ov_singular_values(self) -> Float[Tensor, "head singular"]:
        """Singular values of ``M_h = W_V W_O``, descending, from [d_head, d_head] factors.

        Those that count as zero are zero.
        """
        known = "write_basis" in self.__dict__  # else a triangle is enough, at half the cost
        R_O = self.write_factor if known else linalg.triangular_factor(self.W_O.mT).mT
        sigma = linalg.singular_values(self.value_factor @ R_O)
        zero = linalg.tolerance(sigma, self.values.shape[1], self.d_model)
        return sigma * (sigma > zero[:, None])

    @classmethod
    def side_by_side(cls, layers: Sequence["Heads"]) -> "Heads":
        """The heads of several layers as those of one, in order: only W_O, which all must share.

        Raises:
            NotApplicable: the widths of heads or of the stream differ between layers.
        """
        widths = {(h.d_head, h.d_model) for h in layers}
        if len(widths) > 1:
            raise NotApplicable(
                f"heads of all layers cannot be put side by side: (d_head, d_model) differ, "
                f"{sorted(widths)}"
            )
        return cls(torch.cat([h.W_O for h in layers]), layer=ALL_LAYERS)

    @property
    def nbytes(self) -> int:
        """Bytes that the weights take."""
        weights = (self.W_O, self.W_V, self.W_Q, self.W_K, self.b_V, self.b_O)
        return sum(w.nbytes for w in weights if w is not None)

    def nonfinite(self) -> str | None:
        """The names of weights that hold NaN or infinity, or None."""
        weights = {n: getattr(self, n) for n in ("W_O", "W_V", "W_Q", "W_K", "b_V", "b_O")}
        bad = [n for n, w in weights.items() if w is not None and not linalg.all_finite(w)]
        return ", ".join(bad) or None

    def to(self, *args: torch.dtype | torch.device | str) -> "Heads":
        """The same heads in another dtype or on another device."""
        moved = {
            n: w.to(*args)
            for n in ("W_O", "W_V", "W_Q", "W_K", "b_V", "b_O")
            if (w := getattr(self, n)) is not None
        }
        return replace(self, **moved)
