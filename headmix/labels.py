"""labels: what is known of each token of a text, for probes to look for.

A label is a function of one document's tokens (``Reading``) that gives a word or a number for each:
words become classes, numbers stay numbers. Labels of words (part of speech, …) are asked for at the
word's last piece, the first from which a causal model has seen all of it. Where several labels are
asked for together, the tokens that count are those that have them all, so that labels compare.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from headmix.conllu import Words
from headmix.text import Document
from headmix.tokens import Tokens

#: A token that has no label: of text and of numbers.
NONE = ""


@dataclass(frozen=True, eq=False)
class Reading:
    """One document's tokens as a label sees them.

    Attributes:
        tokens: ids, which of them count, and the words that they are pieces of.
        pieces: the tokenizer's own name of each token.
        frequency: how often each token stands in the whole text.
        position: each token's place in its window, special tokens not counted.
    """

    tokens: Tokens
    pieces: Sequence[str]
    frequency: Int[np.ndarray, "token"]
    position: Int[np.ndarray, "token"]

    def per_word(self, values: Shaped[np.ndarray, "word"]) -> Shaped[np.ndarray, "token"]:
        """A word's value at its last piece; none elsewhere."""
        none = NONE if values.dtype.kind == "U" else np.nan
        if not len(values):
            return np.full(len(self.tokens), none)
        return np.where(self.tokens.is_last, values[self.tokens.word], none)

    def column(self, name: str) -> Shaped[np.ndarray, "token"]:
        """A column of CoNLL-U; none where it holds "_"."""
        words = self.tokens.words
        if words is None:
            return np.full(len(self.tokens), NONE)
        values = getattr(words, name)
        return self.per_word(np.where(values == "_", NONE, values))


#: A label: a word or a number for each token; "" or NaN where it has none.
Label = Callable[[Reading], Shaped[np.ndarray, "token"]]


def doubling(values: Int[np.ndarray, "token"]) -> Shaped[np.ndarray, "token"]:
    """Classes of doubling width.

    >>> doubling(np.array([0, 1, 2, 3, 5, 9])).tolist()
    ['0', '1', '2–3', '2–3', '4–7', '8–15']
    """
    low = np.where(values > 0, 2 ** np.log2(np.maximum(values, 1)).astype(int), 0)
    return np.array([f"{a}" if a < 2 else f"{a}–{2 * a - 1}" for a in low.tolist()], str)


def word_form(form: str) -> str:
    """The class of a word's form.

    >>> [word_form(w) for w in ["dog", "Dog", "DOG", "iPod", "1994", "co-op", "…"]]
    ['lower', 'capitalised', 'upper', 'mixed', 'number', 'mixed', 'punctuation']
    """
    if not any(c.isalnum() for c in form):
        return "punctuation"
    if not any(c.isalpha() for c in form):
        return "number"
    if not form.isalpha():
        return "mixed"
    if form.islower():
        return "lower"
    if form[0].isupper() and (len(form) == 1 or form[1:].islower()):
        return "capitalised"
    return "upper" if form.isupper() else "mixed"


def _of_forms(reading: Reading, classify: Callable[[str], str]) -> Shaped[np.ndarray, "token"]:
    words = reading.tokens.words
    if words is None:
        return np.full(len(reading.tokens), NONE)
    return reading.per_word(np.array([classify(str(form)) for form in words.form], str))


def _capitalised(reading: Reading) -> Shaped[np.ndarray, "token"]:
    return _of_forms(reading, lambda w: "yes" if w[:1].isupper() else "no")


def _word_initial(reading: Reading) -> Shaped[np.ndarray, "token"]:
    t = reading.tokens
    return np.where(t.word < 0, NONE, np.where(t.is_first, "yes", "no"))


def _head_distance(reading: Reading) -> Float[np.ndarray, "token"]:
    """How many words further its head stands; negative for one before it, 0 for a root."""
    words = reading.tokens.words
    if words is None:
        return np.full(len(reading.tokens), np.nan)
    away = np.where(words.head < 0, 0.0, words.head - np.arange(len(words)))
    return reading.per_word(np.where(words.head == -2, np.nan, away))


