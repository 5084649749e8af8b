"""Heads replaced from the command line, on one layer of the demo model."""

import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest
from commands import fails, headmix

import headmix as hm
from headmix.interventions import Interventions
from headmix.options import Reading, Talk

READ = ("--layers", "5", "--folds", "2", "--causal", "--causal-tokens", "40", "--quiet")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("texts") / "text.txt"
    lines = [f"The cat number {n} sat on the mat and looked at dog number {n}." for n in range(8)]
    file.write_text("\f".join(lines))
    return file


@pytest.fixture(scope="module")
def run_file(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run.nc"
    headmix("measure", "demo", "--text", text, "--out", out, *READ)
    return out


def test_results_hold_them_and_say_how(run_file: Path) -> None:
    ds = hm.open_results(run_file)
    assert ds.head_ablation.notnull().all()
    assert (ds.head_ablation_low >= 0).all()
    assert ds.attrs["causal"].startswith("resample, mean, zero of 12 heads on 40 tokens of ")
    reasons = json.loads(ds.attrs["skipped"])
    assert "neither a causal nor a masked language model" in reasons["head_ablation_loss"]["L5"]
    assert [p.name for p in run_file.parent.iterdir()] == ["run.nc"]


def test_page_and_cards_say_what_was_replaced(run_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    headmix("report", run_file, "--out", out)
    page = out.read_text(encoding="utf-8")
    assert "On text, when heads are replaced" in page
    assert "Output change when resampled" in page
    assert "40 tokens of" in page
    told = headmix("inspect", run_file, "--layer", "5", "--head", "3").stdout
    assert "Replaced: resample, mean, zero of 12 heads" in told
    assert "head_ablation_zero" in told
    card = json.loads(headmix("inspect", run_file, "--layer", "5", "--json").stdout)
    names = [reading["metric"] for reading in card["heads"][3]["metrics"]]
    assert {"head_ablation", "head_ablation_mean", "head_ablation_zero"} <= set(names)


def test_it_is_asked_for_with_a_text() -> None:
    assert "--causal: of which text?" in fails("measure", "demo", "--causal", "--json")
    assert "add --causal" in fails(
        "measure", "demo", "--text", "default", "--causal-tokens", "9", "--json"
    )
    asked = Reading(text="a.txt", causal=True, causal_tokens=9).measure_options()
    assert asked == {"text": "a.txt", "causal": Interventions(tokens=9)}
    pairs = Reading(text="a.txt", causal=True, causal_pairs="L5H0-H3, L5H1-H2").measure_options()
    assert pairs["causal"] == Interventions(pairs={"L5": [(0, 3), (1, 2)]})
    assert Reading(text="a.txt", causal=True).measure_options()["causal"] is True


def test_pairs_are_named_with_their_layer(text: Path) -> None:
    measure = ("measure", "demo", "--text", text, *READ, "--json", "--causal-pairs")
    assert "L5H0-L4H1: expected two heads of a layer, as in L3H0-H5" in fails(*measure, "L5H0-L4H1")
    assert "44" in fails(*measure, "L5H0-H44")


def test_ctrl_c_keeps_what_was_seen_and_resume_goes_on(
    text: Path, run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run.nc"
    measure = ("measure", "demo", "--text", text, *READ, "--out", out)

    def interrupt(what: str, done: int, total: int) -> None:
        if what == "heads replaced" and done == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Talk, "progress", lambda self: nullcontext(interrupt))
        told = headmix(*measure, code=130).stdout
    assert "forward passes with heads replaced were run" in told
    assert hm.open_results(out).head_ablation.notnull().all()  # the layer in hand was finished
    assert (tmp_path / "run.nc.partial.causal").exists()
    assert "is left of a run that did not end" in fails(*measure)
    headmix(*measure, "--resume")
    resumed, whole = (hm.open_results(f).drop_attrs(deep=False) for f in (out, run_file))
    assert resumed.identical(whole)
    assert [p.name for p in tmp_path.iterdir()] == ["run.nc"]
