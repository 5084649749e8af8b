"""Figures as SVG: dots with intervals beside their null, and small heat maps.

Written here rather than by a plotting library, because none at hand draws a static picture without
a browser or another dependency. These are text: small, the same every time, readable by screen
readers, and they follow the reader's light or dark scheme. Every figure also knows its numbers as
a table.
"""

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

HERE = Path(__file__).parent

#: Width of a figure: that of a phone, so that its letters stay readable there.
WIDTH = 480

#: What labels of rows take of it, at most: some thirty letters.
LABELS = 200

#: Marks of the first, second and third series: told apart by form as well as by colour.
FORMS = ("M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0", "M-4-4h8v8h-8z", "M0-5L5 4H-5z")


@dataclass(frozen=True)
class Figure:
    """What all figures have.

    Attributes:
        title: what is shown.
        caption: how to read it.
    """

    title: str
    caption: str

    def draw(self) -> Element:
        """The figure as an SVG element."""
        raise NotImplementedError

    def table(self) -> tuple[list[str], list[list[Any]]]:
        """The same numbers: names of columns, and rows."""
        raise NotImplementedError

    def inline(self) -> str:
        """For a page that holds ``palette.css`` and ``figures.css``."""
        return ElementTree.tostring(self.draw(), encoding="unicode")

    def file(self) -> str:
        """For a file of its own, with its style and a ground to stand on."""
        svg = self.draw()
        svg.set("xmlns", "http://www.w3.org/2000/svg")
        style = Element("style")
        style.text = "".join((HERE / name).read_text() for name in ("palette.css", "figures.css"))
        svg.insert(0, style)
        svg.insert(1, Element("rect", {"class": "paper", "width": "100%", "height": "100%"}))
        return ElementTree.tostring(svg, encoding="unicode") + "\n"


@dataclass(frozen=True)
class Dot:
    """One row of a Dots figure.

    Attributes:
        label: the row's name; rows of one label share a line.
        value: one number, or several (each head of a layer, say).
        low, high: the interval.
        null, null_sd: drawn as a dashed tick and a band of two sd.
        series: which of the figure's series.
        group: rows of one group stand under its heading.
    """

    label: str
    value: float | Sequence[float]
    low: float | None = None
    high: float | None = None
    null: float | None = None
    null_sd: float | None = None
    series: int = 0
    group: str = ""

    @property
    def values(self) -> list[float]:
        many = self.value if isinstance(self.value, Sequence) else [self.value]
        return [v for v in many if v is not None and math.isfinite(v)]

    @property
    def reach(self) -> Iterator[float]:
        """Every number that must fit the axis."""
        yield from self.values
        yield from (x for x in (self.low, self.high, self.null) if x is not None)
        if self.null is not None and self.null_sd is not None:
            yield from (self.null - 2 * self.null_sd, self.null + 2 * self.null_sd)


@dataclass(frozen=True)
class Dots(Figure):
    """Rows of values on one axis, each with its interval and its null."""

    axis: str
    dots: Sequence[Dot]
    series: Sequence[str] = ()
    log: bool = False
    zero: bool = False

    def draw(self) -> Element:
        lines = _lines(self.dots)
        left = min(LABELS, 16 + 6.6 * max(len(label) for label, dots in lines if dots))
        top, n_series = _legend_height(self.series), max(1, len(self.series))
        heights = [max(19, 9 * n_series + 6) if dots else 19 for _, dots in lines]
        bottom = top + sum(heights) + 4
        svg = _svg(self, bottom + 40)
        _legend(svg, self.series)
        reach = [x for dot in self.dots for x in dot.reach] + [0.0] * self.zero
        axis = _Axis(reach, left, WIDTH - 14, self.log)
        axis.draw(svg, self.axis, top, bottom)
        for n, (label, dots) in enumerate(lines):
            y = top + sum(heights[:n]) + heights[n] / 2 + 3
            if not dots:
                _text(svg, 4, y + 4, label, "heading")
                continue
            _text(svg, left - 8, y + 4, label, "end")
            for dot in dots:
                _draw_dot(svg, dot, axis, y + 9 * (dot.series - (n_series - 1) / 2))
        return svg

    def table(self) -> tuple[list[str], list[list[Any]]]:
        columns = {
            "group": [d.group for d in self.dots],
            "row": [d.label for d in self.dots],
            "series": [self.series[d.series] if self.series else "" for d in self.dots],
            "value": [d.value for d in self.dots],
            "low": [d.low for d in self.dots],
            "high": [d.high for d in self.dots],
            "null": [d.null for d in self.dots],
            "null sd": [d.null_sd for d in self.dots],
        }
        kept = {k: c for k, c in columns.items() if any(v not in (None, "") for v in c)}
        return list(kept), [list(row) for row in zip(*kept.values(), strict=True)]


