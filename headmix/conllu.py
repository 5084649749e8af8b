"""conllu: documents with their words and labels from CoNLL-U (universaldependencies.org/format)."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
from jaxtyping import Int, Shaped

#: The columns of a line; what is read of them are ID, FORM, UPOS, XPOS, HEAD, DEPREL and MISC.
COLUMNS = ["ID", "FORM", "LEMMA", "UPOS", "XPOS", "FEATS", "HEAD", "DEPREL", "DEPS", "MISC"]


@dataclass(frozen=True, eq=False, repr=False)
class Words:
    """The syntactic words of one document.

    Attributes:
        start, end: the word's characters in the document's text. The words of a multiword token
            have their own part of it where they spell it ("do" + "n't"); where they do not (French
            "du" for "de le") all of it is the first word's and the others have no characters.
        sentence: which sentence of the document.
        head: the position of its head among the document's words; −1 for a root, −2 if not given.
        form, upos, xpos, deprel: as written, "_" where not given.
    """

    start: Int[np.ndarray, "word"]
    end: Int[np.ndarray, "word"]
    sentence: Int[np.ndarray, "word"]
    head: Int[np.ndarray, "word"]
    form: Shaped[np.ndarray, "word"]
    upos: Shaped[np.ndarray, "word"]
    xpos: Shaped[np.ndarray, "word"]
    deprel: Shaped[np.ndarray, "word"]

    def __len__(self) -> int:
        return len(self.form)

    def __repr__(self) -> str:
        n = int(self.sentence[-1]) + 1 if len(self) else 0
        return f"Words({len(self)} words in {n} sentences)"


def recognise(text: str) -> bool:
    """Whether the first line that is no comment has the columns of CoNLL-U.

    >>> recognise("# newdoc\\n1\\tHi\\thi\\tINTJ\\tUH\\t_\\t0\\troot\\t_\\t_\\n")
    True
    """
    for line in text.splitlines():
        if line and not line.startswith("#"):
            return line.count("\t") == len(COLUMNS) - 1
    return False


def read(text: str, name: str) -> Iterator[tuple[str, str, Words]]:
    """Name, text and words of each document: from one ``# newdoc`` to the next, or the whole file.

    The text is put together from the forms, with the spaces that ``SpaceAfter=No`` leaves and an
    empty line before ``# newpar``. Empty nodes (8.1) are no words.

    Raises:
        ValueError: a malformed line; the message names file, line and what was expected.
    """
    draft = _Draft(name)
    for number, line in enumerate(text.split("\n"), 1):
        if re.match(r"#\s*newdoc\b", line):
            yield from draft.finish()
            draft = _Draft(name, (line.partition("=")[2].strip() or f"{name}:{number}"))
        elif re.match(r"#\s*newpar\b", line):
            draft.paragraph()
        elif not line.strip():
            draft.end_sentence()
        elif not line.startswith("#"):
            draft.line(line, number)
    yield from draft.finish()


@dataclass
class _Draft:
    """A document being read."""

    file: str
    title: str = ""
    text: str = ""
    rows: list[list[str]] = field(default_factory=list)  # the words' columns
    spans: list[tuple[int, int]] = field(default_factory=list)
    sentences: list[int] = field(default_factory=list)
    heads: list[int] = field(default_factory=list)
    pending: list[tuple[str, int]] = field(default_factory=list)  # HEADs of this sentence, by line
    first: int = 0  # the position of this sentence's first word
    n_sentences: int = 0
    surface: str = ""  # of the multiword token being read
    until: int = 0  # its last word
    space: str = ""  # before the next word
    number: int = 0

    def line(self, line: str, number: int) -> None:
        self.number = number
        row = line.split("\t")
        if len(row) != len(COLUMNS):
            self.fail(f"{len(COLUMNS)} columns parted by tabs ({' '.join(COLUMNS)})", f"{len(row)}")
        ID, form = row[0], row[1]
        position = len(self.rows) - self.first + 1
        if not form:
            self.fail("a FORM", "nothing")
        if re.fullmatch(r"\d+\.\d+", ID):
            return
        if m := re.fullmatch(r"(\d+)-(\d+)", ID):
            if int(m[1]) != position or int(m[2]) <= position or position <= self.until:
                self.fail(f"a multiword token that begins with word {position}", f"ID {ID}")
            self.surface, self.until = form, int(m[2])
            self.write(form, row[9])
        elif ID == str(position):
            self.word(row, position)
        else:
            self.fail(f"ID {position}, {position}-N or N.M", f"ID {ID!r}")

    def write(self, form: str, misc: str) -> None:
        self.text += self.space + form
        self.space = "" if "SpaceAfter=No" in misc.split("|") else " "

    def word(self, row: list[str], position: int) -> None:
        if position > self.until:
            self.write(row[1], row[9])
            self.spans.append((len(self.text) - len(row[1]), len(self.text)))
        self.rows.append(row)
        self.sentences.append(self.n_sentences)
        self.pending.append((row[6], self.number))
        if position == self.until:
            self.share_surface()

    def share_surface(self) -> None:
        """Give the words of a multiword token their characters."""
        begin = len(self.text) - len(self.surface)
        forms = [row[1] for row in self.rows[len(self.spans) :]]
        spelt = "".join(forms) == self.surface
        for n, form in enumerate(forms):
            length = len(form) if spelt else 0 if n else len(self.surface)
            self.spans.append((begin, begin + length))
            begin += length

    def end_sentence(self) -> None:
        n_words = len(self.pending)
        if n_words < self.until:
            self.fail(f"the words up to {self.until} of a multiword token", f"{n_words} words")
        for head, number in self.pending:
            self.number = number
            if head != "_" and not (head.isdecimal() and int(head) <= n_words):
                self.fail(f"a HEAD from 0 to {n_words}", f"{head!r}")
            known = {"0": -1, "_": -2}
            self.heads.append(known[head] if head in known else self.first + int(head) - 1)
        self.n_sentences += bool(n_words)
        self.first, self.until, self.pending = len(self.rows), 0, []

    def paragraph(self) -> None:
        self.space = "\n\n" if self.text else ""

    def finish(self) -> Iterator[tuple[str, str, Words]]:
        self.end_sentence()
        if not self.rows:
            return
        start, end = np.array(self.spans, np.int64).T
        column = {n: np.array([row[i] for row in self.rows]) for i, n in enumerate(COLUMNS)}
        words = Words(
            start,
            end,
            np.array(self.sentences, np.int64),
            np.array(self.heads, np.int64),
            *(column[n] for n in ("FORM", "UPOS", "XPOS", "DEPREL")),
        )
        yield self.title or self.file, self.text, words

    def fail(self, expected: str, found: str) -> NoReturn:
        raise ValueError(f"{self.file}:{self.number}: expected {expected}, found {found}")
