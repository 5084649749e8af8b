"""Every activation metric against its definition on materialised tokens, of a real model too, and
against scikit-learn."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pytest
import torch
from example_layers import EXAMPLES, OWN, example, moments_of
from sklearn.cross_decomposition import CCA
from sklearn.linear_model import LinearRegression, Ridge

import headmix as hm
from headmix.capture import capture
from headmix.heads import Heads
from headmix.moments import Moments
from headmix.packing import batches

ON_TEXT = {n: metric for n, metric in OWN.items() if "moments" in metric.needs}


@dataclass(frozen=True)
class Tokens:
    """What every head wrote at every token, in full and in double precision."""

    z: np.ndarray  # [token, concat]
    W_O: np.ndarray  # [head, d_head, d_model]
    fold: np.ndarray  # [token]
    groups: tuple[tuple[int, ...], ...]

    @cached_property
    def raw(self) -> np.ndarray:
        """o [head, token, d_model]"""
        H, d, _ = self.W_O.shape
        return self.z.reshape(-1, H, d).transpose(1, 0, 2) @ self.W_O

    @cached_property
    def o(self) -> np.ndarray:
        return self.raw - self.raw.mean(1, keepdims=True)

    @cached_property
    def hsic(self) -> np.ndarray:
        """Inner products of U-centred kernels, which are built [token, token]."""
        n = len(self.z)
        kernels = []
        for o in self.raw:
            K = o @ o.T
            np.fill_diagonal(K, 0)
            rows = K.sum(0) / (n - 2)
            K = K - rows[:, None] - rows[None, :] + K.sum() / ((n - 1) * (n - 2))
            np.fill_diagonal(K, 0)
            kernels.append(K)
        return np.array([[(K * L).sum() for L in kernels] for K in kernels])

    @cached_property
    def canonical(self) -> np.ndarray:
        """Squared canonical correlations [head, head, k] of centred outputs."""
        H = len(self.o)
        d = min(self.W_O.shape[1:])
        bases = [np.linalg.qr(o[:, :d])[0] for o in self.o]  # as good as all columns: rank d
        return (
            np.array(
                [[np.linalg.svd(bases[i].T @ bases[j])[1] for j in range(H)] for i in range(H)]
            ).clip(max=1)
            ** 2
        )

    def held_out(self, unit: tuple[int, ...], fit: Callable[..., np.ndarray]) -> float:
        """K-fold R² of a unit's output from the others' activations, intercept and all."""
        H, d, _ = self.W_O.shape
        heads = self.z.reshape(-1, H, d)
        others = heads[:, [h for h in range(H) if h not in unit]].reshape(len(heads), -1)
        target = self.raw[list(unit)].sum(0)
        error = total = 0.0
        for f in range(self.fold.max() + 1):
            test = self.fold == f
            predicted = fit(others[~test], target[~test], others[test])
            error += ((target[test] - predicted) ** 2).sum()
            total += ((target[test] - target[~test].mean(0)) ** 2).sum()
        return 1 - error / total

    def spectrum(self, o: np.ndarray) -> np.ndarray:
        return np.linalg.eigvalsh(o.T @ o)[::-1].clip(min=0)


def normalised(S: np.ndarray) -> np.ndarray:
    return S / np.sqrt(np.outer(np.diag(S), np.diag(S)))


def least_squares(X: np.ndarray, Y: np.ndarray, new: np.ndarray) -> np.ndarray:
    Q, R = np.linalg.qr(np.hstack([np.ones((len(X), 1)), X]))
    return np.hstack([np.ones((len(new), 1)), new]) @ np.linalg.solve(R, Q.T @ Y)


def log_volume(x: np.ndarray) -> float:
    return np.log(np.linalg.svd(x, compute_uv=False)).sum()


def between(t: Tokens) -> np.ndarray:
    return np.einsum("itm,jtm->ij", t.o, t.o)


def centred_z(t: Tokens) -> np.ndarray:
    return t.z - t.z.mean(0)


def not_self(t: Tokens) -> np.ndarray:
    return 1 - np.eye(len(t.W_O))[..., None]


def shared_information(t: Tokens) -> float:
    u = centred_z(t)
    parts = np.split(u, len(t.W_O), axis=1)
    return sum(log_volume(p) for p in parts) - log_volume(u)


def pr(v: np.ndarray) -> float:
    return v.sum() ** 2 / (v**2).sum()


def entropy_rank(v: np.ndarray) -> float:
    p = v[v > 1e-14 * v.max()] / v.sum()
    return np.exp(-(p * np.log(p)).sum())


def k99(v: np.ndarray) -> float:
    """By interpolation of the cumulative share."""
    share = np.concatenate([[0], np.cumsum(np.sort(v)[::-1]) / v.sum()])
    return float(np.interp(0.99, share, np.arange(len(share))))


def member(t: Tokens) -> np.ndarray:
    return np.array([[h in g for h in range(len(t.W_O))] for g in t.groups], float)


def side_by_side(t: Tokens) -> np.ndarray:
    """Nonzero eigenvalues of the covariance of all outputs, from the tokens' Gram matrix."""
    return np.linalg.eigvalsh(sum(o @ o.T for o in t.o)).clip(min=0)


