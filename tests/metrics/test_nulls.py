"""Nulls against what they claim to describe: many layers drawn at random."""

import numpy as np
import pytest
import torch
from example_layers import OWN, Example, example

from headmix import nulls
from headmix.registry import FROM_TEXT, Metric

DRAWS = 300
SHAPE = {"H": 6, "KV": 3, "d": 4, "D": 32}
#: Nulls that are exact in mean and standard deviation where write subspaces are Haar-random.
EXACT = ("projection_kernel", "mean_overlap", "group_overlap", "ffn_read_share", "ov_cosine")


def haar(n: int, stream: torch.Generator) -> torch.Tensor:
    Q, R = torch.linalg.qr(torch.randn(n, n, generator=stream, dtype=torch.float64))
    return Q * R.diagonal().sign()


def test_moments_under_rotation_are_exact() -> None:
    stream = torch.Generator().manual_seed(0)
    D = 7
    A, B = (torch.randn(D, D, generator=stream, dtype=torch.float64) for _ in range(2))
    A, B = A + A.T, B @ B.T
    drawn = [(A * (R @ B @ R.T)).sum() for R in (haar(D, stream) for _ in range(4000))]
    sample = torch.stack(drawn)
    mean, sd = nulls.haar_inner_product(A.trace(), (A * A).sum(), B.trace(), (B * B).sum(), D)
    assert abs(sample.mean() - mean) < 4 * sd / 4000**0.5
    assert abs(sample.std() / sd - 1) < 0.08


@pytest.mark.parametrize(("H", "rank", "D"), [(2, 32, 64), (4, 16, 64), (6, 8, 64), (3, 50, 64)])
def test_frame_eigenvalues_follow_the_free_law(H: int, rank: int, D: int) -> None:
    stream = torch.Generator().manual_seed(0)
    drawn = []
    for _ in range(40):
        bases = [haar(D, stream)[:rank] for _ in range(H)]
        drawn.append(torch.linalg.eigvalsh(sum(q.T @ q for q in bases)).flip(0))
    count = min(H * rank, D)
    simulated = torch.stack(drawn).mean(0)[:count]
    expected = nulls.frame_eigenvalues(H, rank, D, count)
    # the law is that of infinite dimension: eigenvalues repel the edges by order 1/D
    assert (simulated - expected).abs().max() < 3 / D
    low, high = nulls.frame_edges(H, rank, D)
    bulk = expected[expected < H - 1e-9]
    assert low <= bulk.min()
    assert bulk.max() <= high


def test_two_half_spaces_give_the_arcsine_law() -> None:
    expected = 1 + torch.cos(torch.pi * (torch.arange(64, dtype=torch.float64) + 0.5) / 64)
    assert (nulls.frame_eigenvalues(2, 32, 64, 64) - expected).abs().max() < 1e-3


@pytest.mark.parametrize(("d_in", "d", "D"), [(24, 8, 16), (8, 8, 8), (4, 6, 10), (10, 6, 4)])
def test_gaussian_spectra_are_those_of_gaussian_products(d_in: int, d: int, D: int) -> None:
    stream = torch.Generator().manual_seed(1)
    W_V = torch.randn(2000, d_in, d, generator=stream, dtype=torch.float64)
    W_O = torch.randn(2000, d, D, generator=stream, dtype=torch.float64)
    direct = torch.linalg.svdvals(W_V @ W_O)[:, : min(d_in, d, D)]
    direct = direct / direct.square().sum(-1, keepdim=True).sqrt()
    drawn = nulls.gaussian_ov_singular_values(d_in, d, D)
    assert drawn.shape == (nulls.DRAWS, direct.shape[1])
    error = (drawn.mean(0) - direct.mean(0)).abs()
    assert (error < 4 * direct.std(0) / nulls.DRAWS**0.5 + 1e-12).all()


def test_a_wide_reader_leaves_the_textbook_spectrum() -> None:
    """With W_V near orthogonal only W_O [d, D] is left: PR ≈ dD/(D + d + 1)."""
    d, D = 128, 512
    sigma = nulls.gaussian_ov_singular_values(10**6, d, D)
    energy = sigma.square()
    pr = (energy.sum(-1).square() / energy.square().sum(-1)).mean()
    assert abs(pr / (d * D / (D + d + 1)) - 1) < 0.02
    stable = (energy.sum(-1) / energy[:, 0]).mean()
    assert abs(stable / (d / (1 + (d / D) ** 0.5) ** 2) - 1) < 0.05  # true to order d^(−2/3)


def residuals(metric: Metric) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """value − null mean, over random layers; the null's sd; the null's mean."""
    difference, sds, means = [], [], []
    for seed in range(DRAWS):
        e = example(**SHAPE, layers=2, seed=seed)
        value, (mean, sd) = e.value(metric), e.null(metric)
        keep = apart(metric, e, value)
        difference.append((value - mean)[keep])
        means.append(np.broadcast_to(mean, value.shape)[keep])
        sds.append(np.broadcast_to(np.nan if sd is None else sd, value.shape)[keep])
    return np.stack(difference), np.stack(sds), np.stack(means)


def apart(metric: Metric, e: Example, value: np.ndarray) -> np.ndarray:
    """Pairs of different heads; everything where there are no pairs."""
    keep = ~np.isnan(value)
    if metric.dims[:2] in (("head", "head_b"), ("kv_head", "kv_head_b")):
        keep[np.diag_indices(len(value))] = False
    return keep


@pytest.mark.parametrize("name", EXACT)
def test_exact_nulls(name: str) -> None:
    difference, sd, _ = residuals(OWN[name])
    z = difference / sd
    # each column is one pair or head, independent over draws
    assert np.abs(z.mean(0)).max() < 4.5 / DRAWS**0.5
    assert abs(z.mean()) < 4.5 / DRAWS**0.5
    assert abs(np.sqrt((z**2).mean()) - 1) < 0.1


@pytest.mark.parametrize(
    "name",
    [
        n
        for n, m in OWN.items()
        # nulls of what comes from text have tests of their own, beside what they are nulls of
        if m.null and not {*FROM_TEXT} & {*m.needs} and n not in (*EXACT, "joint_rank")
    ],
)
def test_other_nulls_describe_random_layers(name: str) -> None:
    """First-order and simulated nulls: centred to a third of a standard deviation, sd to 30 %."""
    difference, sd, mean = residuals(OWN[name])
    spread = difference.std(0)
    if np.isnan(sd).all():
        assert np.abs(difference.mean(0)).max() < 0.05 * mean.max()
        return
    assert np.abs(difference.mean(0) / spread).max() < 0.35 + 4 / DRAWS**0.5
    ratio = spread / np.sqrt((sd**2).mean(0))
    assert 0.7 < np.median(ratio) < 1.3


def test_root_mean_square_composition_is_exact() -> None:
    squares = []
    for seed in range(DRAWS):
        e = example(**SHAPE, layers=2, seed=seed)
        squares.append(np.nanmean(e.value(OWN["composition_v"]) ** 2))
    error = np.std(squares) / DRAWS**0.5
    assert abs(np.mean(squares) - 1 / SHAPE["D"]) < 4 * error


def test_general_position_has_full_rank() -> None:
    e = example(**SHAPE)
    mean, sd = e.null(OWN["joint_rank"])
    assert e.value(OWN["joint_rank"]) == mean == 24
    assert sd == 0
