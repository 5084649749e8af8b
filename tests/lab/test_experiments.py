"""Experiments: one Dataset, every number beside its null, intervals over seeds."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr
from scipy import stats

import headmix as hm
from headmix import lab
from headmix.lab.cells import ONE_HEAD

CELLS = (
    lab.Cell("threshold", steps=4, batch=4, learning_rates=(1e-3, 1e-2)),
    lab.Cell("xor_free", skip=True, mlp=True, matched=True, steps=4, batch=4),
    lab.Cell("xor", skip=True, steps=4, batch=4, variants=("full",)),
)
VARIANTS = ("identity", "full", "shared", ONE_HEAD)


@pytest.fixture(scope="module")
def ds() -> xr.Dataset:
    return lab.experiment(CELLS, variants=VARIANTS, seeds=range(2))


def test_cells_that_were_run_are_there_and_no_others(ds) -> None:
    ran = ds.value.notnull().all("seed")
    found = {
        (str(t), str(a), str(v))
        for t in ds.task.values
        for a in ds.architecture.values
        for v in ds.variant.values
        if ran.sel(task=t, architecture=a, variant=v)
    }
    expected = {("threshold", "bare", v) for v in VARIANTS[:3]}
    expected |= {("xor_free", "skip+mlp, matched", v) for v in VARIANTS}
    assert found == expected | {("xor", "skip", "full")}
    assert ds.chance.notnull().all()
    assert ds.unit.sel(task="xor") == "accuracy"
    assert ds.skip.sel(architecture="skip").item() is True
    assert set(ds.learning_rate.values[ran.values]) <= {1e-3, 4e-3, 1e-2, 2.5e-2}


def test_parameters_are_matched_where_that_is_said(ds) -> None:
    n = ds.n_parameters
    bare = n.sel(task="threshold", architecture="bare")
    assert bare.sel(variant="full") - bare.sel(variant="identity") == 32 * 32
    matched = n.sel(task="xor_free", architecture="skip+mlp, matched")
    neuron = 2 * 32 + 1
    assert (abs(matched - matched.sel(variant="full")) <= neuron / 2).all()


@pytest.mark.parametrize("output", lab.OUTPUTS)
def test_numbers_that_do_nothing_are_no_parameters(output) -> None:
    """Of what is trained, what W_O does not depend on is not counted, nor matched."""
    cell = lab.Cell("xor", mlp=True, matched=True)
    model = lab.build(replace(cell.config(output), d_ff=4), 0).double()
    identity = lab.build(replace(cell.config("identity"), d_ff=4), 0)
    inert = 0
    for name, p in model.named_parameters():
        if "o_proj" in name and "bias" not in name:
            with torch.no_grad():
                p += torch.randn_like(p)  # at a place where no gradient is zero by chance
            acts = model.layers[0].attention.o_proj.weight.square().sum()
            (gradient,) = torch.autograd.grad(acts, p)
            inert += int((gradient == 0).sum())
    trained = sum(p.numel() for p in model.parameters())
    assert model.n_parameters == trained - inert
    full = lab.build(cell.config("full"), 0).n_parameters
    assert abs(lab.build(cell.config(output), 0).n_parameters - full) <= (2 * 32 + 1) / 2
    assert model.n_parameters >= identity.n_parameters


def test_overlap_after_training_is_on_the_dial(ds) -> None:
    overlap = ds.overlap.sel(task="threshold", architecture="bare").mean("seed")
    assert overlap.sel(variant="identity") == 0
    assert overlap.sel(variant="shared").item() == pytest.approx(1, abs=1e-4)


def test_results_are_the_same_again_and_alone(ds) -> None:
    alone = lab.experiment(CELLS[:1], variants=["shared"], seeds=range(2))
    where = {"task": "threshold", "architecture": "bare", "variant": "shared"}
    np.testing.assert_array_equal(alone.loss.sel(where), ds.loss.sel(where))


def test_results_are_saved_and_opened(ds, tmp_path) -> None:
    opened = hm.open_results(hm.save(ds, tmp_path / "lab.nc"))
    xr.testing.assert_identical(opened, ds)
    cells = json.loads(opened.attrs["cells"])
    assert cells[0]["task"] == "threshold"


def test_differences_are_paired_by_seed() -> None:
    random = np.random.default_rng(0)
    value = random.random((1, 1, 2, 6))
    ds = xr.Dataset(
        {"value": (("task", "architecture", "variant", "seed"), value)},
        {"variant": ["full", "identity"], "unit": ("task", ["accuracy"])},
    )
    found = lab.against(ds).sel(variant="identity").isel(task=0, architecture=0)
    test = stats.ttest_rel(value[0, 0, 1], value[0, 0, 0]).confidence_interval(0.95)
    assert found.low.item() == pytest.approx(test.low)
    assert found.high.item() == pytest.approx(test.high)
    assert lab.against(ds).difference.sel(variant="full").item() == 0
    with pytest.raises(ValueError, match="no variant 'none'; there are full, identity"):
        lab.against(ds, "none")
    with pytest.raises(ValueError, match="1 seed: an interval needs two or more"):
        lab.against(ds.isel(seed=[0]))


def test_what_cannot_be_run_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown variants \['none'\]; known: identity"):
        lab.experiment(CELLS, variants=["none"])
    with pytest.raises(ValueError, match="nothing to run: 1 cells"):
        lab.experiment(CELLS[:1], variants=[ONE_HEAD])
    with pytest.raises(ValueError, match="unknown task 'xoor'; known: xor, xor_free"):
        lab.Cell("xoor")
    with pytest.raises(ValueError, match="xor: no learning rate to train at"):
        lab.Cell("xor", learning_rates=())
    with pytest.raises(
        ValueError, match=r"has one place in the results: \[\('threshold', 'bare'\), "
    ):
        lab.experiment([CELLS[0], replace(CELLS[0], steps=5)])
    with pytest.raises(ValueError, match=r"seeds \(0, 0\)"):
        lab.experiment(CELLS[:1], seeds=[0, 0])
    config = lab.Config(5, mlp=False)
    with pytest.raises(ValueError, match="no feed-forward to widen"):
        lab.match(config, config)
    wide = lab.Config(5, d_ff=500)
    with pytest.raises(ValueError, match="of them are too many"):
        lab.match(replace(wide, n_heads=64, d_ff=1), wide)


def test_every_cell_of_the_suites_can_be_built() -> None:
    for cell in {*lab.CELLS, *lab.QUICK}:
        for variant in (*lab.VARIANTS, ONE_HEAD):
            if cell.includes(variant):
                assert lab.build(cell.config(variant), 0).n_parameters > 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_quick_suite_finds_what_theory_says() -> None:
    ds = lab.experiment(lab.QUICK, seeds=range(3))
    value, loss = ds.value, ds.loss.sel(task="xor")
    assert loss.sel(architecture="skip").min() > np.log(2) - 0.02
    assert (value.sel(task="xor", architecture="skip+mlp, matched").dropna("variant") == 1).all()
    assert value.sel(task="threshold", architecture="bare").min() > 0.98
    crowd = value.sel(task="crowd", architecture="skip")
    assert crowd.sel(variant="shared").max() < 0.85 < crowd.sel(variant="full").min()
    text = value.sel(task="characters").dropna("architecture", how="all")
    assert text.max() < ds.chance.sel(task="characters")
