"""The experiments that decide what W_O is for: variants × tasks × architectures × seeds."""

import importlib.metadata
import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import xarray as xr
from joblib import Parallel, delayed  # type: ignore[import-untyped]
from scipy import stats

from headmix import __version__
from headmix.lab.cells import CELLS, ONE_HEAD, Cell
from headmix.lab.stack import build
from headmix.lab.tasks import TASKS
from headmix.lab.training import Progress, Trained, train
from headmix.lab.transformer import VARIANTS
from headmix.metrics import mean_overlap
from headmix.results import FORMAT
from headmix.sources import load

#: Seeds that choose learning rates and nothing else.
PILOTS = (1000, 1001)


def experiment(
    cells: Sequence[Cell] = CELLS,
    *,
    variants: Iterable[str] = (*VARIANTS, ONE_HEAD),
    seeds: Iterable[int] = range(5),
    n_jobs: int = 1,
    progress: Progress | None = None,
) -> xr.Dataset:
    """Train every variant on every cell and collect what came of it beside its null.

    The learning rate is chosen for each variant and cell by the mean loss on the validation split
    of ``PILOTS``, seeds of their own; what is reported is the test split's, of ``seeds`` at that
    rate.

    Args:
        cells: which tasks and architectures: ``CELLS`` (the suite), ``QUICK`` or your own.
        variants: keys of ``VARIANTS``, and "one_head".
        seeds: at least five for an interval worth the name.
        n_jobs: processes, each of one thread.
        progress: called with (what, done, total) as variants are done.

    Returns:
        A Dataset over (task, architecture, variant, seed): ``value`` (in the task's ``unit``),
        ``loss`` (nats an answer), ``overlap`` (mean write-subspace overlap of the first layer's
        heads after training); over (task, architecture, variant): ``n_parameters``,
        ``learning_rate``; over task: ``chance``, ``shortcut``, ``unit``. NaN where a cell was not
        run. ``save`` and ``open_results`` keep it.

    Raises:
        ValueError: an unknown variant, no cells, or what would be written to the same place twice.
    """
    variants, seeds = tuple(variants), tuple(seeds)
    known = (*VARIANTS, ONE_HEAD)
    if unknown := set(variants) - set(known):
        raise ValueError(f"unknown variants {sorted(unknown)}; known: {', '.join(known)}")
    jobs = [(cell, v) for cell in cells for v in variants if cell.includes(v)]
    places = [(cell.task, cell.architecture) for cell in cells]
    if (
        len({*places}) < len(places)
        or len({*variants}) < len(variants)
        or len({*seeds}) < len(seeds)
    ):
        raise ValueError(
            f"each task and architecture, variant and seed has one place in the results: {places}, "
            f"{variants}, seeds {seeds}"
        )
    if not jobs:
        raise ValueError(f"nothing to run: {len(cells)} cells, variants {variants}")
    ds = _empty(cells, variants, seeds)
    parallel = Parallel(n_jobs=n_jobs, return_as="generator")
    results = parallel(delayed(_run)(cell, variant, seeds) for cell, variant in jobs)
    for done, ((cell, variant), found) in enumerate(zip(jobs, results, strict=True)):
        where = {"task": cell.task, "architecture": cell.architecture, "variant": variant}
        for name, value in found.items():
            ds[name].loc[where] = value
        if progress:
            progress(f"{cell.task} ({cell.architecture}): {variant}", done + 1, len(jobs))
    return ds


def _run(cell: Cell, variant: str, seeds: tuple[int, ...]) -> dict[str, Any]:
    task, config, rates = TASKS[cell.task](), cell.config(variant), cell.learning_rates
    rate = rates[0]
    if len(rates) > 1:
        # as long as what is reported: rates that are fast at first are not those that arrive
        pilot = train(
            config, task, seeds=PILOTS, learning_rates=rates, steps=cell.steps, batch=cell.batch
        )
        rate = rates[pilot.chosen]
    trained = train(
        config, task, seeds=seeds, learning_rates=[rate], steps=cell.steps, batch=cell.batch
    )
    return {
        "value": trained.value[:, 0].numpy(),
        "loss": trained.loss[:, 0].numpy(),
        "overlap": _overlaps(trained),
        "n_parameters": build(config, 0).n_parameters,
        "learning_rate": rate,
    }


