"""sequence: the values of more than two runs, one after the other, as along a training."""

import re
from collections.abc import Sequence
from itertools import takewhile

import xarray as xr

#: Added to a metric's name: its values in every run.
SEQUENCE = "_sequence"


def in_sequence(runs: Sequence[xr.Dataset], names: Sequence[str]) -> xr.Dataset:
    """``<metric>_sequence`` [run, …] of those metrics that every run has in the same shape.

    Pairs across layers are left out: they are too many. The axis ``run`` is labelled by what tells
    the runs' models apart.
    """
    held = {
        name: xr.concat([run[name].drop_attrs() for run in runs], "run", join="override")
        for name in names
        if "layer_b" not in runs[0][name].dims
        and all(name in run and run[name].shape == runs[0][name].shape for run in runs)
    }
    labels = told_apart([str(run.attrs.get("model", "")) for run in runs])
    made = xr.Dataset({name + SEQUENCE: values for name, values in held.items()})
    return made.assign_coords(run=labels)


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
