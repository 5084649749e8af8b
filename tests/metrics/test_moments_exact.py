"""Heads on text whose numbers are known by hand: equicorrelated, duplicated, adding, cancelling."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from example_layers import OWN, example, moments_of

import headmix as hm
from headmix.heads import Heads
from headmix.moments import Moments
from headmix.registry import Metric, NotApplicable

F64 = torch.float64
m = hm.metrics
H, D_HEAD, RHO = 6, 4, 0.4
ON_TEXT = {n: metric for n, metric in OWN.items() if "moments" in metric.needs}
OFF = ~np.eye(H, dtype=bool)


def close(value: torch.Tensor, expected: object, tolerance: float = 1e-7) -> bool:
    return np.allclose(np.asarray(value), np.asarray(expected), rtol=tolerance, atol=tolerance)


def haar(n: int, seed: int = 0) -> torch.Tensor:
    stream = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(n, n, generator=stream, dtype=F64)).Q


def population(sigma: torch.Tensor, W_O: torch.Tensor, folds: int = 5) -> Moments:
    """The sums of so much Gaussian text of covariance Σ that its folds are all the same."""
    n = 1e9 / folds
    A = torch.linalg.qr(W_O.mT).R.mT
    blocks = sigma.reshape(*A.shape[:2], *A.shape[:2])
    K = torch.einsum("iab,iajc,jcd->ibjd", A, blocks, A)
    trace = torch.einsum("iaia->i", K)
    fourth = torch.outer(trace, trace) + 2 * K.square().sum((1, 3))  # Isserlis
    empty = Moments.zeros(W_O, folds=folds)
    return replace(
        empty,
        count=empty.count + n,
        documents=empty.documents + 1,
        second=empty.second + n * sigma,
        square=empty.square + n * trace,
        square_pairs=empty.square_pairs + n * fourth,
    )


def equicorrelated(rho: float = RHO) -> torch.Tensor:
    """Σ = R ⊗ I: all pairs of heads alike, each direction with its own of the other head."""
    R = torch.full((H, H), rho, dtype=F64) + (1 - rho) * torch.eye(H, dtype=F64)
    return torch.kron(R, torch.eye(D_HEAD, dtype=F64))


ORTHOGONAL = haar(H * D_HEAD).reshape(H, D_HEAD, H * D_HEAD)
SHARED = ORTHOGONAL[:1].expand(H, -1, -1)
ALTERNATING = SHARED * torch.tensor([1.0, -1.0] * (H // 2), dtype=F64)[:, None, None]
LAYOUTS = {"orthogonal": ORTHOGONAL, "shared": SHARED, "alternating": ALTERNATING}
every_layout = pytest.mark.parametrize("W_O", LAYOUTS.values(), ids=LAYOUTS.keys())


@every_layout
def test_redundancy_of_equicorrelated_heads(W_O: torch.Tensor) -> None:
    """Wherever the heads write: what they know of each other is the same."""
    heads, text = Heads(W_O), population(equicorrelated(), W_O)
    one = np.where(OFF, 0, 1)
    assert close(m.cka(heads, text), one + OFF * RHO**2)
    assert close(m.cca(heads, text), one + OFF * RHO**2)
    information = m.gaussian_mi(heads, text)
    assert information.diagonal().isposinf().all()
    assert close(information[OFF] / D_HEAD, -0.5 * math.log(1 - RHO**2))
    assert close(m.loo_r2(heads, text), RHO**2 * (H - 1) / (1 + (H - 2) * RHO))
    assert close(m.loo_r2(heads, text), 0.30769, 1e-5)
    total = -0.5 * ((H - 1) * math.log(1 - RHO) + math.log(1 + (H - 1) * RHO))
    assert close(m.total_correlation(heads, text) / D_HEAD, total)
    assert close(m.total_correlation(heads, text) / D_HEAD, 0.72776, 1e-5)


@pytest.mark.parametrize(
    ("layout", "ratio", "pair"),
    [("orthogonal", 1, 0), ("shared", 1 + (H - 1) * RHO, RHO), ("alternating", 1 - RHO, None)],
)
def test_interference_of_equicorrelated_heads(layout: str, ratio: float, pair: float) -> None:
    W_O = LAYOUTS[layout]
    heads, text = Heads(W_O), population(equicorrelated(), W_O)
    assert close(m.interference_ratio(heads, text), ratio)
    assert close(m.variance_share(heads, text), np.full(H, 1 / H))
    signs = np.outer([1, -1] * (H // 2), [1, -1] * (H // 2))
    expected = RHO * signs if pair is None else np.full((H, H), pair)
    assert close(m.pair_interference(heads, text)[OFF], expected[OFF])


def test_shared_interference_is_three() -> None:
    text = population(equicorrelated(), SHARED)
    assert close(m.interference_ratio(Heads(SHARED), text), 3)


def test_groups_of_equicorrelated_heads() -> None:
    """Three groups of two; a group's kernel is the sum of its heads' kernels."""
    explained = 4 * RHO**2 / (1 + 3 * RHO)  # of a head, by the four heads of the other groups
    for W_O, r2 in ((ORTHOGONAL, explained), (SHARED, 2 * explained / (1 + RHO))):
        heads = Heads(W_O, kv_of_head=[0, 0, 1, 1, 2, 2])
        text = population(equicorrelated(), W_O)
        alike = 2 * RHO**2 / (1 + RHO**2)
        assert close(m.group_cka(heads, text), np.full((3, 3), alike) + (1 - alike) * np.eye(3))
        assert close(m.group_loo_r2(heads, text), np.full(3, r2))


def statistics(variances: np.ndarray) -> tuple[float, float]:
    p = variances / variances.sum()
    return 1 / (p**2).sum(), math.exp(-(p * np.log(p)).sum())


def test_dimensions_of_equicorrelated_heads() -> None:
    side_by_side = np.repeat([1 + (H - 1) * RHO] + [1 - RHO] * (H - 1), D_HEAD)
    pr, rank = statistics(side_by_side)
    for W_O, after in ((ORTHOGONAL, side_by_side), (SHARED, np.ones(D_HEAD))):
        heads, text = Heads(W_O), population(equicorrelated(), W_O)
        assert close(m.head_participation_ratio(heads, text), np.full(H, D_HEAD))
        assert close(m.head_effective_rank(heads, text), np.full(H, D_HEAD))
        assert close(m.head_k99(heads, text), np.full(H, 0.99 * D_HEAD))
        assert close(m.concat_participation_ratio(heads, text), pr)
        assert close(m.concat_effective_rank(heads, text), rank)
        pr_after, rank_after = statistics(after)
        assert close(m.output_participation_ratio(heads, text), pr_after)
        assert close(m.output_effective_rank(heads, text), rank_after)


def test_the_last_direction_of_k99_counts_in_part() -> None:
    sigma = torch.diag(torch.tensor([0.9, 0.07, 0.03, 0.0], dtype=F64))
    W_O = torch.eye(4, dtype=F64)[None]
    heads, text = Heads(W_O), population(sigma, W_O)
    for k99 in (m.head_k99, m.concat_k99, m.output_k99):
        assert close(k99(heads, text), 2 + 2 / 3)


# duplicated heads: every solver meets a singular Σ


def on_tokens(copy: Callable[[torch.Tensor], torch.Tensor], seed: int = 1) -> torch.Tensor:
    """Tokens of six dependent heads, what the second does being made from the first."""
    z = example(seed=seed).z.clone()
    z[:, D_HEAD : 2 * D_HEAD] = copy(z[:, :D_HEAD])
    return z


def with_block(W_O: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    out = W_O.clone()
    out[1] = block
    return out


def test_a_duplicated_head() -> None:
    W_O = example().layers[0].W_O
    W_O = with_block(W_O, W_O[0])
    z = on_tokens(lambda z0: z0)
    heads, text = Heads(W_O), moments_of(z, W_O)
    for metric in (m.cka, m.cca, m.pair_interference):
        assert close(metric(heads, text)[0, 1], 1, 1e-9)
        assert not close(metric(heads, text)[0, 2:], 1, 0.1)
    assert close(m.loo_r2(heads, text)[:2], 1, 1e-9)
    assert m.total_correlation(heads, text).isposinf()
    information = m.gaussian_mi(heads, text)
    assert information[0, 1].isposinf()
    assert information[2:, :2].isfinite().all()
    # the others have the same directions to be predicted from, once or twice
    left = [0, 2, 3, 4, 5]
    once = moments_of(z.unflatten(1, (H, -1))[:, left].flatten(1), W_O[left])
    assert close(m.loo_r2(heads, text)[2:], m.loo_r2(Heads(W_O[left]), once)[1:], 1e-6)
    assert m.total_correlation(Heads(W_O[left]), once).isfinite()


def test_the_same_values_written_elsewhere() -> None:
    """Linear redundancy is whole; kernels are alike only where Γ matches."""
    W_O = example().layers[0].W_O
    z = on_tokens(lambda z0: z0)
    turned = W_O[0] @ haar(W_O.shape[2])
    for block, alike in ((W_O[1], False), (turned, True)):
        W = with_block(W_O, block)
        heads, text = Heads(W), moments_of(z, W)
        assert close(m.cka(heads, text)[0, 1], 1, 1e-9) is alike
        assert m.cka(heads, text)[0, 1] < 1 + 1e-12
        assert close(m.cca(heads, text)[0, 1], 1, 1e-9)
        assert close(m.loo_r2(heads, text)[:2], 1, 1e-9)
        assert m.gaussian_mi(heads, text)[0, 1].isposinf()
        assert m.total_correlation(heads, text).isposinf()
        assert abs(m.pair_interference(heads, text)[0, 1]) < 0.9
        assert m.projection_kernel(heads)[0, 1] < 0.5


def test_a_linear_image_is_as_redundant_as_a_copy() -> None:
    stream = torch.Generator().manual_seed(0)
    mixing = torch.randn(D_HEAD, D_HEAD, generator=stream, dtype=F64)
    W_O = example().layers[0].W_O
    heads, text = Heads(W_O), moments_of(on_tokens(lambda z0: z0 @ mixing), W_O)
    assert close(m.cca(heads, text)[0, 1], 1, 1e-9)
    assert close(m.loo_r2(heads, text)[:2], 1, 1e-9)
    assert m.total_correlation(heads, text).isposinf()


@pytest.mark.parametrize("noise", [1e-1, 1e-3, 1e-5])
def test_a_head_that_is_almost_a_copy_is_finite(noise: float) -> None:
    stream = torch.Generator().manual_seed(0)
    added = noise * torch.randn(240, D_HEAD, generator=stream, dtype=F64)
    z = on_tokens(lambda z0: z0 + added)
    W_O = example().layers[0].W_O
    information = m.gaussian_mi(Heads(W_O), moments_of(z, W_O))[0, 1]
    u = z - z.mean(0)
    # ½ ln |Σ_00| |Σ_11| / |Σ_01,01| by singular values of the data, which lose fewer digits
    logs = [torch.linalg.svdvals(u[:, : 2 * D_HEAD] @ change).log().sum() for change in (
        torch.eye(2 * D_HEAD, dtype=F64)[:, :D_HEAD],
        torch.eye(2 * D_HEAD, dtype=F64)[:, D_HEAD:],
        torch.eye(2 * D_HEAD, dtype=F64),
    )]  # fmt: skip
    assert close(information, logs[0] + logs[1] - logs[2], 1e-5)
    assert m.total_correlation(Heads(W_O), moments_of(z, W_O)).isfinite()


# adding up


def test_what_cancels_and_what_adds() -> None:
    z = example().z
    first = z[:, :D_HEAD].repeat(1, 2)
    block = example().layers[0].W_O[0]
    for sign, left in ((1.0, 1), (-0.5, 1 / 3)):
        W_O = torch.stack([block, sign * block])
        heads, text = Heads(W_O), moments_of(first, W_O)
        assert close(m.cancellation_ratio(heads, text), left, 1e-12)
        assert close(m.pair_interference(heads, text)[0, 1], np.sign(sign), 1e-12)
        assert close(m.head_norm(heads, text)[1], abs(sign) * m.head_norm(heads, text)[0], 1e-12)


def test_orthogonal_heads_of_one_norm_leave_a_root() -> None:
    z = example().z.unflatten(1, (H, D_HEAD))
    z = (z / z.norm(dim=2, keepdim=True)).flatten(1)
    heads, text = Heads(ORTHOGONAL), moments_of(z, ORTHOGONAL)
    assert close(m.cancellation_ratio(heads, text), H**-0.5, 1e-12)
    # turned at random, ‖Σo‖² = H ± √(4 H(H−1)/2 / D)
    spread = 2 * H * (H - 1) / (H * D_HEAD)
    expected = H**-0.5 * (1 - spread / H**2 / 8)
    assert close(m.cancellation_ratio.null(heads, text)[0], expected, 1e-12)
    assert close(m.head_norm(heads, text), np.ones(H), 1e-12)


def test_a_head_that_cancels_the_others_has_a_negative_share() -> None:
    z = example().z[:, :D_HEAD]
    block = ORTHOGONAL[0]
    W_O = torch.stack([2 * block, -block])
    share = m.variance_share(Heads(W_O), moments_of(z.repeat(1, 2), W_O))
    assert close(share, [2, -1], 1e-12)


# sums


@pytest.mark.parametrize("metric", ON_TEXT.values(), ids=ON_TEXT.keys())
def test_split_and_merge_are_the_whole(metric: Metric) -> None:
    e = example()
    heads, z = e.layers[0], e.z
    pivot = z[0]
    half = [moments_of(part, heads.W_O, folds=3, pivot=pivot) for part in (z[:99], z[99:])]
    whole = moments_of(z, heads.W_O, folds=3, pivot=pivot)  # 99 tokens keep the folds' order
    assert close(metric(heads, half[0] + half[1]), metric(heads, whole), 1e-9)


@pytest.mark.parametrize("metric", ON_TEXT.values(), ids=ON_TEXT.keys())
def test_no_metric_depends_on_the_pivot(metric: Metric) -> None:
    e = example()
    value = e.value(metric)
    moved = moments_of(e.z, e.layers[0].W_O, pivot=e.z.mean(0) + 2, positions=8)
    assert close(metric(e.layers[0], moved), value, 1e-9)
    for ours, theirs in zip(metric.null(e.layers[0], moved), e.null(metric), strict=True):
        assert (ours is None and theirs is None) or close(ours, theirs, 1e-9)


@pytest.mark.parametrize("name", [n for n, metric in ON_TEXT.items() if metric.within_position])
def test_within_positions_is_the_metric_of_residuals(name: str) -> None:
    e = example()
    residual = e.z.clone()
    fold = torch.arange(len(e.z)) // 8 % 5
    for f in range(5):
        for position in range(8):
            where = (fold == f) & (torch.arange(len(e.z)) % 8 == position)
            residual[where] -= e.z[where].mean(0)
    direct = moments_of(residual, e.layers[0].W_O, positions=8)
    value = replace(e, within_position=True).value(ON_TEXT[name])
    assert close(value, ON_TEXT[name](e.layers[0], direct), 1e-9)
    assert not close(value, e.value(ON_TEXT[name]), 1e-3)


def test_later_tokens_are_not_forgotten() -> None:
    e = example()
    heads, text = e.layers[0], moments_of(e.z[:120], e.layers[0].W_O)
    before = m.cka(heads, text)
    text.update(e.z[120:], fold=0)
    assert not close(m.cka(heads, text), before, 1e-3)


# what has no value


def few(tokens: int, folds: int = 5) -> tuple[Heads, Moments]:
    e = example()
    return e.layers[0], moments_of(e.z[:tokens], e.layers[0].W_O, folds=folds)


@pytest.mark.parametrize(
    ("name", "tokens", "reason"),
    [
        ("head_norm", 0, "no tokens"),
        ("variance_share", 1, "at least two tokens, got 1"),
        ("cka", 3, "at least four tokens, got 3"),
        ("loo_r2", 25, "20 tokens outside one fold are too few for the 24 directions"),
        ("gaussian_mi", 8, "8 tokens always look dependent in 8 directions"),
        ("total_correlation", 24, "24 tokens always look dependent in 24 directions"),
    ],
)
def test_too_few_tokens_have_a_reason(name: str, tokens: int, reason: str) -> None:
    with pytest.raises(NotApplicable, match=reason):
        ON_TEXT[name](*few(tokens))


def test_held_out_needs_something_held_out() -> None:
    heads, text = few(240, folds=1)
    with pytest.raises(NotApplicable, match="at least two folds of documents, got 1"):
        m.loo_r2(heads, text)
    heads, text = few(240, folds=3)
    assert m.loo_r2(heads, text.without(0)).isfinite().all()


def test_empty_folds_are_not_folds() -> None:
    heads, text = few(240, folds=5)
    wider = replace(
        text, **{n: torch.cat([s, torch.zeros_like(s[:2])]) for n in Moments.sums()
                 if (s := getattr(text, n)) is not None}
    )  # fmt: skip
    assert close(m.loo_r2(heads, wider), m.loo_r2(heads, text), 1e-12)
    assert close(m.loo_r2.null(heads, wider)[1], m.loo_r2.null(heads, text)[1], 1e-12)


def test_a_single_head_has_no_others() -> None:
    e = example(H=1, KV=1)
    with pytest.raises(NotApplicable, match="no others to predict it"):
        e.value(m.loo_r2)


def test_moments_of_another_layer_are_refused() -> None:
    heads = example(H=3, KV=3).layers[0]
    with pytest.raises(ValueError, match="6 heads of width 4, the weights of 3 of width 4"):
        m.cka(heads, example().moments)


def test_the_norm_of_the_sum_must_have_been_kept() -> None:
    e = example()
    text = Moments.zeros(e.layers[0].W_O, folds=1)
    text.update(e.z, fold=0)
    with pytest.raises(NotApplicable, match="norm of the sum of heads was not kept"):
        m.cancellation_ratio(e.layers[0], text)