def of_each(statistic: Callable[[np.ndarray], float]) -> Callable[[Tokens], list[float]]:
    return lambda t: [statistic(t.spectrum(o)) for o in t.o]


ORACLES: dict[str, Callable[[Tokens], object]] = {
    "variance_share": lambda t: between(t).sum(1) / (t.o.sum(0) ** 2).sum(),
    "interference_ratio": lambda t: (t.o.sum(0) ** 2).sum() / (t.o**2).sum(),
    "pair_interference": lambda t: normalised(between(t)),
    "head_norm": lambda t: np.linalg.norm(t.raw, axis=2).mean(1),
    "cancellation_ratio": lambda t: (
        np.linalg.norm(t.raw.sum(0), axis=1).mean() / np.linalg.norm(t.raw, axis=2).mean(1).sum()
    ),
    "head_participation_ratio": of_each(pr),
    "head_effective_rank": of_each(entropy_rank),
    "head_k99": of_each(k99),
    "concat_participation_ratio": lambda t: pr(side_by_side(t)),
    "concat_effective_rank": lambda t: entropy_rank(side_by_side(t)),
    "concat_k99": lambda t: k99(side_by_side(t)),
    "output_participation_ratio": lambda t: pr(t.spectrum(t.o.sum(0))),
    "output_effective_rank": lambda t: entropy_rank(t.spectrum(t.o.sum(0))),
    "output_k99": lambda t: k99(t.spectrum(t.o.sum(0))),
    "cka": lambda t: normalised(t.hsic),
    "group_cka": lambda t: normalised(member(t) @ t.hsic @ member(t).T),
    "cca": lambda t: t.canonical.mean(2),
    "gaussian_mi": lambda t: -0.5 * np.log(1 - t.canonical * not_self(t)).sum(2),
    "total_correlation": shared_information,
    "loo_r2": lambda t: [t.held_out((h,), least_squares) for h in range(len(t.W_O))],
    "group_loo_r2": lambda t: [t.held_out(g, least_squares) for g in t.groups],
}
every_metric = pytest.mark.parametrize("name", ORACLES)


def test_every_metric_has_an_oracle() -> None:
    assert set(ORACLES) == set(ON_TEXT)


def agree(value: torch.Tensor, expected: object, tolerance: float) -> bool:
    ours, theirs = np.asarray(value), np.asarray(expected)
    if ours.ndim == 2:  # a unit beside itself: infinite information, or one
        apart = ~np.eye(len(ours), dtype=bool)
        ours, theirs = ours[apart], theirs[apart]
    return np.allclose(ours, theirs, rtol=tolerance, atol=tolerance * np.abs(theirs).max())


