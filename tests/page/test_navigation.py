"""One choice drives the page: pair, metric, layers, address, back, keys and the search box."""

import numpy as np
import pytest
from small import any_layer, on_text
from test_browser import cells, scroll_to, select, settled

from headmix.page import report
from headmix.page.summary import rows


@pytest.fixture(scope="module")
def ds():
    return any_layer()


@pytest.fixture(scope="module")
def page_file(ds, tmp_path_factory):
    return report(ds, tmp_path_factory.mktemp("page") / "page.html")


def chosen(page) -> str:
    return page.locator("#card-name").inner_text()


def shown(page, state: str) -> str:
    return page.locator(f"select[data-state={state}]").first.input_value()


def fragment(page) -> str:
    return page.evaluate("location.hash")


def test_a_pair_is_part_of_the_address_and_has_a_section(visit, page_file, ds):
    page = visit(page_file, "#layer=L1&head=2&with=L1H3&metric=pair_on_text")
    pair = page.locator("#card .pair")
    assert "L1H2 – L1H3" in pair.inner_text()
    line = pair.locator("tr", has_text="Title of pair_on_text").inner_text()
    at = {"layer": "L1", "head": 2, "head_b": 3}
    value, low, high = (float(ds["pair_on_text" + s].sel(at)) for s in ("", "_low", "_high"))
    assert f"{value:.3g}" in line
    assert f"{low:.3f} – {high:.3f}" in line
    assert "0.500" in line
    overlap = pair.locator("tr", has_text="Write-subspace overlap").inner_text()
    assert f"{float(ds.projection_kernel.sel(at)):.3g}" in overlap
    assert "Alike anywhere" in pair.inner_text()
    page.get_by_role("button", name="Swap").click()
    assert chosen(page) == "L1H3"
    assert "L1H3 – L1H2" in pair.inner_text()
    assert "with=L1H2" in fragment(page)
    page.get_by_role("button", name="Drop pair").click()
    assert pair.count() == 0
    assert "with" not in fragment(page)


def test_pairs_across_layers_name_both_directions(visit, page_file, ds):
    page = visit(page_file, "#layer=L2&head=1&with=L0H3")
    text = page.locator("#card .pair").inner_text()
    assert "Title of cross: L0H3 → L2H1" in text
    assert "pair_on_text" not in text  # that is of heads of one layer
    value = float(ds.cross.sel(layer="L0", head=3, layer_b="L2", head_b=1))
    assert f"{value:.3g}" in text


def test_a_partner_in_the_card_can_be_taken_as_a_pair(visit, page_file):
    page = visit(page_file, "#layer=L1&head=0")
    page.get_by_role("button", name="L1H0 and L1H1 as a pair").first.click()
    assert "with=L1H1" in fragment(page)
    assert "L1H0 – L1H1" in page.locator("#card .pair").inner_text()
    select(page, "head", "3", "#card")
    assert page.locator("#card .pair").count() == 0  # another head drops the pair


def test_one_metric_is_shown_by_every_panel_that_offers_it(visit, page_file):
    page = visit(page_file)
    before = shown(page, "spectrum")
    select(page, "matrix", "pair_on_text", "#pairs")
    assert (shown(page, "matrix"), shown(page, "map")) == ("pair_on_text", "pair_on_text")
    select(page, "map", "head_on_text", "#overview")
    assert (shown(page, "map"), shown(page, "profile")) == ("head_on_text", "head_on_text")
    assert (shown(page, "matrix"), shown(page, "spectrum")) == ("pair_on_text", before)
    again = visit(page_file, fragment(page))
    for name in ("map", "profile", "matrix", "spectrum"):
        assert shown(again, name) == shown(page, name)


def test_back_and_forward_undo_and_redo_choices(visit, page_file):
    page = visit(page_file)
    select(page, "layer", "2", "#card")
    select(page, "head", "3", "#card")
    select(page, "map", "per_head", "#overview")
    length = page.evaluate("history.length")
    select(page, "map", "per_head", "#overview")  # no choice at all
    assert page.evaluate("history.length") == length
    page.go_back()
    settled(page, "document.querySelector('select[data-state=map]').value !== 'per_head'")
    assert chosen(page) == "L2H3"
    page.go_back()
    settled(page, "document.getElementById('card-name').textContent === 'L2H0'")
    page.go_back()
    settled(page, "document.getElementById('card-name').textContent === 'L0H0'")
    for _ in range(3):
        page.go_forward()
    settled(page, "document.getElementById('card-name').textContent === 'L2H3'")
    assert shown(page, "map") == "per_head"


