"""Every metric's definition, from the attributes that travel with its numbers."""

import inspect
import re
from dataclasses import dataclass

import xarray as xr

from headmix.shapes import metric_names


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


def entries(ds: xr.Dataset) -> list[Entry]:
    """One entry a metric, in the order of the Dataset."""
    return [_entry(name, ds[name].attrs) for name in metric_names(ds)]


def _entry(name: str, attrs: dict[str, str]) -> Entry:
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
    )


def _prose(doc: str) -> str:
    """A docstring without its examples and argument lists."""
    kept = re.split(r"\n\s*(?:>>> |Args:|Returns:|Raises:)", inspect.cleandoc(doc))[0]
    unmarked = re.sub(r"``|\*(?=\w)|(?<=\w)\*", "", kept)
    return "\n\n".join(" ".join(part.split()) for part in unmarked.split("\n\n")).strip()
