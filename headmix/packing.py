"""packing: documents dealt to folds, cut into windows, and put into batches."""

import hashlib
import heapq
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headmix.capture import Batch
from headmix.feed import Feed, TextBatch
from headmix.labelling import Labelling, label
from headmix.labels import into_words
from headmix.model import AttentionModel
from headmix.text import Document, Text, read_text
from headmix.tokens import Tokens, Window, windows

#: Which tokens count; the one place that says so, here and in every result.
RULE = (
    "Every token of the text counts, once. Special tokens that the tokenizer adds to a window, and "
    "padding, are input but never count; of token ids given in place of text, those special to the "
    "tokenizer do not count. A document is cut into windows of at most {max_length} tokens, with "
    "the special ones; two documents never share a window."
)
RULE_OF_FIRST = (
    " The tokenizer puts nothing in front of a window, so that the first position, where causal "
    "attention has its sink, holds a token of the text: it is input, but does not count."
)
RULE_OF_DECODERS = " The encoder reads the window, the decoder the same after its start token."

#: Labelled tokens that probes keep themselves.
SAMPLE = 2000


@dataclass(frozen=True, eq=False)
class Batches:
    """Batches in a fixed order, and what is known beforehand.

    Each ``iter`` begins anew, but for an iterator of a user's own, which can be read once.

    Attributes:
        n_batches, n_tokens, n_documents: how much there is; tokens that count. None where a user's
            own batches do not say.
        padding: the share of padding among all tokens that are run.
        max_length: no sequence is longer; 0 where a user's own batches do not say.
        once: whether they can be read only once.
        attrs: what a result must say about its text: ``text``, ``text_rule``, and of text
            ``text_sha256`` (of the documents that were read) and ``text_unknown_tokens``.
        labelling: every token's labels, where they were asked for.
        windows: of text, all rows of all batches, in the order of the text.
    """

    begin: Callable[[], Iterator[Batch]]
    attrs: Mapping[str, str]
    n_batches: int | None = None
    n_tokens: int | None = None
    n_documents: int | None = None
    padding: float | None = None
    max_length: int = 0
    once: bool = False
    labelling: Labelling | None = None
    windows: Sequence[Window] = ()

    def __iter__(self) -> Iterator[Batch]:
        return self.begin()


def batches(
    model: AttentionModel,
    source: Any,
    *,
    folds: int = 5,
    max_tokens: int | None = None,
    tokens_per_batch: int = 1024,
    max_length: int | None = None,
    labels: Mapping[str, Any] | None = None,
    sample: int = SAMPLE,
    seed: int = 0,
) -> Batches:
    """The batches in which a model runs a text.

    Whole documents are dealt to folds, the largest first and each to the emptiest; fewer documents
    than folds are cut into contiguous blocks that stand in for documents. Windows of like length
    share a batch, and batches of all folds take turns, so that what was seen when a run is stopped
    is a fair part of each.

    Args:
        model: a model that can be run, with a tokenizer unless token ids are given.
        source: what ``read_text`` takes; or an iterable of Batch, or of plain inputs of the
            model's forward (each a document of its own, dealt in turn; where it has an attention
            mask beside token ids, only what that lets be seen counts). One array or tensor of
            three axes or more, or of two with floats, is a batch: each item along its first axis
            becomes an input with a batch axis of one (images, audio).
        folds: how many folds.
        max_tokens: stop after so many tokens that count; all by default.
        tokens_per_batch: rows × longest row at most, unless one row alone is longer.
        max_length: the longest window, special tokens included; by default 256 or what the model
            takes, whichever is less.
        labels: from ``labels.parse``: what is known of each token, for probes.
        sample: labelled tokens that probes keep themselves, to count what sums cannot say.
        seed: draws that sample, and the control tasks of labels.

    Raises:
        ValueError: no text, or less than one token a fold; ids outside the vocabulary; text
            without a tokenizer.
        NotApplicable: only the weights were loaded.
    """
    if folds < 1:
        raise ValueError(f"folds={folds}: at least one is needed")
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens}: at least one is needed")
    feed = Feed(model, max_length)
    source, given = _peek(source)
    if given:
        if max_tokens is not None:
            raise ValueError("max_tokens counts the tokens of text; give fewer batches instead")
        if labels:
            raise ValueError("labels belong to the tokens of text, or of documents of token ids")
        return _given(feed, source, folds)
    text = read_text(source)
    documents, digest, first_left_out = _tokenise(feed, text, max_tokens, words=bool(labels))
    unknown = feed.tokeniser.unknown
    n_documents = len(documents)
    if n_documents < folds:
        documents = blocks(documents, folds)
    dealt = deal([d.n_counted for d in documents], folds)
    cut = [_windows(feed, d, n, dealt[n]) for n, d in enumerate(documents)]
    _require(cut, folds, n_documents, RULE_OF_FIRST * first_left_out)
    packed = pack(chain.from_iterable(cut), tokens_per_batch, feed.length, padded=feed.masks)
    lengths = [[feed.length(window) for window in rows] for rows in packed]
    labelling = None
    if labels:
        labelling = label(
            labels, documents, dealt, chain.from_iterable(cut), feed.room, feed.tokeniser.piece,
            sample=sample, seed=seed,
        )  # fmt: skip
    rule = RULE.format(max_length=feed.max_length)
    rule += RULE_OF_FIRST * first_left_out
    rule += RULE_OF_DECODERS * feed.two_streams
    return Batches(
        begin=lambda: map(feed.batch, packed),
        attrs={
            "text": text.description + _blocks_note(n_documents, len(documents)),
            "text_sha256": digest,
            "text_unknown_tokens": str(sum(int((d.ids == unknown).sum()) for d in documents)),
            "text_rule": rule,
        },
        n_batches=len(packed),
        n_tokens=sum(window.tokens.n_counted for rows in cut for window in rows),
        n_documents=sum(map(bool, cut)),
        max_length=feed.max_length,
        padding=1 - sum(map(sum, lengths)) / sum(len(row) * max(row) for row in lengths),
        labelling=labelling,
        windows=tuple(chain.from_iterable(cut)),
    )