@dataclass(frozen=True)
class Heat(Figure):
    """A small table whose cells are shaded by their size, both signs apart."""

    rows: Sequence[str]
    columns: Sequence[str]
    cells: Sequence[Sequence[float | None]]
    row_axis: str = field(default="")

    def draw(self) -> Element:
        left = min(LABELS, 16 + 6.6 * max(map(len, self.rows)))
        width = (WIDTH - 8 - left) / len(self.columns)
        names = [textwrap.wrap(name, max(3, int(width / 5.6))) for name in self.columns]
        top = 13 * max(map(len, names)) + 8
        svg = _svg(self, top + 24 * len(self.rows) + 8)
        for j, parts in enumerate(names):
            for k, part in enumerate(parts):
                y = top - 6 - 13 * (len(parts) - 1 - k)
                _text(svg, left + (j + 0.5) * width, y, part, "small middle")
        found = [abs(v) for row in self.cells for v in row if v is not None and math.isfinite(v)]
        most = max(found, default=1.0) or 1.0
        for i, (name, row) in enumerate(zip(self.rows, self.cells, strict=True)):
            y = top + 24 * i
            _text(svg, left - 8, y + 16, name, "end")
            for j, value in enumerate(row):
                if value is None or not math.isfinite(value):
                    continue
                shade = {
                    "class": "more" if value >= 0 else "less",
                    "fill-opacity": f"{0.06 + 0.5 * abs(value) / most:.3f}",
                }
                box = {"x": left + j * width + 1, "y": y + 1, "width": width - 2, "height": 22}
                SubElement(svg, "rect", shade | {k: f"{v:.1f}" for k, v in box.items()})
                _text(svg, left + (j + 0.5) * width, y + 16, number(value, 2), "small middle")
        return svg

    def table(self) -> tuple[list[str], list[list[Any]]]:
        rows = [[name, *row] for name, row in zip(self.rows, self.cells, strict=True)]
        return [self.row_axis, *self.columns], rows


def figure_from(stored: dict[str, Any]) -> Figure:
    """A figure from its fields, as ``dataclasses.asdict`` and JSON leave them."""
    kinds = {kind.__name__: kind for kind in (Dots, Heat)}
    fields = dict(stored)
    kind = kinds[fields.pop("kind")]
    if kind is Dots:
        fields["dots"] = [Dot(**dot) for dot in fields["dots"]]
    return kind(**fields)


def number(value: float | None, digits: int = 3) -> str:
    """Some significant digits; a dash where there is no number."""
    if value is None or not math.isfinite(value):
        return "–"
    if value and (abs(value) < 1e-3 or abs(value) >= 1e5):
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        raised = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        times = "" if mantissa == "1" else f"{mantissa}·"
        return f"{times}10{raised}".replace("-", "−")
    if abs(value) >= 10**digits:
        return f"{value:.0f}".replace("-", "−")
    return f"{value:.{digits}g}".replace("-", "−")


