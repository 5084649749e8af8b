"""What the page saves: the Dataset's numbers, pictures that stand alone, names that are safe."""

import csv
import io
import json
import re
import struct
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from small import describe, every_shape, on_text

from headmix.page import report
from headmix.page.summary import rows as summary_rows

SVG = "{http://www.w3.org/2000/svg}"

#: Of each panel, the select that chooses its metric, and a metric for it.
CHOICES = {
    "overview": ("map", "head_on_text"),
    "depth": ("profile", "per_group"),
    "pairs": ("matrix", "pair_on_text"),
    "spectra": ("spectrum", "sigma"),
    "labels": ("labelled", "read"),
}


@pytest.fixture(scope="module")
def ds():
    return on_text()


@pytest.fixture(scope="module")
def page_file(ds, tmp_path_factory):
    return report(ds, tmp_path_factory.mktemp("page") / "page.html")


def saved(page, of: str, kind: str) -> tuple[str, bytes]:
    """The name and the bytes that a button saves."""
    button = page.locator(f"button[data-of={of}][data-save={kind}]")
    button.scroll_into_view_if_needed()
    with page.expect_download() as download:
        button.click()
    return download.value.suggested_filename, Path(download.value.path()).read_bytes()


def table(content: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(content.decode(), newline="")))


def test_csv_of_every_figure_holds_the_numbers_of_the_dataset(visit, page_file, ds):
    page = visit(page_file, "#layer=L1&head=2")
    for panel, (choice, metric) in CHOICES.items():
        page.select_option(f"#{panel} select[data-state={choice}]", metric)
        name, content = saved(page, panel, "csv")
        assert name.startswith(f"headmix-small-{panel}-{metric}")
        lines = table(content)
        dims = [d for d in ds[metric].dims if d in lines[0]]
        parts = {metric: metric, "null_mean": f"{metric}_null_mean", "low": f"{metric}_low"}
        for line in lines:
            at = {d: line[d] if ds[d].dtype.kind in "OU" else int(line[d]) for d in dims if d in ds}
            at_index = {d: int(line[d]) for d in dims if d not in ds}
            for column, variable in parts.items():
                if column in line and variable in ds:
                    expected = ds[variable].broadcast_like(ds[metric]).sel(at).isel(at_index)
                    assert float(line[column]) == pytest.approx(float(expected), rel=1e-6)
        shown = ds[metric].sel(layer=["L1"]) if panel in ("pairs", "spectra") else ds[metric]
        shown = shown.isel(label=[0]) if "label" in shown.dims else shown
        diagonal = ds.sizes["head"] if panel == "pairs" else 0
        assert len(lines) == shown.size - diagonal


def test_pairs_across_layers_say_both_ends(visit, page_file, ds):
    lines = table(saved(visit(page_file), "across", "csv")[1])
    best = ds.cross.max(("head", "head_b"))
    assert len(lines) == int(np.isfinite(best).sum())
    for line in lines:
        at = {d: line[d] if "layer" in d else int(line[d]) for d in ds.cross.dims}
        assert float(line["cross"]) == pytest.approx(float(ds.cross.sel(at)), rel=1e-6)
        assert float(line["cross"]) == pytest.approx(
            float(best.sel(layer=at["layer"], layer_b=at["layer_b"])), rel=1e-6
        )
        assert float(line["z"]) == pytest.approx((float(line["cross"]) - 0.25) / 0.02, rel=1e-4)


def test_json_says_what_the_numbers_are(visit, page_file, ds):
    page = visit(page_file, "#layer=L1&head=2&matrix=pair_on_text&position=out")
    name, content = saved(page, "pairs", "json")
    assert name == "headmix-small-pairs-pair_on_text_within_position-L1.json"
    told = json.loads(content)
    assert (told["model"], told["panel"]) == ("small", "pairs")
    assert told["metrics"][0]["name"] == "pair_on_text_within_position"
    assert told["metrics"][0]["formula"] == "f(h)"
    assert told["metrics"][0]["null"] == "flat"
    assert (told["selection"]["layer"], told["selection"]["position"]) == ("L1", "out")
    value = ds.pair_on_text_within_position.sel(layer="L1").values
    column = told["columns"].index("pair_on_text_within_position")
    for row in told["rows"]:
        assert row[column] == pytest.approx(value[row[1], row[2]], rel=1e-6)
    assert len(told["rows"]) == 12


