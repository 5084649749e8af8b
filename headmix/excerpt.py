"""excerpt: a small part of a text for interventions, and for each row another document's.

A window and its donor hold the same number of tokens of two documents, so that every position of
one row has its counterpart at the same position of the other.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headmix.capture import Batch
from headmix.feed import Feed
from headmix.heads import NotApplicable
from headmix.model import AttentionModel
from headmix.packing import Batches, pack
from headmix.tokens import Window

#: Windows are drawn from this many times the tokens that are wanted, and from no fewer than these.
POOL, FEWEST = 20, 40_000

#: Batches a fold that are taken where they do not say which of their tokens count.
UNNAMED = 4

RULE = (
    "Windows were drawn at random, one a document before any gives a second, and cut where no "
    "other document has one as long. Resampling takes z of a window of another document, cut to "
    "the same length, at the same position, special tokens included."
)


@dataclass(frozen=True, eq=False)
class Pass:
    """One forward pass of an excerpt, and the pass that it is resampled from.

    Attributes:
        inputs: of the model's forward.
        donor: likewise, row by row of other documents; None where there is no other document.
        keep: for each residual stream ``[row, token]``, the tokens that count.
        fold: ``[row]``, or one for all rows.
        documents: ``[fold]``, how many documents are seen for the first time.
    """

    inputs: Any
    donor: Any
    keep: Mapping[str, Bool[Tensor, "row token"]]
    fold: Int[Tensor, "row_or_one"]
    documents: Float[Tensor, "fold"]

    def kept(self, stream: str, shape: tuple[int, ...]) -> Bool[Tensor, "row token"]:
        """The tokens that count in something of ``[row, token, …]``; all where none are named.

        Raises:
            NotApplicable: its rows are not the rows of the batch.
        """
        keep = self.keep.get(stream, torch.ones(shape[:2], dtype=torch.bool))
        if len(shape) < 3 or tuple(shape[:2]) != tuple(keep.shape):
            raise NotApplicable(
                f"tokens are regrouped on the way: rows of shape {list(shape[:-1])}, the batch's "
                f"tokens {list(keep.shape)}"
            )
        return keep

    def folds_of(self, keep: Bool[Tensor, "row token"]) -> Int[Tensor, "kept"]:
        """The fold of each token kept."""
        fold = self.fold if len(self.fold) == len(keep) else self.fold[:1].expand(len(keep))
        return fold[:, None].expand(keep.shape)[keep]


@dataclass(frozen=True, eq=False)
class Excerpt:
    """The passes of a small part of a text, the same at every iteration."""

    passes: Sequence[Pass]
    n_tokens: int
    n_documents: int

    def __iter__(self) -> Iterator[Pass]:
        return iter(self.passes)

    def __len__(self) -> int:
        return len(self.passes)

    def __str__(self) -> str:
        tokens = f"{self.n_tokens} tokens" if self.n_tokens else "all tokens"
        return f"{tokens} of {self.n_documents} documents"

    @property
    def can_resample(self) -> bool:
        return all(p.donor is not None for p in self.passes)


@dataclass(frozen=True, eq=False)
class Pool:
    """What an excerpt is drawn from: windows of text, or a user's own batches in order."""

    windows: Sequence[Window]
    given: Sequence[Batch]
    max_length: int

    @classmethod
    def of(cls, batches: Batches, tokens: int, seed: int = 0) -> "Pool":
        """Many times the tokens that are wanted; of a user's own batches just about as many."""
        if batches.windows:
            return cls(_some(batches.windows, tokens, seed), [], batches.max_length)
        given: list[Batch] = []
        seen = 0
        for batch in batches:
            given.append(batch)
            seen += batch.tokens
            if seen >= tokens and len(given) != 1:  # one has no other to be resampled from
                break
        return cls([], given, batches.max_length)


def excerpt(
    model: AttentionModel,
    pool: Pool,
    *,
    tokens: int,
    folds: int,
    tokens_per_batch: int = 1024,
    seed: int = 0,
) -> Excerpt:
    """About so many tokens of a text, from every fold and as many documents as there are.

    Of a user's own batches the first are taken whole, and each is resampled from the next.
    """
    if not pool.windows:
        return _of_batches(pool.given, tokens, folds)
    chosen = _cut(_draw(pool.windows, tokens, folds, seed), pool.windows)
    feed = Feed(model, pool.max_length)
    return _of_windows(feed, chosen, pool.windows, folds, tokens_per_batch, seed)


