"""compare: differences of runs, and heads that are matched where they were shuffled."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from architectures import tiny_model
from commands import fails, headmix
from small import WeightsOnly, small_model

import headmix as hm
from headmix import lab
from headmix.heads import Heads
from headmix.model import AttentionModel
from headmix.shapes import metric_names


def changed(model: AttentionModel, change) -> AttentionModel:
    """The model with every layer's Heads changed."""
    sites = {n: WeightsOnly(change(s.heads()), s.notes) for n, s in model.sites.items()}
    return replace(model, name="changed", sites=sites)


def shuffled(heads: Heads) -> Heads:
    """KV groups swapped, and the heads of the first swapped too: 0 1 | 2 3 → 2 3 | 1 0."""
    heads_in, groups_in = torch.tensor([2, 3, 1, 0]), torch.tensor([1, 0])
    return replace(
        heads, W_O=heads.W_O[heads_in], W_Q=heads.W_Q[heads_in],
        W_V=heads.W_V[groups_in], W_K=heads.W_K[groups_in],
    )  # fmt: skip


def rotated_within_heads(heads: Heads) -> Heads:
    """Another gauge: the same function, other weights."""
    A = torch.linalg.qr(torch.randn(heads.n_kv_heads, heads.d_head, heads.d_head)).Q
    return replace(heads, W_V=heads.W_V @ A, W_O=A.mT[heads.kv_index] @ heads.W_O)


def test_a_model_and_itself_differ_in_nothing() -> None:
    ds = hm.compare(small_model(), small_model())
    for name in ("projection_kernel", "ov_spectrum", "composition_v", "mean_overlap"):
        assert float(np.abs(ds[name]).max()) == 0
    assert float(ds.write_change.max()) == 0
    assert float(ds.ov_change.max()) < 1e-6
    assert np.allclose(ds.write_overlap, 1)


def test_differences_are_b_minus_a_with_both_runs_beside() -> None:
    a = hm.measure(small_model())
    b = hm.measure(changed(small_model(), lambda h: replace(h, W_O=h.W_O * 2 + h.W_O[[0]])))
    ds = hm.compare(a, b)
    assert np.allclose(ds.projection_kernel, b.projection_kernel - a.projection_kernel)
    assert np.array_equal(ds.projection_kernel_run_a, a.projection_kernel)
    assert np.array_equal(ds.projection_kernel_run_b, b.projection_kernel)
    assert np.array_equal(ds.ov_spectrum_run_b_null_sd, b.ov_spectrum_null_sd)
    sd = ds.projection_kernel_null_sd
    assert np.allclose(sd, np.hypot(a.projection_kernel_null_sd, b.projection_kernel_null_sd))
    assert ds.projection_kernel.attrs["title"] == "Write-subspace overlap, B − A"
    assert ds.attrs["model"] == "changed − small"
    runs = json.loads(ds.attrs["compared"])
    assert {name: run["model"] for name, run in runs.items()} == {"A": "small", "B": "changed"}
    assert "write_change" not in ds  # runs hold no weights


def test_shuffled_heads_find_each_other_within_their_groups() -> None:
    ds = hm.compare(small_model(), changed(small_model(), shuffled), match="overlap")
    assert ds.match.values.tolist() == [[3, 2, 0, 1]] * 3
    assert np.allclose(ds.write_overlap, 1, atol=1e-5)
    for name in ("projection_kernel", "group_overlap", "ov_stable_rank", "composition_v"):
        assert float(np.nanmax(np.abs(ds[name]))) < 1e-4, name
        by_index = hm.compare(small_model(), changed(small_model(), shuffled))
        assert name == "group_overlap" or float(np.nanmax(np.abs(by_index[name]))) > 0.01, name


def test_heads_that_do_the_same_find_each_other_by_what_they_do() -> None:
    module = tiny_model("bert")
    other = copy.deepcopy(module)
    order = torch.tensor([2, 0, 3, 1])
    layer = other.encoder.layer[0].attention
    d = module.config.hidden_size // len(order)
    rows = (order[:, None] * d + torch.arange(d)).flatten()
    with torch.no_grad():
        for part in (layer.self.query, layer.self.key, layer.self.value):
            part.weight.copy_(part.weight[rows])
            part.bias.copy_(part.bias[rows])
        layer.output.dense.weight.copy_(layer.output.dense.weight[:, rows])
    text = [torch.randint(5, 30, (40,)) for _ in range(6)]
    options = {"text": text, "metrics": ["cka", "ov_stable_rank"], "folds": 2}
    ds = hm.compare(module, other, match="cka", **options)
    assert ds.match.sel(layer="L0").values.tolist() == order.argsort().tolist()
    assert ds.match.sel(layer="L1").values.tolist() == [0, 1, 2, 3]
    assert float(np.abs(ds.cka).max()) < 1e-6
    with pytest.raises(ValueError, match="matched by cka on a text: name one"):
        hm.compare(module, other, match="cka", metrics=["ov_stable_rank"])


