"""Statistics of MiniLM's heads: TransformerLens's cache and what follows from it, against ours.

Two baselines. ``run_with_cache`` filtered to ``hook_z``, then Cov(z) of each layer, summed in
float64; once as one types it, once asking it to leave the language-model head out. And
``run_with_cache``, what every head writes ``[layer · head, token, d_model]``, then from these the
cross-covariances ``[d_model, d_model]`` of all pairs of a layer's heads, which CKA, CCA and
prediction need (ours has them from Σ); once without, mean, norm and ``tr Cov(o_i, o_j)`` alone.
TransformerLens refuses ``stack_head_results`` on BERT, so the same tensor is made here from its
cache of z and its W_O.

Ours keeps every sum that any metric needs, in five folds. All sides take turns, batch by batch, and
the fastest of each counts; for the peak of memory each runs in a process of its own. Differences
are those from the baseline's largest entry.
"""

import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from engine import LENGTH, ROWS, as_batch, empty_sums, minilm, token_batches
from table import peak_memory, reset_peak_memory, seconds, show
from torch import Tensor

import headmix as hm
from headmix.capture import capture

BATCHES, SIDES = 6, ("headmix", "hook_z", "hook_z, no head", "results", "traces")
Values = dict[str, Tensor]
Side = tuple[Callable[[Tensor, int], None], Callable[[], Values]]


def ours(model: hm.AttentionModel) -> Side:
    heads = {name: model.heads(name) for name in model.layers}
    moments = empty_sums(model)

    def values() -> Values:
        pairs = [hm.metrics.pair_interference(heads[n], m) for n, m in moments.items()]
        covariance = torch.stack([m.covariance for m in moments.values()])
        return {"covariance": covariance, "interference": torch.stack(pairs)}

    return lambda ids, n: capture(model, [as_batch(ids, n)], heads, moments), values


def bridge(model: hm.AttentionModel) -> Any:
    """BERT with the language-model head that TransformerLens wants, its weights MiniLM's."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module
    from transformers import BertForMaskedLM

    whole = BertForMaskedLM(model.module.config)
    whole.bert.load_state_dict(model.module.state_dict(), strict=False)  # it has no pooler
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build_bridge_from_module(whole.eval(), "BertForMaskedLM", hf_config=whole.config)


def cached_z(model: hm.AttentionModel, **options: Any) -> Side:
    lens = bridge(model)
    L, concat = len(model.layers), model.heads(0).W_O.flatten(0, 1).shape[0]
    n, first = 0, torch.zeros(L, concat).double()
    second = torch.zeros(L, concat, concat).double()

    def add(ids: Tensor, number: int) -> None:
        nonlocal n
        _, cache = lens.run_with_cache(
            ids, names_filter=lambda name: name.endswith("hook_z"), **options
        )
        for layer in range(L):
            z = cache[f"blocks.{layer}.attn.hook_z"].flatten(0, 1).flatten(1).double()
            first[layer] += z.sum(0)
            second[layer].addmm_(z.T, z)
        n += ids.numel()

    def values() -> Values:
        mean = first / n
        return {"covariance": second / n - mean[:, :, None] * mean[:, None, :]}

    return add, values


def head_results(model: hm.AttentionModel, *, pairs: bool) -> Side:
    lens = bridge(model)
    W_O = lens.W_O.detach()
    L, H, _, D = W_O.shape
    n, first, norm = 0, torch.zeros(L, H, D), torch.zeros(L, H)
    products = torch.zeros(L, H * D, H * D) if pairs else torch.zeros(L, H, H)

    def add(ids: Tensor, number: int) -> None:
        nonlocal n
        _, cache = lens.run_with_cache(ids)
        z = torch.stack([cache[f"blocks.{layer}.attn.hook_z"].flatten(0, 1) for layer in range(L)])
        results = torch.einsum("lthd,lhdm->lhtm", z, W_O)
        first.add_(results.sum(2))
        norm.add_(results.norm(dim=-1).sum(-1))
        for layer, o in enumerate(results):
            flat = o.transpose(0, 1).flatten(1).T if pairs else o.flatten(1)
            products[layer].addmm_(flat, flat.T)
        n += ids.numel()

    def values() -> Values:
        summed = products
        if pairs:
            blocks = products.view(L, H, D, H, D).diagonal(dim1=2, dim2=4)
            summed = blocks.sum(-1)
        S = summed / n - (first / n) @ (first / n).mT
        own = S.diagonal(dim1=1, dim2=2)
        return {"interference": S / (own[:, :, None] * own[:, None, :]).sqrt()}

    return add, values


def build(side: str, model: hm.AttentionModel) -> Side:
    if side == "headmix":
        return ours(model)
    if side in ("results", "traces"):
        return head_results(model, pairs=side == "results")
    options = {"return_type": None, "stop_at_layer": 6} if side == "hook_z, no head" else {}
    return cached_z(model, **options)


def memory(side: str) -> None:
    """Print the memory peak of a side, above what it held once warm."""
    model = minilm()
    texts = token_batches(model.tokenizer, 3)
    add, _ = build(side, model)
    with torch.inference_mode():
        add(texts[0], 0)
        before = reset_peak_memory()
        for number, ids in enumerate(texts[1:], 1):
            add(ids, number)
        print(peak_memory() - before)


def extra_memory(side: str) -> int:
    done = subprocess.run(
        [sys.executable, __file__, side], stdout=subprocess.PIPE, check=True, text=True
    )
    return int(done.stdout.split()[-1])


def main() -> None:
    model = minilm()
    texts = token_batches(model.tokenizer, BATCHES)
    sides = {side: build(side, model) for side in SIDES}
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    with torch.inference_mode():
        for number, ids in enumerate(texts):
            for side, (add, _) in sides.items():
                times[side].append(seconds(lambda a=add, i=ids, n=number: a(i, n))[0])
        values = {side: value() for side, (_, value) in sides.items()}
    fastest = {side: min(found[1:]) for side, found in times.items()}  # the first call is slow
    tokens = ROWS * LENGTH

    def row(side: str, what: str, value: str, bar: float | None) -> None:
        ratio = fastest[side] / fastest["headmix"]
        mine, theirs = values["headmix"][value], values[side][value]
        show(
            what, f"{tokens / fastest[side]:.0f}/s", f"{tokens / fastest['headmix']:.0f}/s",
            f"{ratio:.1f}×", f"≥ {bar:g}×" if bar else "", ratio >= bar if bar else None,
            float((mine - theirs).abs().max() / theirs.abs().max()),
        )  # fmt: skip

    row("hook_z", "MiniLM, tokens: run_with_cache(hook_z), Cov(z)", "covariance", 2)
    row("hook_z, no head", "… without the language-model head", "covariance", None)
    row("results", "MiniLM, tokens: every o_h, covariances of all pairs", "interference", 5)
    row("traces", "… norms and traces alone", "interference", None)
    theirs, mine = extra_memory("traces"), extra_memory("headmix")
    show(
        "… extra peak memory, norms and traces alone", f"{theirs / 1e6:.0f} MB",
        f"{mine / 1e6:.0f} MB", f"{mine / theirs:.1%}", "≤ 20 %", mine / theirs <= 0.2,
    )  # fmt: skip


if __name__ == "__main__":
    memory(*sys.argv[1:]) if len(sys.argv) > 1 else main()
