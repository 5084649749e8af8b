"""Nulls of activation metrics against heads that are independent noise, drawn many times."""

from functools import cache

import numpy as np
import pytest
import torch
from example_layers import OWN, example, moments_of

import headmix as hm
from headmix import nulls
from headmix.heads import Heads
from headmix.metrics import dimensions
from headmix.moments import Moments

DRAWS = 150
ON_TEXT = {n: metric for n, metric in OWN.items() if "moments" in metric.needs}
#: Exact in mean and standard deviation for Gaussian W_O and independent Gaussian tokens.
EXACT = (
    "interference_ratio",
    "pair_interference",
    "cka",
    "group_cka",
    "cca",
    "gaussian_mi",
    "total_correlation",
)
#: Means only: yardsticks, not distributions.
MEANS = ("variance_share", "head_norm")


@cache
def residuals() -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """By metric, over layers of independent noise: value − null mean, null sd, null mean.

    Simulated nulls are drawn anew for each layer: one simulation has a noise of its own.
    """
    seen: dict[str, list[list[np.ndarray]]] = {n: [[], [], []] for n in ON_TEXT}
    for seed in range(DRAWS):
        e = example(layers=1, seed=seed, independent=True)
        for name, metric in ON_TEXT.items():
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                value, (mean, sd) = e.value(metric), e.null(metric)
            keep = np.ones(value.shape, bool)
            if value.ndim == 2:
                np.fill_diagonal(keep, False)
            sd = np.broadcast_to(np.nan if sd is None else sd, value.shape)
            parts = (value - mean, sd, np.broadcast_to(mean, value.shape))
            for kept, part in zip(seen[name], parts, strict=True):
                kept.append(part[keep] if value.ndim else part[None])
    return {n: tuple(np.stack(part) for part in parts) for n, parts in seen.items()}


@pytest.mark.parametrize("name", EXACT)
def test_exact_nulls(name: str) -> None:
    difference, sd, _ = residuals()[name]
    z = difference / sd
    assert np.abs(z.mean(0)).max() < 4.5 / DRAWS**0.5
    # a layer's pairs share heads: the spread of their joint mean is taken as it is
    assert abs(z.mean()) < 4.5 * z.mean(1).std() / DRAWS**0.5
    # 15 or 3 uncorrelated pairs, or one number, a draw
    freedom = DRAWS * (z.shape[1] / 2 if z.shape[1] > 1 else 1)
    assert abs(np.sqrt((z**2).mean()) - 1) < 4.5 / (2 * freedom) ** 0.5


@pytest.mark.parametrize("name", [n for n in ON_TEXT if n not in EXACT + MEANS])
def test_other_nulls_describe_independent_heads(name: str) -> None:
    """First-order and simulated nulls: centred to a third of a standard deviation, sd to 30 %."""
    difference, sd, _ = residuals()[name]
    spread = difference.std(0)
    assert np.abs(difference.mean(0) / spread).max() < 0.35 + 4 / DRAWS**0.5
    assert 0.7 < np.median(spread / np.sqrt((sd**2).mean(0))) < 1.3


@pytest.mark.parametrize("name", MEANS)
def test_heads_alike_are_alike_on_average(name: str) -> None:
    difference, sd, mean = residuals()[name]
    assert np.isnan(sd).all()
    assert (np.abs(difference.mean(0)) < 4.5 * difference.std(0) / DRAWS**0.5).all()
    assert np.abs(difference).max() > 0.01 * mean.max()


def test_plug_in_biases_are_those_of_the_textbook() -> None:
    """pq/(n−1), pq/2n and (Dc² − Hd²)/4n, to first order in 1/n."""
    e = example(independent=True)
    heads, n, d, H = e.layers[0], len(e.z), 4, 6
    _, wide = noise_layer(H, d, n=100 * n, seed=0)
    m = hm.metrics
    assert np.allclose(m.cca.null(heads, e.moments)[0] * d, d * d / (n - 1))
    assert np.allclose(m.gaussian_mi.null(heads, wide)[0], d * d / (200 * n), rtol=1e-2)
    total = ((H * d) ** 2 - H * d**2) / (400 * n)
    assert np.allclose(m.total_correlation.null(heads, wide)[0], total, rtol=1e-2)