class _Axis:
    """Numbers to places, on a linear or logarithmic scale."""

    def __init__(self, numbers: Sequence[float], start: float, end: float, log: bool = False):
        self.log, self.start, self.end = log, start, end
        inside = [x for x in numbers if math.isfinite(x) and (x > 0 or not log)] or [1.0]
        scaled = [math.log10(x) if log else x for x in inside]
        low, high = min(scaled), max(scaled)
        room = (high - low) * 0.04 or abs(high) * 0.1 or 1.0
        self.low, self.high = low - room, high + room

    def __call__(self, value: float) -> float:
        scaled = (math.log10(value) if value > 0 else self.low) if self.log else value
        part = (min(max(scaled, self.low), self.high) - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.log:
            tens = range(math.floor(self.low), math.ceil(self.high) + 1)
            steps = (1, 2, 5) if self.high - self.low < 2.5 else (1,)
            found = [k * 10.0**t for t in tens for k in steps]
            return [x for x in found if self.low <= math.log10(x) <= self.high]
        span = self.high - self.low
        step = 10.0 ** math.floor(math.log10(span / 4))
        step = next(step * k for k in (1, 2, 5, 10) if span / (step * k) <= 5.5)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [round(n * step, 12) for n in range(first, last + 1)]

    def draw(self, svg: Element, name: str, top: float, bottom: float) -> None:
        for tick in self.ticks():
            x = self(tick)
            _line(svg, x, top, x, bottom, "zero" if tick == 0 else "grid")
            _text(svg, x, bottom + 15, number(tick), "muted small middle")
        _text(svg, (self.start + self.end) / 2, bottom + 32, name, "muted small middle")


def _lines(dots: Sequence[Dot]) -> list[tuple[str, list[Dot]]]:
    """Lines of a Dots figure from top to bottom: headings without dots, labels with theirs."""
    lines: list[tuple[str, list[Dot]]] = []
    groups = dict.fromkeys(dot.group for dot in dots)
    for group in groups:
        if group:
            lines.append((group, []))
        members = [dot for dot in dots if dot.group == group]
        for label in dict.fromkeys(dot.label for dot in members):
            lines.append((label, [dot for dot in members if dot.label == label]))
    return lines


def _draw_dot(svg: Element, dot: Dot, axis: _Axis, y: float) -> None:
    if dot.null is not None:
        spread = 2 * (dot.null_sd or 0.0)
        a, b = axis(dot.null - spread), axis(dot.null + spread)
        box = {"x": a, "y": y - 7, "width": b - a, "height": 14}
        SubElement(svg, "rect", {"class": "band"} | {k: f"{v:.1f}" for k, v in box.items()})
        _line(svg, axis(dot.null), y - 8, axis(dot.null), y + 8, "null")
    if dot.low is not None and dot.high is not None:
        _line(svg, axis(dot.low), y, axis(dot.high), y, f"whisker s{dot.series}")
    for value in dot.values:
        _mark(svg, axis(value), y, dot.series, faint=len(dot.values) > 1)


def _svg(figure: Figure, height: float) -> Element:
    svg = Element(
        "svg",
        {"class": "chart", "viewBox": f"0 0 {WIDTH} {height:.0f}", "role": "img"},
    )
    SubElement(svg, "title").text = _plain(figure.title)
    SubElement(svg, "desc").text = _plain(figure.caption)
    return svg


def _text(svg: Element, x: float, y: float, text: str, kind: str = "") -> Element:
    made = SubElement(svg, "text", {"x": f"{x:.1f}", "y": f"{y:.1f}"} | {"class": kind})
    made.text = _plain(text)
    return made


def _plain(text: str) -> str:
    """Without the control characters that XML cannot hold, not even escaped."""
    return "".join(c for c in text if c in "\t\n" or c >= " ")


def _line(svg: Element, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
    ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    SubElement(svg, "line", {"class": kind} | {k: f"{v:.1f}" for k, v in ends.items()})


def _mark(svg: Element, x: float, y: float, series: int, *, faint: bool) -> None:
    kind = f"s{series}" + " faint" * faint
    where = f"translate({x:.1f} {y:.1f})" + " scale(0.75)" * faint
    SubElement(svg, "path", {"class": kind, "d": FORMS[series], "transform": where})


def _legend_height(series: Sequence[str]) -> int:
    return 18 * len(series) + 4 * bool(series)


def _legend(svg: Element, series: Sequence[str]) -> None:
    for n, name in enumerate(series):
        _mark(svg, 10, 9 + 18 * n, n, faint=False)
        _text(svg, 20, 13 + 18 * n, name, "small")
