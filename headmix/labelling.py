"""labelling: every token's labels as columns of numbers, with control tasks and a sample.

Classes get one column each, a number one; for each label with classes a control task is dealt. What
a label is, and which there are: ``headmix.labels``.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from headmix.labels import NONE, Reading, is_given
from headmix.tokens import Tokens, Window

#: Classes that a label may have; the rarest become one, ``OTHER``.
CLASSES, OTHER = 64, "(other)"

#: Ends the name of a label's control task.
CONTROL = " control"

#: Which tokens are labelled; said in every result.
RULE = (
    "Labels of words belong to the word's last piece, the first from which a causal model has seen "
    "all of it; tokens without one of the labels do not count in probes."
)


@dataclass(frozen=True)
class LabelSet:
    """One label: its classes, or a number.

    Attributes:
        name: what it is called.
        classes: the words it takes; none where it is a number.
        start: its first column among those of all labels.
        share: of the labelled tokens, how many are of each class.
        control: whether it is a control task: classes dealt at random to types of words, as often
            as the real ones (Hewitt & Liang 2019).
        centre, scale: of a number, its mean and sd: its column counts sds from the mean, so that
            sums of years lose no digits, and metres weigh as much as millimetres.
    """

    name: str
    classes: tuple[str, ...]
    start: int
    share: tuple[float, ...] = ()
    control: bool = False
    centre: float = 0.0
    scale: float = 1.0

    @property
    def width(self) -> int:
        """Columns: one a class, or one for a number."""
        return max(1, len(self.classes))

    @property
    def columns(self) -> slice:
        return slice(self.start, self.start + self.width)


@dataclass(frozen=True, eq=False)
class Labelling:
    """Every token's labels, in one column a class or number.

    Attributes:
        sets: the labels, each followed by its control task where it has classes.
        codes: for each document ``[token, set]``: the class's number, or the number; NaN where a
            token has not all labels.
        row: for each document ``[token]``: the row that a token has in the sample of its fold, −1
            for those that are not in it.
        rows: rows of a fold's sample.
        n_tokens: labelled tokens.
    """

    sets: tuple[LabelSet, ...]
    codes: Sequence[Float[np.ndarray, "_ set"]]
    row: Sequence[Int[np.ndarray, "_"]]
    rows: int
    n_tokens: int

    @property
    def width(self) -> int:
        return sum(s.width for s in self.sets)

    @property
    def labels(self) -> list[LabelSet]:
        """Those that are no control tasks."""
        return [s for s in self.sets if not s.control]

    @property
    def description(self) -> str:
        """The labels in words, for results."""
        kinds = [
            f"{s.name} ({len(s.classes)} classes)" if s.classes else f"{s.name} (a number)"
            for s in self.sets
            if not s.control
        ]
        return f"{', '.join(kinds)}; {self.n_tokens} tokens have all of them. {RULE}"

    @cached_property
    def digest(self) -> str:
        """A hash of all labels."""
        digest = hashlib.sha256(repr(self.sets).encode())
        for codes, row in zip(self.codes, self.row, strict=True):
            digest.update(codes.tobytes() + row.tobytes())
        return digest.hexdigest()

    def of(
        self, windows: Iterable[Window]
    ) -> tuple[
        Bool[np.ndarray, "counted"], Float[np.ndarray, "token column"], Int[np.ndarray, "token"]
    ]:
        """Of a batch's tokens that count, in order: which are labelled, their columns and rows."""
        codes, rows = [], []
        for w in windows:
            part = slice(w.start, w.start + len(w))
            codes.append(self.codes[w.document][part][w.tokens.keep])
            rows.append(self.row[w.document][part][w.tokens.keep])
        found, row = np.concatenate(codes), np.concatenate(rows)
        labelled = ~np.isnan(found).any(1)
        return labelled, self._columns(found[labelled]), row[labelled]

    def _columns(self, codes: Float[np.ndarray, "token set"]) -> Float[np.ndarray, "token column"]:
        columns = np.zeros((len(codes), self.width))
        for n, s in enumerate(self.sets):
            if s.classes:
                columns[np.arange(len(codes)), s.start + codes[:, n].astype(int)] = 1
            else:
                columns[:, s.start] = (codes[:, n] - s.centre) / s.scale
        return columns