@pytest.mark.parametrize(("d", "others"), [(4, 12), (6, 30)])
def test_in_sample_r2_of_noise_is_larger_than_nothing_and_held_out_less(
    d: int, others: int
) -> None:
    """In sample (Dc − d)/(n − 1); held out −p/(n_train − p − 2), p = Dc − d."""
    heads, text = noise_layer((others + d) // d, d, n=200, seed=0)
    p, fitted = others, []
    for seed in range(100):
        _, text = noise_layer((others + d) // d, d, n=200, seed=seed)
        sigma = text.covariance
        explained = sigma[:d, d:] @ torch.linalg.solve(sigma[d:, d:], sigma[d:, :d])
        fitted.append(float(explained.trace() / sigma[:d, :d].trace()))
    assert abs(np.mean(fitted) - p / 199) < 4.5 * np.std(fitted) / 10
    mean, _ = hm.metrics.loo_r2.null(heads, text)
    assert np.allclose(mean, -p / (160 - p - 2))


def noise_layer(H: int, d: int, n: int, seed: int) -> tuple[Heads, Moments]:
    stream = torch.Generator().manual_seed(seed)
    W_O = torch.randn(H, d, 2 * H * d, generator=stream, dtype=torch.float64)
    z = torch.randn(n, H * d, generator=stream, dtype=torch.float64)
    return Heads(W_O), moments_of(z, W_O)


# the Gaussian layer that dimensions are compared with


def test_gaussian_layers_have_the_textbook_dimensions() -> None:
    """Dc = D and endless isotropic text: PR half of D, 99 % of the variance in 77 % of it."""
    heads, text = noise_layer(12, 32, n=500, seed=0)
    heads = Heads(heads.W_O[:, :, :384])
    endless = Moments.zeros(heads.W_O, folds=1)
    endless.count[0] = 1e9
    m = hm.metrics
    assert abs(m.output_participation_ratio.null(heads, endless)[0] / 384 - 0.5) < 0.005
    assert abs(m.output_k99.null(heads, endless)[0] / 384 - 0.77) < 0.01
    # closed form with finite text, from E tr S² of two Wishart matrices
    n, D = 499, 384
    closed = D * D / ((D + 1) * (1 + (D + 1) / n) + D)
    simulated = m.output_participation_ratio.null(heads, text)[0]
    assert abs(simulated / closed - 1) < 0.01


@pytest.mark.parametrize("statistic", ["participation_ratio", "effective_rank", "k99"])
@pytest.mark.parametrize("where", ["concat", "output"])
def test_shrunk_simulations_are_those_of_full_size(
    where: str, statistic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, text = noise_layer(12, 16, n=600, seed=0)
    null = ON_TEXT[f"{where}_{statistic}"].null
    full = float(null(heads, text)[0])
    monkeypatch.setattr(dimensions, "SIMULATED", 96)
    shrunk = float(null(heads, text)[0])
    assert full != shrunk
    assert abs(shrunk / full - 1) < 0.01


def test_simulated_spectra_side_by_side_are_those_of_drawn_layers() -> None:
    drawn = []
    for seed in range(20):
        heads, text = noise_layer(4, 6, n=60, seed=seed)
        drawn.append(dimensions.concat_spectrum(heads, text))
    expected = torch.stack(drawn)
    simulated = dimensions._gaussian_concat(59, 4, 6, 48, nulls.generator().initial_seed()) / 60
    error = expected.std(0) / 20**0.5
    assert ((simulated.mean(0) - expected.mean(0)).abs() < 5 * error).all()
