"""What the page says in words and tables, computed from the Dataset."""

import json
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import numpy as np
import xarray as xr

from headmix.collector import WITHIN_POSITION
from headmix.shapes import (
    UNITS,
    Measured,
    by_replacing,
    counted_in,
    group_of,
    is_directed,
    metric_names,
    shape_of,
)

_QUANTISED = re.compile(r"\bi?q[1-8]_\w+|\bnf4\b|\bint[48]\b|[48][- ]?bit|quanti[sz]ed", re.I)


@dataclass(frozen=True)
class Row:
    """One metric over the whole model, and the place furthest from its null."""

    title: str
    name: str
    n: int
    mean: float
    null_mean: float | None
    null_sd: float | None
    beyond: float | None
    place: str
    link: str
    value: float
    z_null: float | None
    low: float | None
    high: float | None
    at: dict[Any, Any]


def rows(ds: xr.Dataset) -> list[Row]:
    """A line for each numeric metric that counts heads, pairs or layers."""
    return _rows(ds, metric_names(ds, within_position=False))


def tables(ds: xr.Dataset) -> list[tuple[str, list[Row]]]:
    """The lines under a heading each: from weights, on text, and with position taken out."""
    plain = metric_names(ds, within_position=False)
    parts = {
        "From the weights": [n for n in plain if group_of(ds[n]) == "weights"],
        "On text": [n for n in plain if group_of(ds[n]) == "text" and not by_replacing(ds[n])],
        "On text, when heads are replaced": [n for n in plain if by_replacing(ds[n])],
        "On text, what position explains taken out": metric_names(ds, within_position=True),
    }
    made = {heading: _rows(ds, names) for heading, names in parts.items()}
    return [(heading, lines) for heading, lines in made.items() if lines]


#: A row's number → what its column is called where the tables are saved.
_COLUMNS = {
    "name": "metric", "title": "title", "n": "n", "mean": "mean", "null_mean": "null_mean",
    "null_sd": "null_sd", "beyond": "share_beyond_2_sd", "place": "furthest_from_null",
    "value": "value", "z_null": "z", "low": "low", "high": "high",
}  # fmt: skip


def plain(tables: list[tuple[str, list[Row]]]) -> dict[str, Any]:
    """The tables as columns and rows, with None for NaN: what the page saves of them."""
    lines = [
        [heading, *(_finite(getattr(row, name)) for name in _COLUMNS)]
        for heading, rows in tables
        for row in rows
    ]
    return {"columns": ["measured", *_COLUMNS.values()], "rows": lines}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _title(ds: xr.Dataset, name: str) -> str:
    """What a metric is called; the heading says already whether position is taken out."""
    plain = name.removesuffix(WITHIN_POSITION)
    return str(ds[plain if plain in ds else name].attrs["title"])


def _rows(ds: xr.Dataset, names: list[str]) -> list[Row]:
    shapes = ("profile", "map", "matrix", "cross", "labelled")
    drawn = [n for n in names if shape_of(ds[n]) in shapes]
    return [row for name in drawn if (row := _row(ds, name)) is not None]


def _row(ds: xr.Dataset, name: str) -> Row | None:
    measured = Measured.of(ds, name).without_self()
    value = measured.value
    n = int(np.isfinite(value).sum())
    if n == 0:
        return None
    distance = value if measured.mean is None else abs(value - measured.mean)
    if (z := measured.z_null) is not None and np.isfinite(z).any():
        distance = abs(z)
    if not np.isfinite(distance).any():
        return None
    flat = int(np.nanargmax(distance.values))
    index = map(int, np.unravel_index(flat, value.shape))
    at = dict(zip(map(str, value.dims), index, strict=True))
    directed = shape_of(value) not in ("matrix", "cross") or is_directed(value)
    at = at if directed else in_order(at)
    return Row(
        title=_title(ds, name),
        name=name,
        n=n if directed else n // 2,
        mean=float(value.mean()),
        null_mean=_mean(measured.mean, value),
        null_sd=_mean(measured.sd, value),
        beyond=None if z is None else _share_beyond(z.values),
        place=place(ds, at, directed),
        link=link(ds, at, name),
        value=float(value.isel(at)),
        z_null=None if z is None else float(z.isel(at)),
        low=_at(measured.low, at),
        high=_at(measured.high, at),
        at=at,
    )


