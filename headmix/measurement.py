"""measure: run metrics over the layers of a model and collect one Dataset."""

import importlib.metadata
import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import torch
import xarray as xr

from headmix import __version__
from headmix.heads import Heads
from headmix.linalg import LinalgError
from headmix.model import AttentionModel
from headmix.registry import LABELS, Metric, NotApplicable, catalogue
from headmix.sources import load

#: Results of this layout; raised when older readers could misread them.
FORMAT = 1

Progress = Callable[[str, int, int], None]


def measure(
    model: AttentionModel | Any,
    *,
    metrics: Iterable[str] | None = None,
    layers: Iterable[str | int] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    **load_options: Any,
) -> xr.Dataset:
    """Measure the heads of a model.

    Args:
        model: an AttentionModel, or anything that ``load`` accepts.
        metrics: names from the catalogue; by default all those marked so.
        layers: names or positions; by default all.
        seed: for nulls that are simulated.
        progress: called with (what, done, total) as the work goes on.
        **load_options: passed to ``load``.

    Returns:
        A Dataset with dims by name (layer, head, head_b, …), a variable a metric,
        ``<metric>_null_mean`` and ``<metric>_null_sd`` beside it, and provenance in its attributes.
        Layers with NaN or infinite weights are marked in ``valid`` and left NaN. What could not be
        computed is listed with the reason in ``attrs["skipped"]``, as JSON.

    Raises:
        ValueError: an unknown metric or layer; the message lists the known ones.
    """
    if not isinstance(model, AttentionModel):
        model = load(model, **load_options)
    chosen = _chosen_metrics(metrics)
    names = [model.layer_name(n) for n in layers] if layers is not None else model.layers
    torch.manual_seed(seed)

    fetch = _Fetch(model)
    collected = _Collected(chosen)
    whole_model = [m for m in chosen if "layers" in m.needs]
    kept: list[Heads] = []
    total = len(names) + bool(whole_model)
    for done, name in enumerate(names):
        if progress:
            progress(name, done, total)
        if name in model.refused:
            collected.refuse(name, model.refused[name])
            continue
        heads = model.heads(name)
        collected.begin(heads, model.sites[name].notes)
        if (bad := heads.nonfinite()) is not None:
            collected.invalid[name] = f"NaN or infinity in {bad}"
            continue
        for metric in chosen:
            if metric not in whole_model:
                collected.run(metric, name, partial(fetch, name, heads))
        if whole_model:
            kept.append(heads)
    for metric in whole_model:
        if progress:
            progress(metric.name, len(names), total)
        if kept:
            collected.run(metric, "", lambda need: kept)
    dataset = collected.dataset()
    dataset.attrs |= _provenance(model, seed)
    return dataset


def _chosen_metrics(names: Iterable[str] | None) -> list[Metric]:
    known = catalogue()
    if names is None:
        return [m for m in known.values() if m.default]
    names = list(names)
    unknown = [n for n in names if n not in known]
    if unknown:
        raise ValueError(f"unknown metric {', '.join(unknown)}; known: {', '.join(known)}")
    return [known[n] for n in names]


class _Fetch:
    """What a metric asks for by parameter name; the vocabulary is read once, reads once a layer."""

    def __init__(self, model: AttentionModel) -> None:
        self.vocabulary = cache(model.vocabulary)
        self.reads = lru_cache(maxsize=1)(model.reads)

    def __call__(self, layer: str, heads: Heads, need: str) -> Any:
        if need == "heads":
            return heads
        return self.vocabulary() if need == "vocabulary" else self.reads(layer)


def _provenance(model: AttentionModel, seed: int) -> dict[str, str]:
    packages = ("torch", "transformers", "transformer-lens", "numpy")
    versions = {p: importlib.metadata.version(p) for p in packages} | {"headmix": __version__}
    return {
        "headmix_format": str(FORMAT),
        "model": model.name,
        "processing": model.processing,
        "seed": str(seed),
        "versions": json.dumps(versions),
        "provenance": json.dumps(dict(model.provenance)),
    }


class _Collected:
    """Values by metric and layer, until they become one Dataset."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self.metrics = metrics
        self.shapes: dict[str, dict[str, Any]] = {}
        self.notes: dict[str, tuple[str, ...]] = {}
        self.invalid: dict[str, str] = {}
        self.values: dict[str, dict[str, tuple[Any, Any, Any]]] = {}
        self.skipped: dict[str, dict[str, str]] = {}

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
        try:
            arguments = [fetch(need) for need in metric.needs]
            value = _array(metric(*arguments))
            mean, sd = metric.null(*arguments) if metric.null else (None, None)
        except (NotApplicable, LinalgError) as reason:
            self.skipped.setdefault(metric.name, {})[layer] = str(reason)
            return
        self.values.setdefault(metric.name, {})[layer] = (value, _array(mean), _array(sd))

    def dataset(self) -> xr.Dataset:
        layers = list(self.shapes)
        per_layer = {
            "d_head": ("layer", [s["d_head"] for s in self.shapes.values()]),
            "d_model": ("layer", [s["d_model"] for s in self.shapes.values()]),
            "kv_of_head": self._stack(
                ("head",), {n: s["kv_of_head"] for n, s in self.shapes.items()}
            ),
            "valid": ("layer", [n not in self.invalid for n in layers]),
            "invalid_reason": ("layer", [self.invalid.get(n, "") for n in layers]),
        }
        ds = xr.Dataset(per_layer, coords={"layer": layers})
        for metric in self.metrics:
            for suffix, variable in self._variables(metric).items():
                ds[metric.name + suffix] = variable
            if metric.name in ds:
                ds[metric.name].attrs = _describe(metric)
        labels = LABELS | {"layer_b": layers}
        for dim in map(str, ds.dims):
            if dim not in ds.coords:
                ds = ds.assign_coords({dim: list(labels.get(dim, range(ds.sizes[dim])))})
        ds.attrs["skipped"] = json.dumps(self.skipped)
        ds.attrs["notes"] = json.dumps({n: v for n, v in self.notes.items() if v})
        return ds

    def _variables(self, metric: Metric) -> dict[str, xr.Variable]:
        by_layer = self.values.get(metric.name)
        if not by_layer:
            return {}
        parts = {}
        for i, suffix in enumerate(("", "_null_mean", "_null_sd")):
            arrays = {n: v[i] for n, v in by_layer.items() if v[i] is not None}
            if not arrays:
                continue
            scalar = all(a.ndim == 0 for a in arrays.values())
            dims = () if scalar else metric.dims
            if "layers" in metric.needs:
                parts[suffix] = xr.Variable(dims, self._spread(arrays[""]))
                continue
            if not scalar:
                arrays = {n: np.broadcast_to(a, by_layer[n][0].shape) for n, a in arrays.items()}
            parts[suffix] = self._stack(dims, arrays)
        return parts

    def _spread(self, values: np.ndarray) -> np.ndarray:
        """Values [layer, head, layer_b, head_b] over the valid layers, spread over all layers."""
        valid = [i for i, n in enumerate(self.shapes) if n not in self.invalid]
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


def _array(value: Any) -> np.ndarray | None:
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    return np.asarray(value)


def _describe(metric: Metric) -> dict[str, str]:
    return {
        "title": metric.title,
        "units": metric.unit,
        "formula": metric.formula,
        "range": metric.range_text,
        "null": metric.null_text,
        "invariant": ", ".join(sorted(metric.invariant)),
        "reference": metric.reference,
        "family": metric.family,
        "doc": metric.function.__doc__ or "",
    }
