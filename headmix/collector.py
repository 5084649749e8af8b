"""Collector: values by metric and layer, until they become one Dataset."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr

from headmix.heads import Heads
from headmix.jackknife import interval
from headmix.labelling import Labelling
from headmix.linalg import LinalgError
from headmix.readouts import LADDER
from headmix.registry import FROM_TEXT, LABELS, Metric, NotApplicable

#: What is stored beside a metric's value, by suffix of the variable's name.
BESIDE = {
    "_null_mean": "expected where heads are unrelated",
    "_null_sd": "standard deviation of that expectation",
    "_low": "lower end of the 95 % interval over documents",
    "_high": "upper end of the 95 % interval over documents",
}

#: Added to a metric's name where position is taken out of the activations.
WITHIN_POSITION = "_within_position"


class Collector:
    """Takes metrics layer by layer, notes what cannot be computed, and makes the Dataset."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self.metrics = metrics
        self.shapes: dict[str, dict[str, Any]] = {}
        self.notes: dict[str, tuple[str, ...]] = {}
        self.invalid: dict[str, str] = {}
        self.values: dict[str, dict[str, dict[str, np.ndarray]]] = {}
        self.skipped: dict[str, dict[str, str]] = {}
        self.counts: dict[str, tuple[float, float]] = {}
        self.compared: list[str] = []
        self.labelling: Labelling | None = None

    def label(self, labelling: Labelling) -> None:
        """What the axes that count labels stand for."""
        self.labelling = labelling

    def refuse(self, layer: str, reason: str) -> None:
        """A layer whose heads are not known keeps its place, empty."""
        self.shapes[layer] = {"d_head": 0, "d_model": 0, "kv_of_head": np.array([], int)}
        self.notes[layer] = ()
        self.invalid[layer] = reason

    def begin(self, heads: Heads, notes: tuple[str, ...]) -> None:
        self.shapes[heads.layer] = {
            "d_head": heads.d_head,
            "d_model": heads.d_model,
            "kv_of_head": np.array(heads.kv_of_head),
        }
        self.notes[heads.layer] = notes

    def run(self, metric: Metric, layer: str, fetch: Callable[[str], Any]) -> None:
        """One metric on one layer ("" for the whole model); ``fetch`` brings what it needs."""
        name = metric.name
        try:
            arguments = {need: fetch(need) for need in metric.needs}
            self.values.setdefault(name, {})[layer] = _evaluate(metric, arguments)
            moments = arguments.get("moments")
            if metric.within_position and moments is not None and moments.has_positions:
                inside = arguments | {"moments": moments.within_positions}
                name = metric.name + WITHIN_POSITION
                self.values.setdefault(name, {})[layer] = _evaluate(metric, inside)
        except (NotApplicable, LinalgError) as reason:
            self.skipped.setdefault(name, {})[layer] = str(reason)

    def dataset(self) -> xr.Dataset:
        layers = list(self.shapes)
        per_layer: dict[str, Any] = {
            "d_head": ("layer", [s["d_head"] for s in self.shapes.values()]),
            "d_model": ("layer", [s["d_model"] for s in self.shapes.values()]),
            "kv_of_head": self._stack(
                ("head",), {n: s["kv_of_head"] for n, s in self.shapes.items()}
            ),
            "valid": ("layer", [n not in self.invalid for n in layers]),
            "invalid_reason": ("layer", [self.invalid.get(n, "") for n in layers]),
        }
        if self.counts:
            seen = np.array([self.counts.get(n, (0.0, 0.0)) for n in layers])
            per_layer |= {"n_tokens": ("layer", seen[:, 0]), "n_documents": ("layer", seen[:, 1])}
        ds = xr.Dataset(per_layer, coords={"layer": layers})
        for metric in self.metrics:
            for name in (metric.name, metric.name + WITHIN_POSITION):
                for suffix, variable in self._variables(metric, name).items():
                    ds[name + suffix] = variable
                if name in ds:
                    ds[name].attrs = _describe(metric, within=name != metric.name)
        labels = LABELS | {"layer_b": layers, "read_out": LADDER}
        if self.labelling is not None:
            names = [s.name for s in self.labelling.labels]
            labels |= {"label": names, "label_b": names}
            ds["n_labelled"] = ((), self.labelling.n_tokens)
        for dim in map(str, ds.dims):
            if dim not in ds.coords:
                ds = ds.assign_coords({dim: list(labels.get(dim, range(ds.sizes[dim])))})
        ds.attrs["skipped"] = json.dumps(self.skipped)
        ds.attrs["notes"] = json.dumps({n: v for n, v in self.notes.items() if v})
        return ds

    def _variables(self, metric: Metric, name: str) -> dict[str, xr.Variable]:
        by_layer = self.values.get(name, {})
        parts = {}
        for suffix in ("", *BESIDE):
            arrays = {n: v[suffix] for n, v in by_layer.items() if suffix in v}
            if not arrays:
                continue
            scalar = all(a.ndim == 0 for a in arrays.values())
            dims = () if scalar else metric.dims
            if "layers" in metric.needs:
                parts[suffix] = xr.Variable(dims, self._spread(arrays[""]))
                continue
            if not scalar:
                arrays = {n: np.broadcast_to(a, by_layer[n][""].shape) for n, a in arrays.items()}
            parts[suffix] = self._stack(dims, arrays)
        return parts

    def _spread(self, values: np.ndarray) -> np.ndarray:
        """Values [layer, head, layer_b, head_b] over the layers compared, spread over all."""
        valid = [i for i, n in enumerate(self.shapes) if n in self.compared]
        if values.ndim == 0 or len(valid) == len(self.shapes):
            return values
        L, (_, H, _, H_b) = len(self.shapes), values.shape
        out = np.full((L, H, L, H_b), np.nan, values.dtype)
        out[np.ix_(valid, range(H), valid, range(H_b))] = values
        return out

    def _stack(self, dims: tuple[str, ...], arrays: dict[str, np.ndarray]) -> xr.Variable:
        """One array over all layers; what a layer lacks is NaN, -1 or empty by kind."""
        some = next(iter(arrays.values()))
        shape = [max(a.shape[i] for a in arrays.values()) for i in range(some.ndim)]
        blank = {"f": np.nan, "i": -1, "b": False}.get(some.dtype.kind, "")
        out = np.full([len(self.shapes), *shape], blank, object if blank == "" else some.dtype)
        for i, layer in enumerate(self.shapes):
            if layer in arrays:
                where: tuple[int | slice, ...] = (i, *(slice(n) for n in arrays[layer].shape))
                out[where] = arrays[layer]
        return xr.Variable(("layer", *dims), out)