def in_order(at: dict[str, int]) -> dict[str, int]:
    """The place of a pair of one layer, the lower head first; for pairs without direction."""
    ends = next(((u, f"{u}_b") for u in UNITS if f"{u}_b" in at), None)
    if ends is None or "layer_b" in at or at[ends[0]] <= at[ends[1]]:
        return at
    return at | {ends[0]: at[ends[1]], ends[1]: at[ends[0]]}


def _at(array: xr.DataArray | None, at: dict[Any, Any]) -> float | None:
    return None if array is None else float(array.isel(at))


def _share_beyond(z: np.ndarray) -> float | None:
    finite = z[np.isfinite(z)]
    return float((abs(finite) > 2).mean()) if finite.size else None


def _mean(null: xr.DataArray | None, value: xr.DataArray) -> float | None:
    """The null's mean over the places that have a value."""
    return None if null is None else float(null.where(np.isfinite(value)).mean())


def place(ds: xr.Dataset, at: dict[Any, Any], directed: bool = True) -> str:
    """Where in the model, in the field's shorthand: L3H5, a pair L3H5 – L3H7,
    or, where one writes and the other reads, a pair across layers L3H5 → L4H2."""
    ends = [end for end in ("", "_b") if not end or any(f"{u}_b" in at for u in UNITS)]
    names = [_end(ds, at, end) for end in ends]
    between = " → " if directed and "layer_b" in at else " – "
    of = [str(ds[d].values[at[d]]) for d in ("label", "read_out", "label_b") if d in at]
    return " · ".join([between.join(names), *of])


def _end(ds: xr.Dataset, at: dict[Any, Any], end: str = "") -> str:
    """One end of a pair, or the only one; the page reads these names back."""
    layer = str(ds.layer.values[at.get("layer" + end, at["layer"])])
    unit = next((u for u in UNITS if u + end in at), None)
    if unit is None:
        return layer
    space = "" if re.fullmatch(r"L\d+", layer) else " "
    return f"{layer}{space}{'H' if unit == 'head' else 'KV'}{at[unit + end]}"


def link(ds: xr.Dataset, at: dict[Any, Any], metric: str = "") -> str:
    """The fragment that selects this place on the page, a pair where it is one, and shows the
    metric in every panel that can."""
    chosen = {"layer": str(ds.layer.values[at["layer"]])}
    if (head := _head(ds, at)) is not None:
        chosen["head"] = str(head)
    if (other := _head(ds, at, "_b")) is not None:
        layer = at.get("layer_b", at["layer"])
        chosen["with"] = _end(ds, {"layer": layer, "head": other})
    if "label" in at:
        chosen["label"] = str(at["label"])
    if metric:
        chosen["metric"] = metric.removesuffix(WITHIN_POSITION)
    if metric.endswith(WITHIN_POSITION):
        chosen["position"] = "out"
    return "#" + urlencode(chosen)


def _head(ds: xr.Dataset, at: dict[Any, Any], end: str = "") -> int | None:
    """The head of a place; the first of its group where the place is a KV head."""
    if "head" + end in at:
        return int(at["head" + end])
    if "kv_head" + end not in at or "kv_of_head" not in ds:
        return None
    groups = ds.kv_of_head.values[at.get("layer" + end, at["layer"])]
    return next((h for h, group in enumerate(groups) if group == at["kv_head" + end]), None)


def runs(ds: xr.Dataset) -> list[str]:
    """What A and B of a comparison are called; nothing where it is none."""
    return [str(run.get("model", "")) for run in _json(ds, "compared").values()]


def quantised(ds: xr.Dataset) -> str | None:
    """How the weights were quantised, where provenance or notes say so."""
    found = _QUANTISED.search(ds.attrs.get("provenance", "") + ds.attrs.get("notes", ""))
    return found[0] if found else None