def test_pictures_stand_alone(visit, page_file):
    page = visit(page_file, "#layer=L1", scheme="dark")
    for panel in ("overview", "depth", "pairs", "spectra", "labels", "across"):
        svg = ElementTree.fromstring(saved(page, panel, "svg")[1])
        words = " ".join("".join(text.itertext()) for text in svg.iter(f"{SVG}text"))
        caption = page.locator(f"#{panel}-caption").inner_text()
        assert "".join(caption.split()) in "".join(words.split())
        assert "small" in words
        ground = next(rect for rect in svg.iter(f"{SVG}rect"))
        assert "rgb(253, 252, 250)" in ground.get("style")  # light, whatever the page is
    png = saved(page, "pairs", "png")[1]
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">I", png[16:20]) == (1800,)
    assert page.locator("html").get_attribute("data-theme") == "dark"


def test_the_chosen_head_and_the_tables_are_saved_too(visit, page_file, ds):
    page = visit(page_file, "#layer=L1&head=2")
    name, content = saved(page, "card", "csv")
    assert name == "headmix-small-head-L1H2.csv"
    lines = table(content)
    own = next(line for line in lines if line["metric"] == "head_on_text")
    value = float(ds.head_on_text.sel(layer="L1", head=2))
    assert [float(own[k]) for k in ("value", "low", "high")] == pytest.approx(
        [value, value - 0.02, value + 0.03], rel=1e-5
    )
    pairs = {line["where"]: line for line in lines if line["metric"] == "pair_on_text"}
    assert set(pairs) == {"L1H2 – L1H0", "L1H2 – L1H1", "L1H2 – L1H3"}
    assert {line["value"] for line in lines if line["metric"] == "words"} == {
        *ds.words.sel(layer="L1", head=2).values
    }
    page.locator("#glance details:last-of-type summary").click()
    name, content = saved(page, "glance", "csv")
    assert name == "headmix-small-summary.csv"
    lines = {line["metric"]: line for line in table(content)}
    for row in summary_rows(ds):
        assert float(lines[row.name]["value"]) == pytest.approx(row.value, rel=1e-6)
        assert lines[row.name]["furthest_from_null"] == row.place


def test_every_button_saves_something(visit, page_file):
    page = visit(page_file, "#layer=L1&head=2")
    page.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
    buttons = page.locator("button[data-save]").evaluate_all(
        "(all) => all.filter((b) => b.checkVisibility()).map((b) => [b.dataset.of, b.dataset.save])"
    )
    assert {of for of, _ in buttons} >= {*CHOICES, "across", "scatter", "graph", "card", "glance"}
    for of, kind in buttons:
        name, content = saved(page, of, kind)
        assert re.fullmatch(rf"headmix-small-[A-Za-z0-9._-]+\.{kind}", name)
        if kind == "csv":
            lines = table(content)
            assert lines, of
            assert len({len(line) for line in lines}) == 1
            assert None not in lines[0]
        if kind == "json":
            told = json.loads(content)
            assert told["rows"], of
            assert {len(row) for row in told["rows"]} == {len(told["columns"])}
        if kind == "svg":
            ElementTree.fromstring(content)


def test_a_key_saves_as_a_click_does(visit, page_file):
    page = visit(page_file)
    page.locator("button[data-of=pairs][data-save=csv]").focus()
    with page.expect_download() as download:
        page.keyboard.press("Enter")
    assert download.value.suggested_filename == "headmix-small-pairs-projection_kernel-L0.csv"


FORMULAS = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", 'a "quoted", word', "two\nlines", "L3"]


def test_text_in_a_csv_is_no_formula_and_no_new_cell(visit, tmp_path):
    ds = every_shape().drop_vars("words")
    words = np.resize(np.array(FORMULAS, object), (3, 4, len(FORMULAS)))
    ds["words"] = (("layer", "head", "rank"), words, describe("Words"))
    lines = table(saved(visit(report(ds, tmp_path / "page.html")), "card", "csv")[1])
    cells = [line["value"] for line in lines if line["metric"] == "words"]
    assert [cell.removeprefix("'") for cell in cells] == FORMULAS
    assert [cell[0] == "'" for cell in cells] == [True] * 6 + [False] * 3


@pytest.mark.parametrize(
    "model",
    ["../../etc/passwd", "C:\\con", ".hidden", "a/b c:d*?\"<>|'", "\u202e\0\ud800", "x" * 999],
)
def test_file_names_are_safe_whatever_the_model_is_called(visit, tmp_path, model):
    ds = every_shape()
    ds.attrs["model"] = model
    name = saved(visit(report(ds, tmp_path / "page.html")), "pairs", "csv")[0]
    assert re.fullmatch(r"headmix-[A-Za-z0-9._-]+-L0\.csv", name)
    assert ".." not in name
    assert len(name) < 200
