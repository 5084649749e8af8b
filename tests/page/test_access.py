"""The page for everyone: axe-core, keyboard alone, paper, and what a screen reader is told."""

from dataclasses import replace

import pytest
from small import WeightsOnly, any_layer, every_shape, small_model
from test_browser import scroll_to, settled

import headmix as hm

SHOWN = "#layer=L1&head=0&with=L1H1&metric=projection_kernel"


@pytest.fixture(scope="module")
def page_files(tmp_path_factory):
    """A page from weights alone, one with all there is, and a comparison."""
    folder = tmp_path_factory.mktemp("access")
    model = small_model()
    sites = {
        name: WeightsOnly(replace(h := site.heads(), W_O=h.W_O + h.W_O.flip(0)))
        for name, site in model.sites.items()
    }
    full = any_layer()
    replaced = full.head_on_text.copy()
    full["head_ablation"] = replaced.assign_attrs(needs="effects", title="Change when replaced")
    found = {
        "weights": hm.measure(model),
        "full": full,
        "comparison": hm.compare(model, replace(model, name="flipped", sites=sites)),
    }
    return {name: hm.report(ds, folder / f"{name}.html") for name, ds in found.items()}


def everything(page) -> None:
    """Draw every figure and open every table and entry."""
    for panel in page.locator("main > section.panel").all():
        if panel.is_visible():
            panel.scroll_into_view_if_needed()
            if (plot := panel.locator(".plot:visible").first).count():
                settled(page, f"document.getElementById('{plot.get_attribute('id')}').data")
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    page.wait_for_timeout(100)


@pytest.mark.parametrize(
    ("name", "scheme", "width"),
    [
        ("weights", "light", 1280),
        ("weights", "dark", 390),
        ("full", "dark", 1280),
        ("full", "light", 390),
        ("comparison", "light", 1280),
        ("comparison", "dark", 390),
    ],
)
def test_axe_finds_nothing_serious(visit, page_files, name, scheme, width):
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed"
    )
    page = visit(page_files[name], SHOWN, scheme=scheme, width=width)
    everything(page)
    found = axe.Axe().run(page).response
    assert len(found["passes"]) > 20  # it looked
    grave = [
        f"{violation['id']}: {node['html'][:200]}"
        for violation in found["violations"]
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
    ]
    assert grave == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_keyboard_alone_reaches_everything_in_order(visit, page_files):
    page = visit(page_files["full"], SHOWN)
    scroll_to(page, "overview")
    page.evaluate("scrollTo(0, 0)")
    where = """(() => {
      const at = document.activeElement;
      const part = at.closest("section.panel, aside, nav");
      const { outlineStyle, outlineWidth } = getComputedStyle(at);
      const seen = at.matches(":focus-visible") && outlineStyle !== "none";
      return [at.closest("[id]")?.id, part?.id || part?.className, seen && outlineWidth !== "0px"];
    })()"""
    seen = []
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    while page.evaluate("document.activeElement !== document.body") and len(seen) < 400:
        seen.append(page.evaluate(where))
        page.keyboard.press("Tab")
    assert all(visible for _, _, visible in seen)
    parts = list(dict.fromkeys(part for _, part, _ in seen if part))
    wanted = ["bar", "glance", "overview", "depth", "pairs", "spectra", "across", "labels",
              "glossary", "card"]  # fmt: skip
    assert [part for part in parts if part in wanted] == wanted
    assert {"find", "theme", "overview-plot"} <= {place for place, _, _ in seen}


FOCUS = """(() => {
  const at = document.activeElement;
  return [at.closest("[id]")?.id, at.dataset.focus ?? null];
})()"""


