"""The Dataset as one plain dictionary, which the page's scripts read."""

import json
from typing import Any

import numpy as np
import xarray as xr

from headmix import __version__
from headmix.collector import WITHIN_POSITION
from headmix.page import ordering
from headmix.page.planes import EXACT, Planes, rounded
from headmix.plots import SCALES
from headmix.sequence import SEQUENCE
from headmix.shapes import (
    RUNS,
    UNITS,
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

#: Metrics of more numbers than this are rounded, to so many bits after the leading one: 5 digits of
#: what is read, 4 of what it is divided by, 3 of the half-widths of intervals.
_MANY = 100_000
_BITS = {"value": 15, "mean": 15, "sd": 12, "below": 9, "skew": 9}

#: Said on the page and in what it saves.
EXACTLY = "All numbers are in single precision, about 7 digits."
ROUNDED = (
    f"Numbers are in single precision, but those of metrics with more than {_MANY:,} of them are "
    "rounded: values and nulls to 5 digits (a relative error of at most 1.5e-5), the nulls' sd to "
    "4 (1.2e-4), the half-widths of intervals to 3 (1e-3 of the wider "
    "side). The results file has them all."
)


def plain(ds: xr.Dataset) -> dict[str, Any]:
    """What the figures need: metrics, their nulls and intervals, labels of axes, colour scales."""
    planes = Planes()
    names = metric_names(ds, within_position=False)
    drawn = [n for n in names if shape_of(ds[n]) != "other"]
    drawn.sort(key=lambda name: group_of(ds[name]) == "text")  # the page opens with the weights
    metrics = [_metric(ds, name, planes) for name in drawn]
    return {
        "headmix": __version__,
        "model": ds.attrs.get("model", "a model"),
        "layers": [str(n) for n in ds.layer.values],
        "labels": {str(dim): _labels(ds, str(dim)) for dim in ds.dims},
        "heads": ds.sizes.get("head", 0),
        "kv_of_head": ds.kv_of_head.values.tolist() if "kv_of_head" in ds else [],
        "valid": ds.valid.values.tolist() if "valid" in ds else [True] * ds.sizes["layer"],
        "compared": "compared" in ds.attrs,
        "metrics": metrics,
        "precision": ROUNDED if any(_many(ds[name]) for name in drawn) else EXACTLY,
        "scales": SCALES,
        "planes": planes.packed(),
    }


def script_json(data: dict[str, Any]) -> str:
    """JSON that stays data inside a script element, whatever text it holds."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).translate(_ESCAPES)


def _metric(ds: xr.Dataset, name: str, planes: Planes) -> dict[str, Any]:
    variable = ds[name]
    shape = shape_of(variable)
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
        "signed": _signed(variable),
        "apart": shape == "matrix" and not _signed(variable) and ordering.diverges(variable),
        "replaced": by_replacing(variable),
        "order": ordering.by_likeness(variable) if shape == "matrix" else None,
        **(
            {"value": _words(variable, planes)}
            if shape == "text"
            else _numbers(ds, name, shape, planes)
        ),
        "sequence": _sequence(ds, name, shape, planes),
        "within": _metric(ds, within, planes) | {"name": name} if within in ds else None,
        "runs": {
            run: _metric(ds, name + suffix, planes) | {"name": name}
            for suffix, run in RUNS.items()
            if name + suffix in ds
        },
    }


def _signed(variable: xr.DataArray) -> bool:
    """Whether a metric may be negative, so that its strongest is the one largest in size."""
    return str(variable.attrs.get("range", "")).strip("[").startswith(("-", "−"))


def _sequence(ds: xr.Dataset, name: str, shape: str, planes: Planes) -> dict[str, Any] | None:
    """One number a head or layer in every run; of pairs the mean over those of a head."""
    if name + SEQUENCE not in ds or shape not in ("profile", "map", "matrix"):
        return None
    values = ds[name + SEQUENCE]
    if shape == "matrix":
        (unit,) = (u for u in UNITS if u in values.dims)
        own = np.eye(values.sizes[unit], dtype=bool)
        values = values.where(~xr.DataArray(own, dims=[unit, f"{unit}_b"])).mean(f"{unit}_b")
    return _array(values, None, EXACT, planes)


def _many(variable: xr.DataArray) -> bool:
    return shape_of(variable) != "text" and variable.size > _MANY


def _numbers(ds: xr.Dataset, name: str, shape: str, planes: Planes) -> dict[str, Any]:
    """A metric's value, null and interval, as far as there are any.

    Where the order of a pair does not matter it is held once. Of very many pairs only some are
    held, and ``at`` says which. An interval is held as the distance of its lower end, and how much
    further out its upper end lies: nothing, mostly.
    """
    value = ds[name]
    bits = _BITS if _many(value) else dict.fromkeys(_BITS, EXACT)
    kept = None
    if shape == "cross" and value.size > _MOST_PAIRS:
        pairs = Measured.of(ds, name).without_self().value
        kept = _strongest(abs(pairs) if _signed(value) else pairs)
        kept = kept if is_directed(value) else _once(kept, value.shape)
    parts = {"value": value, "mean": _null(ds, name + "_null_mean")}
    parts |= {"sd": _null(ds, name + "_null_sd")}
    if name + "_low" in ds:
        below, above = value - ds[name + "_low"], ds[name + "_high"] - value
        skew = rounded(above.values, bits["below"]) - rounded(below.values, bits["below"])
        parts |= {"below": below, "skew": below.copy(data=skew)}
    found: dict[str, Any] = {
        part: _array(array, kept, bits[part], planes)
        for part, array in parts.items()
        if array is not None
    }
    if kept is not None:
        found["value"]["at"] = planes.whole(np.diff(kept, prepend=0))
    return found


def _array(
    array: xr.DataArray, kept: np.ndarray | None, bits: int, planes: Planes
) -> dict[str, Any]:
    """Axes, and where the numbers are: all, some of them, or of equal pairs one."""
    axes = _axes(array)
    if kept is not None and array.ndim == 4:
        values, how = array.values.ravel()[kept], {"kept": True}
    elif (once := _pairs_once(array)) is not None:
        values, how = once, {"half": True}
    else:
        values, how = array.values, {}
    smooth = shape_of(array) in ("spectrum", "layer_spectrum")
    return axes | how | {"numbers": planes.floats(values, bits, smooth=smooth)}


def _pairs_once(array: xr.DataArray) -> np.ndarray | None:
    """Every pair of different places once, if the order of a pair does not matter; else None."""
    second = [str(d) for d in array.dims if str(d).endswith("_b")]
    first = [d.removesuffix("_b") for d in second]
    if not {*first} & {*UNITS} or list(array.dims)[-2 * len(second) :] != first + second:
        return None
    n = int(np.prod([array.sizes[d] for d in first]))
    pairs = array.values.reshape(-1, n, n)
    if not np.allclose(pairs, pairs.mT, rtol=1e-6, atol=0, equal_nan=True):
        return None
    return pairs[:, *np.triu_indices(n, 1)]


def _once(flat: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Flat positions of pairs with the earlier head first."""
    n = shape[0] * shape[1]
    first, second = np.divmod(flat, n)
    return np.unique(np.minimum(first, second) * n + np.maximum(first, second))


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


def _words(array: xr.DataArray, planes: Planes) -> dict[str, Any]:
    """Axes, the different words, and which of them is where."""
    words = [str(word) for word in array.values.ravel()]
    place = {word: i for i, word in enumerate(sorted(set(words)))}
    which = planes.whole(np.array([place[word] for word in words], np.uint32))
    return _axes(array) | {"words": planes.text(list(place)), "which": which}


def _axes(array: xr.DataArray) -> dict[str, Any]:
    return {"dims": [str(d) for d in array.dims], "shape": list(array.shape)}


def _null(ds: xr.Dataset, name: str) -> xr.DataArray | None:
    """A null without the axes along which it does not change."""
    if name not in ds:
        return None
    array = ds[name]
    for dim in array.dims:
        first = array.isel({dim: slice(1)})
        if np.array_equal(array, np.broadcast_to(first, array.shape), equal_nan=True):
            array = first.isel({dim: 0})
    return array


def _labels(ds: xr.Dataset, dim: str) -> list[str]:
    """What the places along an axis are called; the second of a pair is called as the first."""
    base = dim.removesuffix("_b")
    named = base if base in ds.dims and ds.sizes[base] == ds.sizes[dim] else dim
    if named not in ds.coords:
        return [str(i) for i in range(ds.sizes[dim])]
    return [str(label) for label in ds[named].values]