def _tokenise(
    feed: Feed, text: Text, max_tokens: int | None, *, words: bool
) -> tuple[list[Tokens], str, bool]:
    """The documents with a token that counts, in order, as far as they are wanted.

    With them their hash, and whether the first token of a window was left out. ``words``: part
    plain text into words too.
    """
    documents: list[Tokens] = []
    first_left_out = False
    digest = hashlib.sha256()
    left = float("inf") if max_tokens is None else max_tokens
    for document in text:
        tokens = feed.tokeniser(into_words(document) if words else document)
        feed.check(tokens)
        enough = tokens.n_counted >= left
        if tokens.n_counted > left:
            tokens = tokens.first(int(left))
        first_left_out |= _has_sink(feed, tokens)
        if _windows(feed, tokens):
            _add(digest, document)
            documents.append(tokens)
            left -= tokens.n_counted
        if enough:
            break
    return documents, digest.hexdigest(), first_left_out


def _windows(feed: Feed, tokens: Tokens, number: int = 0, fold: int = 0) -> list[Window]:
    sink = _has_sink(feed, tokens)
    return list(windows(tokens, feed.room, number, fold, sink=sink))


def _has_sink(feed: Feed, tokens: Tokens) -> bool:
    return tokens.bare and not feed.tokeniser.prefix


def _add(digest: Any, document: Document) -> None:
    content = document.text.encode("utf-8", "surrogatepass")
    if document.ids is not None:
        content = document.ids.astype("<i8").tobytes()
    digest.update(len(content).to_bytes(8, "little") + content)


def blocks(documents: Sequence[Tokens], wanted: int) -> list[Tokens]:
    """Documents cut into contiguous blocks, as many as wanted, of sizes as alike as can be."""
    parts = [1] * len(documents)
    for _ in range(wanted - len(documents) if documents else 0):
        largest = max(range(len(parts)), key=lambda n: len(documents[n]) / parts[n])
        parts[largest] += 1
    return [b for d, n in zip(documents, parts, strict=True) for b in d.cut(n) if b.n_counted]


def _blocks_note(n_documents: int, n_blocks: int) -> str:
    if n_documents >= n_blocks:
        return ""
    return f", cut into {n_blocks} contiguous blocks that stand in for documents"


def deal(sizes: Sequence[int], folds: int) -> list[int]:
    """A fold for each document: the largest first, each to the fold with the fewest tokens.

    >>> deal([5, 9, 4, 4], folds=2)
    [1, 0, 1, 0]
    """
    fold_of = [0] * len(sizes)
    heap = [(0, fold) for fold in range(folds)]
    for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        tokens, fold_of[n] = heap[0]
        heapq.heapreplace(heap, (tokens + sizes[n], fold_of[n]))
    return fold_of