def test_a_typed_address_and_a_finding_are_entries_too(visit, page_file, ds):
    page = visit(page_file, "#layer=L1&head=1")
    page.evaluate("location.hash = '#layer=L2&head=2&map=cross&over=max'")
    settled(page, "document.getElementById('card-name').textContent === 'L2H2'")
    assert (shown(page, "map"), shown(page, "over")) == ("cross", "max")
    page.locator(".findings a").first.click()
    row = next(r for r in rows(ds) if r.name == "projection_kernel")
    settled(page, f"document.querySelector('.pair h3')?.textContent.startsWith('{row.place}')")
    assert shown(page, "matrix") == "projection_kernel"
    page.go_back()
    settled(page, "document.getElementById('card-name').textContent === 'L2H2'")
    assert shown(page, "map") == "cross"
    page.go_back()
    settled(page, "document.getElementById('card-name').textContent === 'L1H1'")
    assert shown(page, "over") == "mean"


def test_a_link_to_a_section_loses_no_choice(visit, page_file):
    page = visit(page_file)
    select(page, "head", "2", "#card")
    page.click(".bar a[href='#across']")
    settled(page, "location.hash.includes('head=2')")
    assert chosen(page) == "L0H2"
    assert page.locator("#across").evaluate("(e) => e.getBoundingClientRect().top") < 200
    for link in page.locator(".bar a").all():
        link.evaluate("(a) => a.click()")
        settled(page, "location.hash.includes('=')")
        assert "head=2" in fragment(page), link.get_attribute("href")
    assert chosen(page) == "L0H2"


def test_a_name_that_every_object_has_is_no_choice(visit, page_file):
    page = visit(page_file)
    select(page, "head", "2", "#card")
    page.evaluate("location.hash = '#constructor=1'")
    settled(page, "!location.hash.includes('constructor')")
    assert chosen(page) == "L0H2"


@pytest.mark.parametrize(
    "strange",
    [
        "#layer=L9&head=-1&with=L1H99&metric=none&layers=L2-L0",
        "#layer=&head=&with=&metric=&layers=-&label=x&position=up&run=C",
        "#head=1e9&with=%00&layers=L0&map=toString&matrix=__proto__",
        "#layer=L0&layer=L2&with=<img src=x onerror=alert(1)>",
        "#with=L0H0&head=0",
        "#&&==&%E0%A4%A&layer=%E0%A4%A",
    ],
)
def test_garbage_in_the_address_is_ignored(visit, page_file, strange):
    page = visit(page_file, strange)
    scroll_to(page, "overview")
    assert chosen(page) == "L0H0"
    assert page.locator("#card .pair").count() == 0
    assert shown(page, "map") == "projection_kernel"
    assert (shown(page, "from"), shown(page, "to")) == ("0", "2")


def test_arrow_keys_move_the_head_from_anywhere_but_controls(visit, page_file):
    page = visit(page_file)
    for key in ("ArrowRight", "ArrowRight", "ArrowUp", "ArrowLeft", "ArrowUp", "ArrowUp"):
        page.keyboard.press(key)
    assert chosen(page) == "L2H1"
    settled(page, "location.hash.includes('layer=L2&head=1')")
    length = page.evaluate("history.length")
    page.keyboard.press("ArrowUp")  # the last layer already
    assert (chosen(page), page.evaluate("history.length")) == ("L2H1", length)
    page.focus("#overview select[data-state=map]")
    page.keyboard.press("ArrowDown")
    assert chosen(page) == "L2H1"
    page.focus("#find")
    page.keyboard.press("ArrowLeft")
    assert chosen(page) == "L2H1"
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Control+ArrowLeft")
    page.keyboard.press("Shift+ArrowLeft")
    assert chosen(page) == "L2H1"


def test_steps_that_follow_each_other_are_one_entry(visit, page_file):
    page = visit(page_file)
    select(page, "head", "1", "#card")
    length = page.evaluate("history.length")
    pressed = "document.body.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}))"
    page.evaluate(f"for (const key of ['ArrowUp', 'ArrowRight', 'ArrowRight']) {pressed}")
    assert chosen(page) == "L1H3"
    settled(page, "location.hash.includes('layer=L1&head=3')")
    assert page.evaluate("history.length") == length + 1
    page.evaluate(f"for (const key of ['ArrowUp', 'ArrowLeft']) {pressed}")
    select(page, "map", "per_head", "#overview")  # before the steps came to rest
    page.go_back()
    settled(page, "document.querySelector('select[data-state=map]').value !== 'per_head'")
    assert chosen(page) == "L2H2"


def test_arrow_keys_scroll_what_scrolls(visit, page_file):
    page = visit(page_file, width=390)
    page.get_by_text("Every metric in one line").click()
    table = "document.querySelector('#glance details:last-of-type .scroll')"
    assert page.evaluate(f"{table}.scrollWidth > {table}.clientWidth + 1")
    page.locator("#glance details:last-of-type .scroll a").first.focus()
    page.evaluate(f"{table}.scrollLeft = 0")
    page.keyboard.press("ArrowRight")
    settled(page, f"{table}.scrollLeft > 0")
    assert chosen(page) == "L0H0"
    page.keyboard.press("ArrowUp")  # which it does not need
    assert chosen(page) == "L1H0"


