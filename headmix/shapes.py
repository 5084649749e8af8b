"""The shapes that results come in. Plots and page are driven by these, never by a metric's name."""

import re
from collections.abc import Hashable
from dataclasses import dataclass, replace

import numpy as np
import xarray as xr

from headmix.collector import WITHIN_POSITION
from headmix.registry import CAUSAL, FROM_TEXT

#: Added to a metric's name in a comparison: what each run had, and what the run is called.
RUNS = {"_run_a": "A", "_run_b": "B"}

#: Axes that count parts of a layer.
UNITS = ("head", "kv_head")


def metric_names(ds: xr.Dataset, *, within_position: bool | None = None) -> list[str]:
    """The variables that hold a metric: those that ``measure`` gave a title.

    In a comparison these are the differences; what each run had is found by ``RUNS``.

    Args:
        ds: from ``measure``.
        within_position: only those with position taken out, or only those as they are.
    """
    names = [
        str(name)
        for name, variable in ds.items()
        if "title" in variable.attrs and not str(name).endswith(tuple(RUNS))
    ]
    if within_position is None:
        return names
    return [name for name in names if name.endswith(WITHIN_POSITION) == within_position]


def group_of(variable: xr.DataArray) -> str:
    """What a metric was measured on: "weights" or "text"."""
    needs = str(variable.attrs.get("needs", "")).split(", ")
    return "text" if {*FROM_TEXT} & {*needs} else "weights"


def by_replacing(variable: xr.DataArray) -> bool:
    """Whether heads were replaced to measure it."""
    return bool({*CAUSAL} & {*str(variable.attrs.get("needs", "")).split(", ")})


def counted_in(ds: xr.Dataset) -> str:
    """What the text was dealt to folds by: "documents", or "blocks" where it was cut."""
    cut = re.search(r", cut into \d+ contiguous blocks", str(ds.attrs.get("text", "")))
    return "blocks" if cut else "documents"


def layer_name(ds: xr.Dataset, layer: str | int) -> str:
    """The name of a layer given by name, by number (5 is L5), or else by position in the Dataset.

    Raises:
        ValueError: there is no such layer; the message lists those there are.
    """
    names = [str(name) for name in np.atleast_1d(ds.layer.values)]
    for candidate in (str(layer), f"L{layer}"):
        if candidate in names:
            return candidate
    position = int(layer) if re.fullmatch(r"-?\d+", str(layer)) else len(names)
    if -len(names) <= position < len(names):
        return names[position]
    raise ValueError(f"no layer {layer!r} in these results; they have {', '.join(names)}")


def aligned(ds: xr.Dataset) -> xr.Dataset:
    """The Dataset with the second axes of pairs cut to what its first axes hold.

    A choice of layers leaves ``layer_b`` whole; what is left out is left out at both ends here.

    Raises:
        ValueError: no axis of layers, or only some of the heads: they are counted from 0.
    """
    if "layer" not in ds.dims:
        raise ValueError('these results have no axis of layers: choose with sel(layer=["L0"])')
    for unit in UNITS:
        labels = ds[unit].values if unit in ds.coords else np.arange(ds.sizes.get(unit, 0))
        lost = unit not in ds.dims and (unit in ds.coords or f"{unit}_b" in ds.dims)
        if lost or labels.tolist() != list(range(labels.size)):
            raise ValueError(
                f"these results were cut to {unit} {labels.tolist()}: cards and report need every "
                f"{unit} of a layer; only layers can be chosen, as in sel(layer=[...])"
            )
    for dim in ("layer", *UNITS):
        if f"{dim}_b" not in ds.dims or ds[f"{dim}_b"].values.tolist() == ds[dim].values.tolist():
            continue
        if missing := {*ds[dim].values.tolist()} - {*ds[f"{dim}_b"].values.tolist()}:
            raise ValueError(
                f"these results were cut along {dim}_b, where {sorted(missing)} of {dim} are not: "
                f"choose along {dim} alone"
            )
        ds = ds.sel({f"{dim}_b": ds[dim].values})
    return ds


