"""The Dataset as one plain dictionary, which the page's scripts read."""

import base64
import json
from typing import Any

import numpy as np
import xarray as xr

from headmix import __version__
from headmix.collector import WITHIN_POSITION
from headmix.plots import SCALES
from headmix.shapes import (
    RUNS,
    Measured,
    by_replacing,
    group_of,
    is_directed,
    metric_names,
    shape_of,
)

#: Where a script element's content could end or a string literal break.
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}

#: A page carries all pairs across layers up to here, and beyond only the strongest.
_MOST_PAIRS = 500_000
_PARTNERS = 6


def plain(ds: xr.Dataset) -> dict[str, Any]:
    """What the figures need: metrics, their nulls and intervals, labels of axes, colour scales."""
    return {
        "headmix": __version__,
        "model": ds.attrs.get("model", "a model"),
        "layers": [str(n) for n in ds.layer.values],
        "labels": {str(dim): _labels(ds, str(dim)) for dim in ds.dims},
        "heads": ds.sizes.get("head", 0),
        "kv_of_head": ds.kv_of_head.values.tolist() if "kv_of_head" in ds else [],
        "valid": ds.valid.values.tolist() if "valid" in ds else [True] * ds.sizes["layer"],
        "compared": "compared" in ds.attrs,
        "metrics": [_metric(ds, name) for name in metric_names(ds, within_position=False)],
        "scales": SCALES,
    }


def script_json(data: dict[str, Any]) -> str:
    """JSON that stays data inside a script element, whatever text it holds."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).translate(_ESCAPES)


def _metric(ds: xr.Dataset, name: str) -> dict[str, Any]:
    variable = ds[name]
    shape = shape_of(variable)
    kept = None
    if shape == "cross" and variable.size > _MOST_PAIRS:
        kept = _strongest(Measured.of(ds, name).without_self().value)
    least = str(variable.attrs.get("range", "")).strip("[").split(",")[0]
    within = name + WITHIN_POSITION
    return {
        "name": name,
        "variable": name,
        "title": variable.attrs["title"],
        "formula": variable.attrs.get("formula", ""),
        "null": variable.attrs.get("null", ""),
        "unit": variable.attrs.get("units", ""),
        "shape": shape,
        "directed": shape == "cross" and is_directed(variable),
        "group": group_of(variable),
        "signed": least.startswith(("-", "−")),
        "replaced": by_replacing(variable),
        "value": _words(variable) if shape == "text" else _numbers(variable, kept),
        "mean": _null(ds, name + "_null_mean", kept),
        "sd": _null(ds, name + "_null_sd", kept),
        "low": _numbers(ds[name + "_low"], kept) if name + "_low" in ds else None,
        "high": _numbers(ds[name + "_high"], kept) if name + "_high" in ds else None,
        "within": _metric(ds, within) | {"name": name} if within in ds else None,
        "runs": {
            run: _metric(ds, name + suffix) | {"name": name}
            for suffix, run in RUNS.items()
            if name + suffix in ds
        },
    }


def _numbers(array: xr.DataArray, kept: np.ndarray | None = None) -> dict[str, Any]:
    """Axes, and float32 numbers in base64: a third of the size of JSON, and exact.

    Of an array of all axes only the ``kept`` places, with their flat positions.
    """
    if kept is None or array.ndim < 4:
        return _axes(array) | {"numbers": _base64(array.values, "<f4")}
    numbers = array.values.ravel()[kept]
    return _axes(array) | {"at": _base64(kept, "<u4"), "numbers": _base64(numbers, "<f4")}


def _base64(values: np.ndarray, dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values, dtype=dtype).tobytes()).decode()


def _strongest(array: xr.DataArray) -> np.ndarray:
    """Flat positions of the largest pair of each two layers and of the largest few of each head."""
    values = np.nan_to_num(array.values, nan=-np.inf)
    L, H, L_b, H_b = values.shape
    flat = np.arange(values.size).reshape(L * H, L_b * H_b)
    by_head = values.reshape(flat.shape)
    from_head = np.argpartition(-by_head, _PARTNERS, axis=1)[:, :_PARTNERS]
    into_head = np.argpartition(-by_head, _PARTNERS, axis=0)[:_PARTNERS]
    blocks = values.transpose(0, 2, 1, 3).reshape(L, L_b, H * H_b).argmax(-1)
    i, j = np.indices(blocks.shape)
    layers = np.ravel_multi_index((i, blocks // H_b, j, blocks % H_b), values.shape)
    found = [
        np.take_along_axis(flat, from_head, 1),
        np.take_along_axis(flat, into_head, 0),
        layers,
    ]
    kept = np.unique(np.concatenate([f.ravel() for f in found]))
    return kept[np.isfinite(array.values.ravel()[kept])]


def _words(array: xr.DataArray) -> dict[str, Any]:
    return _axes(array) | {"words": [str(word) for word in array.values.ravel()]}


def _axes(array: xr.DataArray) -> dict[str, Any]:
    return {"dims": [str(d) for d in array.dims], "shape": list(array.shape)}


def _null(ds: xr.Dataset, name: str, kept: np.ndarray | None) -> dict[str, Any] | None:
    """A null without the axes along which it does not change."""
    if name not in ds:
        return None
    array = ds[name]
    for dim in array.dims:
        first = array.isel({dim: slice(1)})
        if np.array_equal(array, np.broadcast_to(first, array.shape), equal_nan=True):
            array = first.isel({dim: 0})
    return _numbers(array, kept)


def _labels(ds: xr.Dataset, dim: str) -> list[str]:
    """What the places along an axis are called; the second of a pair is called as the first."""
    base = dim.removesuffix("_b")
    named = base if base in ds.dims and ds.sizes[base] == ds.sizes[dim] else dim
    if named not in ds.coords:
        return [str(i) for i in range(ds.sizes[dim])]
    return [str(label) for label in ds[named].values]
