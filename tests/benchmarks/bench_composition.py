"""V-composition of all pairs of heads: TransformerBridge.all_composition_scores against ours.

Each side runs in a process of its own, which reports the time and the memory peak above what it
held before. The baseline needs 22 GB for all 30 layers; where less is free, both sides get as many
layers as fit (its memory grows with their square). A number as argument sets a lower limit still.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from smollm2 import bridge, heads_of
from table import available_memory, difference, peak_memory, reset_peak_memory, seconds, show

import headmix as hm

HEADS, D_HEAD, D_MODEL, ALL_LAYERS = 9, 64, 576, 30
NEEDED_A_PAIR = 2 * D_HEAD * D_MODEL * 4  # the broadcast product and a copy, in float32


def run(side: str, layers: int, out: str) -> None:
    """One side, measured."""
    model = bridge(layers)
    if side == "baseline":
        work = lambda: model.all_composition_scores("V").scores  # noqa: E731
    else:
        hm.metrics.composition_v(heads_of(model)[:2])  # the first call of a BLAS routine is slow
        work = lambda: hm.metrics.composition_v(heads_of(model))  # noqa: E731
    before = reset_peak_memory()
    with torch.no_grad():
        time, scores = seconds(work, repeats=1)
    extra = peak_memory() - before
    torch.save({"time": time, "extra": extra, "scores": scores}, out)


def main(most: int = ALL_LAYERS) -> None:
    fits = ((available_memory() - 3e9) / NEEDED_A_PAIR) ** 0.5 / HEADS
    layers = min(most, int(fits))
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for side in ("headmix", "baseline"):
            out = str(Path(folder) / side)
            subprocess.run([sys.executable, __file__, side, str(layers), out], check=True)
            results[side] = torch.load(out)
    ours, theirs = results["headmix"], results["baseline"]
    later = ~ours["scores"].isnan()
    apart = difference(ours["scores"][later], theirs["scores"][later])
    speed, memory = theirs["time"] / ours["time"], ours["extra"] / theirs["extra"]
    what = f"V-composition of all pairs, SmolLM2-135M, {layers} layers"
    show(
        what + ": time", f"{theirs['time']:.1f} s", f"{ours['time']:.2f} s",
        f"{speed:.0f}×", "≥ 50×", speed >= 50 and apart <= 1e-4, apart,
    )  # fmt: skip
    show(
        what + ": extra peak memory", f"{theirs['extra'] / 1e9:.1f} GB",
        f"{ours['extra'] / 1e9:.2f} GB", f"{memory:.1%}", "≤ 3 %", memory <= 0.03,
    )  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) > 2:
        run(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    else:
        main(*map(int, sys.argv[1:]))
