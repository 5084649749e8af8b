"""Extra peak memory of ``measure`` on MiniLM, over the loaded model, as the text grows tenfold.

Every length of text runs in a process of its own: all default metrics, intervals included.
"""

import ctypes
import gc
import subprocess
import sys

from engine import minilm
from table import peak_memory, reset_peak_memory, show

import headmix as hm

TOKENS = (5_000, 50_000)
BAR = 0.05


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


def extra_memory(tokens: int) -> int:
    done = subprocess.run(
        [sys.executable, __file__, str(tokens)], stdout=subprocess.PIPE, check=True, text=True
    )
    return int(done.stdout.split()[-1])


def main() -> None:
    extra = {n: extra_memory(n) for n in TOKENS}
    least = extra[TOKENS[0]]
    for n in TOKENS[1:]:
        ratio = extra[n] / least
        show(
            f"MiniLM, extra peak memory, {TOKENS[0]} and {n} tokens", f"{least / 1e6:.1f} MB",
            f"{extra[n] / 1e6:.1f} MB", f"{ratio:.3f}×", "1 ± 0.05", abs(ratio - 1) <= BAR,
        )  # fmt: skip


if __name__ == "__main__":
    run(int(sys.argv[1])) if len(sys.argv) > 1 else main()
