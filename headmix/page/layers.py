"""Layer by layer, what stands out most by the metrics that the page knows by name."""

from dataclasses import dataclass

import numpy as np
import xarray as xr

from headmix.page.sentences import largest
from headmix.page.summary import in_order, link, place
from headmix.shapes import Measured, is_directed

#: Metric → what its largest value in a layer says.
COLUMNS = {
    "ov_change": "OV matrix changed most",
    "projection_kernel": "Overlap most in weights",
    "cka": "Most alike on the text",
    "loo_r2": "Best predicted by the others",
    "head_ablation": "Changes the output most when replaced",
    "interference_ratio": "Interference of all heads",
}


@dataclass(frozen=True)
class Cell:
    """The number that stands out in one layer, and where it is."""

    place: str
    link: str
    value: float
    null_mean: float | None
    null_sd: float | None
    z_null: float | None
    low: float | None
    high: float | None


def by_layer(ds: xr.Dataset) -> tuple[list[str], list[tuple[str, list[Cell | None]]]]:
    """Headings, and for each layer its name and a cell under each heading.

    Of a comparison the cells hold the differences largest in size.
    """
    compared = "compared" in ds.attrs
    names = [n for n in COLUMNS if n in ds and np.isfinite(ds[n]).any()]
    headings = [
        str(ds[n].attrs["title"]) if compared and n != "ov_change" else COLUMNS[n] for n in names
    ]
    measured = {n: Measured.of(ds, n).without_self() for n in names}
    layers = [str(n) for n in ds.layer.values]
    directed = {n: is_directed(ds[n]) for n in names}
    rows = [
        [_cell(ds, n, measured[n], i, compared, directed[n]) for n in names]
        for i in range(len(layers))
    ]
    return headings, list(zip(layers, rows, strict=True)) if names else []


def _cell(
    ds: xr.Dataset, name: str, measured: Measured, layer: int, compared: bool, directed: bool
) -> Cell | None:
    here = measured.value.isel(layer=[layer])
    found = largest(abs(here) if compared else here, 1)
    if not found:
        return None
    at = found[0] | {"layer": layer}
    at = at if directed else in_order(at)
    z = measured.z_null

    def one(array: xr.DataArray | None) -> float | None:
        return None if array is None else float(array.isel(at))

    return Cell(
        place=place(ds, at, directed) if len(at) > 1 else "",
        link=link(ds, at, name),
        value=float(measured.value.isel(at)),
        null_mean=one(measured.mean),
        null_sd=one(measured.sd),
        z_null=one(z),
        low=one(measured.low),
        high=one(measured.high),
    )
