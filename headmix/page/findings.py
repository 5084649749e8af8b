"""A few sentences about metrics that the page knows by name, each with number, null and count."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import xarray as xr

from headmix.page import changes
from headmix.page.summary import Row, link, place, rows
from headmix.shapes import Measured, counted_in
from headmix.terminal import interval


@dataclass(frozen=True)
class Finding:
    """A sentence, and the fragment that shows where it comes from."""

    text: str
    link: str
    place: str


def find(ds: xr.Dataset) -> list[Finding]:
    """What stands out, where the metrics it rests on were measured."""
    if "compared" in ds.attrs:
        return [Finding(*told) for told in changes.find(ds)]
    by_name = {row.name: row for row in rows(ds)}
    sentences: dict[str, Callable[[xr.Dataset, Row], Finding | None]] = {
        "projection_kernel": _overlap,
        "joint_span": _span,
        "ov_stable_rank": _rank,
        "composition_v": _composition,
        "ov_copying": _copying,
        "loo_r2": _predicted,
        "interference_ratio": _cancelling,
        "cka": _alike,
    }
    told = (say(ds, by_name[n]) for n, say in sentences.items() if n in by_name)
    return [finding for finding in told if finding is not None]


def _overlap(ds: xr.Dataset, row: Row) -> Finding | None:
    if row.null_mean is None or row.null_sd is None or row.beyond is None:
        return None
    relation = _relation(row.mean, row.null_mean)
    return Finding(
        f"The write subspaces of two heads of a layer overlap by {row.mean:.1%} on average "
        f"({row.n} pairs), {relation} the {row.null_mean:.1%} of random subspaces of the same "
        f"size (null sd {row.null_sd:.1%}). {row.beyond:.0%} of the pairs lie more than two null "
        f"sd away from that; the furthest overlap by {row.value:.1%}.",
        row.link,
        row.place,
    )


def _span(ds: xr.Dataset, row: Row) -> Finding | None:
    if row.null_mean is None:
        return None
    return Finding(
        f"Together the heads of a layer span {row.mean:.0f} directions effectively, "
        f"{_relation(row.mean, row.null_mean)} the {row.null_mean:.0f} that random heads would "
        f"(mean of {row.n} layers); furthest from that is one layer with {row.value:.0f}.",
        row.link,
        row.place,
    )


def _rank(ds: xr.Dataset, row: Row) -> Finding | None:
    if row.null_mean is None:
        return None
    return Finding(
        f"A head's OV matrix has a stable rank of {row.mean:.1f} on average ({row.n} heads), "
        f"{_relation(row.mean, row.null_mean)} the {row.null_mean:.1f} of a Gaussian matrix of "
        f"its shape; the furthest has {row.value:.1f}.",
        row.link,
        row.place,
    )


def _composition(ds: xr.Dataset, row: Row) -> Finding | None:
    if row.null_mean is None:
        return None
    measured = Measured.of(ds, row.name).value
    at = {str(d): int(i) for d, i in measured.argmax(...).items()}
    strongest = float(measured.isel(at))
    return Finding(
        f"The strongest composition through values is {strongest:.3f}, "
        f"{strongest / row.null_mean:.1f} times the {row.null_mean:.3f} of unrelated heads "
        f"(the largest of {row.n} pairs; the mean is {row.mean:.3f}).",
        link(ds, at),
        place(ds, at),
    )


def _copying(ds: xr.Dataset, row: Row) -> Finding | None:
    value = ds[row.name].values
    finite = value[np.isfinite(value)]
    return Finding(
        f"{int((finite > 0.5).sum())} of {row.n} heads tend to raise the logit of the tokens they "
        f"attend to (copying score above 0.5) and {int((finite < -0.5).sum())} to lower it (below "
        f"−0.5); unrelated weights give about 0. Read directly from the embeddings, past every "
        f"other layer and norm. The largest in size is {row.value:+.2f}.".replace("-", "−"),
        row.link,
        row.place,
    )


def _predicted(ds: xr.Dataset, row: Row) -> Finding | None:
    if row.null_mean is None:
        return None
    measured = Measured.of(ds, row.name)
    best = largest(measured.value, 3)
    median = float(measured.value.median())  # a head that the others mislead can be far below 0
    value, more = _said(measured, best[0]), _and(ds, measured, best[1:])
    return Finding(
        f"The other heads of its layer predict what this head writes better than any other: "
        f"held-out R² {value}, where predictors of pure noise give {row.null_mean:.2f}. Next come "
        f"{more}; the median of {row.n} heads is {median:.2f}.{_read(ds)}".replace(" -", " −"),
        link(ds, best[0]),
        place(ds, best[0]),
    )


def _cancelling(ds: xr.Dataset, row: Row) -> Finding | None:
    measured = Measured.of(ds, row.name)
    (at,) = largest(-measured.value, 1)
    lowest = float(measured.value.isel(at))
    if measured.mean is None or measured.sd is None:
        return None
    mean, sd = float(measured.mean.isel(at)), float(measured.sd.isel(at))
    below = int((measured.value < measured.mean).sum())
    if lowest >= mean:
        what = "In no layer do the heads cancel; they add up least here"
    elif measured.high is not None and float(measured.high.isel(at)) >= mean:
        what = "In no layer are the heads seen to cancel on this text; they add up least here"
    else:
        what = "The heads of this layer cancel most"
    return Finding(
        f"{what}: their sum varies {_said(measured, at)} times as much as they do one by one, "
        f"against {mean:.2f} (sd {sd:.2f}) were each turned at random. {below} of {row.n} layers "
        f"lie below that null; the mean is {row.mean:.2f}.{_read(ds)}",
        link(ds, at),
        place(ds, at),
    )


def _alike(ds: xr.Dataset, row: Row) -> Finding | None:
    measured = Measured.of(ds, row.name).without_self()
    first, *rest = largest(measured.value, 6)[::2]  # each pair is there twice
    if row.null_mean is None or row.null_sd is None:
        return None
    weights = ""
    if "projection_kernel" in ds:
        overlap = Measured.of(ds, "projection_kernel")
        weights = f" Their write subspaces overlap by {float(overlap.value.isel(first)):.1%}"
        if overlap.mean is not None:
            weights += f" (null {float(overlap.mean.isel(first)):.1%})"
        weights += "."
    return Finding(
        f"These two heads find the same tokens alike more than any other pair of a layer: debiased "
        f"CKA {_said(measured, first)}, {row.null_mean:.2f} (sd {row.null_sd:.4f}) for independent "
        f"heads on independent tokens.{weights} Next come {_and(ds, measured, rest)}; the mean "
        f"over {row.n} pairs is {row.mean:.2f}.{_read(ds)}",
        link(ds, first),
        place(ds, first),
    )


def largest(value: xr.DataArray, n: int) -> list[dict[str, int]]:
    """The places of the n largest values, the largest first."""
    filled = np.nan_to_num(value.values, nan=-np.inf)
    order = np.argsort(-filled, axis=None, kind="stable")[: min(n, int(np.isfinite(value).sum()))]
    index = zip(*np.unravel_index(order, value.shape), strict=True)
    return [dict(zip(map(str, value.dims), map(int, at), strict=True)) for at in index]


def _said(measured: Measured, at: dict[str, int]) -> str:
    """A number with its interval."""
    value = f"{float(measured.value.isel(at)):.2f}"
    if measured.low is None or measured.high is None:
        return value
    ends = {"low": float(measured.low.isel(at)), "high": float(measured.high.isel(at))}
    return f"{value} (95 % interval {interval(ends)})".replace("-", "−")


def _and(ds: xr.Dataset, measured: Measured, places: list[dict[str, int]]) -> str:
    return " and ".join(f"{place(ds, at)} with {_said(measured, at)}" for at in places) or "no more"


def _read(ds: xr.Dataset) -> str:
    """How much text that rests on."""
    if "n_tokens" not in ds:
        return ""
    tokens, documents = float(ds.n_tokens.max()), float(ds.n_documents.max())
    return f" On {tokens:,.0f} tokens of {documents:,.0f} {counted_in(ds)}."


def _relation(value: float, null: float) -> str:
    if abs(value - null) <= 0.02 * abs(null):
        return "about"
    return "more than" if value > null else "less than"
