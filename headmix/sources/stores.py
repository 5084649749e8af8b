"""What every checkpoint file turns into: named tensors with known shapes, read one at a time.

Files come from strangers. Whatever is read is bounded and checked before it is believed; whatever
is wrong becomes one ``BadCheckpoint``.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

#: No header, index or config of a real model comes near these.
MAX_HEADER_BYTES = 25_000_000
MAX_TENSORS = 200_000

#: Files up to this size are hashed whole for the provenance, larger ones by their header.
SMALL_FILE = 16_000_000


class BadCheckpoint(ValueError):
    """A checkpoint that cannot be used; the message names the file, and what is wrong in it."""


@dataclass(frozen=True)
class Stored:
    """A tensor as the file describes it; ``dtype`` is the file's own name for it."""

    shape: tuple[int, ...]
    dtype: str


@runtime_checkable
class Store(Protocol):
    """Named tensors in one or more files.

    Attributes:
        tensors: what is there, from headers alone.
        provenance: the files with their hashes, and how numbers are stored.
    """

    @property
    def tensors(self) -> Mapping[str, Stored]: ...

    @property
    def provenance(self) -> Mapping[str, str]: ...

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """One tensor, converted, in memory of its own; BadCheckpoint if it cannot be read."""


def parse_json(text: bytes, what: str) -> dict[str, Any]:
    """A JSON object without repeated keys.

    Raises:
        BadCheckpoint: it is too long, not JSON, not an object, nested too deep, or repeats a key.
    """
    if len(text) > MAX_HEADER_BYTES:
        raise BadCheckpoint(
            f"{what} has {len(text):,} bytes; more than {MAX_HEADER_BYTES:,} is refused"
        )
    try:
        value = json.loads(text.decode(), object_pairs_hook=lambda pairs: _object(pairs, what))
    except BadCheckpoint:
        raise
    except (ValueError, RecursionError) as error:  # ValueError: JSON, UTF-8 and huge integers
        raise BadCheckpoint(f"{what} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadCheckpoint(f"{what} holds a {type(value).__name__}, expected an object")
    return value


def _object(pairs: list[tuple[str, Any]], what: str) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise BadCheckpoint(f"{what} names {twice!r:.100} twice")
    return made


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file, as ``parse_json``; never more of it than a header may be long."""
    with path.open("rb") as file:
        return parse_json(file.read(MAX_HEADER_BYTES + 1), str(path))


def inside(folder: Path, name: str, named_by: str) -> Path:
    """A file of the model's folder, by a name that a stranger's index gave.

    Links are followed only to where they stay in the folder, or lead into the blobs of the same
    model in a hub cache (``models--x/snapshots/y/file`` → ``models--x/blobs/z``).

    Raises:
        BadCheckpoint: the name leads elsewhere, or to nothing.
    """
    parts = PurePosixPath(name.replace("\\", "/"))
    if "\0" in name or not name or parts.is_absolute() or ".." in parts.parts or ":" in name:
        raise BadCheckpoint(
            f"{named_by} names the file {name!r:.100}, which is outside {folder}: refused"
        )
    path = folder / name
    try:
        real, home = path.resolve(), folder.resolve()
    except (OSError, RuntimeError) as error:  # a loop of links
        raise BadCheckpoint(f"{named_by} names {name!r:.100}, a broken link: {error}") from None
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if not any(real.is_relative_to(a) for a in allowed):
        raise BadCheckpoint(
            f"{named_by} names the file {name!r:.100}, a link that leads outside {folder}: refused"
        )
    if not real.is_file():
        raise BadCheckpoint(f"{named_by} names the file {name!r:.100}, which is not in {folder}")
    return path


def fingerprint(path: Path, header: bytes | None) -> str:
    """Name, size and hash: of the whole of a small file, of the header, if any, of a large one."""
    size = path.stat().st_size
    if size <= SMALL_FILE:
        return f"{path.name} {size} bytes sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}"
    if header is None:
        return f"{path.name} {size} bytes"
    return f"{path.name} {size} bytes header-sha256 {hashlib.sha256(header).hexdigest()}"


def dtypes(tensors: Iterable[Stored]) -> str:
    """The kinds of numbers in a checkpoint, the commonest first."""
    counts: dict[str, int] = {}
    for stored in tensors:
        counts[stored.dtype] = counts.get(stored.dtype, 0) + 1
    return ", ".join(sorted(counts, key=lambda d: (-counts[d], d)))