def facts(ds: xr.Dataset) -> list[tuple[str, str]]:
    """The model's sizes and what was read, for the head of the page."""
    found = [("layers", str(ds.sizes["layer"]))]
    if "kv_of_head" in ds:
        groups = ds.kv_of_head.values
        found.append(("heads a layer", _span((groups >= 0).sum(-1))))
        if (kv := groups.max(-1) + 1).tolist() != (groups >= 0).sum(-1).tolist():
            found.append(("KV heads a layer", _span(kv)))
    for name in ("d_head", "d_model"):
        if name in ds:
            found.append((name, _span(ds[name].values)))
    found.append(("weights", ds.attrs.get("processing", "not said")))
    if "n_tokens" in ds:
        found += [("tokens of text", _span(ds.n_tokens.values))]
        found += [(counted_in(ds), _span(ds.n_documents.values))]
    return found


def _span(values: Any) -> str:
    low, high = int(np.min(values)), int(np.max(values))
    return f"{low:,}" if low == high else f"{low:,} – {high:,}"


def left_out(ds: xr.Dataset) -> list[tuple[str, str, str]]:
    """(what, where, why) for layers that are invalid and metrics that were skipped."""
    layers = [str(n) for n in ds.layer.values]
    out = []
    if "invalid_reason" in ds:
        reasons = ds.invalid_reason.values
        out = [("the whole layer", n, str(r)) for n, r in zip(layers, reasons, strict=True) if r]
    for metric, by_layer in _json(ds, "skipped").items():
        by_reason: dict[str, list[str]] = {}
        for layer, reason in by_layer.items():
            same = reason.replace(layer, "the layer") if layer else reason
            by_reason.setdefault(same, []).append(layer)
        out += [(metric, _where(ls, layers), reason) for reason, ls in by_reason.items()]
    undrawn = [n for n in metric_names(ds) if shape_of(ds[n]) == "other"]
    why = "no panel draws results of this shape; the numbers are in the results file"
    return out + [(n, "dims " + ", ".join(map(str, ds[n].dims)), why) for n in undrawn]


def notes(ds: xr.Dataset) -> list[tuple[str, str]]:
    """(where, what) for each note about the layers, equal ones gathered."""
    layers = [str(n) for n in ds.layer.values]
    by_note: dict[str, list[str]] = {}
    for layer, texts in _json(ds, "notes").items():
        for text in texts:
            by_note.setdefault(text, []).append(layer)
    return [(_where(where, layers), text) for text, where in by_note.items()]


def _where(some: list[str], layers: list[str]) -> str:
    if some in ([""], layers):
        return "all layers"
    return ", ".join(some) if len(some) <= 6 else f"{', '.join(some[:5])} and {len(some) - 5} more"


def provenance(ds: xr.Dataset) -> dict[str, str]:
    """How these numbers came to be, flattened for a table."""
    known = {
        "model": "model",
        "processing": "weights",
        "seed": "seed",
        "headmix_format": "format",
        "text": "text",
        "text_sha256": "SHA-256 of the text",
        "text_rule": "which tokens count",
        "text_unknown_tokens": "tokens unknown to the tokenizer",
        "labels": "labels that probes look for",
        "folds": "folds of documents",
        "plan": "pass over the text",
        "causal": "heads replaced",
        "interrupted": "interrupted",
    }
    own = {label: str(ds.attrs[name]) for name, label in known.items() if name in ds.attrs}
    versions = ", ".join(f"{k} {v}" for k, v in _json(ds, "versions").items())
    rest = {k: v for k, v in _json(ds, "provenance").items() if k not in own}
    return own | {str(k): str(v) for k, v in rest.items()} | {"versions": versions}


def _json(ds: xr.Dataset, name: str) -> dict[str, Any]:
    """An attribute that holds a JSON object; empty where it is missing or not one."""
    try:
        found = json.loads(ds.attrs.get(name, "{}"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