def label(
    labels: Mapping[str, Any],
    documents: Sequence[Tokens],
    folds: Sequence[int],
    windows: Iterable[Window],
    room: int,
    piece: Callable[[int], str],
    *,
    sample: int,
    seed: int,
) -> Labelling:
    """Label every token of a text.

    Args:
        labels: from ``labels.parse``.
        documents: all of them, tokenised.
        folds: each document's.
        windows: what will be run; tokens outside are not labelled.
        room: tokens of text in a window.
        piece: the tokenizer's name of a token.
        sample: tokens, of all folds, that are kept themselves and not only in sums.
        seed: draws the sample and the control tasks.

    Raises:
        ValueError: a label gives not one value a token, fits no token, or is the same for all.
    """
    ran = [np.zeros(len(d), bool) for d in documents]
    for w in windows:
        ran[w.document][w.start : w.start + len(w)] = w.tokens.keep
    readings = _readings(documents, room, piece)
    values = {name: _values(name, of, readings, ran) for name, of in labels.items()}
    has = [
        np.logical_and.reduce([r, *(is_given(v[n]) for v in values.values())])
        for n, r in enumerate(ran)
    ]
    n_tokens = sum(int(h.sum()) for h in has)
    if not n_tokens:
        each = {
            name: sum(int((is_given(a) & r).sum()) for a, r in zip(v, ran, strict=True))
            for name, v in values.items()
        }
        raise ValueError(
            f"no token has all of the labels {', '.join(values)}"
            + "".join(f"; {name}: {n}" for name, n in each.items())
            + ". Labels of syntax need CoNLL-U that gives them (_ is none)"
        )
    types = [_types(d) for d in documents]
    sets: list[LabelSet] = []
    codes: list[list[np.ndarray]] = [[] for _ in documents]
    for name, of_documents in values.items():
        for one, coded in _encode(name, of_documents, has, types, seed, _width(sets)):
            sets.append(one)
            for n, c in enumerate(coded):
                codes[n].append(np.where(has[n], c, np.nan))
    rows, row = _sample(has, folds, sample, seed)
    stacked = [np.stack(c, 1) for c in codes]
    return Labelling(tuple(sets), stacked, row, rows, n_tokens)


def _width(sets: Sequence[LabelSet]) -> int:
    return sum(s.width for s in sets)


def _readings(documents: Sequence[Tokens], room: int, piece: Callable[[int], str]) -> list[Reading]:
    counts = Counter(id for d in documents for id in d.ids.tolist())
    names = {id: piece(id) for id in counts}
    return [
        Reading(
            d,
            [names[id] for id in d.ids.tolist()],
            np.array([counts[id] for id in d.ids.tolist()], np.int64),
            np.arange(len(d)) % room,
        )
        for d in documents
    ]