def test_the_ov_matrix_does_not_change_with_the_gauge_and_w_o_does() -> None:
    ds = hm.compare(small_model(), changed(small_model(), rotated_within_heads))
    assert float(ds.ov_change.max()) < 1e-5
    assert float(ds.write_change.min()) > 0.1


def test_the_change_of_ov_is_that_of_the_materialised_product() -> None:
    other = changed(small_model(), lambda h: replace(h, W_O=h.W_O + 0.1 * torch.randn_like(h.W_O)))
    ds = hm.compare(small_model(), other)
    a, b = small_model().heads(1), other.heads(1)
    M_a, M_b = (h.W_V[h.kv_index] @ h.W_O for h in (a, b))
    expected = torch.linalg.matrix_norm(M_b - M_a) / torch.linalg.matrix_norm(M_a)
    assert np.allclose(ds.ov_change.sel(layer="L1"), expected, rtol=1e-4)


def test_an_interval_of_a_difference_is_that_of_independent_runs() -> None:
    a = hm.measure(small_model())
    for part, value in (("low", 0.1), ("high", 0.3)):
        a[f"mean_overlap_{part}"] = (a.mean_overlap + (value - 0.2)).drop_attrs()
    ds = hm.compare(a, a)
    assert np.allclose(ds.mean_overlap_low, -0.1 * 2**0.5, atol=1e-6)
    assert np.allclose(ds.mean_overlap_high, 0.1 * 2**0.5, atol=1e-6)
    assert set(metric_names(ds)) == set(metric_names(a))


def test_the_page_of_a_comparison(tmp_path) -> None:
    other = changed(small_model(), lambda h: replace(h, W_O=h.W_O * 1.5))
    ds = hm.compare(small_model(), other)
    page = hm.report(ds, tmp_path / "page.html").read_text()
    assert "OV matrices changed by 50.00% of their norm on average" in page
    again = hm.open_results(hm.save(ds, tmp_path / "difference.nc"))
    assert np.array_equal(again.write_change, ds.write_change)


def test_what_other_labels_say_is_not_subtracted() -> None:
    a = hm.measure(small_model())
    share = ("layer", "label"), np.ones((3, 1)), {"title": "Share"}
    runs = [a.assign(share=share).assign_coords(label=[name]) for name in ("upos", "depth")]
    ds = hm.compare(*runs)
    assert "share" not in ds
    assert "label" not in ds.dims
    said = json.loads(ds.attrs["skipped"])["share"][""]
    assert said == "label is ['upos'] and ['depth'] in the two runs"
    assert float(np.abs(hm.compare(runs[0], runs[0]).share).max()) == 0


def test_what_cannot_be_compared_is_said() -> None:
    small = hm.measure(small_model())
    folded = small.assign_attrs(processing="folded")
    with pytest.raises(ValueError, match="one run are raw, those of the other folded"):
        hm.compare(small, folded)
    assert "mean_overlap" in hm.compare(small, folded, any_processing=True)
    with pytest.raises(ValueError, match=r"different layers, L0, L1, L2 and L0, L1"):
        hm.compare(small, hm.measure(small_model(layers=2)))
    with pytest.raises(ValueError, match=r"layers × heads are 3×4 and 3×2"):
        hm.compare(small, hm.measure(small_model(heads=2)))
    with pytest.raises(ValueError, match=r"L0: W_O is \[4, 4, 16\] in one model and \[4, 4, 24\]"):
        hm.compare(small_model(), small_model(d_model=24))
    with pytest.raises(ValueError, match="a run holds no weights"):
        hm.compare(small, small_model(), match="overlap")
    with pytest.raises(ValueError, match="one of index, overlap, cka, got 'names'"):
        hm.compare(small, small, match="names")
    twice = hm.compare(small, small)
    with pytest.raises(ValueError, match="is a comparison itself"):
        hm.compare(twice, small)


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "demo.nc"
    return hm.save(hm.measure("demo", metrics=["mean_overlap", "ov_stable_rank"]), out)