def _overlaps(trained: Trained) -> list[float]:
    """Mean overlap of what heads of the first layer write to, for each seed."""
    if trained.config.n_heads == 1:
        return [float("nan")] * len(trained.seeds)
    models = [trained.model(seed) for seed in trained.seeds]
    return [float(mean_overlap(load(model).heads(0))) for model in models]


def against(ds: xr.Dataset, baseline: str = "full") -> xr.Dataset:
    """Differences of every variant's value to one variant's, seed by seed, with their interval.

    Args:
        ds: from ``experiment``.
        baseline: a variant.

    Returns:
        ``difference`` (mean over seeds of value − baseline's value), and ``low`` and ``high``, the
        ends of its 95 % t interval over seeds; NaN where a cell was not run. Seeds are paired by
        the examples they see. Mind ``unit``: of nats per character, less is better. The interval
        says how far seeds agree; it is no p-value.

    Raises:
        ValueError: fewer than two seeds, or a baseline that was not run.
    """
    if baseline not in ds.variant:
        raise ValueError(f"no variant {baseline!r}; there are {', '.join(ds.variant.values)}")
    n = ds.sizes["seed"]
    if n < 2:
        raise ValueError(f"{n} seed: an interval needs two or more")
    apart = ds.value - ds.value.sel(variant=baseline, drop=True)
    mean = apart.mean("seed", skipna=False)
    half = stats.t.ppf(0.975, n - 1) * apart.std("seed", ddof=1, skipna=False) / n**0.5
    made = xr.Dataset({"difference": mean, "low": mean - half, "high": mean + half})
    return made.assign_coords(unit=ds.unit).assign_attrs(baseline=baseline, seeds=n)


def _empty(cells: Sequence[Cell], variants: Sequence[str], seeds: Sequence[int]) -> xr.Dataset:
    """The Dataset with its coordinates, nulls and provenance, all results NaN."""
    names = list(dict.fromkeys(cell.task for cell in cells))
    architectures = {cell.architecture: cell for cell in cells}
    tasks = [TASKS[name]() for name in names]
    coords: dict[str, Any] = {
        "task": names,
        "architecture": list(architectures),
        "variant": list(variants),
        "seed": list(seeds),
        "unit": ("task", [t.unit for t in tasks]),
        "title": ("task", [t.title for t in tasks]),
    }
    for switch in ("skip", "norm", "mlp", "matched"):
        on = [getattr(cell, switch) for cell in architectures.values()]
        coords[switch] = ("architecture", on)
    dims = ("task", "architecture", "variant", "seed")
    shape = tuple(len(coords[d]) for d in dims)
    data: dict[str, Any] = {
        name: (dims, np.full(shape, np.nan)) for name in ("value", "loss", "overlap")
    }
    for name in ("n_parameters", "learning_rate"):
        data[name] = (dims[:3], np.full(shape[:3], np.nan))
    data["chance"] = ("task", [t.chance for t in tasks])
    data["shortcut"] = ("task", [np.nan if t.shortcut is None else t.shortcut for t in tasks])
    return xr.Dataset(data, coords, _provenance(cells))


def _provenance(cells: Sequence[Cell]) -> dict[str, Any]:
    packages = ("torch", "numpy", "xarray")
    versions = {p: importlib.metadata.version(p) for p in packages}
    return {
        "headmix_format": str(FORMAT),
        "kind": "lab experiment",
        "cells": json.dumps([asdict(cell) for cell in cells]),
        "versions": json.dumps(
            {"headmix": __version__, "python": platform.python_version(), **versions}
        ),
        "threads": f"1 a process, of {torch.get_num_threads()}",
    }
