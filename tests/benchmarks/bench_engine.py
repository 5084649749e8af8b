"""The whole engine against the bare forward pass of the same base model, batch by batch in turn.

The engine keeps every sum that the metrics need, for all layers, in five folds. It ends the pass at
the last attention layer; a forward pass that ends there too is timed beside, so that what the
engine itself costs can be told from what it saves. The floor is arithmetic: n · Dc² float64
multiply-adds a layer, half of them for one triangle, at the rate of a large product here and now.

A name as argument (minilm, smollm2) runs that model only.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median

import torch
from engine import LENGTH, ROWS, as_batch, empty_sums, minilm, smollm2, token_batches
from table import seconds, show
from torch import Tensor

from headmix.capture import capture
from headmix.model import AttentionModel, Enough

MODELS = {"minilm": (minilm, "MiniLM", 6), "smollm2": (smollm2, "SmolLM2-135M", 3)}
BATCHES, BAR = 5, 1.12


def float64_rate() -> float:
    """Flops a second in a product as large as any here."""
    A = torch.randn(1024, 1024, dtype=torch.float64)
    time, _ = seconds(lambda: A @ A, repeats=10)
    return 2 * 1024**3 / time


def floor(model: AttentionModel) -> float:
    """Seconds a batch that one triangle of Σ zzᵀ takes, all layers."""
    widths = [model.heads(name).W_O.flatten(0, 1).shape[0] for name in model.layers]
    return sum(ROWS * LENGTH * width**2 for width in widths) / float64_rate()


def ways(model: AttentionModel) -> dict[str, Callable[[Tensor, int], None]]:
    """The bare pass, the same ended at the last attention layer, and the engine."""
    heads = {name: model.heads(name) for name in model.layers}
    moments = empty_sums(model)
    last = model.sites[model.layers[-1]]

    def bare(ids: Tensor, number: int) -> None:
        with torch.inference_mode():
            model.module(input_ids=ids)

    def ended(ids: Tensor, number: int) -> None:
        def stop(z: Tensor, out: Tensor) -> None:
            raise Enough

        with ExitStack() as stack:
            stack.enter_context(last.watch(stop))
            model.forward({"input_ids": ids})

    def engine(ids: Tensor, number: int) -> None:
        capture(model, [as_batch(ids, number)], heads, moments)

    return {"bare": bare, "ended": ended, "engine": engine}


def compare(build: Callable[[], AttentionModel], name: str, repeats: int) -> None:
    model = build()
    kernel = model.module.config._attn_implementation
    assert kernel == "sdpa", kernel
    texts = token_batches(model.tokenizer, BATCHES)
    compared = ways(model)
    for work in compared.values():
        work(texts[0], 0)  # the first call is slow
    times: dict[str, list[float]] = {way: [] for way in compared}
    for _ in range(repeats):
        for number, ids in enumerate(texts):
            for way, work in compared.items():
                times[way].append(seconds(lambda w=work, i=ids, n=number: w(i, n))[0])
    least = floor(model)
    bare, ended, engine = (median(times[way]) for way in ("bare", "ended", "engine"))
    fastest = min(times["engine"]) / min(times["bare"])
    what = f"{name}, {ROWS} × {LENGTH} tokens"
    show(
        f"{what}: all sums, {len(texts)} folds, medians", f"{bare * 1e3:.0f} ms",
        f"{engine * 1e3:.0f} ms", f"{engine / bare:.3f}×", f"≤ {BAR}×", engine <= BAR * bare,
    )  # fmt: skip
    show(
        "… the fastest of each", f"{min(times['bare']) * 1e3:.0f} ms",
        f"{min(times['engine']) * 1e3:.0f} ms", f"{fastest:.3f}×", f"≤ {BAR}×", fastest <= BAR,
    )  # fmt: skip
    show(
        "… against a pass that ends at the last attention too", f"{ended * 1e3:.0f} ms",
        f"{engine * 1e3:.0f} ms", f"{engine / ended:.3f}×",
    )  # fmt: skip
    show(
        "… floor: one triangle of Σ zzᵀ in float64", f"{bare * 1e3:.0f} ms",
        f"{least * 1e3:.1f} ms", f"{least / bare:.1%}",
    )  # fmt: skip


def main(names: list[str]) -> None:
    for name in names or MODELS:
        compare(*MODELS[name])


if __name__ == "__main__":
    main(sys.argv[1:])