def _values(
    name: str, of: Any, readings: Sequence[Reading], ran: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """A label's values by document: words as text, numbers as floats."""
    if callable(of):
        found = [_plain(of(reading)) for reading in readings]
    else:
        given = _plain(of)
        sizes = [int(r.sum()) for r in ran]
        if given.shape != (sum(sizes),):
            raise ValueError(
                f"label {name!r}: an array of shape {list(given.shape)} for the {sum(sizes)} "
                "tokens that count in this text: one value each is needed"
            )
        parts = np.split(given, np.cumsum(sizes)[:-1])
        found = [_spread(part, r) for part, r in zip(parts, ran, strict=True)]
    for n, (v, r) in enumerate(zip(found, ran, strict=True)):
        if v.shape != r.shape:
            raise ValueError(
                f"label {name!r}: values of shape {list(v.shape)} for document {n}, which has "
                f"{len(r)} tokens"
            )
    if all(v.dtype.kind == "f" for v in found):
        return [v.astype(float) for v in found]
    return [
        np.where(np.isnan(v), NONE, v.astype(str)) if v.dtype.kind == "f" else v.astype(str)
        for v in found
    ]


def _plain(values: Any) -> np.ndarray:
    """Numbers or words; of objects, None and NaN say that a token has none."""
    values = np.asarray(values)
    if values.dtype.kind != "O" or values.ndim != 1:
        return values
    none = [v is None or v != v for v in values.tolist()]
    numbers = all(n or isinstance(v, float) for n, v in zip(none, values.tolist(), strict=True))
    return (
        np.where(none, np.nan, values).astype(float)
        if numbers
        else np.where(none, NONE, [str(v) for v in values.tolist()])
    )


def _spread(part: np.ndarray, ran: np.ndarray) -> np.ndarray:
    if part.dtype.kind == "f":
        out = np.full(len(ran), np.nan)
    else:  # integers and booleans are classes
        part = part.astype(str)
        out = np.full(len(ran), NONE, part.dtype)
    out[ran] = part
    return out


def _types(document: Tokens) -> list[str]:
    """What counts as one word for the control task: the word's form, or the token."""
    ids = [f"#{id}" for id in document.ids.tolist()]
    if document.words is None:
        return ids
    forms = document.words.form
    return [str(forms[w]) if w >= 0 else id for w, id in zip(document.word, ids, strict=True)]


def _encode(
    name: str,
    values: Sequence[np.ndarray],
    has: Sequence[np.ndarray],
    types: Sequence[Sequence[str]],
    seed: int,
    start: int,
) -> list[tuple[LabelSet, list[np.ndarray]]]:
    """A label as numbers, by document, and its control task."""
    seen = np.concatenate([v[h] for v, h in zip(values, has, strict=True)])
    if seen.dtype.kind == "f":
        if not np.isfinite(seen).all():
            raise ValueError(
                f"label {name!r} is infinite for {int(np.isinf(seen).sum())} tokens: NaN says that "
                "a token has none"
            )
        if seen.min() == seen.max():
            raise ValueError(
                f"label {name!r} is {seen[0]} for every token: nothing to find, leave it out"
            )
        mean = float(seen.mean())
        number = LabelSet(name, (), start, centre=mean, scale=float(seen.std()))
        return [(number, list(values))]
    common = [c for c, _ in Counter(seen.tolist()).most_common()]
    if len(common) < 2:
        raise ValueError(
            f"label {name!r} is {common[0]!r} for every token: nothing to find, leave it out"
        )
    if len(common) > CLASSES:
        common = [*common[: CLASSES - 1], OTHER]
    code = {str(c): float(n) for n, c in enumerate(common)}
    last = float(len(common) - 1)
    coded = [np.array([code.get(str(x), last) for x in v.tolist()]) for v in values]
    counts = np.bincount(
        np.concatenate([c[h] for c, h in zip(coded, has, strict=True)]).astype(int),
        minlength=len(common),
    )
    share = tuple((counts / counts.sum()).tolist())
    real = LabelSet(name, tuple(common), start, share)
    dealt = _deal_to_types(types, np.cumsum(share), f"{seed} {name}")
    control = replace(real, name=name + CONTROL, start=start + real.width, control=True)
    return [(real, coded), (control, dealt)]


def _deal_to_types(types: Sequence[Sequence[str]], upto: np.ndarray, salt: str) -> list[np.ndarray]:
    """A class for each type of word, at random but the same wherever the type stands."""
    known: dict[str, float] = {}

    def of(word: str) -> float:
        if word not in known:
            number = int.from_bytes(hashlib.sha256(f"{salt} {word}".encode()).digest()[:8], "big")
            known[word] = float(min(int(np.searchsorted(upto, number / 2**64)), len(upto) - 1))
        return known[word]

    return [np.array([of(word) for word in document]) for document in types]


def _sample(
    has: Sequence[np.ndarray], folds: Sequence[int], wanted: int, seed: int
) -> tuple[int, list[np.ndarray]]:
    """Rows for tokens drawn at random, as many in each fold as in any other."""
    row = [np.full(len(h), -1) for h in has]
    most = 0
    each = -(-wanted // max(1, len(set(folds))))
    for fold in sorted(set(folds)):
        places = [(n, t) for n, h in enumerate(has) if folds[n] == fold for t in np.flatnonzero(h)]
        random = np.random.default_rng([seed, fold])
        chosen = random.permutation(len(places))[:each]
        for number, place in enumerate(sorted(chosen.tolist())):
            n, t = places[place]
            row[n][t] = number
        most = max(most, len(chosen))
    return most, row