def _some(windows: Sequence[Window], tokens: int, seed: int) -> list[Window]:
    """Drawn at random until there are enough, whatever batches they are run in."""
    enough, seen = max(POOL * tokens, FEWEST), 0
    some: list[Window] = []
    for window in random.Random(seed).sample(windows, len(windows)):
        if seen >= enough:
            break
        some.append(window)
        seen += window.tokens.n_counted
    return some


def _draw(pool: Sequence[Window], tokens: int, folds: int, seed: int) -> list[Window]:
    """Windows of every fold in turn; no second one of a document before each had its first."""
    dice = random.Random(seed)
    by_fold: dict[int, list[Window]] = {}
    for window in dice.sample(pool, len(pool)):
        by_fold.setdefault(window.fold, []).append(window)
    chosen = []
    for number, fold in enumerate(sorted(by_fold)):
        left = tokens * (number + 1) // len(by_fold) - tokens * number // len(by_fold)
        turns: dict[int, int] = {}
        order: list[tuple[int, int, Window]] = []
        for window in by_fold[fold]:
            turn = turns[window.document] = turns.get(window.document, -1) + 1
            order.append((turn, len(order), window))
        for _, _, window in sorted(order, key=lambda item: item[:2]):
            if left < 1:
                break
            n = window.tokens.n_counted
            if n > left:
                window = replace(window, tokens=window.tokens.first(left))
            chosen.append(window)
            left -= n
    return chosen


def _cut(chosen: Sequence[Window], pool: Sequence[Window]) -> list[Window]:
    """No window longer than the longest of any other document."""
    longest: dict[int, int] = {}
    for window in pool:
        longest[window.document] = max(longest.get(window.document, 0), len(window))
    ranked = sorted(longest, key=lambda d: -longest[d])
    if len(ranked) < 2:
        return list(chosen)
    most, second = ranked[0], longest[ranked[1]]
    cut = [
        replace(w, tokens=w.tokens[:second]) if w.document == most and len(w) > second else w
        for w in chosen
    ]
    return [w for w in cut if w.tokens.n_counted]


def _of_windows(
    feed: Feed,
    chosen: Sequence[Window],
    pool: Sequence[Window],
    folds: int,
    tokens_per_batch: int,
    seed: int,
) -> Excerpt:
    dice = random.Random(seed)
    fold_of = {(w.document, w.start): w.fold for w in chosen}
    donor_of = {(w.document, w.start): _donor(w, pool, dice) for w in chosen}  # in any batch
    alike = [replace(w, fold=0) for w in chosen]  # rows of all folds share a pass
    met: set[int] = set()
    passes = []
    for rows in pack(alike, tokens_per_batch, feed.length, padded=feed.masks):
        fold = torch.tensor([fold_of[w.document, w.start] for w in rows])
        documents = torch.zeros(folds, dtype=torch.float64)
        for w, f in zip(rows, fold.tolist(), strict=True):
            documents[f] += w.document not in met
            met.add(w.document)
        donors = [donor_of[w.document, w.start] for w in rows]
        other = None if None in donors else feed.batch([d for d in donors if d is not None]).inputs
        batch = feed.batch(rows)
        passes.append(Pass(batch.inputs, other, batch.keep, fold, documents))
    return Excerpt(passes, sum(w.tokens.n_counted for w in chosen), len(met))


def _donor(window: Window, pool: Sequence[Window], dice: random.Random) -> Window | None:
    """A window of another document, at least as long, and cut to the same length."""
    others = [w for w in pool if w.document != window.document and len(w) >= len(window)]
    if not others:
        return None
    other = dice.choice(others)
    return replace(other, tokens=other.tokens[: len(window)])


def _of_batches(given: Sequence[Batch], tokens: int, folds: int) -> Excerpt:
    passes: list[Pass] = []
    seen = 0
    for n, batch in enumerate(given):
        if passes and (seen >= tokens or (not seen and n >= UNNAMED * folds)):
            break
        seen += batch.tokens
        documents = torch.zeros(folds, dtype=torch.float64)
        documents[batch.fold] = batch.documents
        donor = given[(n + 1) % len(given)].inputs if len(given) > 1 else None
        fold = torch.tensor([batch.fold])
        passes.append(Pass(batch.inputs, donor, batch.keep, fold, documents))
    n_documents = sum(batch.documents for batch in given[: len(passes)])
    return Excerpt(passes, seen, n_documents)
