"""tokens: from documents to windows of token ids that a model takes in one go."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, Shaped

from headmix.conllu import Words
from headmix.text import Document


@dataclass(frozen=True, eq=False, repr=False)
class Tokens:
    """One document (or a block that stands for one) as token ids.

    Attributes:
        name: the document's.
        ids: ``[token]``.
        keep: ``[token]``, the tokens that count.
        word: ``[token]``, the word that the token begins in, −1 where there is none.
        is_first: ``[token]``, whether it is the first piece of that word.
        is_last: ``[token]``, whether it is the last.
        bare: whether special tokens are added to each window.
        words: the document's words, which ``word`` counts.
    """

    name: str
    ids: Int[np.ndarray, "token"]
    keep: Bool[np.ndarray, "token"]
    word: Int[np.ndarray, "token"]
    is_first: Bool[np.ndarray, "token"]
    is_last: Bool[np.ndarray, "token"]
    bare: bool
    words: Words | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def n_counted(self) -> int:
        return int(self.keep.sum())

    def labels(self, column: str) -> Shaped[np.ndarray, "token"]:
        """A column of its words ("upos", "head", …) for each token; of no word, "" or −1.

        Raises:
            ValueError: the document came without words.
        """
        if self.words is None:
            raise ValueError(f"document {self.name} has no words with {column}: CoNLL-U has them")
        values = getattr(self.words, column)
        none = "" if values.dtype.kind == "U" else -1
        return np.where(self.word < 0, none, values[self.word])

    def __getitem__(self, part: slice) -> "Tokens":
        arrays = ("ids", "keep", "word", "is_first", "is_last")
        return replace(self, **{name: getattr(self, name)[part] for name in arrays})

    def first(self, counted: int) -> "Tokens":
        """As far as so many tokens count."""
        return self[: int(np.searchsorted(self.keep.cumsum(), counted)) + 1]

    def cut(self, parts: int) -> list["Tokens"]:
        """Contiguous parts in which the same number of tokens count, to within one."""
        counted = np.flatnonzero(self.keep)
        inner = [int(counted[len(counted) * n // parts]) for n in range(1, parts)]
        return [self[a:b] for a, b in pairwise([0, *inner, len(self)])]


class Tokeniser:
    """A model's tokenizer, and the special tokens that it puts around a window.

    Raises:
        ValueError: the tokenizer gives no special-tokens mask.
    """

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer is not None and not _knows_words(tokenizer):
            tokenizer = None
        self.tokenizer = tokenizer
        self.prefix: list[int] = []
        self.suffix: list[int] = []
        self.special: set[int] = set()
        self.unknown: int | None = None
        if tokenizer is not None:
            self.unknown = tokenizer.unk_token_id
            ids, special = self._encode("a", add_special_tokens=True)
            inside = [n for n, s in enumerate(special) if not s] or [len(ids), len(ids) - 1]
            self.prefix, self.suffix = ids[: inside[0]], ids[inside[-1] + 1 :]
            self.special = {*tokenizer.all_special_ids} - {self.unknown}

    def piece(self, token: int) -> str:
        """The tokenizer's own name of a token."""
        if self.tokenizer is None:
            return f"#{token}"
        return str(self.tokenizer.convert_ids_to_tokens(token))

    def _encode(self, text: str, **options: Any) -> tuple[list[int], list[int]]:
        encoding = self.tokenizer(text, return_special_tokens_mask=True, verbose=False, **options)
        return list(encoding["input_ids"]), list(encoding["special_tokens_mask"])

    def __call__(self, document: Document) -> Tokens:
        """One document's tokens: all of its text counts, whatever marks it holds.

        Ids that are given are taken as they are: nothing is added, and those that are special to
        the tokenizer do not count.

        Raises:
            ValueError: text without a tokenizer, or words without the offsets of a fast one.
        """
        if document.ids is not None:
            keep = ~np.isin(document.ids, list(self.special))
            return _unlabelled(document.name, document.ids, keep, bare=False)
        if self.tokenizer is None:
            raise ValueError(
                "this model came without a tokenizer, so that it cannot take text: give token ids, "
                "or load it with tokenizer=..."
            )
        options: dict[str, Any] = {"add_special_tokens": False, "verbose": False}
        if getattr(self.tokenizer, "is_fast", False):  # "<s>" in a text is four characters of it
            options["split_special_tokens"] = True
        if document.words is None:
            ids = np.array(self.tokenizer(document.text, **options)["input_ids"], np.int64)
            return _unlabelled(document.name, ids, np.ones(len(ids), bool), bare=True)
        if "split_special_tokens" not in options:
            raise ValueError(
                f"{type(self.tokenizer).__name__} does not say which characters a token stands "
                "for, so that words cannot be found: a fast tokenizer is needed"
            )
        encoding = self.tokenizer(document.text, return_offsets_mapping=True, **options)
        return _labelled(
            document, document.words, encoding["input_ids"], encoding["offset_mapping"]
        )


def _knows_words(tokenizer: Any) -> bool:
    """Whether it has more than special tokens: transformers makes empty ones where files lack."""
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", ())}
    return len({*tokenizer.get_vocab().values()} - special) > 1


def _unlabelled(
    name: str, ids: Int[np.ndarray, "token"], keep: Bool[np.ndarray, "token"], *, bare: bool
) -> Tokens:
    no = np.zeros(len(ids), bool)
    return Tokens(name, ids, keep, np.full(len(ids), -1), no, no, bare)


def _labelled(
    document: Document, words: Words, ids: Sequence[int], offsets: Sequence[tuple[int, int]]
) -> Tokens:
    """Align tokens with words by their characters.

    A token that reaches over several words is the word's that it begins in.
    """
    word = np.full(len(ids), -1)
    starts, ends = np.zeros((2, len(ids)), bool)
    word_at = np.full(len(document.text) + 1, -1)
    for n, (a, b) in enumerate(zip(words.start, words.end, strict=True)):
        word_at[a:b] = n
    for t, (a, b) in enumerate(offsets):
        inside = word_at[a:b]
        inside = inside[inside >= 0]
        if len(inside):
            word[t] = inside[0]
    known = np.flatnonzero(word >= 0)
    starts[known] = np.diff(word[known], prepend=-1) != 0
    ends[known] = np.diff(word[known], append=-1) != 0
    ids_, keep = np.array(ids, np.int64), np.ones(len(ids), bool)
    return Tokens(document.name, ids_, keep, word, starts, ends, True, words)


@dataclass(frozen=True, eq=False, repr=False)
class Window:
    """What fills one row of a batch.

    Attributes:
        tokens: the part of a document, without special tokens.
        document: its number, in the order of the text.
        start: the document's token that comes first.
        fold: the document's fold.
    """

    tokens: Tokens
    document: int
    start: int
    fold: int

    @property
    def begins(self) -> bool:
        """Whether the document begins here."""
        return self.start == 0

    def __len__(self) -> int:
        return len(self.tokens)


def windows(
    tokens: Tokens, room: int, document: int, fold: int, *, sink: bool = False
) -> Iterator[Window]:
    """The windows of one document, all full but the last; the first token of a sink does not count.

    ``sink`` says that each window begins with a token of the text: nothing stands before it to
    take the attention that heads of causal models put on the first position.
    """
    for start in range(0, len(tokens), room):
        part = tokens[start : start + room]
        if sink:
            part = replace(part, keep=part.keep & (np.arange(len(part)) > 0))
        if part.n_counted:
            yield Window(part, document, start, fold)