@pytest.fixture(scope="module")
def real() -> tuple[Heads, Moments, Tokens]:
    """A thousand tokens of prose through a layer of MiniLM, and every one of them kept."""
    model, layer = hm.load("demo"), "L3"
    weights = model.heads(layer)
    pairs = [h // 2 for h in range(weights.n_heads)]
    heads = Heads(weights.W_O, kv_of_head=pairs, layer=layer)
    text = batches(model, "default", folds=5, max_tokens=1000)
    kept: list[torch.Tensor] = []
    folds: list[torch.Tensor] = []
    for batch in text:
        seen: list[torch.Tensor] = []
        with model.sites[layer].watch(lambda z, out, seen=seen: seen.append(z)):
            model.forward(batch.inputs)
        kept.append(seen[0][batch.keep[weights.stream]])
        folds.append(torch.full((len(kept[-1]),), batch.fold))
    z = torch.cat(kept)
    sums = Moments.zeros(weights.W_O, folds=5, pivot=z[:100].mean(0))
    capture(model, text, {layer: weights}, {layer: sums})
    groups = tuple((h, h + 1) for h in range(0, weights.n_heads, 2))
    return heads, sums, Tokens(
        z.double().numpy(), weights.W_O.double().numpy(), torch.cat(folds).numpy(), groups
    )  # fmt: skip


@every_metric
def test_equals_the_definition_on_a_real_model(
    name: str, real: tuple[Heads, Moments, Tokens]
) -> None:
    heads, sums, tokens = real
    assert sums.n == len(tokens.z) == 1000
    assert agree(ON_TEXT[name](heads, sums), ORACLES[name](tokens), 1e-6)


def small(kind: str, seed: int = 0) -> tuple[Heads, Moments, Tokens]:
    e = example(**EXAMPLES[kind], seed=seed)
    heads = e.layers[0]
    owner = np.array(heads.kv_of_head)
    groups = tuple(tuple(np.flatnonzero(owner == g)) for g in range(heads.n_kv_heads))
    fold = np.arange(len(e.z)) % 5
    tokens = Tokens(e.z.numpy(), heads.W_O.numpy(), fold, groups)
    return heads, moments_of(e.z, heads.W_O), tokens


@every_metric
@pytest.mark.parametrize("kind", ["grouped", "Dc > D", "thin heads"])
def test_equals_the_definition(name: str, kind: str) -> None:
    heads, sums, tokens = small(kind)
    assert agree(ON_TEXT[name](heads, sums), ORACLES[name](tokens), 1e-9)


@pytest.mark.parametrize("kind", ["own values", "grouped", "wide heads"])
def test_debiased_cka_equals_its_kernel_form(kind: str) -> None:
    heads, sums, tokens = small(kind, seed=3)
    value = hm.metrics.cka(heads, sums)
    assert np.abs(value.numpy() - normalised(tokens.hsic)).max() < 1e-12


def test_canonical_correlations_equal_scikit_learn() -> None:
    heads, sums, tokens = small("grouped")
    d = heads.d_head
    parts = np.split(tokens.z, heads.n_heads, axis=1)
    for i, j in ((0, 1), (2, 5)):
        fitted = CCA(n_components=d, scale=False, max_iter=100_000, tol=1e-14)
        x, y = fitted.fit_transform(parts[i], parts[j])
        rho = [np.corrcoef(x[:, c], y[:, c])[0, 1] for c in range(d)]
        assert np.isclose(hm.metrics.cca(heads, sums)[i, j], np.square(rho).mean(), rtol=1e-6)


@pytest.mark.parametrize("model", [LinearRegression(), Ridge(alpha=1e-10, solver="svd")])
def test_held_out_r2_equals_scikit_learn(model: LinearRegression | Ridge) -> None:
    heads, sums, tokens = small("grouped")
    value, groups = hm.metrics.loo_r2(heads, sums), hm.metrics.group_loo_r2(heads, sums)
    fit = lambda X, Y, new: model.fit(X, Y).predict(new)  # noqa: E731
    for h in range(heads.n_heads):
        assert np.isclose(value[h], tokens.held_out((h,), fit), rtol=1e-8)
    for g, unit in enumerate(tokens.groups):
        assert np.isclose(groups[g], tokens.held_out(unit, fit), rtol=1e-8)
