"""What the sentences of a page have in common: a number with its interval, the next ones, n."""

from dataclasses import dataclass

import numpy as np
import xarray as xr

from headmix.page.summary import place
from headmix.shapes import Measured, counted_in
from headmix.terminal import interval


@dataclass(frozen=True)
class Finding:
    """A sentence, and the fragment that shows where it comes from."""

    text: str
    link: str
    place: str


def largest(value: xr.DataArray, n: int) -> list[dict[str, int]]:
    """The places of the n largest values, the largest first."""
    filled = np.nan_to_num(value.values, nan=-np.inf)
    order = np.argsort(-filled, axis=None, kind="stable")[: min(n, int(np.isfinite(value).sum()))]
    index = zip(*np.unravel_index(order, value.shape), strict=True)
    return [dict(zip(map(str, value.dims), map(int, at), strict=True)) for at in index]


def said(measured: Measured, at: dict[str, int]) -> str:
    """A number with its interval."""
    value = f"{float(measured.value.isel(at)):.2f}"
    if measured.low is None or measured.high is None:
        return value.replace("-", "−")
    ends = {"low": float(measured.low.isel(at)), "high": float(measured.high.isel(at))}
    return f"{value} (95 % interval {interval(ends)})".replace("-", "−")


def also(ds: xr.Dataset, measured: Measured, places: list[dict[str, int]]) -> str:
    """Further places with their numbers."""
    told = [f"{place(ds, at)} with {said(measured, at)}" for at in places]
    return " and ".join(told) or "no more"


def null(measured: Measured, at: dict[str, int]) -> str:
    """The null of one number; nothing where there is none."""
    if measured.mean is None:
        return ""
    mean = f"null {float(measured.mean.isel(at)):.2f}"
    sd = "" if measured.sd is None else f" (sd {float(measured.sd.isel(at)):.2g})"
    return f", {mean}{sd}".replace("-", "−")


def read(ds: xr.Dataset) -> str:
    """How much text that rests on."""
    if "n_tokens" not in ds:
        return ""
    tokens, documents = float(ds.n_tokens.max()), float(ds.n_documents.max())
    return f" On {tokens:,.0f} tokens of {documents:,.0f} {counted_in(ds)}."


def relation(value: float, against: float) -> str:
    """How a mean stands to its null."""
    if abs(value - against) <= 0.02 * abs(against):
        return "about"
    return "more than" if value > against else "less than"
