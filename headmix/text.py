"""text: from files, standard input, data sets or strings to documents.

Documents are what counts as independent: folds, held-out tests and jackknife intervals are made of
whole documents, and none ever shares a window with another.
"""

import importlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headmix import conllu
from headmix.conllu import Words

#: Files of a directory that are read; the first three as plain text.
SUFFIXES = (".txt", ".md", ".rst", ".conllu")

#: Files by which a directory saved by ``datasets`` is known.
SAVED = ("state.json", "dataset_dict.json")

#: Ends a document wherever it stands in a plain text.
MARK = re.compile(r"\f|<\|endoftext\|>")

#: Ends a document in a single file that has no mark: three or more line ends, blank space between.
GAP = re.compile(r"\n[^\S\n]*\n[^\S\n]*\n\s*")


@dataclass(frozen=True, eq=False, repr=False)
class Document:
    """One document: its text, or token ids that stand for themselves.

    Attributes:
        name: where it comes from.
        text: the whole of it.
        ids: ``[token]``, in place of text.
        words: its words and their labels, where they are known.
    """

    name: str
    text: str = ""
    ids: np.ndarray | None = None
    words: Words | None = None

    def __repr__(self) -> str:
        size = f"{len(self.text)} characters" if self.ids is None else f"{len(self.ids)} token ids"
        return f"Document({self.name}: {size})"


@dataclass(frozen=True, eq=False)
class Text:
    """Documents in order, read as they are asked for, and what they are in words."""

    documents: Iterable[Document]
    description: str

    def __iter__(self) -> Iterator[Document]:
        return iter(self.documents)


def read_text(source: Any) -> Text:
    """Documents from wherever text is.

    Where documents end: at ``# newdoc`` in CoNLL-U; in plain text at form feeds and at
    ``<|endoftext|>``, or, in a single file without either, at two or more blank lines. A file of a
    directory ends a document too; where some are .conllu, only those are read. (Fewer documents
    than folds are cut into blocks later.)

    Args:
        source: "default" (the topics of Python's own help), "-" (standard input), the path of a
            plain text or .conllu file, a directory of such files or one saved by ``datasets``,
            "datasets:NAME[,CONFIG][:SPLIT[:COLUMN]]", a Dataset, or an iterable whose items are
            documents: strings, Documents, or token ids (lists, arrays or tensors of integers; the
            rows of a matrix likewise). A string is always a place to read from: ``[string]`` is
            one document.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file is not UTF-8 or malformed CoNLL-U, or an item is none of these.
        ImportError: ``datasets`` is not installed.

    >>> text = read_text(["One document.", "Another."])
    >>> list(text)
    [Document(1: 13 characters), Document(2: 8 characters)]
    """
    if isinstance(source, Text):
        return source
    if isinstance(source, Path):
        return _read_path(source)
    if isinstance(source, str):
        return _read_name(source)
    if hasattr(source, "column_names"):
        return Text(_rows(source, None, None, "the Dataset"), "a Dataset given in memory")
    if isinstance(source, np.ndarray | torch.Tensor):
        source = [source] if source.ndim == 1 else source
    if not isinstance(source, Iterable):
        raise ValueError(f"expected text, got {type(source).__name__}: see read_text for what is")
    items = (_document(item, n) for n, item in enumerate(source, 1))
    return Text(items if iter(source) is source else list(items), "documents given in memory")


def _read_name(source: str) -> Text:
    if source == "default":
        topics = importlib.import_module("pydoc_data.topics").topics
        version = ".".join(map(str, sys.version_info[:3]))
        return Text(
            [Document(name, text) for name, text in sorted(topics.items())],
            f"the help topics of Python {version}, a document each",
        )
    if source == "-":
        text = _decode(getattr(sys.stdin, "buffer", sys.stdin).read(), "standard input")
        read = _labelled if conllu.recognise(text) else partial(_plain, alone=True)
        return Text(list(read(text, "standard input")), "standard input")
    if source.startswith("datasets:"):
        return _read_dataset(source)
    return _read_path(Path(source).expanduser())


