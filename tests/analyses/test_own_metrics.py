"""The metrics that analyses add for themselves, where the answer is known."""

import importlib

import numpy as np
import pytest
import torch
import xarray as xr
from scipy import stats

import headmix as hm
from headmix.moments import Moments

views = importlib.import_module("01_views")
emphasis = importlib.import_module("03_emphasis")
dimension = importlib.import_module("05_dimension")


def on(W_O: torch.Tensor, z: torch.Tensor) -> tuple[hm.Heads, Moments]:
    heads = hm.Heads(W_O)
    moments = Moments.zeros(heads.W_O, folds=1)
    moments.update(z, fold=0)
    return heads, moments


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_nothing_is_lost_where_the_concatenation_fits():
    heads, moments = on(random(4, 3, 12), random(5000, 12, seed=1))
    assert float(dimension.read_back_r2(heads, moments)) == pytest.approx(1, abs=1e-9)


def test_of_isotropic_heads_in_a_narrow_stream_its_share_of_the_width_comes_back():
    frames = torch.linalg.qr(random(8, 8, 4)).Q.mT  # orthonormal rows: what a head writes is z
    heads, moments = on(frames, random(200_000, 32, seed=1))
    assert float(dimension.read_back_r2(heads, moments)) == pytest.approx(8 / 32, abs=0.01)


def test_a_direction_that_W_O_drops_is_lost():
    W_O = torch.eye(6).reshape(2, 3, 6).clone()
    W_O[1] = W_O[0]
    heads, moments = on(W_O, random(50_000, 6))
    assert float(dimension.read_back_r2(heads, moments)) == pytest.approx(0.5, abs=0.01)


def test_dimensions_after_W_O_are_those_of_the_product():
    heads, moments = on(random(4, 3, 10), random(3000, 12, seed=1) @ random(12, 12, seed=2))
    expected = float(hm.metrics.output_participation_ratio(heads, moments))
    assert float(dimension.dimensions_after(heads, moments)) == pytest.approx(expected, rel=1e-6)


def test_heads_that_were_turned_at_random_are_like_their_null():
    z = random(3000, 24, seed=1) @ random(24, 24, seed=2)
    scores = []
    for seed in range(40):
        frames = torch.linalg.qr(random(6, 32, 4, seed=10 + seed)).Q.mT
        heads, moments = on(frames, z)
        mean, sd = dimension.turned(heads, moments)
        scores.append(float((dimension.dimensions_after(heads, moments) - mean) / sd))
    # sixteen draws make the mean and the sd of the null rough: a t with 15 degrees of freedom
    assert abs(np.mean(scores)) < 4 * np.sqrt(17 / 16 * 15 / 13 / 40)
    assert max(map(abs, scores)) < stats.t.isf(1e-5, 15) * np.sqrt(17 / 16)


@pytest.mark.parametrize("sign", [1, -1])
def test_copies_that_write_alike_add_up_and_copies_that_write_against_each_other_cancel(sign):
    W_O, z = random(8, 3, 24), random(4000, 8, 3, seed=1)
    W_O[1::2] = sign * W_O[::2]
    z[:, 1::2] = z[:, ::2]
    heads, moments = on(W_O, z.flatten(1))
    # of the seven most redundant of 28 pairs, four are copies and three strangers
    assert sign * float(emphasis.redundant_interference(heads, moments)) > 2


def test_strangers_are_like_the_null_of_redundant_heads():
    scores = []
    for seed in range(60):
        z = random(2000, 24, seed=seed) @ random(24, 24, seed=1000 + seed)
        heads, moments = on(random(8, 3, 24, seed=2000 + seed), z)
        mean, sd = emphasis.null(heads, moments)
        scores.append(float((emphasis.redundant_interference(heads, moments) - mean) / sd))
    assert abs(np.mean(scores)) < 4 / 60**0.5
    assert 0.7 < np.std(scores) < 1.35  # of 60 numbers with sd 1: within 3 or 4 sd


def test_rank_correlation_is_that_of_scipy():
    a, b = random(12), random(12, seed=1)
    assert float(emphasis.spearman(a, b)) == pytest.approx(stats.spearmanr(a, b).statistic)


def test_the_slice_quantile_is_that_of_the_beta_law():
    mean, total = 4 / 12, 6
    sd = (mean * (1 - mean) / (total + 1)) ** 0.5
    ds = xr.Dataset({"head_concentration_null_mean": mean, "head_concentration_null_sd": sd})
    assert views.slice_quantile(ds) == pytest.approx(stats.beta.ppf(0.99, 2, 4))
