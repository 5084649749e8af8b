"""Cards: what a Dataset says about one layer or one head, as plain dictionaries.

Nothing here knows a metric by name: where one shows up follows from the shape of its result.
"""

import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from headmix.collector import WITHIN_POSITION
from headmix.shapes import (
    Measured,
    aligned,
    counted_in,
    group_of,
    is_directed,
    layer_name,
    metric_names,
    shape_of,
)

#: How many partners a ranking lists.
NEAREST = 5

Card = dict[str, Any]
#: Where in the Dataset: layer, head and kv_head by label.
Place = Mapping[str, Any]


def summary(ds: xr.Dataset) -> Card:
    """What a run holds, and what it had to leave out and why."""
    invalid = ds.invalid_reason.values[~ds.valid.values], ds.layer.values[~ds.valid.values]
    return {
        "model": ds.attrs.get("model", ""),
        "layers": [str(name) for name in ds.layer.values],
        "metrics": metric_names(ds),
        "invalid": {str(name): str(reason) for reason, name in zip(*invalid, strict=True)},
        "skipped": _attribute(ds, "skipped"),
        "interrupted": ds.attrs.get("interrupted", ""),
    }


def layer_card(ds: xr.Dataset, layer: str | int) -> Card:
    """One layer: its own numbers, and a row for each head.

    Raises:
        ValueError: the Dataset has no such layer; the message lists those it has.
    """
    ds = aligned(ds)
    name = layer_name(ds, layer)
    card = _header(ds, name)
    card["metrics"] = _readings(ds, "profile", {"layer": name})
    card["within_position"] = _readings(ds, "profile", {"layer": name}, within_position=True)
    card["spectra"] = _spectra(ds, "layer_spectrum", {"layer": name})
    card["labels"] = _label_tables(ds, {"layer": name})
    card["heads"] = [_head_row(ds, name, head) for head in range(card["n_heads"])]
    return card


def head_card(ds: xr.Dataset, layer: str | int, head: int) -> Card:
    """One head: its numbers beside their nulls, its neighbours, its partners and its words.

    Raises:
        ValueError: no such layer or head; the message lists those there are. Or the layer is
            invalid; the message says why.
    """
    ds = aligned(ds)
    name = layer_name(ds, layer)
    card = _header(ds, name)
    if "invalid" in card:
        raise ValueError(f"layer {name} is invalid, it has no head cards: {card['invalid']}")
    if not 0 <= head < card["n_heads"]:
        raise ValueError(
            f"layer {name} has no head {head}; it has heads 0 to {card['n_heads'] - 1}"
        )
    here = _place(ds, name, head)
    card |= {"head": head, "kv_head": here["kv_head"]}
    card["metrics"] = _readings(ds, "map", here) + _of_labels(ds, here)
    card["within_position"] = _readings(ds, "map", here, within_position=True)
    card["nearest"] = _rankings(ds, "matrix", here)
    there = {f"{dim}_b": at for dim, at in here.items()}
    card["nearest_in_any_layer"] = _rankings(ds, "cross", here, directed=False)
    card["reads_from"] = _rankings(ds, "cross", there, directed=True)
    card["writes_to"] = _rankings(ds, "cross", here, directed=True)
    card["spectra"] = _spectra(ds, "spectrum", here)
    card["words"] = _words(ds, here)
    return card


def _header(ds: xr.Dataset, layer: str) -> Card:
    at = ds.sel(layer=layer)
    group = at.kv_of_head.values
    header: Card = {
        "model": ds.attrs.get("model", ""),
        "processing": ds.attrs.get("processing", ""),
        "layer": layer,
        "n_heads": int((group >= 0).sum()),
        "n_kv_heads": int(group.max()) + 1,
        "d_head": int(at.d_head),
        "d_model": int(at.d_model),
        "notes": _attribute(ds, "notes").get(layer, []),
        "skipped": _skipped(ds, layer),
        "text": _text(ds, layer),
        "causal": ds.attrs.get("causal", ""),
    }
    if not bool(at.valid):
        header["invalid"] = str(at.invalid_reason.item())
    return header


def _text(ds: xr.Dataset, layer: str) -> Card | None:
    """Which text the model read, and how much of it; None where only weights were measured."""
    if "n_tokens" not in ds:
        return None
    at = ds.sel(layer=layer)
    return {
        "source": ds.attrs.get("text", ""),
        "n_tokens": int(at.n_tokens),
        "n_documents": int(at.n_documents),
        "counted_in": counted_in(ds),
        "folds": int(ds.attrs.get("folds", 0)),
        "interrupted": ds.attrs.get("interrupted", ""),
    }


def _attribute(ds: xr.Dataset, name: str) -> dict[str, Any]:
    return dict(json.loads(ds.attrs.get(name, "{}")))


def _skipped(ds: xr.Dataset, layer: str) -> dict[str, str]:
    """Why a metric is missing here; reasons that hold for the whole model have no layer."""
    reasons = {m: by.get(layer, by.get("")) for m, by in _attribute(ds, "skipped").items()}
    return {metric: reason for metric, reason in reasons.items() if reason}


def _place(ds: xr.Dataset, layer: str, head: int) -> Place:
    kv_head = int(ds.kv_of_head.sel(layer=layer, head=head))
    return {"layer": layer, "head": head, "kv_head": kv_head}


