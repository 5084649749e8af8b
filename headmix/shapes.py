"""The shapes that results come in. Plots and page are driven by these, never by a metric's name."""

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import xarray as xr

#: Axes that count parts of a layer.
UNITS = ("head", "kv_head")


def metric_names(ds: xr.Dataset) -> list[str]:
    """The variables that hold a metric: those that ``measure`` gave a title."""
    return [str(name) for name, variable in ds.items() if "title" in variable.attrs]


def shape_of(variable: xr.DataArray | xr.Variable) -> str:
    """One of profile, map, matrix, cross, layer_spectrum, spectrum, text, other.

    ========== ============================== ============================
    profile    [layer]                        one number a layer
    map        [layer, head]                  one a head
    matrix     [layer, head, head_b]          one a pair of the same layer
    cross      [layer, head, layer_b, head_b] one a pair of any two layers
    spectra    [layer, k], [layer, head, k]   a curve a layer or head
    text       anything                       words
    ========== ============================== ============================
    """
    if variable.dtype.kind in "OUST":
        return "text"
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


def _pair_or_curve(dim: Hashable) -> str:
    return "other" if dim in UNITS or str(dim).endswith("_b") else "spectrum"


@dataclass(frozen=True, eq=False)
class Measured:
    """A metric with its null beside it, broadcast to the same axes; None where there is none."""

    value: xr.DataArray
    mean: xr.DataArray | None
    sd: xr.DataArray | None

    @classmethod
    def of(cls, ds: xr.Dataset, metric: str) -> "Measured":
        value = ds[metric]

        def beside(suffix: str) -> xr.DataArray | None:
            if metric + suffix not in ds:
                return None
            return ds[metric + suffix].broadcast_like(value).transpose(*value.dims)

        return cls(value, beside("_null_mean"), beside("_null_sd"))

    def sel(self, dim: str, label: object) -> "Measured":
        """One label of one axis."""
        mean, sd = (a if a is None else a.sel({dim: label}) for a in (self.mean, self.sd))
        return Measured(self.value.sel({dim: label}), mean, sd)

    def without_self(self) -> "Measured":
        """The value of a unit with itself blanked: it compares nothing."""
        value = self.value
        for unit in UNITS:
            if unit in value.dims and f"{unit}_b" in value.dims and "layer_b" not in value.dims:
                size = value.sizes[unit]
                same = xr.DataArray(np.eye(size, dtype=bool), dims=(unit, f"{unit}_b"))
                value = value.where(~same)
        return Measured(value, self.mean, self.sd)

    def reduce(self, how: str, dims: tuple[str, ...]) -> "Measured":
        """The mean or max over axes. Either has a spread of its own, so the null's sd goes."""
        mean = None if self.mean is None else self.mean.mean(dims)
        return Measured(getattr(self.value, how)(dims), mean, None)

    @property
    def z_null(self) -> xr.DataArray | None:
        """Distance from the null mean in null standard deviations; not a test of anything."""
        if self.mean is None or self.sd is None:
            return None
        return (self.value - self.mean) / self.sd.where(self.sd > 0)
