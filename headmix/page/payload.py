"""The Dataset as one plain dictionary, which the page's scripts read."""

import base64
import json
from typing import Any

import numpy as np
import xarray as xr

from headmix.plots import SCALES
from headmix.shapes import metric_names, shape_of

#: Where a script element's content could end or a string literal break.
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def payload(ds: xr.Dataset) -> dict[str, Any]:
    """Everything the figures need: metrics with their nulls, labels of the axes, colour scales."""
    return {
        "layers": [str(n) for n in ds.layer.values],
        "labels": {str(dim): _labels(ds, str(dim)) for dim in ds.dims},
        "heads": ds.sizes.get("head", 0),
        "kv_of_head": ds.kv_of_head.values.tolist() if "kv_of_head" in ds else [],
        "valid": ds.valid.values.tolist() if "valid" in ds else [True] * ds.sizes["layer"],
        "metrics": [_metric(ds, name) for name in metric_names(ds)],
        "scales": SCALES,
    }


def script_json(data: dict[str, Any]) -> str:
    """JSON that stays data inside a script element, whatever text it holds."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).translate(_ESCAPES)


def _metric(ds: xr.Dataset, name: str) -> dict[str, Any]:
    variable = ds[name]
    shape = shape_of(variable)
    low = str(variable.attrs.get("range", "")).strip("[").split(",")[0]
    return {
        "name": name,
        "title": variable.attrs["title"],
        "unit": variable.attrs.get("units", ""),
        "shape": shape,
        "signed": low.startswith(("-", "−")),
        "value": _words(variable) if shape == "text" else _numbers(variable),
        "mean": _null(ds, name + "_null_mean"),
        "sd": _null(ds, name + "_null_sd"),
    }


def _numbers(array: xr.DataArray) -> dict[str, Any]:
    """Axes, and float32 numbers in base64: a third of the size of JSON, and exact."""
    raw = np.ascontiguousarray(array.values, dtype="<f4").tobytes()
    return _axes(array) | {"numbers": base64.b64encode(raw).decode()}


def _words(array: xr.DataArray) -> dict[str, Any]:
    return _axes(array) | {"words": [str(word) for word in array.values.ravel()]}


def _axes(array: xr.DataArray) -> dict[str, Any]:
    return {"dims": [str(d) for d in array.dims], "shape": list(array.shape)}


def _null(ds: xr.Dataset, name: str) -> dict[str, Any] | None:
    """A null without the axes along which it does not change."""
    if name not in ds:
        return None
    array = ds[name]
    for dim in array.dims:
        first = array.isel({dim: 0})
        if np.array_equal(
            *np.broadcast_arrays(array, first.expand_dims(dim, array.dims.index(dim)))
        ):
            array = first
    return _numbers(array)


def _labels(ds: xr.Dataset, dim: str) -> list[str]:
    """What the places along an axis are called; the second of a pair is called as the first."""
    base = dim.removesuffix("_b")
    named = base if base in ds.dims and ds.sizes[base] == ds.sizes[dim] else dim
    if named not in ds.coords:
        return [str(i) for i in range(ds.sizes[dim])]
    return [str(label) for label in ds[named].values]
