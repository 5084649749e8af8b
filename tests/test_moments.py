"""The accumulator: splitting, merging, order and pivot change nothing; sums are the sums."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headmix.moments import Moments

H, D_HEAD, D_MODEL, FOLDS = 3, 4, 16, 3


def tokens(n: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(n, H * D_HEAD, generator=generator, dtype=torch.float64)
    return z @ torch.randn(H * D_HEAD, H * D_HEAD, generator=generator, dtype=torch.float64) + 3


def output_projection() -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(H, D_HEAD, D_MODEL, generator=generator, dtype=torch.float64)


def accumulated(
    z: torch.Tensor, folds: torch.Tensor, *, step: int = 10**9, pivot: torch.Tensor | None = None
) -> Moments:
    """Moments of tokens with a fold each, at most ``step`` tokens a batch."""
    W_O = output_projection()
    m = Moments.zeros(W_O, folds=FOLDS, pivot=pivot, positions=5)
    written = z @ W_O.flatten(0, 1)
    for fold in range(FOLDS):
        mine = (folds == fold).nonzero().flatten()
        for part in mine.split(step):
            m.update(z[part], written[part], fold=fold, position=part % 5)
    return m


def assert_equal(a: Moments, b: Moments, tolerance: float = 1e-9) -> None:
    assert torch.allclose(a.covariance, b.covariance, rtol=tolerance, atol=tolerance)
    for name in Moments.sums():
        mine, theirs = getattr(a, name), getattr(b, name)
        if name == "second":
            mine, theirs = mine.triu(), theirs.triu()
        assert torch.allclose(mine, theirs, rtol=tolerance, atol=tolerance * 1e3), name


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 50), st.integers(0, 2**32 - 1))
def test_batch_sizes_and_order_change_nothing(step: int, seed: int) -> None:
    z, folds = tokens(120), torch.arange(120) % FOLDS
    shuffled = torch.randperm(120, generator=torch.Generator().manual_seed(seed))
    whole, parts = accumulated(z, folds), accumulated(z, folds, step=step)
    assert_equal(whole, parts)
    W_O, mixed = output_projection(), Moments.zeros(output_projection(), folds=FOLDS, positions=5)
    for t in shuffled:
        one = z[t][None]
        mixed.update(one, one @ W_O.flatten(0, 1), fold=int(folds[t]), position=t[None] % 5)
    assert_equal(whole, mixed)


def test_split_and_merge_are_the_batch() -> None:
    z, folds = tokens(200), torch.arange(200) % FOLDS
    cut = torch.arange(200) < 77
    empty = torch.full_like(folds, -1)
    left = accumulated(z, torch.where(cut, folds, empty))
    right = accumulated(z, torch.where(cut, empty, folds))
    merged = left + right
    W_O = output_projection()
    whole = Moments.zeros(W_O, folds=FOLDS, positions=5)
    for fold in range(FOLDS):
        mine = (folds == fold).nonzero().flatten()
        whole.update(z[mine], z[mine] @ W_O.flatten(0, 1), fold=fold, position=mine % 5)
    assert_equal(merged, whole)
    assert merged.n == 200


def test_no_statistic_depends_on_the_pivot() -> None:
    z, folds = tokens(90), torch.arange(90) % FOLDS
    plain, pivoted = accumulated(z, folds), accumulated(z, folds, pivot=z.mean(0))
    assert torch.allclose(plain.covariance, pivoted.covariance, rtol=1e-9)
    assert torch.allclose(plain.mean, pivoted.mean, rtol=1e-9)
    assert torch.allclose(plain.norm, pivoted.norm, rtol=1e-9)


def test_a_pivot_saves_digits_where_the_mean_is_large() -> None:
    z, folds = tokens(90), torch.arange(90) % FOLDS
    far = z + 1e7
    exact = torch.cov(z.T, correction=0)
    error = (accumulated(far, folds, pivot=far.mean(0)).covariance - exact).abs().max()
    assert error < 1e-6 < (accumulated(far, folds).covariance - exact).abs().max()


def test_the_sums_are_the_sums() -> None:
    z, folds = tokens(60), torch.arange(60) % FOLDS
    m, W_O = accumulated(z, folds, pivot=z[0]), output_projection()
    o = torch.einsum("thd,hdm->thm", z.unflatten(1, (H, D_HEAD)), W_O)
    u = z - z[0]
    n = torch.einsum("thd,hdm->thm", u.unflatten(1, (H, D_HEAD)), W_O).square().sum(-1)
    assert torch.allclose(m.covariance, torch.cov(z.T, correction=0))
    assert torch.allclose(m.square.sum(0), n.sum(0))
    assert torch.allclose(m.square_pairs.sum(0), n.T @ n)
    assert torch.allclose(m.weighted.sum(0), u.T @ n)
    assert torch.allclose(m.norm.sum(0), o.norm(dim=-1).sum(0))
    assert torch.allclose(m.joint_norm.sum(), o.sum(1).norm(dim=-1).sum())


def test_leaving_a_fold_out_is_never_having_seen_it() -> None:
    z, folds = tokens(60), torch.arange(60) % FOLDS
    left = accumulated(z, folds).without(1)
    assert torch.allclose(left.covariance, torch.cov(z[folds != 1].T, correction=0))


def test_within_positions_is_the_residual_of_position_means() -> None:
    z, folds = tokens(60), torch.arange(60) % FOLDS
    residual = z.clone()
    for fold in range(FOLDS):
        for position in range(5):
            where = (folds == fold) & (torch.arange(60) % 5 == position)
            residual[where] -= z[where].mean(0)
    expected = residual.T @ residual / (60 - FOLDS * 5)
    assert torch.allclose(accumulated(z, folds).within_positions.covariance, expected)


def test_what_does_not_belong_together_is_not_added() -> None:
    W_O = output_projection()
    with pytest.raises(ValueError, match="pivot differs"):
        Moments.zeros(W_O, folds=2) + Moments.zeros(W_O, folds=2, pivot=torch.ones(H * D_HEAD))
    with pytest.raises(ValueError, match="roots differs"):
        Moments.zeros(W_O, folds=2) + Moments.zeros(2 * W_O, folds=2)
    with pytest.raises(ValueError, match="2 folds cannot be added to 3"):
        Moments.zeros(W_O, folds=2) + Moments.zeros(W_O, folds=3)
    with pytest.raises(ValueError, match="no positions were kept"):
        _ = Moments.zeros(W_O, folds=2).within_positions
    with pytest.raises(ValueError, match="at least two tokens"):
        _ = Moments.zeros(W_O, folds=2).covariance
