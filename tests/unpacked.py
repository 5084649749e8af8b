"""Reads the page's numbers, written apart from what packs them and from what the page does."""

import base64
import gzip
import itertools
import json
import struct
from typing import Any

import numpy as np


def blob(data: dict[str, Any]) -> bytes:
    return gzip.decompress(base64.b64decode(data["planes"]))


def whole(data: dict[str, Any], spec: dict[str, int]) -> list[int]:
    """Numbers one by one: their first bytes stand together, then their second ones."""
    n, content = spec["n"], blob(data)[spec["start"] :]
    four = [[content[p * n + i] if p < spec["planes"] else 0 for p in range(4)] for i in range(n)]
    return [struct.unpack(">I", bytes(b))[0] for b in four]


def floats(data: dict[str, Any], spec: dict[str, int]) -> np.ndarray:
    numbers = whole(data, spec)
    if spec.get("steps"):
        numbers = [total % 2**32 for total in itertools.accumulate(numbers)]
    raw = b"".join(struct.pack(">I", number) for number in numbers)
    return np.array(struct.unpack(f">{spec['n']}f", raw), np.float32)


def array(data: dict[str, Any], metric: dict[str, Any], part: str = "value") -> np.ndarray:
    """A part of a metric with all its axes; NaN where the page holds nothing."""
    told = metric[part]
    numbers = floats(data, told["numbers"])
    if told.get("kept"):
        full = np.full(told["shape"], np.nan, np.float32)
        n = full.shape[-1] * full.shape[-2]
        first, second = np.divmod(np.cumsum(whole(data, metric["value"]["at"])), n)
        full.reshape(n, n)[first, second] = numbers
        if not metric["directed"]:
            full.reshape(n, n)[second, first] = numbers
        return full
    if told.get("half"):
        n = int(np.prod(told["shape"][len(told["shape"]) % 2 :])) ** 0.5
        full = np.full((*told["shape"][: len(told["shape"]) % 2], int(n), int(n)), np.nan, "f4")
        i, j = np.triu_indices(int(n), 1)
        full[..., i, j] = full[..., j, i] = numbers.reshape(*full.shape[:-2], -1)
        return full.reshape(told["shape"])
    return numbers.reshape(told["shape"])


def words(data: dict[str, Any], told: dict[str, Any]) -> list[str]:
    start, n = told["words"]["start"], told["words"]["n"]
    different = json.loads(blob(data)[start : start + n])
    return [different[i] for i in whole(data, told["which"])]
