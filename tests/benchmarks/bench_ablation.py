"""Resample ablation of every head against the bare forward passes that it takes.

Per pass over the text and head: one forward pass from the head's layer on. The bar counts whole
bare forward passes, the stricter row below it only the blocks that are really run. Baseline and
ours take turns: a bare pass after each layer of ours, so that both meet the same load.

A name as argument (minilm, smollm2) runs that model only.
"""

import sys
from statistics import median

import torch
from engine import minilm, smollm2
from table import seconds, show

from headmix.causal import Runs
from headmix.interventions import Interventions
from headmix.model import AttentionModel
from headmix.packing import batches

MODELS = {"minilm": (minilm, "MiniLM", 2000), "smollm2": (smollm2, "SmolLM2-135M", 250)}
BAR = 1.3


def prepared(model: AttentionModel, tokens: int) -> Runs:
    """All that is read and drawn before the first pass."""
    heads = {name: model.heads(name) for name in model.layers}
    feed = batches(model, "default", max_tokens=20_000)
    options = Interventions(tokens=tokens, replacements=("resample",), interactions=0)
    return Runs(model, heads, feed, options, folds=5)


def compare(model: AttentionModel, name: str, tokens: int) -> None:
    """One run of ours, with bare passes between its layers."""
    runs = prepared(model, tokens)
    inputs = [run.inputs for run in runs.text["effects"]]
    bare: list[list[float]] = [[] for _ in inputs]

    def forward(n: int) -> None:
        with torch.inference_mode():
            model.module(**inputs[n])

    for n in range(len(inputs)):
        forward(n)  # the first call is slow
    spent = 0.0  # in bare passes, which are not ours

    def between() -> bool:
        nonlocal spent
        for n in range(len(inputs)):
            time, _ = seconds(lambda n=n: forward(n))
            bare[n].append(time)
            spent += time
        return False

    whole, _ = seconds(lambda: runs.go(lambda done, total: None, between))
    ours = whole - spent
    L, H = len(model.layers), runs.heads[model.layers[0]].n_heads
    one = sum(median(times) for times in bare)
    all_passes = L * H * one
    share = (L + 1) / (2 * L)
    what = f"{name}: resample {L * H} heads, {runs.text['effects'].n_tokens} tokens"
    show(
        what, f"{all_passes:.1f} s", f"{ours:.1f} s", f"{ours / all_passes:.2f}×", f"≤ {BAR}×",
        ours <= BAR * all_passes,
    )  # fmt: skip
    show(
        f"… against the {share:.0%} of blocks that are run", f"{all_passes * share:.1f} s",
        f"{ours:.1f} s", f"{ours / (all_passes * share):.2f}×",
    )  # fmt: skip


def main(names: list[str]) -> None:
    for name in names or MODELS:
        build, title, tokens = MODELS[name]
        compare(build(), title, tokens)


if __name__ == "__main__":
    main(sys.argv[1:])