def _require(cut: list[list[Window]], folds: int, n_documents: int, rule: str) -> None:
    """Raises ValueError where there is too little text; ``rule`` says what else does not count."""
    n_tokens = sum(window.tokens.n_counted for rows in cut for window in rows)
    if not n_tokens:
        raise ValueError(f"the text is empty: no document has a token that counts.{rule}")
    if n_tokens < max(2, folds) or len({rows[0].fold for rows in cut if rows}) < folds:
        tokens = f"{n_tokens} token{'s' * (n_tokens != 1)} in {n_documents} document"
        raise ValueError(
            f"the text has {tokens}{'s' * (n_documents != 1)}: too short for {folds} folds, each "
            "of which needs one at least (and a covariance two). Give more text or fewer folds."
            + rule
        )


def pack(
    rows: Iterable[Window],
    tokens_per_batch: int,
    length: Callable[[Window], int] = len,
    *,
    padded: bool = True,
) -> list[tuple[Window, ...]]:
    """Windows in batches, each of one fold: of like length, or of equal length if not padded."""
    by_fold: dict[int, list[Window]] = {}
    for window in rows:
        by_fold.setdefault(window.fold, []).append(window)
    queues = [
        list(_fill(by_fold[fold], tokens_per_batch, length, padded)) for fold in sorted(by_fold)
    ]
    for queue in queues:
        random.Random(0).shuffle(queue)  # or else the short windows would all come last
    return [batch for turn in zip_longest(*queues) for batch in turn if batch]


def _fill(
    rows: list[Window], budget: int, length: Callable[[Window], int], padded: bool
) -> Iterator[tuple[Window, ...]]:
    batch: list[Window] = []
    longest = 0
    for window in sorted(rows, key=length, reverse=True):
        full = (len(batch) + 1) * longest > budget
        if batch and (full or (not padded and length(window) != longest)):
            yield tuple(batch)
            batch = []
        longest = longest if batch else length(window)
        batch.append(window)
    yield tuple(batch)


def _peek(source: Any) -> tuple[Any, bool]:
    """The source, and whether its items are inputs of the model rather than documents."""
    if isinstance(source, Batch | Mapping) and not hasattr(source, "column_names"):
        return [source], True
    if isinstance(source, Tensor | np.ndarray) and _is_batch(source):
        return [source[n : n + 1] for n in range(len(source))], True
    whole = isinstance(source, str | Text | Tensor | np.ndarray) or hasattr(source, "column_names")
    if whole or not isinstance(source, Iterable):
        return source, False
    iterator = iter(source)
    head = list(islice(iterator, 1))
    again = chain(head, iterator) if iterator is source else source
    return again, bool(head) and _is_input(head[0])


def _is_batch(array: Tensor | np.ndarray) -> bool:
    """Whether it holds inputs along its first axis, and not token ids or rows of them."""
    return array.ndim > 2 or (array.ndim == 2 and _is_input(array.ravel()))


def _is_input(item: Any) -> bool:
    if isinstance(item, Tensor):
        return item.ndim != 1 or item.is_floating_point()
    if isinstance(item, np.ndarray):
        return item.ndim != 1 or item.dtype.kind == "f"
    if isinstance(item, tuple):
        return bool(item) and isinstance(item[0], Tensor | np.ndarray)
    return isinstance(item, Batch | Mapping)


def _given(feed: Feed, source: Iterable[Any], folds: int) -> Batches:
    """A user's own batches, or inputs each of which becomes one."""

    def begin() -> Iterator[Batch]:
        for n, item in enumerate(source):
            if not isinstance(item, Batch):
                inputs = _tensors(item, feed.device)
                keep = feed.keep_of(inputs) if isinstance(inputs, Mapping) else {}
                item = Batch(inputs, fold=n % folds, keep=keep)
            if not 0 <= item.fold < folds:
                raise ValueError(f"batch {n} is of fold {item.fold}; there are {folds}, from 0")
            yield item

    size = len(source) if isinstance(source, Sized) else None
    rule = "Given as batches: every token counts but those that the batches leave out."
    attrs = {"text": "given as batches", "text_rule": rule}
    return Batches(begin, attrs, n_batches=size, once=isinstance(source, Iterator))


def _tensors(item: Any, device: torch.device) -> Any:
    if isinstance(item, np.ndarray):
        item = torch.from_numpy(item)
    if isinstance(item, Tensor):
        return item.to(device)
    if isinstance(item, Mapping):
        return {name: _tensors(value, device) for name, value in item.items()}
    return tuple(_tensors(v, device) for v in item) if isinstance(item, tuple) else item


__all__ = ["Batches", "TextBatch", "batches"]
