"""A logistic probe, for those who want one beside the linear probes that sums are enough for."""

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from headmix.heads import Heads
from headmix.probes import place, splits
from headmix.readouts import ReadOuts
from headmix.registry import NotApplicable


def logistic_accuracy(
    heads: Heads, outs: ReadOuts, name: str, label: str, *, C: float = 1.0
) -> float:
    """Held-out accuracy of multinomial logistic regression on the sample of tokens.

    The same folds as every probe, but only the tokens of the sample to fit on: sums do not hold
    what a logistic probe needs. Slow beside ``probe_accuracy``, and no part of ``measure``.

    Args:
        heads, outs: a layer's weights, and its sums from ``headmix.read_outs``.
        name: a read-out, one of ``headmix.readouts.LADDER``.
        label: a label with classes, or its control task ("upos control").
        C: inverse strength of the penalty, on coordinates scaled to variance 1.

    Returns:
        The share of held-out tokens whose class is found, in [0, 1]; NaN where there are none.

    Raises:
        ValueError: no such label with classes.
        NotApplicable: the block has no such read-out, or fewer than two folds hold tokens.
    """
    known = {s.name: s for s in outs.sets if s.classes}
    if label not in known:
        raise ValueError(f"no label {label!r} with classes; there are {', '.join(known)}")
    p = place(heads, outs, name)
    if p is None:
        raise NotApplicable(f"{heads.layer} has no {name}: {outs.absent.get(name, 'unknown')}")
    rows = [p.sample[f][p.filled[f] > 0].double() for f in range(len(p.count))]
    x = [r[:, : p.width].numpy() for r in rows]
    y = [r[:, p.width :][:, known[label].columns].argmax(1).numpy() for r in rows]
    right = n = 0
    for train, test in splits(outs):
        probe = make_pipeline(StandardScaler(), LogisticRegression(C=C, max_iter=1000))
        probe.fit(np.concatenate([x[f] for f in train]), np.concatenate([y[f] for f in train]))
        right += int((probe.predict(x[test]) == y[test]).sum())
        n += len(y[test])
    return right / n if n else float("nan")
