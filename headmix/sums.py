"""Sums: what all statistics from one pass over text have in common. They are sums, and add up."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import ClassVar, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

S = TypeVar("S", bound="Sums")

#: Blocks a side in which the upper triangle of Σ uuᵀ is computed: the work is (1 + 1/n)/2 of a full
#: product's, and eight already leave little to gain.
TRIANGLE_BLOCKS = 8


def add_scatter(total: Float[Tensor, "u u"], u: Float[Tensor, "token u"]) -> None:
    """Add Σ uuᵀ in place; only the upper triangle, and some of what is near it, is kept up."""
    step = -(-u.shape[1] // TRIANGLE_BLOCKS)
    for i in range(0, u.shape[1], step):
        rows, rest = u[:, i : i + step], u[:, i:]
        if u.dtype == total.dtype:
            total[i : i + step, i:].addmm_(rows.T, rest)
        else:
            total[i : i + step, i:] += rows.T @ rest


def symmetric(total: Float[Tensor, "*batch u u"]) -> Float[Tensor, "*batch u u"]:
    """Σ uuᵀ whole again, from its upper triangle."""
    upper = torch.ones(total.shape[-2:], dtype=torch.bool, device=total.device).triu()
    return torch.where(upper, total, total.mT)


@dataclass(frozen=True, eq=False, repr=False)
class Sums:
    """Sums over a text, one entry a fold of documents: the first axis of every field that adds up.

    Shards, threads and machines merge by addition; a fold is left out (cross-validation, jackknife)
    by leaving it out of the sum.

    Attributes:
        count: ``[fold]``, how many terms the sums have.
        documents: ``[fold]``, how many documents those come from.
    """

    #: Fields that do not add up: two of a kind add up only where these are the same.
    SAME: ClassVar[tuple[str, ...]] = ()

    count: Float[Tensor, "fold"]
    documents: Float[Tensor, "fold"]

    @classmethod
    def sums(cls) -> list[str]:
        """The names of what adds up."""
        return [f.name for f in fields(cls) if f.name not in cls.SAME]

    @property
    def n_folds(self) -> int:
        return self.count.shape[0]

    @cached_property
    def n(self) -> float:
        """Terms in all folds."""
        return float(self.count.sum())

    def forget(self) -> None:
        """Drop what was derived before the sums changed."""
        for derived in self.__dict__.keys() - self.__dataclass_fields__.keys():
            del self.__dict__[derived]

    def __add__(self: S, other: S) -> S:
        """Both texts' sums. Raises ValueError where these are of other layers, folds or pivots."""
        kind = type(self).__name__
        for name in self.SAME:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine.shape != theirs.shape or not torch.equal(mine, theirs.to(mine)):
                raise ValueError(
                    f"two {kind} add up only for the same layer on the same pivot; {name} differs "
                    f"({list(mine.shape)} and {list(theirs.shape)})"
                )
        if self.n_folds != other.n_folds:
            raise ValueError(f"{self.n_folds} folds cannot be added to {other.n_folds}")
        for name in self.sums():
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine.shape != theirs.shape:
                raise ValueError(
                    f"two {kind} add up only for the same layer; {name} has shape "
                    f"{list(mine.shape)} in one and {list(theirs.shape)} in the other"
                )
        return replace(self, **{n: getattr(self, n) + getattr(other, n) for n in self.sums()})

    def select(self: S, folds: Iterable[int]) -> S:
        """Only the given folds."""
        index = list(folds)
        return replace(self, **{n: getattr(self, n)[index] for n in self.sums()})

    def without(self: S, fold: int) -> S:
        """All folds but one: the training part of cross-validation, a jackknife replicate."""
        return self.select(f for f in range(self.n_folds) if f != fold)

    @cached_property
    def replicates(self: S) -> list[S]:
        """The jackknife's: all folds but one, for each that holds tokens."""
        return [self.without(f) for f in self.count.nonzero().flatten().tolist()]

    def to(self: S, device: torch.device | str) -> S:
        """The same sums on another device."""
        return replace(self, **{f.name: getattr(self, f.name).to(device) for f in fields(self)})
