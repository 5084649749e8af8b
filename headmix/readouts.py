"""ReadOuts: what can be read of labels at each place of a block, in sums that add up.

For each read-out x, the sums Σu and Σuuᵀ of ``u = [x, Y]`` over labelled tokens, Y holding a column
for each class or number. Every linear probe, its test on documents that were held out, and what is
left after a concept is erased follow from them. A small sample of the tokens themselves is kept
beside them, for what sums cannot say: how often the largest of several scores is the right one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headmix.labelling import Labelling, LabelSet
from headmix.sums import Sums, add_scatter

#: Where labels are read, in the order in which information passes.
LADDER = ("concat", "attn_out", "resid_pre", "resid_mid", "mlp_in", "mlp_out", "resid_post")

#: Those whose sums are kept: the output projection is linear, so that attn_out follows from concat.
WATCHED = ("concat", *LADDER[2:])


@dataclass(frozen=True, eq=False, repr=False)
class LabelledSums(Sums):
    """Sums over labelled tokens of one read-out, one entry a fold of documents.

    With ``u = [x − pivot, Y]``, a token:

    Products of one batch are summed in the precision of x (float32 at least), batches in float64.

    Attributes:
        pivot: ``[width]``, subtracted from x so that sums of squares lose no digits.
        first: ``[fold, u]``, Σ u.
        second: ``[fold, u, u]``, Σ uuᵀ; only the upper blocks are kept up to date.
        sample: ``[fold, row, u]``, u itself of the tokens of the sample; zero until seen.
        filled: ``[fold, row]``, 1 where seen.
    """

    SAME: ClassVar[tuple[str, ...]] = ("pivot",)

    pivot: Float[Tensor, "width"]
    first: Float[Tensor, "fold u"]
    second: Float[Tensor, "fold u u"]
    sample: Float[Tensor, "fold row u"]
    filled: Float[Tensor, "fold row"]

    @classmethod
    def zeros(
        cls,
        width: int,
        columns: int,
        *,
        folds: int,
        rows: int = 0,
        pivot: Float[Tensor, "width"] | None = None,
        device: torch.device | str = "cpu",
    ) -> "LabelledSums":
        """Nothing seen yet, of a read-out of some width and labels of so many columns."""

        def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros(folds, *shape, dtype=dtype, device=device)

        u = width + columns
        point = torch.zeros(width) if pivot is None else pivot
        return cls(
            count=zeros(),
            documents=zeros(),
            pivot=point.to(device, torch.float64),
            first=zeros(u),
            second=zeros(u, u),
            sample=zeros(rows, u, dtype=torch.float32),
            filled=zeros(rows, dtype=torch.float32),
        )

    @staticmethod
    def nbytes(width: int, columns: int, *, folds: int, rows: int) -> int:
        """What ``zeros`` takes."""
        u = width + columns
        return folds * (8 * (2 + u + u * u) + 4 * rows * (u + 1)) + 8 * width

    @property
    def width(self) -> int:
        return self.pivot.shape[0]

    def update(
        self,
        x: Float[Tensor, "token width"],
        Y: Float[Tensor, "token column"],
        *,
        fold: int,
        row: Int[Tensor, "token"] | None = None,
    ) -> None:
        """Add labelled tokens of one fold, in place; ``row``: where in the sample, −1 nowhere."""
        self.forget()
        wide = torch.promote_types(x.dtype, torch.float32)
        x = (x.to(self.pivot) - self.pivot).to(wide)
        u = torch.cat([x, Y.to(x)], dim=1)
        add_scatter(self.second[fold], u)
        self.count[fold] += len(u)
        self.first[fold] += u.sum(0, dtype=torch.float64)
        if row is not None and (chosen := row >= 0).any():
            self.sample[fold, row[chosen]] = u[chosen].to(self.sample)
            self.filled[fold, row[chosen]] = 1


@dataclass(eq=False, repr=False)
class ReadOuts:
    """What labels can be read at each place of one layer's block.

    Leaving out folds is free: all choices of folds share the sums, and what was derived from them.

    Attributes:
        sets: the labels, control tasks included.
        sums: by name of the read-out, those of ``WATCHED`` that the block has.
        absent: why it has not the others.
        folds: those that count; all where None.
    """

    sets: tuple[LabelSet, ...]
    sums: dict[str, LabelledSums]
    absent: Mapping[str, str] = field(default_factory=dict)
    folds: tuple[int, ...] | None = None
    derived: dict[object, object] = field(default_factory=dict)

    @property
    def labels(self) -> list[LabelSet]:
        """The labels that are no control tasks."""
        return [s for s in self.sets if not s.control]

    def control_of(self, s: LabelSet) -> LabelSet | None:
        """A label's control task; None for a number."""
        return self.sets[self.sets.index(s) + 1] if s.classes else None

    @property
    def concat(self) -> LabelledSums:
        return self.sums["concat"]

    @property
    def used(self) -> list[int]:
        """The folds that count and hold tokens."""
        chosen = range(self.concat.n_folds) if self.folds is None else self.folds
        return [f for f in chosen if self.concat.count[f] > 0]

    @property
    def count(self) -> Float[Tensor, "fold"]:
        """Labelled tokens in each fold that counts."""
        return self.concat.count[self.used]

    @property
    def n(self) -> float:
        return float(self.count.sum())

    @property
    def documents(self) -> Float[Tensor, "fold"]:
        return self.concat.documents[self.used]

    def select(self, folds: Iterable[int]) -> "ReadOuts":
        """Only the given folds."""
        return replace(self, folds=tuple(folds))

    @cached_property
    def replicates(self) -> list["ReadOuts"]:
        """The jackknife's: all folds but one, for each that holds tokens."""
        return [self.select(f for f in self.used if f != out) for out in self.used]

    def forget(self) -> None:
        """Drop what was derived before the sums changed."""
        self.derived.clear()
        self.__dict__.pop("replicates", None)

    def __add__(self, other: "ReadOuts") -> "ReadOuts":
        """The sums of both parts of one labelled text. Raises ValueError for labels of another."""
        if self.sets != other.sets or self.sums.keys() != other.sums.keys():
            raise ValueError(
                f"read-outs of the labels {[s.name for s in self.sets]} at {list(self.sums)} "
                f"cannot be added to those of {[s.name for s in other.sets]} at {list(other.sums)}"
            )
        total = {name: sums + other.sums[name] for name, sums in self.sums.items()}
        return ReadOuts(self.sets, total, self.absent)

    def __repr__(self) -> str:
        names = ", ".join(s.name for s in self.labels)
        return f"ReadOuts({names} at {', '.join(self.sums)}; {int(self.n)} labelled tokens)"