def _evaluate(metric: Metric, arguments: dict[str, Any]) -> dict[str, np.ndarray]:
    """The value and what stands beside it, by suffix."""
    value = metric(*arguments.values())
    parts = {"": value}
    if metric.null:
        parts["_null_mean"], parts["_null_sd"] = metric.null(*arguments.values())
    parts |= _interval(metric, arguments, value)
    return {suffix: _array(part) for suffix, part in parts.items() if part is not None}


def _interval(metric: Metric, arguments: dict[str, Any], value: Any) -> dict[str, Any]:
    """The document-jackknife interval, cut to the metric's range, where folds can be left out."""
    sums = [need for need in metric.needs if need in FROM_TEXT]
    without = list(zip(*(arguments[need].replicates for need in sums), strict=True))
    if len(without) < 2:
        return {}
    try:
        replicates = [
            metric(*(arguments | dict(zip(sums, others, strict=True))).values())
            for others in without
        ]
    except (NotApplicable, LinalgError):
        return {}
    low, high = interval(torch.as_tensor(value), [torch.as_tensor(r) for r in replicates])
    # a jackknife knows nothing of the range that a metric has
    bounds = metric.bounds(arguments.get("heads"))
    return {"_low": low.clamp(*bounds), "_high": high.clamp(*bounds)}


def _array(value: Any) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    return np.asarray(value)


def _describe(metric: Metric, within: bool) -> dict[str, str]:
    return {
        "title": metric.title + " (position taken out)" * within,
        "units": metric.unit,
        "formula": metric.formula,
        "range": metric.range_text,
        "null": metric.null_text,
        "invariant": ", ".join(sorted(metric.invariant)),
        "reference": metric.reference,
        "family": metric.family,
        "needs": ", ".join(metric.needs),
        "doc": metric.function.__doc__ or "",
    }