def _head_row(ds: xr.Dataset, layer: str, head: int) -> Card:
    here = _place(ds, layer, head)
    nearest = {r["metric"]: r["partners"][0] for r in _rankings(ds, "matrix", here)}
    return {
        "head": head,
        "kv_head": here["kv_head"],
        "metrics": _readings(ds, "map", here),
        "nearest": nearest,
    }


def _of_shape(
    ds: xr.Dataset, shape: str, here: Place, within_position: bool = False
) -> list[tuple[Card, Measured]]:
    """The metrics of one shape, with the axes that ``here`` fixes taken out."""
    found = []
    for name in metric_names(ds, within_position=within_position):
        if shape_of(ds[name]) == shape:
            measured = Measured.of(ds, name).without_self()
            for dim in set(here) & set(ds[name].dims):
                measured = measured.sel(dim, here[dim])
            plain = name.removesuffix(WITHIN_POSITION) if within_position else name
            title = ds[plain if plain in ds else name].attrs["title"]
            about = {"metric": name, "title": title, "on": group_of(ds[name])}
            found.append((about, measured))
    return found


def _readings(ds: xr.Dataset, shape: str, here: Place, within_position: bool = False) -> list[Card]:
    found = _of_shape(ds, shape, here, within_position)
    return [about | _reading(measured, ()) for about, measured in found]


def _reading(measured: Measured, index: tuple[int, ...]) -> Card:
    """A number with its null and interval, each None where unknown or not finite."""
    parts = {
        "value": measured.value,
        "null_mean": measured.mean,
        "null_sd": measured.sd,
        "z_null": measured.z_null,
        "low": measured.low,
        "high": measured.high,
    }
    numbers = {n: None if a is None else float(a.values[index]) for n, a in parts.items()}
    return {n: v if v is not None and np.isfinite(v) else None for n, v in numbers.items()}


def _of_labels(ds: xr.Dataset, here: Place) -> list[Card]:
    """Of the metrics that have a number for each label and head, those of one head."""
    return [
        about | {"title": f"{about['title']}: {name}"} | _reading(measured.sel("label", name), ())
        for about, measured in _of_shape(ds, "labelled", here)
        if measured.value.dims == ("label",) and "layer" not in measured.value.dims
        if {*here} & {"head", "kv_head"} & {*ds[about["metric"]].dims}
        for name in measured.value.label.values.tolist()
    ]


def _label_tables(ds: xr.Dataset, here: Place) -> list[Card]:
    """The metrics of labels that count no heads: a row a label, a column a read-out or label."""
    tables = []
    for about, measured in _of_shape(ds, "labelled", here):
        dims = [str(d) for d in measured.value.dims]
        if {"head", "kv_head"} & {*dims}:
            continue
        columns = [str(c) for d in dims[1:] for c in measured.value[d].values]
        rows = []
        for i, name in enumerate(measured.value.label.values.tolist()):
            at = [(i, j) for j in range(len(columns))] if columns else [(i,)]
            rows.append({"label": name, "readings": [_reading(measured, place) for place in at]})
        tables.append(about | {"columns": columns, "rows": rows})
    return tables


def _rankings(ds: xr.Dataset, shape: str, here: Place, directed: bool | None = None) -> list[Card]:
    """For each pair metric the partners of one head, the largest value first.

    Args:
        directed: only metrics where it matters which head comes first, or only those where not.
    """
    rankings = []
    for about, measured in _of_shape(ds, shape, here):
        if directed is not None and is_directed(ds[about["metric"]]) != directed:
            continue
        values = measured.value
        order = np.argsort(-values.values, axis=None, kind="stable")[:NEAREST]
        partners = []
        for flat in order.tolist():
            index = tuple(int(i) for i in np.unravel_index(flat, values.shape))
            if np.isfinite(values.values[index]):
                where = _labels(values, values.dims, index)
                who = {dim.removesuffix("_b"): label for dim, label in where.items()}
                partners.append(who | _reading(measured, index))
        if partners:
            rankings.append(about | {"partners": partners})
    return rankings


def _spectra(ds: xr.Dataset, shape: str, here: Place) -> list[Card]:
    spectra = []
    for about, measured in _of_shape(ds, shape, here):
        values = measured.value.values
        if finite := values[np.isfinite(values)].tolist():
            spectra.append(about | {"values": finite})
    return spectra


def _words(ds: xr.Dataset, here: Place) -> list[Card]:
    """Text metrics: a row for each index of all axes but the last."""
    found = []
    for name in metric_names(ds):
        if shape_of(ds[name]) != "text" or "head" not in ds[name].dims:
            continue
        words = ds[name].sel({dim: at for dim, at in here.items() if dim in ds[name].dims})
        rows = []
        for index in np.ndindex(words.shape[:-1]):
            where = _labels(words, words.dims[:-1], index)
            if texts := [str(word) for word in words.values[index] if str(word)]:
                rows.append({"where": where, "words": texts})
        found.append({"metric": name, "title": words.attrs["title"], "rows": rows})
    return found


def _labels(
    values: xr.DataArray, dims: Sequence[Hashable], index: tuple[int, ...]
) -> dict[str, Any]:
    """The labels of one position, by axis."""
    at = zip(dims, index, strict=True)
    return {str(dim): values[dim].values.tolist()[i] for dim, i in at}
