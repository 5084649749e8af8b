"""Probes of every read-out of every layer from sums, against scikit-learn's RidgeClassifier.

The baseline is what one would write: keep the activations, and fit one RidgeClassifier a read-out
and fold, here for one layer of MiniLM. Both give the same held-out R² (of class indicators; theirs
codes them ±1, which changes nothing). The baseline is timed on activations as they come (float32)
and checked in float64.

The path of a CoNLL-U file as argument labels parts of speech; without one the label is the form of
the words of the default text.
"""

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from engine import minilm
from sklearn.linear_model import RidgeClassifier
from table import seconds, show

import headmix as hm
from headmix import labels as labelling
from headmix import metrics, probes
from headmix.activations import accumulate
from headmix.blocks import find_block
from headmix.labelling import LabelSet
from headmix.model import AttentionModel
from headmix.packing import Batches, batches
from headmix.readouts import LADDER, ReadOuts

#: Of so many tokens of English, twenty thousand are the last piece of a word.
TOKENS, LAYER, BAR_SECONDS, BAR_RATIO, BAR_APART = 25_000, "L3", 30, 20, 1e-6


def bare(model: AttentionModel, feed: Batches) -> None:
    for batch in feed:
        model.forward(batch.inputs)


def activations(model: AttentionModel, feed: Batches) -> dict[str, Any]:
    """One layer's read-outs [token, width], class codes and folds of the labelled tokens."""
    block, site = find_block(model, LAYER), model.sites[LAYER]
    kept: dict[str, list[np.ndarray]] = {name: [] for name in (*LADDER, "Y", "fold")}
    assert feed.labelling is not None
    for batch in feed:
        chosen, Y, _ = feed.labelling.of(batch.windows)
        where = batch.keep["residual"].clone()
        where[batch.keep["residual"]] = torch.from_numpy(chosen)

        def add(name: str, x: torch.Tensor, where: torch.Tensor = where) -> None:
            kept[name].append(x[where].numpy())

        def both(z: torch.Tensor, out: torch.Tensor) -> None:
            add("concat", z)
            add("attn_out", out)

        rest = [name for name in LADDER[2:] if name in block.read_outs]
        with site.watch(both), block.watch(model, add, rest):
            model.forward(batch.inputs)
        kept["Y"].append(Y)
        kept["fold"].append(np.full(len(Y), batch.fold))
    return {name: np.concatenate(parts) for name, parts in kept.items() if parts}


def coordinates(found: Mapping[str, np.ndarray], heads: hm.Heads, outs: ReadOuts) -> dict[str, Any]:
    """In which probes read: heads are each scaled to variance 1."""
    A, _, scale = probes.frames(heads, outs)
    z = torch.from_numpy(found["concat"]).unflatten(1, (heads.n_heads, -1)).double()
    x = torch.einsum("thd,hdk->thk", z, A) / scale[:, None]
    return {**found, "concat": x.flatten(1).float().numpy()}


def baseline(
    found: Mapping[str, Any], s: LabelSet, dtype: type[np.floating[Any]]
) -> tuple[float, dict[str, float]]:
    """Seconds to fit a classifier for each read-out and fold, and the held-out R² of each."""
    Y, fold = found["Y"][:, s.columns], found["fold"]
    y, total_time, r2 = Y.argmax(1), 0.0, {}
    for name in (n for n in LADDER if n in found):
        x = found[name].astype(dtype)
        error = total = 0.0
        for f in range(5):
            train, test = fold != f, fold == f
            alpha = probes.RIDGE * float(x[train].var(0, dtype=np.float64).sum()) / x.shape[1]
            probe = RidgeClassifier(alpha=alpha * train.sum())
            inputs, targets = x[train], y[train]
            time, _ = seconds(lambda p=probe, a=inputs, b=targets: p.fit(a, b))
            total_time += time
            guess = (probe.decision_function(x[test]) + 1) / 2
            error += np.square(Y[test] - guess).sum()
            total += np.square(Y[test] - Y[train].mean(0)).sum()
        r2[name] = 1 - error / total
    return total_time, r2


def main(path: str | None) -> None:
    model = minilm()
    asked, text = labelling.parse(
        f"upos={path}" if path else "word_form", None if path else "default"
    )
    feed = batches(model, text, labels=asked, max_tokens=TOKENS)
    assert feed.labelling is not None
    heads = {name: model.heads(name) for name in model.layers}
    names = [n for n, m in hm.catalogue().items() if "read_outs" in m.needs]

    def run(chosen: list[str]) -> Any:
        return hm.measure(model, text, labels=asked, metrics=chosen, max_tokens=TOKENS)

    bare(model, feed)  # the first pass is slow
    forward, _ = seconds(lambda: bare(model, feed), repeats=2)
    what = f"MiniLM, {feed.labelling.n_tokens} labelled tokens, {len(feed.labelling.labels)} label"
    for title, chosen in (("the ladder of R²", ["probe_r2"]), ("all metrics of probes", names)):
        time, _ = seconds(lambda c=chosen: run(c))
        show(
            f"{what}: {title}", f"{forward:.1f} s", f"{time:.1f} s", f"+{time - forward:.1f} s",
            f"≤ {BAR_SECONDS} s", time - forward <= BAR_SECONDS,
        )  # fmt: skip

    outs = accumulate(model, heads, feed, folds=5, kinds=("read_outs",))[0].read_outs[LAYER]
    s = outs.labels[0]
    found = coordinates(activations(model, feed), heads[LAYER], outs)

    def ladder() -> torch.Tensor:
        outs.forget()
        return metrics.probe_r2(heads[LAYER], outs)[0]

    theirs, _ = baseline(found, s, np.float32)
    _, exact = baseline(found, s, np.float64)
    ours, values = seconds(ladder, repeats=3)
    apart = max(abs(float(values[LADDER.index(n)]) - v) for n, v in exact.items())
    show(
        f"… {LAYER}: {len(exact)} read-outs × 5 folds, fits alone", f"{theirs:.1f} s",
        f"{ours:.2f} s", f"{theirs / ours:.0f}×", f"≥ {BAR_RATIO}×", theirs >= BAR_RATIO * ours,
    )  # fmt: skip
    show(
        "… the same held-out R², largest difference",
        "",
        "",
        f"{apart:.1e}",
        f"≤ {BAR_APART}",
        apart <= BAR_APART,
    )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
