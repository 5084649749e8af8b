"""GGUF: llama.cpp's format, whose weights are often quantised; only what is read is dequantised."""

import math
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headmix.sources.stores import (
    MAX_HEADER_BYTES,
    MAX_TENSORS,
    BadCheckpoint,
    Stored,
    dtypes,
    fingerprint,
)

#: Types of metadata values by their number: struct format, or text and list.
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_TEXT, _LIST = 8, 9


@dataclass(frozen=True, eq=False)
class GGUFStore:
    """Tensors and metadata of one GGUF file.

    ``tensors`` gives shapes as PyTorch does, slowest axis first: a projection is [out, in].
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Stored]
    starts: Mapping[str, int]
    provenance: Mapping[str, str]

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        stored = self.tensors[name]
        kind, size = _quantisation(stored.dtype), _bytes(stored)
        raw = np.memmap(self.path, np.uint8, "r", offset=self.starts[name], shape=(size,))
        rows = np.asarray(raw).reshape(*stored.shape[:-1], -1)
        try:
            numbers = np.array(_gguf().quants.dequantize(rows, kind), np.float32)
        except NotImplementedError:
            raise BadCheckpoint(
                f"{self.path}: {name} is stored as {stored.dtype}, which the gguf package cannot "
                "dequantise"
            ) from None
        return torch.from_numpy(numbers).reshape(stored.shape).to(dtype)


def bits(dtype: str) -> int | None:
    """Bits of one number, by the name of a quantised type: 4 for "Q4_1"; None if not quantised."""
    found = re.match(r"(?:I?Q|TQ|MXFP|NVFP)(\d)", dtype)
    return int(found[1]) if found else None


def quantisation_note(dtypes: Iterable[str]) -> tuple[str, ...]:
    """A note where any of these storage types is quantised."""
    packed = {d: b for d in sorted({*dtypes}) if (b := bits(d))}
    if not packed:
        return ()
    low, high = min(packed.values()), max(packed.values())
    width = f"{low}-bit" if low == high else f"{low}- to {high}-bit"
    return (f"{width} weights ({', '.join(packed)}): spectra and ranks carry quantisation noise",)


def open_file(path: Path) -> GGUFStore:
    """One GGUF file.

    Raises:
        BadCheckpoint: it is truncated, malformed, one part of several, or contradicts itself.
        ImportError: the gguf package is not installed.
    """
    _gguf()
    size = path.stat().st_size
    with path.open("rb") as file:
        cursor = _Cursor(path, file.read(MAX_HEADER_BYTES), size)
    n_tensors, n_values = _counts(cursor)
    metadata = _unique(path, (cursor.value() for _ in range(n_values)))
    if (parts := metadata.get("split.count", 1)) not in (0, 1):
        raise BadCheckpoint(f"{path} is one of {parts} parts: merge them (llama-gguf-split) first")
    described = _unique(path, (cursor.tensor() for _ in range(n_tensors)))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20:
        raise BadCheckpoint(f"{path}: general.alignment is {alignment!r:.40}")
    start = -(-cursor.at // alignment) * alignment
    for name, (stored, offset) in described.items():
        if start + offset + _bytes(stored) > size:
            raise BadCheckpoint(
                f"{path}: {name!r:.100} ({stored.dtype} {list(stored.shape)}) ends at byte "
                f"{start + offset + _bytes(stored)}, but the file has {size}: it is cut short"
            )
    tensors = {name: stored for name, (stored, _) in described.items()}
    return GGUFStore(
        path,
        metadata,
        tensors,
        {name: start + offset for name, (_, offset) in described.items()},
        {
            "files": fingerprint(path, cursor.data[: cursor.at]),
            "dtype": dtypes(tensors.values()),
        },
    )


def _counts(cursor: "_Cursor") -> tuple[int, int]:
    """Numbers of tensors and of metadata values, from the first bytes of the file."""
    magic = cursor.bytes(4)
    if magic != b"GGUF":
        raise BadCheckpoint(f"{cursor.path} is not GGUF: it begins with {magic!r}, not b'GGUF'")
    version = cursor.number("I")
    if version not in (2, 3):
        raise BadCheckpoint(
            f"{cursor.path}: GGUF version {version}, expected 2 or 3, little-endian"
        )
    n_tensors, n_values = cursor.number("Q"), cursor.number("Q")
    if max(n_tensors, n_values) > MAX_TENSORS:
        raise BadCheckpoint(
            f"{cursor.path} names {n_tensors:,} tensors and {n_values:,} metadata values; more "
            f"than {MAX_TENSORS:,} is refused"
        )
    return n_tensors, n_values


def _unique(path: Path, pairs: Any) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in pairs:
        if name in made:
            raise BadCheckpoint(f"{path} names {name!r:.100} twice")
        made[name] = value
    return made


@dataclass
class _Cursor:
    """Reads a header from its beginning, never past its end."""

    path: Path
    data: bytes
    size: int
    at: int = 0

    def bytes(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            found = f"the file ends at byte {self.size}"
            if len(self.data) < self.size:
                found = f"a header of more than {MAX_HEADER_BYTES:,} bytes is refused"
            raise BadCheckpoint(
                f"{self.path} is truncated or malformed: expected {count} bytes at byte {self.at}, "
                + found
            )
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, kind: str) -> Any:
        return struct.unpack("<" + kind, self.bytes(struct.calcsize("<" + kind)))[0]

    def text(self) -> str:
        return self.bytes(self.number("Q")).decode(errors="replace")

    def value(self) -> tuple[str, Any]:
        """A metadata value with its name."""
        name, kind = self.text(), self.number("I")
        if kind != _LIST:
            return name, self._one(kind, name)
        kind, count = self.number("I"), self.number("Q")
        if kind in _SCALARS:
            width = struct.calcsize("<" + _SCALARS[kind])
            packed = self.bytes(count * width)
            return name, list(struct.unpack(f"<{count}{_SCALARS[kind]}", packed))
        if 8 * count > len(self.data) - self.at:  # each text takes its length, 8 bytes, at least
            raise BadCheckpoint(f"{self.path}: {name!r:.100} claims {count} items: malformed")
        return name, [self._one(kind, name) for _ in range(count)]

    def _one(self, kind: int, name: str) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind not in _SCALARS:
            raise BadCheckpoint(f"{self.path}: {name!r:.100} has the unknown type {kind}")
        return self.number(_SCALARS[kind])

    def tensor(self) -> tuple[str, tuple[Stored, int]]:
        """A tensor's description, and where it begins within the data."""
        name, n_dims = self.text(), self.number("I")
        if n_dims > 8:
            raise BadCheckpoint(f"{self.path}: {name!r:.100} has {n_dims} dimensions")
        shape = tuple(self.number("Q") for _ in range(n_dims))[::-1]
        kind, offset = self.number("I"), self.number("Q")
        types = _gguf().GGMLQuantizationType
        if kind not in types._value2member_map_:
            raise BadCheckpoint(f"{self.path}: {name!r:.100} has the unknown type {kind}")
        stored = Stored(shape, types(kind).name)
        block, _ = _gguf().GGML_QUANT_SIZES[types(kind)]
        if shape and shape[-1] % block:
            raise BadCheckpoint(
                f"{self.path}: {name!r:.100} has rows of {shape[-1]} numbers, which {stored.dtype} "
                f"cannot store: it packs {block} at a time"
            )
        return name, (stored, offset)


def _bytes(stored: Stored) -> int:
    block, width = _gguf().GGML_QUANT_SIZES[_quantisation(stored.dtype)]
    return math.prod(stored.shape) // block * width


def _quantisation(dtype: str) -> Any:
    return _gguf().GGMLQuantizationType[dtype]


def _gguf() -> Any:
    try:
        import gguf
    except ImportError:
        raise ImportError(
            'reading GGUF files needs the gguf package: pip install "headmix[gguf]"'
        ) from None
    return gguf
