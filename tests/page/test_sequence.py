"""The page of a sequence of runs follows every metric through all of them."""

import json
from dataclasses import replace

import numpy as np
import pytest
from small import WeightsOnly, small_model
from test_download import saved

import headmix as hm

STEPS = (1.0, 2.0, 4.0)


def run(step: float):
    """A model whose heads write more and more of what head 1 writes."""
    model = small_model()

    def trained(heads):
        return replace(heads, W_O=heads.W_O + step * heads.W_O[[1]])

    sites = {n: WeightsOnly(trained(s.heads()), s.notes) for n, s in model.sites.items()}
    return hm.measure(replace(model, name=f"run-step{step:g}", sites=sites))


@pytest.fixture(scope="module")
def sequence():
    return hm.compare(*map(run, STEPS))


@pytest.fixture
def page(sequence, tmp_path, visit):
    opened = visit(hm.report(sequence, tmp_path / "page.html"))
    opened.locator("#sequence").scroll_into_view_if_needed()
    return opened


def lines(page, metric: str) -> dict[str, list[float]]:
    """What is drawn, by name."""
    page.locator('#sequence select[data-state="followed"]').select_option(metric)
    page.wait_for_selector("#sequence-plot[data-ready]")
    page.wait_for_function(
        "title => document.getElementById('sequence-caption').textContent.startsWith(title)",
        arg=page.evaluate("name => named(name).title.replace(', B − A', '')", metric),
    )
    drawn = page.evaluate(
        "document.getElementById('sequence-plot').data.map(({ name, y }) => [name, [...y]])"
    )
    return dict(drawn)


def test_lines_are_the_values_of_every_run(page, sequence):
    page.evaluate("choose({ layer: 1, head: 2 })")
    drawn = lines(page, "ov_stable_rank")
    every = sequence.ov_stable_rank_sequence.sel(layer="L1")
    assert np.allclose(drawn["L1, mean over heads"], every.mean("head"), rtol=1e-6)
    assert np.allclose(drawn["L1H2"], every.sel(head=2), rtol=1e-6)
    null = sequence.ov_stable_rank_run_a_null_mean.sel(layer="L1")
    assert np.allclose(drawn["null"], float(null), rtol=1e-6)


def test_pairs_are_followed_by_their_mean(page, sequence):
    page.evaluate("choose({ layer: 0, head: 3 })")
    drawn = lines(page, "projection_kernel")
    pairs = sequence.projection_kernel_sequence.sel(layer="L0", head=3, head_b=[0, 1, 2])
    assert np.allclose(drawn["L0H3"], pairs.mean("head_b"), rtol=1e-5)
    assert np.ptp(drawn["L0H3"]) > 0.01


def test_position_is_taken_out_where_that_was_followed(sequence, tmp_path, visit):
    name = "ov_stable_rank_within_position"
    out = sequence.ov_stable_rank_sequence * 0.5
    out[1, 1, 2] = np.nan
    title = sequence.ov_stable_rank.attrs["title"].replace(", B", " (position taken out), B")
    ds = sequence.assign({f"{name}_sequence": out, name: sequence.ov_stable_rank * 0.5})
    ds[name].attrs |= sequence.ov_stable_rank.attrs | {"title": title}
    page = visit(hm.report(ds, tmp_path / "page.html"), "#layer=L1&head=2&position=out")
    page.locator("#sequence").scroll_into_view_if_needed()
    drawn = lines(page, "ov_stable_rank")
    assert np.allclose(drawn["L0, mean over heads"], out.sel(layer="L0").mean("head"), rtol=1e-6)
    told = json.loads(saved(page, "sequence", "json")[1])
    assert told["columns"][-1] == told["metrics"][0]["name"] == name
    assert "(position taken out) in every run" in told["caption"]
    assert "B − A" not in told["metrics"][0]["title"]
    assert (told["selection"]["position"], told["selection"]["run"]) == ("out", "every")
    own = [row[2] for row in told["rows"] if row[1] == "L1H2"]
    assert own[1] is None
    assert own[::2] == pytest.approx(out[::2, 1, 2].values, rel=1e-6)
    lines(page, "projection_kernel")  # which has nothing to do with position
    told = json.loads(saved(page, "sequence", "json")[1])
    assert told["selection"]["position"] == "in"
    assert told["caption"].endswith("; position as it is.")


def test_the_axis_names_the_runs_and_two_runs_are_no_sequence(page, tmp_path, visit):
    page.wait_for_selector("#sequence-plot[data-ready]")
    shown = page.locator("#sequence-plot .xtick").all_text_contents()
    assert [text for text in shown if text] == ["step1", "step2", "step4"]
    two = visit(hm.report(hm.compare(run(1.0), run(2.0)), tmp_path / "two.html"))
    assert two.locator("#sequence").count() == 0