def _depth(reading: Reading) -> Float[np.ndarray, "token"]:
    """Arcs from a word to the root of its sentence."""
    words = reading.tokens.words
    if words is None or not len(words):
        return np.full(len(reading.tokens), np.nan)
    depth, up = np.zeros(len(words)), words.head
    for _ in range(int(np.bincount(words.sentence).max())):
        depth += up >= 0
        up = np.where(up < 0, up, words.head[up])
    if (up >= 0).any():
        word = str(words.form[np.argmax(up >= 0)])
        raise ValueError(
            f"depth in {reading.tokens.name}: from the word {word!r} heads lead "
            "round in a circle and to no root: correct HEAD there"
        )
    return reading.per_word(np.where(up == -2, np.nan, depth))


#: The labels that have a name.
LABELS: dict[str, Label] = {
    "upos": lambda r: r.column("upos"),
    "xpos": lambda r: r.column("xpos"),
    "deprel": lambda r: r.column("deprel"),
    "head_distance": _head_distance,
    "depth": _depth,
    "word_form": lambda r: _of_forms(r, word_form),
    "capitalised": _capitalised,
    "word_initial": _word_initial,
    "frequency": lambda r: doubling(r.frequency),
    "position": lambda r: doubling(r.position),
}

#: Other names of them.
ALIASES = {"pos": "upos", "dep": "deprel", "dependency": "deprel"}

#: Before a label's name: that of the token, or word, before.
PREVIOUS = "previous_"


def named(name: str) -> Label:
    """The label of a name.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    plain = ALIASES.get(name, name)
    if plain in LABELS:
        return LABELS[plain]
    if name.startswith(PREVIOUS):
        inner = named(name.removeprefix(PREVIOUS))
        return lambda reading: _previous(inner(reading))
    raise ValueError(
        f"unknown label {name!r}; known: {', '.join(LABELS)}, each also as {PREVIOUS}NAME, that of "
        "the token before; or pass your own: labels={name: array or function}"
    )


def _previous(values: Shaped[np.ndarray, "token"]) -> Shaped[np.ndarray, "token"]:
    """The value of the labelled token before."""
    out = np.full_like(values, NONE if values.dtype.kind == "U" else np.nan)
    there = np.flatnonzero(is_given(values))
    out[there[1:]] = values[there[:-1]]
    return out


def is_given(values: Shaped[np.ndarray, "token"]) -> Bool[np.ndarray, "token"]:
    """Which tokens have a label."""
    return values != NONE if values.dtype.kind == "U" else ~np.isnan(values)


def parse(labels: Any, text: Any = None) -> tuple[dict[str, Any], Any]:
    """Labels by name, and the text that they are of.

    The rule: names with commas, and after the last one "=FILE" where the labels are those of that
    file, which then is the text: ``"upos,position"``, ``"pos=corpus.conllu"``. In Python also a
    list of names, or a mapping to names, functions of a ``Reading``, or arrays with a value for
    each token of the text that counts.

    Raises:
        ValueError: an unknown label, none at all, or a file that is not the text.

    >>> parse("pos,depth=corpus.conllu")[1]
    'corpus.conllu'
    """
    if isinstance(labels, str):
        names, equals, file = labels.partition("=")
        if equals and text is not None and str(text) != file:
            other = repr(text) if isinstance(text, str | PurePath) else "that is given"
            raise ValueError(
                f"labels of {file!r} for the text {other}: the file after = is the text; name one"
            )
        labels, text = [n.strip() for n in names.split(",") if n.strip()], file or text
    if not isinstance(labels, Mapping):
        labels = {str(name): str(name) for name in labels}
    if not labels:
        raise ValueError(f"no label was named; known: {', '.join(LABELS)}")
    return {n: named(v) if isinstance(v, str) else v for n, v in labels.items()}, text


def into_words(document: Document) -> Document:
    """The document parted into words and punctuation, where it is text that came without words.

    >>> into_words(Document("one", "Well, so it's 3.")).words.form.tolist()
    ['Well', ',', 'so', 'it', "'", 's', '3', '.']
    """
    if document.words is not None or document.ids is not None:
        return document
    found = list(re.finditer(r"\w+|[^\w\s]", document.text))
    start, end = (np.array([m.span()[n] for m in found], np.int64) for n in (0, 1))
    unknown = np.full(len(found), "_")
    words = Words(
        start,
        end,
        sentence=np.zeros(len(found), np.int64),
        head=np.full(len(found), -2),
        form=np.array([m[0] for m in found], str),
        upos=unknown,
        xpos=unknown,
        deprel=unknown,
    )
    return replace(document, words=words)
