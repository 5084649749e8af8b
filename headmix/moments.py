"""Moments: everything second-order about one layer's heads, from one pass, in sums that add up.

The state is a handful of sums over tokens, kept apart by fold of documents, so that shards, threads
and machines merge by addition, a fold can be left out (cross-validation, jackknife) by leaving it
out of the sum, and memory does not grow with the text. Everything linear in residual space follows
from these sums and the weights: ``tr Cov(o_i, o_j) = tr(Σ_ij Γ_ji)`` with Σ = Cov(z), Γ = W_O W_Oᵀ.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headmix.sums import Sums, add_scatter, symmetric


@dataclass(frozen=True, eq=False, repr=False)
class Moments(Sums):
    """Sums over tokens for one attention layer, one entry a fold of documents.

    With ``u = z − pivot``, ``x_h = u_h Γ_hh^½`` (an isometric copy of what head h writes, in
    d_head coordinates) and ``n_h = ‖x_h‖²``, a token:

    Attributes:
        pivot: ``[concat]``, subtracted from z so that sums of squares lose no digits; two Moments
            add up only on the same pivot. No statistic depends on it.
        roots: ``[head, d_head, k]``, a factor ``A_h`` with ``A_h A_hᵀ = Γ_hh``.
        count: ``[fold]``, tokens.
        documents: ``[fold]``, documents.
        first: ``[fold, concat]``, Σ u.
        second: ``[fold, concat, concat]``, Σ uuᵀ; only the upper blocks are kept up to date, read
            ``scatter``.
        square: ``[fold, head]``, Σ n_h.
        square_pairs: ``[fold, head, head]``, Σ n_i n_j.
        weighted: ``[fold, concat, head]``, Σ u n_j.
        norm: ``[fold, head]``, Σ ‖o_h‖.
        joint_norm: ``[fold]``, Σ ‖Σ_h o_h‖.
        position_count: ``[fold, position]``; no positions unless asked for.
        position_first: ``[fold, position, concat]``, Σ u of the tokens at each position.

    All sums are float64. The norms of single tokens that go into them, n_h and ‖o_h‖, are taken in
    the precision of z, float32 at least.
    """

    SAME: ClassVar[tuple[str, ...]] = ("pivot", "roots")

    pivot: Float[Tensor, "concat"]
    roots: Float[Tensor, "head d_head k"]
    first: Float[Tensor, "fold concat"]
    second: Float[Tensor, "fold concat concat"]
    square: Float[Tensor, "fold head"]
    square_pairs: Float[Tensor, "fold head head"]
    weighted: Float[Tensor, "fold concat head"]
    norm: Float[Tensor, "fold head"]
    joint_norm: Float[Tensor, "fold"]
    position_count: Float[Tensor, "fold position"]
    position_first: Float[Tensor, "fold position concat"]

    @classmethod
    def zeros(
        cls,
        W_O: Float[Tensor, "head d_head d_model"],
        *,
        folds: int,
        pivot: Float[Tensor, "concat"] | None = None,
        positions: int = 0,
        device: torch.device | str = "cpu",
    ) -> "Moments":
        """Nothing seen yet.

        Args:
            W_O: the layer's output projection per head, for norms of what heads write.
            folds: into how many folds documents are divided.
            pivot: a point near the mean of z; zero by default.
            positions: how many positions to keep means for; 0 keeps none.
            device: where the sums live: where z will be.
        """
        H, d, _ = W_O.shape

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(folds, *shape, dtype=torch.float64, device=device)

        W = W_O.to(device, torch.float64)
        point = torch.zeros(H * d) if pivot is None else pivot
        return cls(
            pivot=point.to(device, torch.float64),
            roots=torch.linalg.qr(W.mT, mode="r").R.mT,
            count=zeros(),
            documents=zeros(),
            first=zeros(H * d),
            second=zeros(H * d, H * d),
            square=zeros(H),
            square_pairs=zeros(H, H),
            weighted=zeros(H * d, H),
            norm=zeros(H),
            joint_norm=zeros(),
            position_count=zeros(positions),
            position_first=zeros(positions, H * d),
        )

    @property
    def n_heads(self) -> int:
        return self.roots.shape[0]

    @property
    def d_head(self) -> int:
        return self.roots.shape[1]

    def __repr__(self) -> str:
        return (
            f"Moments({self.n_heads} heads of width {self.d_head}, {int(self.n)} tokens of "
            f"{int(self.documents.sum())} documents in {self.n_folds} folds)"
        )

    def update(
        self,
        z: Float[Tensor, "token concat"],
        written: Float[Tensor, "token d_model"] | None = None,
        *,
        fold: int,
        position: Int[Tensor, "token"] | None = None,
    ) -> None:
        """Add the tokens of one fold, in place.

        Args:
            z: the concatenation of head outputs.
            written: ``Σ_h o_h``, the projection's output without its bias; where None, the norm of
                the sum is left out.
            fold: the fold that the tokens' documents belong to.
            position: each token's position, where positions are kept.
        """
        self.forget()
        u = z.to(self.first.device) - self.pivot  # in float64, as the pivot is
        add_scatter(self.second[fold], u)
        wide = torch.promote_types(z.dtype, torch.float32)
        x = u.to(wide).unflatten(1, (self.n_heads, -1)).transpose(0, 1) @ self.roots.to(wide)
        n = x.square().sum(-1).T.double()
        self.count[fold] += len(u)
        self.first[fold] += u.sum(0)
        self.square[fold] += n.sum(0)
        self.square_pairs[fold].addmm_(n.T, n)
        self.weighted[fold] += (n.T @ u).T  # in this order twice as fast
        o = x + self._pivot_x.to(wide)[:, None]
        self.norm[fold] += torch.linalg.vector_norm(o, dim=-1).sum(1, dtype=torch.float64)
        if written is not None:
            wide = torch.promote_types(written.dtype, torch.float32)
            norm = torch.linalg.vector_norm(written, dim=-1, dtype=wide).sum(dtype=torch.float64)
            self.joint_norm[fold] += norm.to(self.joint_norm.device)
        if position is not None and self.position_count.shape[1]:
            where = position.to(u.device)
            self.position_count[fold].index_add_(0, where, torch.ones_like(u[:, 0]))
            self.position_first[fold].index_add_(0, where, u)

    @cached_property
    def _pivot_x(self) -> Float[Tensor, "head k"]:
        return torch.einsum("hd,hde->he", self.pivot.unflatten(0, (self.n_heads, -1)), self.roots)

    @property
    def has_positions(self) -> bool:
        return self.position_count.shape[1] > 0

    @cached_property
    def within_positions(self) -> "Moments":
        """The same tokens after the mean at their position, within their fold, is taken away.

        What is left is variation that position does not explain. The counts become degrees of
        freedom, one lost for each position seen in a fold. Only ``covariance`` and what follows
        from it keep a meaning.

        Raises:
            ValueError: no positions were kept.
        """
        if not self.has_positions:
            raise ValueError("no positions were kept: capture with positions > 0")
        weight = self.position_count.clamp_min(1).rsqrt()[..., None]
        means = self.position_first * weight
        seen = (self.position_count > 0).sum(1)
        return replace(
            self,
            count=self.count - seen,
            first=torch.zeros_like(self.first),
            second=self.second - means.mT @ means,
        )

    @cached_property
    def scatter(self) -> Float[Tensor, "concat concat"]:
        """Σ uuᵀ over all folds."""
        return symmetric(self.second.sum(0))

    @cached_property
    def mean(self) -> Float[Tensor, "concat"]:
        """E[z]."""
        return self.pivot + self.first.sum(0) / self.n

    @cached_property
    def covariance(self) -> Float[Tensor, "concat concat"]:
        """Σ = Cov(z), divided by n.

        Raises:
            ValueError: fewer than two tokens were seen.
        """
        if self.n < 2:
            raise ValueError(f"a covariance needs at least two tokens, got {int(self.n)}")
        m = self.first.sum(0) / self.n
        return self.scatter / self.n - torch.outer(m, m)