def shape_of(variable: xr.DataArray | xr.Variable) -> str:
    """One of profile, map, matrix, cross, layer_spectrum, spectrum, labelled, text, other.

    ========== ============================== ============================
    profile    [layer]                        one number a layer
    map        [layer, head]                  one a head
    matrix     [layer, head, head_b]          one a pair of the same layer
    cross      [layer, head, layer_b, head_b] one a pair of any two layers
    spectra    [layer, k], [layer, head, k]   a curve a layer or head
    labelled   [layer, label], [layer, label, one a label: alone, or at each read-out,
               x]                             head or other label
    text       anything                       words
    ========== ============================== ============================
    """
    if variable.dtype.kind in "OUST":
        return "text"
    if "label" in variable.dims:
        return "labelled" if len(variable.dims) <= 3 else "other"
    match tuple(d for d in variable.dims if d != "layer"):
        case ():
            return "profile"
        case (unit,):
            return "map" if unit in UNITS else "layer_spectrum"
        case (unit, unit_b) if unit in UNITS:
            return "matrix" if unit_b == f"{unit}_b" else _pair_or_curve(unit_b)
        case (unit, "layer_b", unit_b) if unit in UNITS and unit_b == f"{unit}_b":
            return "cross"
    return "other"


def is_directed(value: xr.DataArray) -> bool:
    """Whether it matters which head of a pair comes first, as where one writes what one reads."""
    first = [d for d in ("layer", *UNITS) if d in value.dims and f"{d}_b" in value.dims]
    second = [f"{d}_b" for d in first]
    rest = [d for d in value.dims if d not in (*first, *second)]
    there = value.transpose(*rest, *first, *second).values
    back = value.transpose(*rest, *second, *first).values
    return not np.allclose(there, back, rtol=1e-4, atol=1e-6, equal_nan=True)


def _pair_or_curve(dim: Hashable) -> str:
    return "other" if dim in UNITS or str(dim).endswith("_b") else "spectrum"


@dataclass(frozen=True, eq=False)
class Measured:
    """A metric, its null and its interval on the same axes; None where there is none.

    Attributes:
        value: the metric.
        mean, sd: its null.
        low, high: the ends of its 95 % interval over documents.
    """

    value: xr.DataArray
    mean: xr.DataArray | None
    sd: xr.DataArray | None
    low: xr.DataArray | None = None
    high: xr.DataArray | None = None

    @classmethod
    def of(cls, ds: xr.Dataset, metric: str) -> "Measured":
        value = ds[metric]

        def beside(suffix: str) -> xr.DataArray | None:
            if metric + suffix not in ds:
                return None
            return ds[metric + suffix].broadcast_like(value).transpose(*value.dims)

        suffixes = ("_null_mean", "_null_sd", "_low", "_high")
        return cls(value, *(beside(suffix) for suffix in suffixes))

    def sel(self, dim: str, label: object) -> "Measured":
        """One label of one axis."""
        rest = (self.mean, self.sd, self.low, self.high)
        return Measured(
            self.value.sel({dim: label}), *(a if a is None else a.sel({dim: label}) for a in rest)
        )

    def without_self(self) -> "Measured":
        """The value of a unit with itself blanked: it compares nothing."""
        value = self.value
        for unit in (*UNITS, "label"):
            if unit in value.dims and f"{unit}_b" in value.dims:
                same = value[unit] == value[f"{unit}_b"]
                if "layer_b" in value.dims:
                    same = same & (value["layer"] == value["layer_b"])
                value = value.where(~same)
        return replace(self, value=value)

    def reduce(self, how: str, dims: tuple[str, ...]) -> "Measured":
        """The mean or max over axes. Either has a spread of its own: null's sd and interval go."""
        mean = None if self.mean is None else self.mean.mean(dims)
        return Measured(getattr(self.value, how)(dims), mean, None)

    @property
    def z_null(self) -> xr.DataArray | None:
        """Distance from the null mean in null standard deviations; not a test of anything."""
        if self.mean is None or self.sd is None:
            return None
        return (self.value - self.mean) / self.sd.where(self.sd > 0)