def empty(
    labelling: Labelling,
    widths: Mapping[str, int],
    *,
    folds: int,
    absent: Mapping[str, str] | None = None,
    pivots: Mapping[str, Tensor] | None = None,
) -> ReadOuts:
    """Nothing seen yet, at read-outs of these widths."""
    sums = {
        name: LabelledSums.zeros(
            width,
            labelling.width,
            folds=folds,
            rows=labelling.rows,
            pivot=(pivots or {}).get(name),
        )
        for name, width in widths.items()
    }
    return ReadOuts(labelling.sets, sums, absent or {})


def nbytes(
    labelling: Labelling, n_concat: int, d_model: int, names: Sequence[str], folds: int
) -> int:
    """Bytes that one layer's sums take."""
    widths = [n_concat if name == "concat" else d_model for name in names]
    return sum(
        LabelledSums.nbytes(w, labelling.width, folds=folds, rows=labelling.rows) for w in widths
    )


def tensors(read_outs: ReadOuts) -> dict[str, Tensor]:
    """All there is to keep, by "read-out/field"."""
    return {
        f"{name}/{f.name}": getattr(sums, f.name)
        for name, sums in read_outs.sums.items()
        for f in fields(sums)
    }


def fill(read_outs: ReadOuts, kept: Mapping[str, Tensor]) -> None:
    """Put back what ``tensors`` gave."""
    for name, sums in read_outs.sums.items():
        read_outs.sums[name] = LabelledSums(
            **{f.name: kept[f"{name}/{f.name}"] for f in fields(sums)}
        )
    read_outs.forget()
