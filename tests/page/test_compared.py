"""The page of a comparison: both runs and their difference, one of them in every panel."""

from dataclasses import replace

import pytest
from small import WeightsOnly, small_model
from test_browser import cells, scroll_to, select, settled

import headmix as hm


@pytest.fixture(scope="module")
def ds():
    model = small_model()
    sites = {
        name: WeightsOnly(replace(h := site.heads(), W_O=h.W_O + h.W_O.flip(0)))
        for name, site in model.sites.items()
    }
    return hm.compare(model, replace(model, name="flipped", sites=sites))


def test_runs_stand_side_by_side_and_one_is_chosen_for_all_panels(visit, tmp_path, ds):
    page = visit(hm.report(ds, tmp_path / "page.html"))
    assert "A is small, B is flipped" in page.locator(".lead").inner_text()
    scroll_to(page, "overview")
    assert page.locator("#overview-caption").inner_text().startswith("Change of the OV matrix")
    assert page.locator("#sides").is_hidden()  # a change is of both runs
    select(page, "map", "projection_kernel", "#overview")
    value = {"A": ds.projection_kernel_run_a, "B": ds.projection_kernel_run_b}
    value["difference"] = ds.projection_kernel
    expected = {}
    for run, pairs in value.items():
        own = 0 if run == "difference" else 1  # a head with itself is left out
        expected[run] = ((pairs.sum("head_b") - own) / 3).values.tolist()
        scroll_to(page, f"side-{run}")
        assert cells(page, f"side-{run}")[2] == pytest.approx(expected[run][2], rel=1e-4, abs=1e-6)
    for run in ("B", "A", "difference"):
        select(page, "run", run, ".bar")
        shown = "document.getElementById('overview-plot').data[0].z[1][2]"
        settled(page, f"Math.abs({shown} - {expected[run][1][2]}) < 1e-5")
        told = f"run={run}" in page.evaluate("location.hash")
        assert told == (run != "difference")  # as the page opens


def test_a_single_run_offers_no_other(visit, tmp_path):
    page = visit(hm.report(hm.measure(small_model()), tmp_path / "page.html"))
    scroll_to(page, "overview")
    assert page.locator("select[data-state=run]").is_hidden()
    assert page.locator("#sides").count() == 0
