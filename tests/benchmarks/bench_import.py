"""``import headmix`` in a fresh interpreter, and what it pulls in."""

import subprocess
import sys

from table import show

HEAVY = ("torch", "transformers", "transformer_lens", "plotly", "sklearn", "xarray")


def seconds_to_import(package: str) -> tuple[float, set[str]]:
    """The shortest of five imports, and the heavy packages that came along."""
    code = (
        f"import sys, time; start = time.perf_counter(); import {package}; "
        "print(time.perf_counter() - start); "
        f"print(*[n for n in {HEAVY} if n in sys.modules])"
    )
    times, came = [], set()
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        first, second = done.stdout.decode().splitlines()[-2:]
        times.append(float(first))
        came = set(second.split())
    return min(times), came


def main() -> None:
    theirs, _ = seconds_to_import("transformer_lens")
    ours, came = seconds_to_import("headmix")
    show(
        f"import, bringing in {', '.join(sorted(came)) or 'none of ' + ', '.join(HEAVY)}",
        f"{theirs:.2f} s", f"{ours:.3f} s", f"{theirs / ours:.0f}×", "< 0.5 s",
        ours < 0.5 and not came & {"transformers", "transformer_lens", "plotly", "sklearn"},
    )  # fmt: skip


if __name__ == "__main__":
    main()
