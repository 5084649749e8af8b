"""One table for all benchmarks: what was compared, both sides, the bar and whether it is met."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

COLUMNS = ("what", "baseline", "headmix", "ratio", "bar", "met", "max relative difference")
WIDTHS = (58, 12, 12, 10, 10, 4, 24)


def show(
    what: str,
    baseline: str,
    ours: str,
    ratio: str,
    bar: str = "",
    met: bool | None = None,
    difference: float | None = None,
) -> None:
    """Print one row, under the header when it is the first of this process."""
    if not show.__dict__.setdefault("begun", False):
        show.__dict__["begun"] = True
        load = os.getloadavg()[0]
        print(f"{torch.get_num_threads()} threads, load {load:.1f} on {os.cpu_count()} cores")
        print(_line(COLUMNS))
        print(_line(tuple("-" * w for w in WIDTHS)))
    answer = {None: "", True: "yes", False: "NO"}[met]
    apart = "" if difference is None else f"{difference:.1e}"
    print(_line((what, baseline, ours, ratio, bar, answer, apart)), flush=True)


def _line(cells: tuple[str, ...]) -> str:
    return " | ".join(c.ljust(w) for c, w in zip(cells, WIDTHS, strict=True)).rstrip()


def seconds(function: Callable[[], Any], repeats: int = 1) -> tuple[float, Any]:
    """The shortest of ``repeats`` wall times, and the last result."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = function()
        times.append(time.perf_counter() - start)
    return min(times), result


def difference(ours: torch.Tensor, baseline: torch.Tensor) -> float:
    """Largest relative difference, against values that are not themselves rounding."""
    return float(((ours - baseline).abs() / baseline.abs().clamp(min=1e-6)).max())


def reset_peak_memory() -> int:
    """Forget the process's memory peak (Linux) and return what it holds now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_memory() -> int:
    """The most this process has held since the last reset, in bytes."""
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def available_memory() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