@pytest.mark.parametrize(
    ("typed", "place"),
    [("L2H3", "L2H3"), ("l2 h3", "L2H3"), ("2.3", "L2H3"), ("L2:H3", "L2H3"), ("H2", "L1H2"),
     ("h 2", "L1H2"), ("L2", "L2H1"), ("2", "L2H1"), ("  L0H0 ", "L0H0")],
)  # fmt: skip
def test_the_box_finds_heads_and_layers(visit, page_file, typed, place):
    page = visit(page_file, "#layer=L1&head=1")
    page.keyboard.press("/")
    page.keyboard.type(typed)
    page.keyboard.press("Enter")
    assert chosen(page) == place
    assert page.locator("#found").inner_text() in (f"{place}.", f"Layer {place[:2]}.")


def test_the_box_finds_metrics_and_says_what_there_is(visit, page_file):
    page = visit(page_file)
    box, said = page.locator("#find"), page.locator("#found")
    for typed in ("pair_on_text", "Title of pair_on_text", "pair_on"):
        select(page, "map", "per_head", "#overview")
        box.fill(typed)
        box.press("Enter")
        assert shown(page, "map") == shown(page, "matrix") == "pair_on_text"
    for typed, answer in (
        ("L1H9", "L1 has no such head: it has H0 – H3."),
        ("H9", "L0 has no such head: it has H0 – H3."),
        ("on_text", "3 metrics are called so: "),
        ("L9H0", "Nothing here is called “L9H0”. Layers are L0 – L2"),
        ("<b>", "Nothing here is called “<b>”."),
    ):
        box.fill(typed)
        assert said.inner_text() == ""
        before = fragment(page)
        box.press("Enter")
        assert said.inner_text().startswith(answer)
        assert fragment(page) == before
        assert box.get_attribute("aria-invalid") == "true"
    assert page.locator("#find-names option").count() == page.evaluate("DATA.metrics.length")


def test_the_box_answers_where_there_are_no_heads(visit, ds, tmp_path):
    without = ds[["per_layer", "per_layer_null_mean", "per_layer_null_sd"]]
    page = visit(report(without.assign_attrs(ds.attrs), tmp_path / "page.html"))
    for typed in ("nothing", "L0H2", "h2"):
        page.fill("#find", typed)
        page.press("#find", "Enter")
        assert page.locator("#found").inner_text() == (
            f"Nothing here is called “{typed}”. Layers are L0 – L2; a metric is named by its title."
        )


def test_layers_of_any_name_are_found(visit, tmp_path):
    ds = on_text()
    names = ["encoder.L0", "decoder.L0", "decoder.L0.cross"]
    ds = ds.assign_coords(layer=names, layer_b=names)
    page = visit(report(ds, tmp_path / "page.html"), "#layer=decoder.L0&head=1&with=encoder.L0+H3")
    assert "decoder.L0 H1 – encoder.L0 H3" in page.locator("#card .pair").inner_text()
    for typed, place in (("decoder.L0.cross H2", "decoder.L0.cross H2"),
                         ("encoder.l0h1", "encoder.L0 H1"), ("1.3", "decoder.L0 H3")):  # fmt: skip
        page.fill("#find", typed)
        page.press("#find", "Enter")
        assert chosen(page) == place
    select(page, "from", "1", ".bar")
    assert "layers=decoder.L0-decoder.L0.cross" in fragment(page)
    again = visit(tmp_path / "page.html", fragment(page))
    assert (shown(again, "from"), shown(again, "to")) == ("1", "2")


def test_a_range_of_layers_restricts_the_panels_of_the_whole_model(visit, page_file, ds):
    page = visit(page_file, "#layer=L0&head=0&metric=per_head&layers=L1-L2")
    scroll_to(page, "overview")
    np.testing.assert_allclose(cells(page, "overview"), ds.per_head.values[1:], rtol=1e-5)
    page.keyboard.press("ArrowUp")  # steps go along the layers shown
    assert chosen(page) == "L1H0"
    page.keyboard.press("ArrowDown")
    assert chosen(page) == "L1H0"
    select(page, "to", "0", ".bar")  # one end takes the other along
    settled(page, "document.getElementById('overview-plot').data[0].z.length === 1")
    assert "layers=L0-L0" in fragment(page)
    select(page, "to", "2", ".bar")
    settled(page, "document.getElementById('overview-plot').data[0].z.length === 3")
    assert "layers" not in fragment(page)
