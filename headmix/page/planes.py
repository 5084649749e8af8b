"""Many numbers as few bytes: rounded where they are many, byte by byte, and compressed together."""

import base64
import gzip
import json
from typing import Any

import numpy as np

#: Bits after the leading one that a float32 has.
EXACT = 23


class Planes:
    """Arrays on their way to the page.

    Of each array all first bytes stand together, then all second ones, and so on: exponents are
    alike and last bytes of rounded numbers empty, which is what the compression lives on. Adding an
    array gives what the page needs to find it again.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._end = 0

    def floats(
        self, values: np.ndarray, bits: int = EXACT, *, smooth: bool = False
    ) -> dict[str, Any]:
        """Numbers as float32, rounded to ``bits`` after the leading one.

        Of ``smooth`` ones, which differ little from each to the next, the steps are held.
        """
        raw = rounded(values, bits).view(np.uint32).ravel()
        raw = np.diff(raw, prepend=np.uint32(0)) if smooth else raw  # around the clock: exact
        return (
            self.whole(raw, -(-(9 + bits) // 8))
            | {"bits": bits}
            | ({"steps": True} if smooth else {})
        )

    def whole(self, values: np.ndarray, planes: int = 4) -> dict[str, int]:
        """Unsigned 32-bit numbers, of which the first ``planes`` bytes are kept."""
        first = np.ascontiguousarray(values, dtype=">u4").reshape(-1, 1).view(np.uint8)
        return self._add(first[:, :planes].T.tobytes()) | {"n": values.size, "planes": planes}

    def text(self, value: Any) -> dict[str, int]:
        """Anything that JSON can say."""
        content = json.dumps(value, separators=(",", ":")).encode()
        return self._add(content) | {"n": len(content)}

    def packed(self) -> str:
        """All of it: gzip in base64."""
        return base64.b64encode(gzip.compress(b"".join(self._parts), 6, mtime=0)).decode()

    def _add(self, content: bytes) -> dict[str, int]:
        start, self._end = self._end, self._end + len(content)
        self._parts.append(content)
        return {"start": start}


def rounded(values: np.ndarray, bits: int = EXACT) -> np.ndarray:
    """float32 with ``bits`` binary digits after the leading one, to the nearest; ties to even.

    The relative error is at most 2^-(bits + 1); NaN and infinities stay.
    """
    exact = np.ascontiguousarray(values, dtype=np.float32)
    if (drop := EXACT - bits) <= 0:
        return exact
    raw = exact.view(np.uint32).astype(np.uint64)
    raw += (1 << (drop - 1)) - 1 + ((raw >> drop) & 1)
    near = (raw >> drop << drop).astype(np.uint32).view(np.float32)
    return np.where(np.isfinite(exact), near, exact)