def test_the_focus_stays_where_a_choice_was_made(visit, page_files):
    page = visit(page_files["full"], "#layer=L1&head=0&metric=pair_on_text")
    scroll_to(page, "across")
    scroll_to(page, "labels")

    def press(button):
        button.focus()
        page.keyboard.press("Enter")
        return page.evaluate(FOCUS)

    card = page.locator("#card-body")
    pair = "L1H0 and L1H1 as a pair"
    again = card.get_by_role("button", name=pair)
    assert again.count() > 1
    assert press(again.last) == ["card-body", pair]
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == pair
    assert again.last.evaluate("(button) => button === document.activeElement")
    assert press(card.get_by_role("button", name="Swap")) == ["card-body", "swap"]
    assert page.locator("#card-name").inner_text() == "L1H1"
    assert press(card.get_by_role("button", name="Drop pair")) == ["card-body", None]
    page.keyboard.press("Tab")  # goes on from there
    assert page.evaluate(FOCUS)[0] == "card-body"
    assert press(card.locator(".partners .place").first)[0] == "card-body"
    assert page.locator("#card-name").inner_text() != "L1H1"
    for place in ("across-strongest", "labels-of"):
        button = page.locator(f"#{place} .place").last
        name = button.inner_text()
        assert press(button) == [place, name]
        assert button.evaluate("(button) => button === document.activeElement")


def test_the_focus_stays_on_the_buttons_that_turn_pages(visit, tmp_path):
    ds = hm.measure(small_model(layers=2, heads=16), metrics=["projection_kernel"])
    page = visit(hm.report(ds, tmp_path / "page.html"), "#span=shown")
    scroll_to(page, "pairs")
    for expected in ("More", None):  # three pages: on the last there is no more
        page.get_by_role("button", name="More").focus()
        page.keyboard.press("Enter")
        assert page.evaluate(FOCUS) == ["joined-pages", expected]


def test_a_change_is_told_and_the_rest_is_not_read_anew(visit, page_files):
    page = visit(page_files["full"], SHOWN)
    scroll_to(page, "pairs")
    live = {n.get_attribute("id"): n.inner_text() for n in page.locator("[aria-live]").all()}
    live |= {n.get_attribute("id"): n.inner_text() for n in page.locator("[role=status]").all()}
    assert live["card-name"] == "L1H0"
    assert all(len(text) < 200 for text in live.values())


def test_the_theme_button_says_what_it_does(visit, page_files):
    page = visit(page_files["weights"])
    button = page.locator("#theme")
    assert button.inner_text() == "Dark"
    button.click()
    assert button.inner_text() == "Light"
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_paper_there_are_figures_and_the_card_and_no_bar(visit, page_files, scheme):
    page = visit(page_files["full"], SHOWN, scheme=scheme)
    scroll_to(page, "overview")
    panels = ("depth", "pairs", "spectra", "across", "labels")
    assert not page.evaluate("'ready' in document.getElementById('across-plot').dataset")
    width = "document.getElementById('overview-plot')._fullLayout.width"
    before = page.evaluate(width)
    told = f"window.printed = [theme(), {width}]"  # by then it is drawn
    page.evaluate(f"addEventListener('beforeprint', () => {{ {told}; }})")
    assert page.pdf()[:4] == b"%PDF"
    assert page.evaluate("window.printed") == ["light", 660]
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    settled(page, f"{width} === {before}")
    page.emulate_media(media="print")
    for panel in panels:
        assert page.evaluate(f"document.getElementById('{panel}-plot').dataset.ready")
        assert page.locator(f"#{panel}-plot svg.main-svg").first.is_visible()
    assert page.locator("#card").is_visible()
    assert "L1H0 – L1H1" in page.locator("#card .pair").inner_text()
    assert not page.locator(".bar").is_visible()
    assert not page.locator("select:visible, .save:visible, .with:visible, #theme:visible").count()


def test_a_distance_is_grey_where_the_interval_holds_the_null(visit, tmp_path):
    ds = any_layer()
    value = ds.head_on_text.copy()
    value[1, 0], value[1, 1] = 0.51, 0.9  # the null is 0.5, the interval −0.02 to +0.03
    ds["head_on_text"] = value
    ds["head_on_text_low"], ds["head_on_text_high"] = value - 0.02, value + 0.03
    page = visit(hm.report(ds, tmp_path / "page.html"), "#layer=L1&head=0")
    row = page.locator("#card .readings tr", has_text="Title of head_on_text")
    assert row.locator(".distance").get_attribute("class") == "distance held"
    page.keyboard.press("ArrowRight")
    assert row.locator(".distance").get_attribute("class") == "distance high"
    assert "Grey" in page.locator("#card > .reading").inner_text()
    plain = visit(hm.report(every_shape(), tmp_path / "plain.html"))
    assert "Grey" not in plain.locator("#card > .reading").inner_text()
