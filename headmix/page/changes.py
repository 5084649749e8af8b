"""Sentences about what differs between two runs, for the page of ``compare``."""

import numpy as np
import xarray as xr

from headmix.page.summary import Row, link, place, rows
from headmix.shapes import RUNS

#: How many metrics get a sentence.
MOST = 5


def find(ds: xr.Dataset) -> list[tuple[str, str, str]]:
    """(sentence, link, place): what the weights say, and the metrics that moved furthest."""
    by_name = {row.name: row for row in rows(ds)}
    told = [_weights(ds, by_name), _matches(ds)]
    moved = [row for row in by_name.values() if row.z_null is not None]
    moved.sort(key=lambda row: (_holds_none(row), -abs(row.z_null or 0)))
    told += [_moved(ds, row) for row in moved[:MOST]]
    told.append(_rest(moved[MOST:], len(by_name) - len(moved)))
    return [sentence for sentence in told if sentence is not None]


def _weights(ds: xr.Dataset, by_name: dict[str, Row]) -> tuple[str, str, str] | None:
    if "ov_change" not in by_name and "write_change" not in by_name:
        return None
    name = "ov_change" if "ov_change" in by_name else "write_change"
    what = "OV matrices" if name == "ov_change" else "blocks of W_O"
    layers = ds[name].mean([d for d in ds[name].dims if d != "layer"])
    most, least = (ds.layer.values[int(f(layers.values))] for f in (np.nanargmax, np.nanargmin))
    at = {str(d): int(i) for d, i in ds[name].argmax(...).items()}
    return (
        f"The heads' {what} changed by {float(layers.mean()):.2%} of their norm on average, most "
        f"in {most} ({float(layers.max()):.2%}), least in {least} ({float(layers.min()):.2%}); of "
        f"all {by_name[name].n} heads most by {float(ds[name].isel(at)):.2%}.",
        link(ds, at, name),
        place(ds, at),
    )


def _matches(ds: xr.Dataset) -> tuple[str, str, str] | None:
    moved = (ds.match.values != np.arange(ds.sizes["head"])) & (ds.kv_of_head.values >= 0)
    if not moved.any():
        return None
    layer, head = (int(i) for i in np.argwhere(moved)[0])
    at = {"layer": layer, "head": head}
    return (
        f"{int(moved.sum())} of {int((ds.kv_of_head.values >= 0).sum())} heads are compared with "
        f"one of another number, the first with head {int(ds.match.values[layer, head])}.",
        link(ds, at),
        place(ds, at),
    )


def _moved(ds: xr.Dataset, row: Row) -> tuple[str, str, str]:
    interval = ""
    if row.low is not None and row.high is not None and np.isfinite([row.low, row.high]).all():
        interval = f", interval {_signed(row.low)} to {_signed(row.high)}"
        interval += ", which holds no change at all" if _holds_none(row) else ""
    title = row.title.removesuffix(", B − A")
    own = [float(ds[row.name + run].isel(row.at)) for run in RUNS if row.name + run in ds]
    ends = "".join(
        f" {word} {_signed(v, sign='')}" for word, v in zip(("from", "to"), own, strict=False)
    )
    return (
        f"{title}: moved furthest{ends}, by {_signed(row.value)} ({_signed(row.z_null or 0.0, 2)} "
        f"null sd{interval}); the mean of {row.n} differences is {_signed(row.mean, 2)}.",
        row.link,
        row.place,
    )


def _holds_none(row: Row) -> bool:
    """Whether the interval of a difference holds no difference: other documents may show none."""
    return row.low is not None and row.high is not None and row.low <= 0 <= row.high


def _rest(rest: list[Row], unranked: int) -> tuple[str, str, str] | None:
    """What did not move further, so that the list is known to be whole."""
    if not rest:
        return None
    first = max(rest, key=lambda row: abs(row.z_null or 0))
    furthest = _signed(abs(first.z_null or 0.0), 2, sign="")
    more = f"; {unranked} without a null sd are not ranked" if unranked else ""
    return (
        f"None of the other {len(rest)} metrics moved by more than {furthest} null sd "
        f"({first.title.removesuffix(', B − A')}"
        f"{', by an interval that holds no change at all' * _holds_none(first)}){more}.",
        first.link,
        first.place,
    )


def _signed(value: float, digits: int = 3, sign: str = "+") -> str:
    whole = 10**digits <= abs(value) < 1e6
    return f"{value:{sign}{'.0f' if whole else f'.{digits}g'}}".replace("-", "−")
