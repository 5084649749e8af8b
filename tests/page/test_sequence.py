"""The page of a sequence of runs follows every metric through all of them."""

from dataclasses import replace

import numpy as np
import pytest
from small import WeightsOnly, small_model

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


def test_the_axis_names_the_runs_and_two_runs_are_no_sequence(page, tmp_path, visit):
    page.wait_for_selector("#sequence-plot[data-ready]")
    shown = page.locator("#sequence-plot .xtick").all_text_contents()
    assert [text for text in shown if text] == ["step1", "step2", "step4"]
    two = visit(hm.report(hm.compare(run(1.0), run(2.0)), tmp_path / "two.html"))
    assert two.locator("#sequence").count() == 0
