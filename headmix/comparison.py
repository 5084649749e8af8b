"""compare: what differs between two runs, head by head."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Int

from headmix.collector import BESIDE
from headmix.matching import MATCHES, Order, by_index, matched, what_changed
from headmix.measurement import measure
from headmix.model import AttentionModel
from headmix.sequence import SEQUENCE, in_sequence
from headmix.shapes import RUNS, aligned, metric_names
from headmix.sources import load


def compare(
    a: Any,
    b: Any,
    *more: Any,
    match: str = "index",
    any_processing: bool = False,
    **options: Any,
) -> xr.Dataset:
    """What differs between two models or two runs, metric by metric: B − A.

    Args:
        a, b: Datasets from ``measure`` or ``open_results``, or anything that ``measure`` takes for
            a model; then both are measured alike.
        *more: further ones, in order, as the checkpoints of a training are: A is then the first of
            all and B the last.
        match: which heads are compared. "index": those of the same number. "overlap": within each
            layer those that write into the same subspaces, by the assignment that makes the sum of
            ``projection_kernel`` largest (KV groups as wholes). "cka": those whose outputs on the
            text are alike, likewise by debiased ``cka``; both models must read the same token ids.
            The last two need models, since runs hold no weights.
        any_processing: compare also where only one of the two was folded.
        **options: passed to ``measure``, for models.

    Returns:
        A Dataset as ``measure`` gives, each metric holding the difference, and beside it
        ``<metric>_run_a`` and ``<metric>_run_b`` with their own nulls and intervals.
        ``<metric>_null_mean`` is the difference of the nulls and ``<metric>_null_sd`` that of two
        independent draws, which a model and its fine-tune are not: read it as a unit of length.
        ``<metric>_low`` and ``_high`` combine both intervals as if the runs were independent, too
        wide where they saw the same text.
        ``match`` [layer, head] says which head of B was taken. Of models also
        ``write_change`` ``‖W_O^B − W_O^A‖ / ‖W_O^A‖``, which depends on the gauge,
        ``ov_change`` the same of ``M_h = W_V W_O``, which does not, and ``write_overlap``, the
        ``projection_kernel`` of a head with its match.
        Of more than two, ``<metric>_sequence`` [run, …] holds the values of all, but for pairs
        across layers.

    Raises:
        ValueError: processing, layers or heads differ, heads are to be matched between runs, or a
            run is a comparison itself.
    """
    if match not in MATCHES:
        raise ValueError(f"match must be one of {', '.join(MATCHES)}, got {match!r}")
    models = [None if isinstance(x, xr.Dataset) else _loaded(x) for x in (a, b, *more)]
    if match != "index" and None in models:
        raise ValueError(f"match={match!r} needs the models: a run holds no weights")
    runs = [
        aligned(x if model is None else measure(model, **options))
        for x, model in zip((a, b, *more), models, strict=True)
    ]
    for run in runs[1:]:
        _need_alike(runs[0], run, any_processing=any_processing)
    first, *rest = models
    orders = [
        matched((first, model), runs[0], match, options) if first and model else by_index(runs[0])
        for model in rest
    ]
    runs[1:] = map(_reordered, runs[1:], orders)
    ds = _differences(runs[0], runs[-1])
    if more:
        ds = _with_sequence(ds, runs)
    ds["match"] = (("layer", "head"), orders[-1])
    changes = what_changed((first, rest[-1]), ds) if first and rest[-1] else {}
    for name, (title, formula, values) in changes.items():
        attrs = {"title": title, "formula": formula, "family": "comparison", "needs": "heads"}
        blank = {"units": "", "null": "none known", "invariant": "", "reference": "", "doc": ""}
        ds[name] = (("layer", "head"), values, blank | {"range": "[0, ∞]"} | attrs)
    # first: what a page shows first
    return ds[[*changes, *(name for name in ds.data_vars if name not in changes)]]


def _with_sequence(ds: xr.Dataset, runs: list[xr.Dataset]) -> xr.Dataset:
    """All runs beside the difference of the first and the last."""
    a = runs[0]
    alike = {n: all(n in b and _comparable(a[n], b[n]) for b in runs) for n in metric_names(ds)}
    skipped = json.loads(ds.attrs["skipped"])
    reason = "not every run of the sequence has it on the same axes"
    skipped |= {name + SEQUENCE: {"": reason} for name, same in alike.items() if not same}
    ds = ds.assign(in_sequence(runs, [name for name, same in alike.items() if same]))
    return ds.assign_attrs(skipped=json.dumps(skipped))


def _loaded(model: Any) -> AttentionModel:
    return model if isinstance(model, AttentionModel) else load(model)


def _need_alike(a: xr.Dataset, b: xr.Dataset, *, any_processing: bool) -> None:
    """Raises ValueError where a difference of the two would mean nothing."""
    for ds in (a, b):
        if "compared" in ds.attrs:
            raise ValueError(f"{ds.attrs['model']} is a comparison itself: compare runs")
    how = [ds.attrs.get("processing") for ds in (a, b)]
    if how[0] != how[1] and not any_processing:
        raise ValueError(
            f"the weights of one run are {how[0]}, those of the other {how[1]}: measure both alike "
            "(or ask for any processing)"
        )
    layers = [ds.layer.values.tolist() for ds in (a, b)]
    if layers[0] != layers[1]:
        raise ValueError(
            f"the runs have different layers, {', '.join(layers[0])} and {', '.join(layers[1])}: "
            "choose those that both have, as in sel(layer=[...])"
        )
    groups = [ds.kv_of_head.values for ds in (a, b)]
    if not np.array_equal(*groups):
        shapes = ["×".join(map(str, g.shape)) for g in groups]
        raise ValueError(
            f"heads or their KV groups differ: layers × heads are {shapes[0]} and {shapes[1]}"
        )


def _reordered(ds: xr.Dataset, order: Order) -> xr.Dataset:
    """The Dataset with the heads of each layer, and their KV heads, in another order."""
    groups = ds.kv_of_head.values
    orders = {"head": order, "kv_head": _order_of_groups(order, groups)}
    out = ds.copy()
    for name, variable in ds.data_vars.items():
        values, dims = variable.values, variable.dims
        for layer, unit in (("layer", ""), ("layer_b" if "layer_b" in dims else "layer", "_b")):
            for part, wanted in orders.items():
                if layer in dims and part + unit in dims and name != "kv_of_head":
                    axes = dims.index(layer), dims.index(part + unit)
                    values = np.take_along_axis(values, _along(wanted, axes, values), axes[1])
        out[name] = (dims, values, variable.attrs)
    return out


def _order_of_groups(
    order: Order, groups: Int[np.ndarray, "layer head"]
) -> Int[np.ndarray, "layer kv_head"]:
    out = np.tile(np.arange(groups.max(initial=0) + 1), (len(groups), 1))
    for layer, (row, group) in enumerate(zip(order, groups, strict=True)):
        there = group >= 0
        out[layer, group[there]] = group[row[there]]
    return out


def _along(
    order: Int[np.ndarray, "layer unit"], axes: tuple[int, int], values: np.ndarray
) -> np.ndarray:
    """Indices for ``take_along_axis``, broadcastable over all other axes."""
    turned = order if axes[0] < axes[1] else order.T
    shape = [n if axis in axes else 1 for axis, n in enumerate(values.shape)]
    return turned[tuple(slice(0, shape[axis]) for axis in sorted(axes))].reshape(shape)


def _differences(a: xr.Dataset, b: xr.Dataset) -> xr.Dataset:
    both = [n for n in metric_names(a) if n in b and _comparable(a[n], b[n])]
    kept = ["d_head", "d_model", "kv_of_head"]
    ds = a[kept].assign(valid=a.valid & b.valid)
    ds["invalid_reason"] = xr.where(a.invalid_reason != "", a.invalid_reason, b.invalid_reason)
    for name in both:
        parts = _difference(name, a, b)
        ds = ds.assign({name + suffix: part for suffix, part in parts.items()})
        ds[name].attrs = a[name].attrs | {
            "title": a[name].attrs["title"] + ", B − A",
            "range": "[−∞, ∞]",
            "null": "difference of the two nulls; sd as of independent draws",
        }
        for suffix, run in zip(RUNS, (a, b), strict=True):
            beside = {s: run[name + s] for s in ("", *BESIDE) if name + s in run}
            ds = ds.assign({name + suffix + s: variable for s, variable in beside.items()})
    skipped = {name: {"": reason} for name, reason in _left_out(a, b, both)}
    names = [run.attrs.get("model", "") for run in (a, b)]
    ds.attrs = a.attrs | {
        "model": f"{names[1]} − {names[0]}",
        "provenance": json.dumps(_provenance(a, b)),
        "compared": json.dumps({run: dict(ds.attrs) for run, ds in (("A", a), ("B", b))}),
        "skipped": json.dumps(skipped),
    }
    return ds


def _provenance(a: xr.Dataset, b: xr.Dataset) -> dict[str, str]:
    """That of both runs, each entry under the letter of its run."""
    return {
        f"{run}: {what}": said
        for run, ds in (("A", a), ("B", b))
        for what, said in {"model": ds.attrs.get("model", ""), **_known(ds)}.items()
    }


def _known(ds: xr.Dataset) -> dict[str, str]:
    return {str(k): str(v) for k, v in json.loads(ds.attrs.get("provenance", "{}")).items()}


def _left_out(a: xr.Dataset, b: xr.Dataset, both: list[str]) -> Iterator[tuple[str, str]]:
    """Metrics that have no difference, with the reason."""
    for name in dict.fromkeys([*metric_names(a), *metric_names(b)]):
        if name in both:
            continue
        if name not in a or name not in b:
            yield name, f"only run {'B' if name not in a else 'A'} has it"
        elif a[name].dtype.kind != "f":
            yield name, "words have no difference: see each run"
        elif unlike := _unlike(a[name], b[name]):
            dim, *labels = unlike
            yield name, f"{dim} is {' and '.join(map(str, labels))} in the two runs"
        else:
            yield name, f"shapes {list(a[name].shape)} and {list(b[name].shape)} differ"


def _comparable(a: xr.DataArray, b: xr.DataArray) -> bool:
    same = a.dtype.kind == b.dtype.kind == "f" and a.dims == b.dims and a.shape == b.shape
    return same and not _unlike(a, b)


def _unlike(a: xr.DataArray, b: xr.DataArray) -> tuple[str, list[Any], list[Any]] | None:
    """An axis as long in both whose entries stand for other things, and what they stand for."""
    for dim in map(str, a.dims):
        if dim in a.coords and dim in b.coords and a.sizes[dim] == b.sizes.get(dim):
            labels = a[dim].values.tolist(), b[dim].values.tolist()
            if labels[0] != labels[1]:
                return dim, *labels
    return None


def _difference(name: str, a: xr.Dataset, b: xr.Dataset) -> dict[str, xr.DataArray]:
    """B − A, its null and its interval, by suffix."""
    parts = {"": b[name] - a[name]}
    there = {s for s in BESIDE if name + s in a and name + s in b}
    if "_null_mean" in there:
        parts["_null_mean"] = b[name + "_null_mean"] - a[name + "_null_mean"]
    if "_null_sd" in there:
        parts["_null_sd"] = (a[name + "_null_sd"] ** 2 + b[name + "_null_sd"] ** 2) ** 0.5
    if {"_low", "_high"} <= there:
        below = {run: ds[name] - ds[name + "_low"] for run, ds in (("a", a), ("b", b))}
        above = {run: ds[name + "_high"] - ds[name] for run, ds in (("a", a), ("b", b))}
        parts["_low"] = parts[""] - (below["b"] ** 2 + above["a"] ** 2) ** 0.5
        parts["_high"] = parts[""] + (above["b"] ** 2 + below["a"] ** 2) ** 0.5
    return {suffix: part.drop_attrs() for suffix, part in parts.items()}
