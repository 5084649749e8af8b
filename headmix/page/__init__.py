"""The report: a Dataset in, one offline HTML page out. Nothing but the Dataset is looked at."""

import base64
import gzip
import hashlib
import math
import os
from functools import cache
from importlib import resources
from pathlib import Path

import jinja2
import xarray as xr

from headmix import __version__
from headmix.files import whole_file
from headmix.page import findings, findings_text, glossary, layers, payload, summary
from headmix.registry import TRANSFORMATIONS
from headmix.shapes import aligned
from headmix.terminal import interval

#: In the order in which they build on each other; together they are the page's one script.
_PANELS = (
    "overview",
    "depth",
    "pairs",
    "joined",
    "scatter",
    "spectra",
    "across",
    "graph",
    "labels",
    "sequence",
)
_SCRIPTS = (
    *("data.js", "dom.js", "draw.js", "panels.js"),
    *(f"panels/{name}.js" for name in _PANELS),
    *("state.js", "find.js", "keys.js", "pair.js", "card.js", "export.js", "page.js"),
)


def report(ds: xr.Dataset, path: str | os.PathLike[str]) -> Path:
    """Write the report page of a Dataset from ``measure`` or ``open_results``.

    One self-contained HTML file that works from disk and asks the network for nothing.

    Returns:
        The path written. The file appears whole or not at all.

    Raises:
        ValueError: the Dataset does not come from ``measure``, or holds only some of the heads.
        OSError: the folder does not exist or cannot be written to.
    """
    if "headmix_format" not in ds.attrs or "layer" not in ds.dims:
        raise ValueError("report takes a Dataset from headmix.measure; this one has no layers")
    with whole_file(path) as temporary:
        temporary.write_text(render(ds), encoding="utf-8", errors="replace")
    return Path(path)


def render(ds: xr.Dataset) -> str:
    """The page as text."""
    ds = aligned(ds)
    tables = summary.tables(ds)
    data = payload.plain(ds) | {"summary": summary.plain(tables)}
    planes = data.pop("planes")
    script = "".join(_asset(f"js/{name}") for name in _SCRIPTS)
    style = _asset("style.css")
    plotly_packed, plotly_hash = _plotly()
    return _template().render(
        model=ds.attrs.get("model", "a model"),
        runs=summary.runs(ds),
        sequence=ds.sizes.get("run", 0),
        quantised=summary.quantised(ds),
        facts=summary.facts(ds),
        findings=findings.find(ds),
        layers=layers.by_layer(ds),
        beaten=findings_text.beaten(ds),
        tables=tables,
        on_text="n_tokens" in ds or any(str(name).endswith("_low") for name in ds),
        interrupted=ds.attrs.get("interrupted", ""),
        left_out=summary.left_out(ds),
        notes=summary.notes(ds),
        glossary=glossary.entries(ds),
        transformations=TRANSFORMATIONS,
        provenance=summary.provenance(ds) | {"numbers on this page": data["precision"]},
        data=payload.script_json(data),
        planes=planes,
        version=__version__,
        style=style,
        script=script,
        plotly=plotly_packed,
        policy=_policy(style, script, plotly_hash),
    )


def _policy(style: str, script: str, plotly_hash: str) -> str:
    """The content security policy: exactly these scripts and styles, and no address at all.

    plotly.js fills an empty style element through the CSSOM, so the hash of nothing is allowed, and
    sets style attributes on text inside figures. Its heatmaps are pictures made on the spot.
    """
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src '{_hash(script)}' '{plotly_hash}'",
            f"style-src-elem '{_hash(style)}' '{_hash('')}'",
            "style-src-attr 'unsafe-inline'",
            "img-src data: blob:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _plotly() -> tuple[str, str]:
    """plotly.js, compressed, and the hash under which the page may run it."""
    from plotly.offline import get_plotlyjs

    source = get_plotlyjs()
    packed = gzip.compress(source.encode(), compresslevel=9, mtime=0)
    return base64.b64encode(packed).decode(), _hash(source)


def _asset(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": _number, "null": _null_text, "interval": _interval_text}
    environment.filters["distance"] = _distance
    return environment.from_string(_asset("template.html"))


def _null_text(row: summary.Row | layers.Cell) -> str:
    """Mean ± sd, both to the second significant digit of the sd."""
    if row.null_sd is None or row.null_mean is None or not row.null_sd > 0:
        return _number(row.null_mean)
    decimals = max(0, 1 - math.floor(math.log10(row.null_sd)))
    return f"{row.null_mean:.{decimals}f} ± {row.null_sd:.{decimals}f}".replace("-", "−")


def _interval_text(row: summary.Row | layers.Cell) -> str:
    """Both ends, as the cards have them; a dash where there are none."""
    return interval({"low": row.low, "high": row.high}).replace("-", "−") or "–"


def _number(value: float | None, digits: int = 4) -> str:
    """Some significant digits; a dash where there is no number."""
    return "–" if value is None or math.isnan(value) else f"{value:.{digits}g}".replace("-", "−")


def _distance(z: float | None) -> str:
    """A distance from the null; of a large one only whole sds matter."""
    return f"{z:.0f}".replace("-", "−") if z is not None and abs(z) >= 100 else _number(z, 2)
