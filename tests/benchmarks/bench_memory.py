"""Extra peak memory of ``measure`` on MiniLM, over the loaded model, as the text grows tenfold.

Every length of text runs in a process of its own: all default metrics, intervals included. What is
compared is what is held: glibc is told to give blocks back to the system as soon as they are freed.
Left to itself it keeps some, more or less from run to run and whatever the length of the text;
the last row shows that.
"""

import ctypes
import gc
import os
import subprocess
import sys

from engine import minilm
from table import peak_memory, reset_peak_memory, show

import headmix as hm

TOKENS = (5_000, 50_000)
BAR = 0.05

#: Blocks of a quarter MiB and more are mapped one by one, and threads share one heap.
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**18), "MALLOC_ARENA_MAX": "1"}


def run(tokens: int) -> None:
    """Bytes at the peak above what was held before."""
    model = minilm()
    # modules and caches of the first call are no part of what the text takes, nor is freed memory
    # that the allocator keeps for later
    hm.measure(model, "default", max_tokens=2500)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = reset_peak_memory()
    ds = hm.measure(model, "default", max_tokens=tokens)
    extra = peak_memory() - before
    assert int(ds.n_tokens[0]) == tokens
    print(extra)


def extra_memory(tokens: int, allocator: dict[str, str]) -> int:
    done = subprocess.run(
        [sys.executable, __file__, str(tokens)],
        env=os.environ | allocator, stdout=subprocess.PIPE, check=True, text=True,
    )  # fmt: skip
    return int(done.stdout.split()[-1])


def main() -> None:
    few, many = TOKENS
    for what, allocator in (("MiniLM, extra peak memory", GIVEN_BACK), ("… as glibc has it", {})):
        least, most = extra_memory(few, allocator), extra_memory(many, allocator)
        barred = {"bar": "1 ± 0.05", "met": abs(most / least - 1) <= BAR} if allocator else {}
        show(
            f"{what}, {few} and {many} tokens", f"{least / 1e6:.1f} MB", f"{most / 1e6:.1f} MB",
            f"{most / least:.3f}×", **barred,
        )  # fmt: skip


if __name__ == "__main__":
    run(int(sys.argv[1])) if len(sys.argv) > 1 else main()
