"""The page of a comparison: both runs and their difference, one of them in every panel."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import norm
from small import WeightsOnly, small_model
from test_browser import cells, scroll_to, select, settled
from test_download import saved

import headmix as hm
from headmix.page import changes
from headmix.page.summary import rows


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


def test_decreases_are_among_the_strongest_changes(visit, tmp_path, ds):
    """The largest change is a decrease in every panel that looks for one."""
    cross = next(n for n in ds if n + "_run_a" in ds and "layer_b" in ds[n].dims)
    drop = {"layer": "L0", "head": 2, "layer_b": "L2", "head_b": 3}
    value = ds[cross].copy()
    value.loc[drop] = -9
    page = visit(hm.report(ds.assign({cross: value}), tmp_path / "page.html"),
                 f"#head=2&map={cross}&over=max&x={cross}&y={cross}&reduce=max")  # fmt: skip
    pairs = value.values
    known = np.isfinite(pairs)
    scroll_to(page, "across")
    assert cells(page, "across")[0][2] == pytest.approx(-9)
    told = page.locator("#across-strongest tbody tr").first.inner_text()
    assert "L0H2" in told
    assert "−9" in told
    assert told.index("L0H2") < told.index("L2H3")
    scroll_to(page, "overview")
    assert cells(page, "overview")[0][2] == cells(page, "overview")[2][3] == pytest.approx(-9)
    assert "lies further from it" in page.locator("#overview-gauge").inner_text()
    scroll_to(page, "graph")
    sd = ds[cross + "_null_sd"].values
    mean = ds[cross + "_null_mean"].values
    z = np.abs((pairs - mean) / sd)[known]
    select(page, "beyond", "2", "#graph")
    settled(page, "document.getElementById('graph-caption').textContent.includes('at least 2 ')")
    caption = page.locator("#graph-caption").inner_text()
    assert f"{(z >= 2).sum()} of {known.sum()} pairs" in caption
    assert "away from the null" in caption
    told = re.search(r"about ([\d.]+) of", caption)
    assert float(told[1]) == pytest.approx(known.sum() * 2 * norm.sf(2), rel=0.05)


def test_what_is_saved_says_of_which_run_it_is(visit, tmp_path, ds):
    page = visit(hm.report(ds, tmp_path / "page.html"), "#map=projection_kernel&run=B&layer=L1")
    values = {"A": ds.projection_kernel_run_a, "B": ds.projection_kernel_run_b}
    values["difference"] = ds.projection_kernel
    panels = {f"side-{run}": run for run in values} | {"overview": "B"}
    for panel, run in panels.items():
        scroll_to(page, panel)
        told = json.loads(saved(page, panel, "json")[1])
        assert told["selection"]["run"] == run
        own = 0 if run == "difference" else 1
        mean = (values[run].sum("head_b") - own) / 3
        for layer, head, value, *_ in told["rows"]:
            expected = float(mean.sel(layer=layer, head=head))
            assert value == pytest.approx(expected, rel=1e-4, abs=1e-6)
    for table in ("joined", "card"):
        assert json.loads(saved(page, table, "json")[1])["selection"]["run"] == "B"


def test_a_single_run_offers_no_other(visit, tmp_path):
    page = visit(hm.report(hm.measure(small_model()), tmp_path / "page.html"))
    scroll_to(page, "overview")
    for panel in ("overview", "joined", "card"):
        assert "run" not in json.loads(saved(page, panel, "json")[1])["selection"]
    assert page.locator("select[data-state=run]").is_hidden()
    assert page.locator("#sides").count() == 0


def test_a_comparison_without_a_number_a_head_opens(visit, tmp_path):
    run = hm.measure(small_model(), metrics=["joint_span"])
    page = visit(hm.report(hm.compare(run, run.copy()), tmp_path / "page.html"))
    scroll_to(page, "depth")
    assert page.locator("#overview").is_hidden()
    assert page.locator("#sides").is_hidden()


def test_sentences_give_both_values_and_what_moved_no_further(ds, tmp_path):
    told = [text for text, _, _ in changes.find(ds)]
    by_name = {row.name: row for row in rows(ds)}
    moved = [row for row in by_name.values() if row.z_null is not None]
    moved.sort(key=lambda row: -abs(row.z_null))
    first = moved[0]
    a, b = (float(ds[first.name + run].isel(first.at)) for run in ("_run_a", "_run_b"))
    assert b - a == pytest.approx(first.value, rel=1e-4)
    (sentence,) = [t for t in told if t.startswith(f"{first.title.removesuffix(', B − A')}: ")]
    assert f"from {a:.3g} to {b:.3g}, by {first.value:+.3g}".replace("-", "−") in sentence
    rest = moved[changes.MOST :]
    assert told[-1].startswith(f"None of the other {len(rest)} metrics moved by more than ")
    assert rest[0].title.removesuffix(", B − A") in told[-1]
    page = hm.report(ds, tmp_path / "page.html").read_text(encoding="utf-8")
    assert "At a glance: what changed from A to B" in page
    assert "Always B − A, whatever <em>Run</em> says." in page


def test_an_interval_that_holds_no_change_is_said_to(ds):
    moved = max((row for row in rows(ds) if row.z_null is not None), key=lambda r: abs(r.z_null))
    value = ds[moved.name]
    wide = ds.assign({moved.name + "_low": value * 0 - 9, moved.name + "_high": value * 0 + 9})
    told = [text for text, _, _ in changes.find(wide)]
    title = moved.title.removesuffix(", B − A")
    assert not any(t.startswith(f"{title}: moved furthest") for t in told)  # others come first
    assert f"({title}, by an interval that holds no change at all)" in told[-1]
    few = wide[[n for n in wide if not n.startswith(("composition", "ov_"))]]
    assert "interval −9 to +9, which holds no change at all" in " ".join(
        text for text, _, _ in changes.find(few)
    )
    assert "holds no change" not in " ".join(text for text, _, _ in changes.find(ds))
