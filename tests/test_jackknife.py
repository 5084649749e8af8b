"""The jackknife over folds of documents: a closed form, and its coverage where documents matter."""

import pytest
import torch
from scipy import stats
from torch import Tensor

import headmix as hm
from headmix.jackknife import interval
from headmix.moments import Moments

H, D_HEAD, D_MODEL, FOLDS = 2, 2, 5, 5
CONCAT = H * D_HEAD

#: Simulated texts, each of documents with random effects of their own.
TEXTS, DOCUMENTS, TOKENS = 400, 40, 20


def normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


W_O = normal(H, D_HEAD, D_MODEL, seed=1)
HEADS = hm.Heads(W_O)
BETWEEN, WITHIN = normal(2, CONCAT, CONCAT, seed=2)
COVARIANCE = BETWEEN.T @ BETWEEN + WITHIN.T @ WITHIN


@pytest.mark.parametrize("folds", [2, 5, 9])
def test_of_a_mean_it_is_the_standard_error_of_fold_means(folds):
    values = normal(folds, 30, 3, seed=folds) + 2  # fold, token, any shape
    total = values.sum((0, 1))
    replicates = [(total - values[f].sum(0)) / (folds * 30 - 30) for f in range(folds)]
    low, high = interval(total / (folds * 30), replicates)
    means = values.mean(1).numpy()
    expected = stats.t.interval(0.95, folds - 1, means.mean(0), stats.sem(means))
    torch.testing.assert_close(low, torch.from_numpy(expected[0]), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(high, torch.from_numpy(expected[1]), rtol=1e-10, atol=1e-12)


def test_it_is_about_the_estimate_and_no_wider_than_the_folds_differ():
    estimate = torch.tensor([1.0, 2.0])
    low, high = interval(estimate, [torch.tensor([3.0, 5.0])] * 4)
    assert torch.equal(low, estimate)
    assert torch.equal(high, estimate)


@pytest.mark.parametrize("replicates", [[], [torch.ones(3)]])
def test_fewer_than_two_folds_are_refused(replicates):
    with pytest.raises(
        ValueError, match=f"^a jackknife needs at least two folds, got {len(replicates)}$"
    ):
        interval(torch.ones(3), replicates)


def text(seed: int) -> Tensor:
    """z ``[document, token, concat]``: tokens of a document share a random effect."""
    effect = normal(DOCUMENTS, 1, CONCAT, seed=2 * seed)
    noise = normal(DOCUMENTS, TOKENS, CONCAT, seed=2 * seed + 1)
    return effect @ BETWEEN + noise @ WITHIN


def folds_of(parts: Tensor) -> Moments:
    moments = Moments.zeros(W_O, folds=FOLDS)
    for fold, part in enumerate(parts):
        moments.update(part, fold=fold)
    return moments


STATISTICS = {
    "mean": lambda moments: moments.mean[0],
    "pair_interference": lambda moments: hm.metrics.pair_interference(HEADS, moments)[0, 1],
    "cka": lambda moments: hm.metrics.cka(HEADS, moments)[0, 1],
}


def truth() -> dict[str, Tensor]:
    """Of infinitely many documents, from the covariance that the texts are drawn with."""
    S = COVARIANCE.unflatten(0, (H, -1)).unflatten(2, (H, -1))
    cross = torch.einsum("idm,idje,jen->ijmn", W_O, S, W_O)  # Cov(o_i, o_j)
    trace, square = cross.diagonal(dim1=2, dim2=3).sum(2), cross.square().sum((2, 3))
    return {
        "mean": torch.zeros((), dtype=torch.float64),
        "pair_interference": trace[0, 1] / (trace[0, 0] * trace[1, 1]).sqrt(),
        "cka": square[0, 1] / (square[0, 0] * square[1, 1]).sqrt(),
    }


@pytest.fixture(scope="module")
def covered() -> dict[str, dict[str, int]]:
    """In how many texts the interval holds the truth, by documents and by tokens."""
    true = truth()
    counts = {way: dict.fromkeys(STATISTICS, 0) for way in ("documents", "tokens")}
    for seed in range(TEXTS):
        z = text(seed)
        shuffled = torch.randperm(DOCUMENTS * TOKENS, generator=torch.Generator().manual_seed(seed))
        ways = {
            "documents": z.reshape(FOLDS, -1, CONCAT),
            "tokens": z.flatten(0, 1)[shuffled].reshape(FOLDS, -1, CONCAT),
        }
        for way, parts in ways.items():
            moments = folds_of(parts)
            for name, statistic in STATISTICS.items():
                low, high = interval(statistic(moments), [statistic(m) for m in moments.replicates])
                counts[way][name] += bool(low <= true[name] <= high)
    return counts


@pytest.mark.parametrize("statistic", STATISTICS)
def test_it_covers_the_truth_as_often_as_it_says(covered, statistic):
    low, high = stats.binom.ppf([0.001, 0.999], TEXTS, 0.95)
    assert low <= covered["documents"][statistic] <= high


@pytest.mark.parametrize("statistic", STATISTICS)
def test_folds_of_single_tokens_would_be_far_too_sure(covered, statistic):
    # too small a standard error, by the root of the design effect 1 + (TOKENS − 1) · ICC; chance
    # would let a 95 % interval cover so seldom once in 10⁹ times
    assert covered["tokens"][statistic] < stats.binom.ppf(1e-9, TEXTS, 0.95)