def _read_path(path: Path) -> Text:
    if not path.exists():
        raise FileNotFoundError(
            f"there is no text file or directory {path}; a data set is named datasets:NAME, text "
            "in memory is given as a list of documents, and 'default' needs no file"
        )
    if path.is_file():
        return Text(list(_read_file(path, alone=True)), f"the file {path.name}")
    if any((path / mark).exists() for mark in SAVED):
        return _saved_dataset(path)
    files = sorted(f for f in path.rglob("*") if f.suffix in SUFFIXES and f.is_file())
    files = [f for f in files if f.suffix == ".conllu"] or files  # not a treebank's licence too
    if not files:
        raise ValueError(f"{path} holds no {', '.join(SUFFIXES)} files and no saved data set")
    documents: Iterable[Document] = _Again(
        lambda: chain.from_iterable(_read_file(f, alone=False) for f in files)
    )
    return Text(documents, f"{len(files)} files of the directory {path.name}")


def _read_file(path: Path, *, alone: bool) -> Iterator[Document]:
    text = _decode(path.read_bytes(), str(path))
    if path.suffix == ".conllu":
        return _labelled(text, str(path))
    return _plain(text, str(path), alone)


def _decode(data: bytes | str, name: str) -> str:
    if isinstance(data, str):
        return data
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}"
        ) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _labelled(text: str, name: str) -> Iterator[Document]:
    for title, content, words in conllu.read(text, name):
        yield Document(title, content, words=words)


def _plain(text: str, name: str, alone: bool) -> Iterator[Document]:
    parts = MARK.split(text)
    if len(parts) == 1 and alone:
        parts = GAP.split(text)
    parts = [part for part in parts if part.strip()]
    for n, part in enumerate(parts, 1):
        yield Document(name if len(parts) == 1 else f"{name}#{n}", part)


def _document(item: Any, n: int) -> Document:
    if isinstance(item, Document):
        return item
    if isinstance(item, str):
        return Document(str(n), item)
    if isinstance(item, torch.Tensor):
        item = item.detach().cpu().numpy()
    ids = np.asarray(item)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(
            f"document {n}: expected a string or a list of token ids, got {type(item).__name__} "
            f"of shape {list(ids.shape)} and type {ids.dtype}"
        )
    return Document(str(n), ids=ids.astype(np.int64))


@dataclass(frozen=True)
class _Again:
    """An iterable from a function that begins anew each time."""

    begin: Callable[[], Iterable[Document]]

    def __iter__(self) -> Iterator[Document]:
        return iter(self.begin())


def _datasets() -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError:
        raise ImportError(
            "reading a data set needs the package datasets: pip install datasets"
        ) from None


def _read_dataset(source: str) -> Text:
    _, name, *rest = source.split(":")
    if not name or len(rest) > 2:
        raise ValueError(f"expected datasets:NAME[,CONFIG][:SPLIT[:COLUMN]], got {source}")
    split, column = [part or None for part in (*rest, "", "")[:2]]
    path = Path(name).expanduser()
    if path.is_dir() or name.startswith((".", "/", "~")):
        return _saved_dataset(path, split, column)
    data = _datasets().load_dataset(*name.split(",", 1), split=split or "train")
    return Text(_rows(data, None, column, name), f"the data set {source.removeprefix('datasets:')}")


def _saved_dataset(path: Path, split: str | None = None, column: str | None = None) -> Text:
    if not any((path / mark).exists() for mark in SAVED):
        raise FileNotFoundError(f"{path} is no directory in which datasets saved a data set")
    data = _datasets().load_from_disk(str(path))
    return Text(_rows(data, split, column, str(path)), f"the saved data set {path.name}")


def _rows(data: Any, split: str | None, column: str | None, name: str) -> Iterable[Document]:
    """Each row's text, the column named or the one that can be meant, as a document."""
    if isinstance(data, Mapping):  # a Dataset each split
        split = split or next(iter(data))
        if split not in data:
            raise ValueError(f"{name} has no split {split!r}; it has {', '.join(data)}")
        data = data[split]
    columns = list(data.column_names)
    if column is None:
        column = "text" if "text" in columns else columns[0] if len(columns) == 1 else None
    if column not in columns:
        raise ValueError(
            f"{name}: which column holds the text? {column!r} is not one of {', '.join(columns)}; "
            "name one: datasets:NAME:SPLIT:COLUMN"
        )
    return _Again(lambda: (_document(row[column], n) for n, row in enumerate(data, 1)))
