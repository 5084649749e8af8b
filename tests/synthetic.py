"""A made-up run on a large model: every metric there is, on as many heads as asked for."""

import json

import numpy as np
import xarray as xr

from headmix.collector import LABELS, WITHIN_POSITION, _describe
from headmix.measurement import FORMAT
from headmix.readouts import LADDER
from headmix.registry import CAUSAL, FROM_TEXT, Metric, catalogue

#: Too many numbers for a page in any model of this size, and of a shape that no panel draws.
NEVER = ("principal_angles",)

#: The nulls of these differ from pair to pair, or from head to head, in their sd.
EACH_SD = ("composition", "pair_interference", "ov_cosine", "loo_r2", "probe", "view_share")


def large_run(
    layers: int = 80,
    heads: int = 64,
    kv_heads: int = 8,
    d_head: int = 128,
    compositions: tuple[str, ...] = ("composition_q", "composition_k", "composition_v"),
    seed: int = 0,
) -> xr.Dataset:
    """Numbers at random, but with the axes, ranges, nulls and intervals that real ones have.

    Attention, joint and causal metrics are in it; of the pairs of any two layers only those of the
    named ``compositions``, at 26 million numbers each for 80 layers of 64 heads.
    """
    random = np.random.default_rng(seed)
    labels = ["pos", "position", "capitalised"]
    sizes = {
        "layer": layers, "head": heads, "kv_head": kv_heads, "singular": d_head,
        "eigen": heads * d_head, "direction": 3, "side": 2, "sign": 2, "place": 5,
        "label": len(labels), "read_out": len(LADDER),
    }  # fmt: skip
    names = [f"L{n}" for n in range(layers)]
    ds = xr.Dataset(coords={"layer": names, "layer_b": names, "label": labels, "label_b": labels})
    for metric in catalogue().values():
        across = "layer_b" in metric.dims
        if metric.name in NEVER or (across and metric.name not in compositions):
            continue
        dims = metric.dims if across else ("layer", *metric.dims)
        shape = [sizes[d.removesuffix("_b")] for d in dims]
        for suffix in ("", WITHIN_POSITION) if metric.within_position else ("",):
            made = _words(random, shape) if "vocabulary" in metric.name else None
            parts = {"": made} if made is not None else _numbers(random, metric, dims, shape)
            for part, values in parts.items():
                ds[metric.name + suffix + part] = (dims, values)
            ds[metric.name + suffix].attrs = _describe(metric, within=bool(suffix))
    group = np.arange(heads) // (heads // kv_heads)
    ds["kv_of_head"] = (("layer", "head"), np.tile(group, (layers, 1)))
    for name, value in {"d_head": d_head, "d_model": heads * d_head, "valid": True}.items():
        ds[name] = ("layer", [value] * layers)
    ds["n_tokens"], ds["n_documents"] = ("layer", [20000.0] * layers), ("layer", [40.0] * layers)
    known = LABELS | {"read_out": LADDER}
    for dim in map(str, ds.dims):
        if dim not in ds.coords:
            ds = ds.assign_coords({dim: list(known.get(dim, range(ds.sizes[dim])))})
    about = {"model": "a large model", "processing": "raw", "seed": "0", "text": "made up"}
    about |= {"headmix_format": str(FORMAT), "folds": "5", "skipped": "{}", "versions": "{}"}
    return ds.assign_attrs(about | {"provenance": json.dumps({"source": "random numbers"})})


def _numbers(
    random: np.random.Generator, metric: Metric, dims: tuple[str, ...], shape: list[int]
) -> dict[str, np.ndarray]:
    """Some heads stand out from the rest; null sds, and half-widths of intervals, vary."""
    value = random.beta(2, 20, shape).astype("f4") if len(shape) < 4 else _uniform(random, shape)
    if dims[-1] in ("singular", "eigen"):
        value = -np.sort(-value) * np.exp(-np.arange(shape[-1]) / shape[-1]).astype("f4")
    pair = [d for d in dims if d.endswith("_b") and d != "layer_b"]
    if (pair == ["head_b"] and "layer_b" not in dims) or pair == ["kv_head_b"]:
        value = (value + value.mT) / 2
        value[:, np.arange(shape[-1]), np.arange(shape[-1])] = 1
    if "layer_b" in dims:
        later = np.triu(np.ones((shape[0], shape[0]), bool), 1)
        value[~np.broadcast_to(later[:, None, :, None], shape)] = np.nan
    if {*metric.needs} & {*CAUSAL} and pair == ["head_b"]:
        keep = random.random(shape) < 100 / shape[-1] ** 2  # of very many pairs a sample is read
        value[~(keep | keep.mT)] = np.nan
    parts = {"": value} | _null(random, metric, value, pair)
    if {*metric.needs} & {*FROM_TEXT}:
        width = 0.02 * (1 + _like(random, shape, pair))
        parts |= {"_low": np.clip(value - width, 0, None), "_high": np.clip(value + width, 0, 1)}
    return parts


def _null(
    random: np.random.Generator, metric: Metric, value: np.ndarray, pair: list[str]
) -> dict[str, np.ndarray]:
    """As of the real metrics: mostly the same everywhere or in a layer; of some, of each pair."""
    same = np.full(value.shape, 0.09, "f4")
    if "attention" in metric.needs:
        return {"_null_mean": same + 0.1 * _like(random, value.shape, pair)}
    if metric.dims == ("eigen",):
        return {"_null_mean": np.broadcast_to(value.mean(0), value.shape)}
    if metric.dims == ("head", "singular"):
        sd = 0.01 * value * (1 + 0.1 * _uniform(random, value.shape))
        return {"_null_mean": value * (1 + 0.01 * _uniform(random, value.shape)), "_null_sd": sd}
    if {*metric.needs} & {*CAUSAL}:
        return {"_null_mean": same}
    if metric.name.startswith(EACH_SD):
        return {"_null_mean": same, "_null_sd": 0.01 * (1 + _like(random, value.shape, pair))}
    layer = _uniform(random, [len(value), *[1] * (value.ndim - 1)])
    return {"_null_mean": same, "_null_sd": np.broadcast_to(0.01 * (1 + layer), value.shape)}


def _uniform(random: np.random.Generator, shape: list[int]) -> np.ndarray:
    return random.random(shape, dtype="f4")


def _like(random: np.random.Generator, shape: list[int], pair: list[str]) -> np.ndarray:
    values = _uniform(random, shape)
    return (values + values.mT) / 2 if pair and len(shape) == 3 else values


def _words(random: np.random.Generator, shape: list[int]) -> np.ndarray:
    """Tokens out of 100,000, rare ones rarely."""
    rank = np.minimum(random.zipf(1.2, shape), 100_000)
    return np.array([f" token{n}" for n in range(100_001)], object)[rank]
