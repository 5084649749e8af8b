"""Figures: complete, the same every time, and deaf to markup in what they show."""

import math
from xml.etree import ElementTree

import pytest
from figures import WIDTH, Dot, Dots, Heat, figure_from, number
from small import HOSTILE

SVG = "{http://www.w3.org/2000/svg}"


def examples(name: str = "row") -> list:
    dots = [
        Dot(name, 0.5, 0.2, 0.8, 0.1, 0.05, group="one"),
        Dot(name, [0.1, 0.4, math.nan], series=1, group="one"),
        Dot("other", -0.3, group="two"),
    ]
    return [
        Dots(name, "How to read it.", "axis", dots, series=("a", name)),
        Dots(name, "On a logarithm.", "x", [Dot(name, 3.0), Dot("b", 400.0, 0.0, 900.0)], log=True),
        Heat(name, "How to read it.", ["r", name], ["c", name], [[0.5, None], [-1.0, 0.25]]),
    ]  # fmt: skip


@pytest.mark.parametrize("figure", examples(), ids=lambda f: type(f).__name__)
def test_a_figure_is_the_same_after_a_round_trip_and_fits_its_frame(figure):
    from dataclasses import asdict

    again = figure_from({"kind": type(figure).__name__, **asdict(figure)})
    assert again.file() == figure.file()
    assert len(figure.file()) < 200_000
    svg = ElementTree.fromstring(figure.file())
    _, _, width, height = map(float, svg.get("viewBox").split())
    assert width == WIDTH
    for element in svg.iter(f"{SVG}text"):
        assert 0 <= float(element.get("x")) <= width
        assert 0 <= float(element.get("y")) <= height
    assert svg.get("role") == "img"
    assert svg.find(f"{SVG}title").text == figure.title
    assert svg.find(f"{SVG}desc").text == figure.caption


@pytest.mark.parametrize("text", HOSTILE)
def test_text_stays_text(text):
    kept = "".join(c for c in text if c in "\t\n" or c >= " ")  # XML has no other controls
    for figure in examples(text):
        svg = ElementTree.fromstring(figure.file())
        tags = {element.tag.removeprefix(SVG) for element in svg.iter()}
        assert tags <= {"svg", "title", "desc", "style", "rect", "text", "line", "path"}
        assert svg.find(f"{SVG}title").text in (kept, None)


def test_dots_stand_where_their_numbers_are():
    figure = Dots("t", "c", "axis", [Dot("a", 0.0), Dot("b", 5.0), Dot("c", 10.0)])
    svg = ElementTree.fromstring(figure.file())
    marks = [e.get("transform") for e in svg.iter(f"{SVG}path")]
    x = [float(m.removeprefix("translate(").split()[0]) for m in marks]
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.2)
    assert x[0] < x[2] <= WIDTH


def test_the_table_twin_has_the_numbers_of_the_figure():
    columns, rows = examples()[0].table()
    assert columns == ["group", "row", "series", "value", "low", "high", "null", "null sd"]
    assert rows[0] == ["one", "row", "a", 0.5, 0.2, 0.8, 0.1, 0.05]
    columns, rows = examples()[2].table()
    assert rows[1] == ["row", -1.0, 0.25]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (None, "–"), (math.nan, "–"), (-0.12345, "−0.123"), (2.75e-10, "2.75·10⁻¹⁰"),
     (81821.7, "81822"), (1.0, "1"), (4e5, "4·10⁵")],
)  # fmt: skip
def test_numbers_are_written_short(value, text):
    assert number(value) == text
