"""safetensors: one file, or shards named by an index; only what is asked for is read."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headmix.sources.stores import (
    MAX_HEADER_BYTES,
    MAX_TENSORS,
    BadCheckpoint,
    Stored,
    dtypes,
    fingerprint,
    inside,
    parse_json,
    read_json,
)

#: Bits of one number, by the format's names.
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

#: Those that are weights as they stand; others need scales or codes kept elsewhere in the file.
PLAIN = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True, eq=False)
class SafetensorsStore:
    """Tensors by name in one or more safetensors files."""

    tensors: Mapping[str, Stored]
    files: Mapping[str, Path]
    provenance: Mapping[str, str]
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        path, stored = self.files[name], self.tensors[name]
        if stored.dtype not in PLAIN:
            raise BadCheckpoint(
                f"{path}: {name} is stored as {stored.dtype}, quantised: its scales are not "
                "applied here; use a checkpoint in bf16, fp16 or fp32"
            )
        try:
            # Opened for each tensor and closed again: the pages of an open mapping count as ours.
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(name).to(dtype, copy=True)
        except (SafetensorError, OSError) as error:
            raise BadCheckpoint(f"{path}: {name} cannot be read: {error}") from None


def open_file(path: Path) -> SafetensorsStore:
    """One safetensors file.

    Raises:
        BadCheckpoint: it is truncated, malformed or contradicts itself.
    """
    tensors, header, metadata = _header(path)
    provenance = {"files": fingerprint(path, header), "dtype": dtypes(tensors.values())}
    return SafetensorsStore(tensors, dict.fromkeys(tensors, path), provenance, metadata)


def open_index(path: Path) -> SafetensorsStore:
    """The shards that an index file (``model.safetensors.index.json``) names.

    Raises:
        BadCheckpoint: the index or a shard is malformed, or a shard lies outside the folder.
    """
    places = read_json(path).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(f, str) for f in places.values()):
        raise BadCheckpoint(f"{path} has no weight_map from tensor names to file names")
    _limit(len(places), str(path))
    names = sorted(set(places.values()))
    shards = {n: inside(path.parent, n, path.name) for n in names}
    headers = {n: _header(shard) for n, shard in shards.items()}
    for tensor, name in places.items():
        if tensor not in headers[name][0]:
            raise BadCheckpoint(f"{path} puts {tensor!r:.100} in {name}, which does not hold it")
    tensors = {tensor: headers[name][0][tensor] for tensor, name in places.items()}
    hashes = "; ".join(fingerprint(shards[n], headers[n][1]) for n in names)
    provenance = {"files": hashes, "dtype": dtypes(tensors.values())}
    return SafetensorsStore(tensors, {t: shards[n] for t, n in places.items()}, provenance)


def _limit(count: int, what: str) -> None:
    if count > MAX_TENSORS:
        raise BadCheckpoint(f"{what} names {count:,} tensors; more than {MAX_TENSORS:,} is refused")


def _header(path: Path) -> tuple[dict[str, Stored], bytes, Mapping[str, Any]]:
    """What the header says, checked against the size of the file; the header; its metadata."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > size - 8:
            claimed = f"a header of {length:,} bytes" if len(prefix) == 8 else "a header length"
            raise BadCheckpoint(
                f"{path} is truncated or not safetensors: expected {claimed}, found a file of "
                f"{size:,} bytes"
            )
        if length > MAX_HEADER_BYTES:
            raise BadCheckpoint(
                f"{path}: a header of {length:,} bytes; more than {MAX_HEADER_BYTES:,} is refused"
            )
        header = file.read(length)
    fields = parse_json(header, f"{path}: the header")
    about = fields.pop("__metadata__", None)
    _limit(len(fields), str(path))
    room = size - 8 - length
    tensors = {name: _checked(path, name, entry, room) for name, entry in fields.items()}
    return tensors, header, about if isinstance(about, dict) else {}


def _checked(path: Path, name: str, entry: Any, room: int) -> Stored:
    """One entry of a header; its shape and type must fill exactly the bytes it claims."""
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, place = (entry.get(k) for k in ("dtype", "shape", "data_offsets"))
    if not (isinstance(dtype, str) and _counts(shape) and _counts(place) and len(place) == 2):
        raise BadCheckpoint(
            f"{path}: the entry of {name!r:.100} needs dtype, shape and data_offsets, "
            f"got {entry!r:.200}"
        )
    if dtype not in BITS:
        raise BadCheckpoint(f"{path}: {name!r:.100} has the unknown dtype {dtype!r:.40}")
    begin, end = place
    if not begin <= end <= room:
        raise BadCheckpoint(
            f"{path}: {name!r:.100} lies at bytes {begin} to {end}, but the file holds {room} "
            "bytes of data: truncated or malformed"
        )
    # Python's integers do not overflow: a shape whose product does is simply too large
    expected = math.prod(shape) * BITS[dtype] // 8
    if expected != end - begin:
        raise BadCheckpoint(
            f"{path}: {name!r:.100} has shape {shape} of {dtype}, expected {expected} bytes, "
            f"found {end - begin}"
        )
    return Stored(tuple(shape), dtype)


def _counts(value: Any) -> bool:
    """A short list of non-negative integers."""
    return (
        isinstance(value, list)
        and len(value) <= 16
        and all(type(n) is int and 0 <= n < 2**63 for n in value)
    )
