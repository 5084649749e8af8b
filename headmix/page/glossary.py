"""Every metric's definition, from the attributes that travel with its numbers."""

import inspect
import re
from dataclasses import dataclass

import xarray as xr

from headmix.collector import WITHIN_POSITION
from headmix.shapes import group_of, metric_names


@dataclass(frozen=True)
class Entry:
    name: str
    title: str
    formula: str
    unit: str
    range: str
    null: str
    invariant: str
    gauge_dependent: bool
    reference: str
    family: str
    text: str
    within_position: bool
    on_text: bool


def entries(ds: xr.Dataset) -> list[Entry]:
    """One entry a metric, in the order of the Dataset."""
    return [_entry(ds, name) for name in metric_names(ds, within_position=False)]


def _entry(ds: xr.Dataset, name: str) -> Entry:
    attrs = ds[name].attrs

    def get(key: str) -> str:
        return str(attrs.get(key, ""))

    return Entry(
        name=name,
        title=get("title"),
        formula=get("formula"),
        unit=get("units"),
        range=get("range"),
        null=get("null"),
        invariant=get("invariant"),
        gauge_dependent="gauge" not in get("invariant").split(", "),
        reference=get("reference"),
        family=get("family"),
        text=_prose(get("doc")),
        within_position=name + WITHIN_POSITION in ds,
        on_text=group_of(ds[name]) == "text",
    )


def _prose(doc: str) -> str:
    """A docstring without its examples and argument lists."""
    kept = re.split(r"\n\s*(?:>>> |Args:|Returns:|Raises:)", inspect.cleandoc(doc))[0]
    unmarked = re.sub(r"``|\*(?=\w)|(?<=\w)\*", "", kept)
    return "\n\n".join(" ".join(part.split()) for part in unmarked.split("\n\n")).strip()
