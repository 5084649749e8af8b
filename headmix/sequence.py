"""sequence: the values of more than two runs, one after the other, as along a training."""

import re
from collections.abc import Sequence
from itertools import takewhile

import xarray as xr

#: Added to a metric's name: its values in every run.
SEQUENCE = "_sequence"


def in_sequence(runs: Sequence[xr.Dataset], names: Sequence[str]) -> xr.Dataset:
    """``<metric>_sequence`` [run, …] of metrics that every run has on the same axes.

    Pairs across layers are left out: they are too many. The axis ``run`` is labelled by what tells
    the runs' models apart.
    """
    kept = [name for name in names if "layer_b" not in runs[0][name].dims]
    made = xr.Dataset(
        {
            name + SEQUENCE: xr.concat([r[name].drop_attrs() for r in runs], "run", join="override")
            for name in kept
        }
    )
    return made.assign_coords(run=told_apart([str(run.attrs.get("model", "")) for run in runs]))


def told_apart(names: Sequence[str]) -> list[str]:
    """Names without the words that all of them begin with; numbered where two are the same.

    >>> told_apart(["seed0-rate0.003-step00000", "seed0-rate0.003-step00100"])
    ['step00000', 'step00100']
    """
    words = [re.findall(r"[^-_/ ]*[-_/ ]*", name) for name in names]
    same = len(list(takewhile(lambda at: len(set(at)) == 1, zip(*words, strict=False))))
    short = ["".join(parts[same:]) for parts in words]
    if len({*short, ""}) <= len(short):
        return [f"{number}: {name}" for number, name in enumerate(names)]
    return short
