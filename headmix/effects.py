"""Effects: what replacing heads does to the model's output, and to what comes next, in sums."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headmix.heads import Heads, NotApplicable
from headmix.sums import Sums

#: What a head's z can be replaced by.
REPLACEMENTS = {
    "resample": "z of another document at the same position",
    "mean": "its mean over the text",
    "zero": "zero",
}

#: How many heads are replaced at once, at most: units of several heads are resampled only.
MEMBERS = {"resample": 1_000_000, "mean": 1, "zero": 1}

#: Where the interaction of two heads is read, in the order in which information gets there.
READ_OUTS = {
    "attn_out": "what the output projection returns",
    "mlp_in": "what the feed-forward reads: the norm of the stream",
    "mlp_out": "what the feed-forward adds to the stream",
    "next_logits": "the attention logits of the next layer, but for a constant a query",
}

#: Roundings of what is read that count as no effect.
ROUNDINGS = 16

#: Why a read-out is missing, by the code that ``Interactions`` keeps.
MISSING = (
    "",
    "the block around this layer does not show where its feed-forward begins",
    "the block around this layer does not show what its feed-forward adds",
    "no layer of the same stream comes next",
    "the next layer hands out no attention weights, from which its logits are read",
    "tokens are regrouped there, so that they cannot be told apart",
)


@dataclass(frozen=True, eq=False, repr=False)
class Effects(Sums):
    """What replacing z of some of a layer's heads does to the output, one entry a fold.

    Attributes:
        count: ``[fold]``, tokens whose output counts.
        documents: ``[fold]``, documents.
        members: ``[unit, head]``, which heads each unit replaces at once: one, a KV group, a pair.
        predictions: ``[fold]``, tokens whose prediction counts; 0 where the model predicts none.
        clean_loss: ``[fold]``, Σ loss of the model as it is, in nats.
        distance: ``[fold, replacement, unit]``, Σ ‖y' − y‖/‖y‖ over tokens, y the output.
        loss: ``[fold, replacement, unit]``, Σ loss with the unit replaced − loss, in nats.
        divergence: ``[fold, replacement, unit]``, Σ KL(p ‖ p'), p the model's own prediction.

    Replacements come in the order of ``REPLACEMENTS``; those that were not run are NaN
    (several heads at once are resampled only).
    """

    SAME: ClassVar[tuple[str, ...]] = ("members",)

    members: Bool[Tensor, "unit head"]
    predictions: Float[Tensor, "fold"]
    clean_loss: Float[Tensor, "fold"]
    distance: Float[Tensor, "fold replacement unit"]
    loss: Float[Tensor, "fold replacement unit"]
    divergence: Float[Tensor, "fold replacement unit"]

    @classmethod
    def zeros(
        cls,
        members: Bool[Tensor, "unit head"],
        *,
        folds: int,
        replacements: Sequence[str] = tuple(REPLACEMENTS),
    ) -> "Effects":
        """Nothing replaced yet."""
        empty = torch.full((folds, len(REPLACEMENTS), len(members)), torch.nan, dtype=torch.float64)
        for name in replacements:
            empty[:, list(REPLACEMENTS).index(name), members.sum(1) <= MEMBERS[name]] = 0.0

        def zeros() -> Tensor:
            return torch.zeros(folds, dtype=torch.float64)

        return cls(
            count=zeros(), documents=zeros(), members=members, predictions=zeros(),
            clean_loss=zeros(), distance=empty, loss=empty.clone(), divergence=empty.clone(),
        )  # fmt: skip

    @property
    def n_heads(self) -> int:
        return self.members.shape[1]

    def __repr__(self) -> str:
        return (
            f"Effects({len(self.members)} units of {self.n_heads} heads, {int(self.n)} tokens of "
            f"{int(self.documents.sum())} documents in {self.n_folds} folds)"
        )

    def clean(
        self,
        fold: Int[Tensor, "token"],
        documents: Float[Tensor, "fold"],
        losses: Float[Tensor, "prediction"] | None = None,
        fold_of_losses: Int[Tensor, "prediction"] | None = None,
    ) -> None:
        """Count the tokens of a pass in which nothing is replaced, in place."""
        self.forget()
        self.count.index_add_(0, fold, torch.ones(len(fold), dtype=torch.float64))
        self.documents.add_(documents)
        if losses is not None and fold_of_losses is not None:
            ones = torch.ones(len(losses), dtype=torch.float64)
            self.predictions.index_add_(0, fold_of_losses, ones)
            self.clean_loss.index_add_(0, fold_of_losses, losses.double().cpu())

    def add(
        self,
        what: str,
        replacement: str,
        unit: int,
        fold: Int[Tensor, "token"],
        values: Float[Tensor, "token"],
    ) -> None:
        """Add one number a token to ``distance``, ``loss`` or ``divergence``, in place."""
        self.forget()
        sums = getattr(self, what)[:, list(REPLACEMENTS).index(replacement), unit]
        sums.index_add_(0, fold, values.double().cpu())

    def unit(self, heads: Sequence[int]) -> int | None:
        """The unit that replaces exactly these heads; None where none does."""
        wanted = torch.zeros(self.n_heads, dtype=torch.bool)
        wanted[list(heads)] = True
        found = (self.members == wanted).all(1).nonzero().flatten().tolist()
        return int(found[0]) if found else None


def units(heads: Heads, pairs: Sequence[tuple[int, int]] = ()) -> Bool[Tensor, "unit head"]:
    """Every head, every KV group of several heads, and the pairs that were chosen.

    >>> units(Heads(W_O=torch.ones(4, 1, 4), kv_of_head=(0, 0, 1, 1)), [(1, 2)]).int()
    tensor([[1, 0, 0, 0],
            [0, 1, 0, 0],
            [0, 0, 1, 0],
            [0, 0, 0, 1],
            [1, 1, 0, 0],
            [0, 0, 1, 1],
            [0, 1, 1, 0]], dtype=torch.int32)
    """
    sets = [{h} for h in range(heads.n_heads)]
    owner = list(heads.kv_of_head or ())
    sets += [{h for h, g in enumerate(owner) if g == group} for group in range(heads.n_kv_heads)]
    for i, j in pairs:
        if not 0 <= min(i, j) < max(i, j) < heads.n_heads:
            raise ValueError(
                f"{heads.layer}: no pair ({i}, {j}): two different heads of 0 to "
                f"{heads.n_heads - 1} are needed"
            )
        sets.append({i, j})
    once = [s for n, s in enumerate(sets) if s not in sets[:n]]
    members = torch.zeros(len(once), heads.n_heads, dtype=torch.bool)
    for row, chosen in zip(members, once, strict=True):
        row[list(chosen)] = True
    return members


@dataclass(frozen=True, eq=False, repr=False)
class Interactions(Sums):
    """How far two heads' effects do not add up, at places after them, one entry a fold.

    With f(S) what a read-out gives when z of the heads S is resampled, ``δ_i = f(i) − f(∅)`` and
    ``Δ_ij = f(ij) − f(i) − f(j) + f(∅)``: zero wherever the way to the read-out is linear.

    Attributes:
        count: ``[fold]``, tokens.
        documents: ``[fold]``, documents.
        pairs: ``[head, head]``, which pairs were run; symmetric.
        missing: ``[read_out]``, an index of ``MISSING``; 0 where the read-out can be had.
        rounding: ``[fold, read_out]``, Σ (ε ‖f(∅)‖)² over tokens, ε a few roundings of the model's
            precision: what is no more than that is no effect.
        single: ``[fold, read_out, head]``, Σ ‖δ_i‖² over tokens.
        joint: ``[fold, read_out, head, head]``, Σ ‖Δ_ij‖² over tokens.

    Read-outs come in the order of ``READ_OUTS``.
    """

    SAME: ClassVar[tuple[str, ...]] = ("pairs", "missing")

    pairs: Bool[Tensor, "head head"]
    missing: Int[Tensor, "read_out"]
    rounding: Float[Tensor, "fold read_out"]
    single: Float[Tensor, "fold read_out head"]
    joint: Float[Tensor, "fold read_out head head"]

    @classmethod
    def zeros(
        cls, pairs: Bool[Tensor, "head head"], missing: Sequence[int], *, folds: int
    ) -> "Interactions":
        """Nothing replaced yet."""
        H, R = len(pairs), len(READ_OUTS)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(folds, *shape, dtype=torch.float64)

        return cls(
            count=zeros(), documents=zeros(), pairs=pairs, missing=torch.tensor(list(missing)),
            rounding=zeros(R), single=zeros(R, H), joint=zeros(R, H, H),
        )  # fmt: skip

    @property
    def n_heads(self) -> int:
        return len(self.pairs)

    def __repr__(self) -> str:
        return (
            f"Interactions({int(self.pairs.sum()) // 2} pairs of {self.n_heads} heads, "
            f"{int(self.n)} tokens in {self.n_folds} folds)"
        )

    def clean(self, fold: Int[Tensor, "token"], documents: Float[Tensor, "fold"]) -> None:
        """Count the tokens of a pass in which nothing is replaced, in place."""
        self.forget()
        self.count.index_add_(0, fold, torch.ones(len(fold), dtype=torch.float64))
        self.documents.add_(documents)

    def add_clean(
        self, read_out: str, fold: Int[Tensor, "token"], value: Float[Tensor, "token *feature"]
    ) -> None:
        """Note how large a read-out is, and so its rounding, in place."""
        self.forget()
        epsilon = ROUNDINGS * torch.finfo(value.dtype).eps
        squares = (value.double().flatten(1) * epsilon).square().sum(1).cpu()
        self.rounding[:, list(READ_OUTS).index(read_out)].index_add_(0, fold, squares)

    def add(
        self,
        read_out: str,
        where: tuple[int, ...],
        fold: Int[Tensor, "token"],
        difference: Float[Tensor, "token *feature"],
    ) -> None:
        """Add ``‖δ_i‖²`` (where = (i,)) or ``‖Δ_ij‖²`` (where = (i, j)) of each token, in place."""
        self.forget()
        squares = difference.double().flatten(1).square().sum(1).cpu()
        at = list(READ_OUTS).index(read_out)
        for place in {where, where[::-1]}:
            sums = (self.single if len(place) == 1 else self.joint)[:, at]
            for head in place:
                sums = sums[:, head]
            sums.index_add_(0, fold, squares)

    def require(self, read_out: str) -> int:
        """The index of a read-out.

        Raises:
            NotApplicable: it could not be had; the message says why.
        """
        at = list(READ_OUTS).index(read_out)
        if why := int(self.missing[at]):
            raise NotApplicable(MISSING[why])
        return at