def test_the_command_writes_page_or_numbers(demo_run: Path, tmp_path: Path) -> None:
    page, numbers = tmp_path / "page.html", tmp_path / "numbers.nc"
    metrics = ("--metrics", "mean_overlap,ov_stable_rank")
    told = headmix("compare", demo_run, "demo", *metrics, "--out", page).stdout
    assert told.splitlines()[-1] == f"Report: {page}"
    assert "moved furthest from 0.144 to 0.144, by +0 (+0 null sd)" in told
    said = headmix("compare", "demo", "demo", *metrics, "--out", numbers, "--json").stdout
    assert json.loads(said)["metrics"] == list(metric_names(hm.open_results(numbers)))
    assert float(hm.open_results(numbers).ov_change.max()) < 1e-6


def test_the_command_says_what_cannot_be_compared(demo_run: Path, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "page.html")
    assert "--layers would change nothing in it" in fails(
        "compare", demo_run, demo_run, "--layers", "0", *out
    )
    assert "a run holds no weights" in fails(
        "compare", demo_run, demo_run, "--match", "overlap", *out
    )
    assert not (tmp_path / "page.html").exists()


def test_a_sequence_holds_every_run_and_the_difference_of_first_and_last() -> None:
    def scaled(factor: float) -> AttentionModel:
        by = torch.tensor([factor, 1, 1, 1])[:, None, None]
        model = changed(small_model(), lambda h: replace(h, W_O=h.W_O * by + h.W_O[[1]]))
        return replace(model, name=f"run-step{factor:g}")

    runs = [hm.measure(scaled(f)) for f in (1, 2, 3)]
    ds = hm.compare(*runs)
    assert ds.run.values.tolist() == ["step1", "step2", "step3"]
    assert ds.ov_stable_rank_sequence.dims == ("run", "layer", "head")
    for step, run in zip(ds.run.values, runs, strict=True):
        at = ds.ov_stable_rank_sequence.sel(run=step)
        assert np.array_equal(at, run.ov_stable_rank)
    assert np.allclose(ds.ov_stable_rank, runs[2].ov_stable_rank - runs[0].ov_stable_rank)
    assert "composition_v_sequence" not in ds  # pairs across layers are too many
    assert set(metric_names(ds)) == set(metric_names(runs[0]))


def test_a_run_with_other_labels_has_no_place_in_a_sequence() -> None:
    a = hm.measure(small_model())
    share = ("layer", "label"), np.ones((3, 1)), {"title": "Share"}
    runs = [a.assign(share=share).assign_coords(label=[name]) for name in ("upos", "depth")]
    ds = hm.compare(runs[0], runs[1], runs[0])
    assert "share" in ds
    assert "share_sequence" not in ds
    assert "not every run" in json.loads(ds.attrs["skipped"])["share_sequence"][""]
    assert "share_sequence" in hm.compare(runs[0], runs[0], runs[0])


def test_every_run_of_a_sequence_is_matched_to_the_first() -> None:
    a, b = small_model(), changed(small_model(), shuffled)
    ds = hm.compare(a, b, a, match="overlap", metrics=["ov_stable_rank"])
    ranks = ds.ov_stable_rank_sequence
    assert np.allclose(ranks, ranks[0], rtol=1e-4)
    assert ds.match.values.tolist() == [[0, 1, 2, 3]] * 3
    with pytest.raises(ValueError, match="the other folded"):
        hm.compare(a, hm.measure(a).assign_attrs(processing="folded"), a)


def test_checkpoints_of_a_training_are_a_sequence_on_the_command_line(tmp_path: Path) -> None:
    task = lab.TASKS["induction"]()
    lab.train(
        task.config(mlp=False), task, seeds=[0],
        learning_rates=[1e-2], steps=4, batch=8, checkpoints=tmp_path, every=2,
    )  # fmt: skip
    files = sorted(tmp_path.glob("*.safetensors"))
    numbers = tmp_path / "training.nc"
    headmix("compare", *files, "--out", numbers)
    ds = hm.open_results(numbers)
    assert ds.run.values.tolist() == ["step00000", "step00002", "step00004"]
    assert float(ds.ov_change.min()) > 0
