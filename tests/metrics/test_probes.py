"""Probes from sums against probes from tokens, planted truth, and what noise gives."""

import numpy as np
import pytest
import torch
from example_layers import OWN, Example, example
from example_read_outs import SETS, one_hot, stream_of, sums_of
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LinearRegression, Ridge

import headmix as hm
from headmix import metrics, probes
from headmix.heads import Heads
from headmix.labelling import LabelSet
from headmix.metrics.views import eraser
from headmix.readouts import LADDER, ReadOuts
from headmix.registry import NotApplicable

PROBES = {n: m for n, m in OWN.items() if "read_outs" in m.needs}


def fold_of(n: int, folds: int = 5, document: int = 8) -> np.ndarray:
    return np.arange(n) // document % folds


def places(e: Example) -> dict[str, np.ndarray]:
    """Every read-out's coordinates as probes take them, from tokens."""
    stream = stream_of(e)
    heads = e.layers[0]
    z = e.z.unflatten(1, (heads.n_heads, -1))
    x = []
    for h in range(heads.n_heads):
        A = torch.linalg.qr(heads.W_O[h].mT)[1].mT
        own = z[:, h] @ A
        x.append(own / own.var(0, correction=0).sum().sqrt())
    found = stream | {"concat": torch.cat(x, 1), "attn_out": e.z @ heads.W_O.flatten(0, 1)}
    return {name: found[name].numpy() for name in LADDER}


def ridge_of(x: np.ndarray) -> float:
    return probes.RIDGE * len(x) * x.var(0).mean()


def r2(x: np.ndarray, Y: np.ndarray) -> float:
    """Held-out R² with scikit-learn, errors and squares pooled over folds."""
    error = total = 0.0
    folds = fold_of(len(x))
    for f in range(5):
        train, test = folds != f, folds == f
        fitted = Ridge(alpha=ridge_of(x[train])).fit(x[train], Y[train])
        error += np.square(Y[test] - fitted.predict(x[test])).sum()
        total += np.square(Y[test] - Y[train].mean(0)).sum()
    return 1 - error / total


def test_the_ladder_is_scikit_learns_ridge_regression() -> None:
    e = example()
    x, Y = places(e), one_hot(e.codes).numpy()
    found = metrics.probe_r2(e.heads, e.read_outs).numpy()
    real = [s for s in SETS if not s.control]
    for i, s in enumerate(real):
        for j, name in enumerate(LADDER):
            assert found[i, j] == pytest.approx(r2(x[name], Y[:, s.columns]), abs=1e-10)


def test_each_heads_probe_is_that_of_its_own_coordinates() -> None:
    e = example()
    concat, Y = places(e)["concat"], one_hot(e.codes).numpy()
    found = metrics.head_probe_r2(e.heads, e.read_outs).numpy()
    for h, x in enumerate(np.split(concat, e.heads.n_heads, 1)):
        assert found[0, h] == pytest.approx(r2(x, Y[:, SETS[0].columns]), abs=1e-10)


@pytest.mark.parametrize("name", LADDER)
def test_accuracy_is_that_of_linear_discriminant_analysis(name: str) -> None:
    e = example()
    x, y = places(e)[name], e.codes[:, 0].numpy()
    folds, right = fold_of(len(x)), 0
    for f in range(5):
        train, test = folds != f, folds == f
        within = x[train] - np.stack([x[train][y[train] == c].mean(0) for c in range(3)])[y[train]]
        C = within.T @ within / train.sum()
        C += np.eye(len(C)) * probes.RIDGE * x[train].var(0).mean()
        # whitened by the ridged covariance, LDA needs no shrinkage of its own
        W = np.linalg.inv(np.linalg.cholesky(C)).T
        means = np.stack([(x[train] @ W)[y[train] == c].mean(0) for c in range(3)])
        prior = np.log(np.bincount(y[train]) / train.sum())
        score = (x[test] @ W) @ means.T - np.square(means).sum(1) / 2 + prior
        right += (score.argmax(1) == y[test]).sum()
    found = metrics.probe_accuracy(e.heads, e.read_outs)[0, LADDER.index(name)]
    assert float(found) == pytest.approx(right / len(x), abs=1e-12)


def test_with_almost_no_ridge_accuracy_is_scikit_learns(monkeypatch) -> None:
    monkeypatch.setattr(probes, "RIDGE", 1e-9)
    e = example()
    x, y = places(e)["resid_pre"], e.codes[:, 0].numpy()
    folds = fold_of(len(x))
    right = 0
    for f in range(5):
        train, test = folds != f, folds == f
        fitted = LinearDiscriminantAnalysis(solver="lsqr").fit(x[train], y[train])
        right += (fitted.predict(x[test]) == y[test]).sum()
    found = metrics.probe_accuracy(e.heads, e.read_outs)[0, LADDER.index("resid_pre")]
    assert float(found) == pytest.approx(right / len(x), abs=1e-12)


def test_description_length_is_the_code_of_one_token_after_the_other() -> None:
    """The evidence in closed form is the product of predictive densities, in any order."""
    e = example()
    x, number = places(e)["resid_mid"], torch.randn(240, 1, generator=torch.manual_seed(0))
    number = number.double() + stream_of(e)["resid_mid"][:, :1]
    sets = (LabelSet("amount", (), 0),)
    outs = sums_of(stream_of(e), number, sets)
    found = float(metrics.probe_mdl(e.heads, outs)[0, LADDER.index("resid_mid")])
    y = (number - number.mean()).numpy()[:, 0]
    y, x = y / y.std(), x - x.mean(0)
    order = np.random.default_rng(1).permutation(len(y))
    lengths = [_code_length(y[order], np.zeros((len(y), 0)), 1.0)]
    lengths.append(_code_length(y[order], x[order], x.var(0).sum()))
    assert found == pytest.approx((lengths[0] - lengths[1]) / len(y), abs=1e-9)


def _code_length(y: np.ndarray, x: np.ndarray, prior: float) -> float:
    """Nats, one token after the other, of a normal-inverse-gamma model (a, b = 1/2)."""
    from scipy.stats import t

    precision, weighted, a, b = prior * np.eye(x.shape[1]), np.zeros(x.shape[1]), 0.5, 0.5
    length = 0.0
    for target, row in zip(y, x, strict=True):
        mean = np.linalg.solve(precision, weighted) if len(row) else weighted
        spread = 1 + (row @ np.linalg.solve(precision, row) if len(row) else 0.0)
        length -= t.logpdf(target, 2 * a, row @ mean, np.sqrt(b / a * spread))
        b += (target - row @ mean) ** 2 / spread / 2
        a += 0.5
        precision, weighted = precision + np.outer(row, row), weighted + row * target
    return length


def test_view_share_is_the_correlation_ratio() -> None:
    e = example()
    x = e.z.unflatten(1, (6, -1)).transpose(0, 1) @ e.heads.W_O
    y = e.codes[:, 0]
    found = metrics.view_share(e.heads, e.read_outs)[0]
    for h in range(6):
        o = x[h] - x[h].mean(0)
        between = sum((y == c).sum() * o[y == c].mean(0).square().sum() for c in range(3))
        eta = between / o.square().sum()
        assert float(found[h]) == pytest.approx(float(eta) - 2 / 239, abs=1e-9)


def test_unique_shares_are_what_dropping_a_label_costs() -> None:
    e = example()
    Y = one_hot(e.codes)[:, [0, 1, 2, 6, 7]].numpy()
    o = (e.z.unflatten(1, (6, -1))[:, 2] @ e.heads.W_O[2]).numpy()

    def share(columns: list[int]) -> float:
        fitted = LinearRegression().fit(Y[:, columns], o).predict(Y[:, columns])
        return float(np.square(fitted - o.mean(0)).sum() / np.square(o - o.mean(0)).sum())

    found = metrics.view_share_unique(e.heads, e.read_outs)[:, 2].numpy()
    whole = share([0, 1, 2, 3, 4])
    assert found[0] == pytest.approx(whole - share([3, 4]) - 2 / 239, abs=1e-9)
    assert found[1] == pytest.approx(whole - share([0, 1, 2]) - 1 / 239, abs=1e-9)


def test_shares_of_a_probe_are_covariances_of_what_heads_write() -> None:
    e = example()
    o = e.z.unflatten(1, (6, -1)).transpose(0, 1) @ e.heads.W_O
    w = probes.fit(e.heads, e.read_outs, "attn_out", (0, 1, 2, 3, 4)).weights[:, SETS[0].columns]
    read = (o - o.mean(1, keepdim=True)) @ w
    whole = read.sum(0)
    share = (read * whole).sum((1, 2)) / whole.square().sum()
    v = read.square().sum((1, 2))
    found = metrics.probe_share(e.heads, e.read_outs)[0]
    assert torch.allclose(found, share)
    assert float(found.sum()) == pytest.approx(1)
    spread = metrics.probe_participation(e.heads, e.read_outs)[0]
    assert float(spread) == pytest.approx(float(v.sum() ** 2 / v.square().sum()))


def test_in_sample_attention_output_says_no_more_than_the_heads(monkeypatch) -> None:
    """The ladder's theorem: equal where W_O has the rank of the concatenation, less where not."""
    monkeypatch.setattr(probes, "RIDGE", 1e-9)
    for D, equal in ((32, True), (12, False)):
        e = example(D=D)
        folds = (0, 1, 2, 3, 4)
        found = {}
        for name in ("concat", "attn_out"):
            parts = [probes.errors(e.heads, e.read_outs, name, folds, f) for f in folds]
            error, total = (torch.stack(list(p)).sum(0) for p in zip(*parts, strict=True))
            found[name] = 1 - probes.per_label(SETS, error) / probes.per_label(SETS, total)
        gained = found["attn_out"] - found["concat"]
        assert (gained < 1e-6).all()
        assert (gained.abs() < 1e-6).all() == equal


def test_a_small_step_of_sums_is_that_of_all_at_once() -> None:
    e = example()
    Y, stream = one_hot(e.codes), stream_of(e)
    whole = sums_of(stream, Y, SETS, document=8)
    first = {n: x.clone() for n, x in stream.items()}
    half = torch.arange(240) < 120
    a = sums_of({n: x[half] for n, x in first.items()}, Y[half], SETS, document=8)
    b = sums_of({n: x[~half] for n, x in first.items()}, Y[~half], SETS, document=8)
    for sums in a.sums.values():  # rows of the sample are given beforehand: here by hand
        sums.sample.zero_()
        sums.filled.zero_()
    total = a + b
    assert torch.allclose(total.concat.second.triu(), whole.concat.second.triu())
    assert torch.allclose(
        metrics.probe_r2(e.heads, total), metrics.probe_r2(e.heads, whole), atol=1e-12
    )
    with pytest.raises(ValueError, match="cannot be added"):
        a + ReadOuts(SETS[:2], a.sums)


def test_folds_left_out_are_left_out() -> None:
    e = example()
    keep = torch.from_numpy(fold_of(240) != 2)
    stream = {n: x[keep] for n, x in stream_of(e).items()}
    without = e.read_outs.replicates[2]
    assert without.used == [0, 1, 3, 4]
    direct = sums_of(stream, one_hot(e.codes)[keep], SETS, folds=4, document=8)
    a, b = (metrics.probe_mdl(e.heads, outs) for outs in (without, direct))
    # heads are scaled over all folds, the ridge and prior are not: a small difference remains
    assert torch.allclose(a, b, atol=2e-3)
    assert torch.allclose(a[:, 2:], b[:, 2:], atol=1e-10)


def test_the_eraser_is_that_of_concept_erasure() -> None:
    leace = pytest.importorskip("concept_erasure", reason="the package is not installed")
    torch.manual_seed(0)
    y = torch.randint(3, (500,))
    x = (torch.randn(500, 8) @ torch.randn(8, 8) + torch.randn(3, 8)[y] * 2).double()
    Y = torch.eye(3)[y].double()
    C, cross = torch.cov(x.T), torch.cov(torch.cat([x, Y], 1).T)[:8, 8:]
    right, left = eraser(C, cross)
    mine = x - (x - x.mean(0)) @ right @ left
    theirs = leace.LeaceEraser.fit(x, Y, shrinkage=False)(x)
    assert torch.allclose(mine, theirs, atol=1e-6)


def test_erasing_leaves_no_linear_trace_and_changes_the_least() -> None:
    torch.manual_seed(1)
    y = torch.randint(3, (400,))
    x = (torch.randn(400, 6) @ torch.randn(6, 6)).double() + torch.randn(3, 6)[y].double()
    Y = torch.eye(3)[y].double()
    both = torch.cov(torch.cat([x, Y], 1).T, correction=0)
    right, left = eraser(both[:6, :6], both[:6, 6:])
    P = right @ left
    assert torch.allclose(P @ P, P, atol=1e-9)
    erased = x - (x - x.mean(0)) @ P
    means = torch.stack([erased[y == c].mean(0) for c in range(3)])
    assert torch.allclose(means, means[:1].expand(3, -1), atol=1e-9)
    # any other map that erases (here the orthogonal projection) changes the tokens more
    U = torch.linalg.svd(both[:6, 6:])[0][:, :2]
    other = (x - x.mean(0)) @ U @ U.T
    assert (x - erased).square().sum() < other.square().sum()


def test_damage_is_the_loss_of_r2_after_the_eraser() -> None:
    e = example()
    out = (e.z @ e.heads.W_O.flatten(0, 1)).numpy()
    Y = one_hot(e.codes).numpy()
    a, b = Y[:, :3], Y[:, 6:8]
    both = torch.from_numpy(np.cov(np.concatenate([out, a], 1).T, bias=True))
    right, left = eraser(both[:32, :32], both[:32, 32:])
    erased = out - (out - out.mean(0)) @ (right @ left).numpy()

    def score(x: np.ndarray) -> float:
        fitted = x @ np.linalg.lstsq(x - x.mean(0), b - b.mean(0), rcond=1e-6)[0]
        return np.square(fitted - fitted.mean(0)).sum()

    found = metrics.leace_damage(e.heads, e.read_outs)
    assert float(found[0, 1]) == pytest.approx(1 - score(erased) / score(out), abs=1e-6)
    assert torch.allclose(found.diagonal(), torch.ones(2, dtype=torch.float64), atol=1e-9)


def planted(n: int, generator: torch.Generator, H: int = 4, d: int = 4) -> tuple[Heads, ReadOuts]:
    """Head 0 alone holds label a, heads 1 and 2 hold b together, head 3 holds nothing."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    z = normal(n, H, d)
    a, b = normal(n), normal(n)
    z[:, 0, 0] = a + normal(n)
    noise = normal(n)
    z[:, 1, 0], z[:, 2, 0] = b + noise, b - noise
    heads = Heads(W_O=torch.linalg.qr(normal(H * d, H * d)).Q.reshape(H, d, H * d))
    sets = (LabelSet("a", (), 0), LabelSet("b", (), 1))
    stream = {"concat": z.flatten(1), "resid_pre": normal(n, H * d)}
    return heads, sums_of(stream, torch.stack([a, b], 1), sets)


def test_planted_views_are_found_where_they_are(monkeypatch) -> None:
    monkeypatch.setattr(probes, "RIDGE", 1e-6)
    heads, outs = planted(20_000, torch.Generator().manual_seed(3))
    r = metrics.head_probe_r2(heads, outs)
    assert torch.allclose(r[0], torch.tensor([0.5, 0, 0, 0]).double(), atol=0.02)
    assert torch.allclose(r[1], torch.tensor([0, 0.5, 0.5, 0]).double(), atol=0.02)
    assert metrics.multi_head_gain(heads, outs).tolist() == pytest.approx([0, 0.5], abs=0.02)
    kappa = metrics.head_concentration(heads, outs)
    assert torch.allclose(kappa[0], torch.tensor([1.0, 0, 0, 0]).double(), atol=0.02)
    assert torch.allclose(kappa[1], torch.tensor([0, 0.5, 0.5, 0]).double(), atol=0.02)
    N = metrics.probe_participation(heads, outs)
    assert N.tolist() == pytest.approx([1, 2], abs=0.02)
    share = metrics.probe_share(heads, outs)
    assert torch.allclose(share[1], torch.tensor([0, 0.5, 0.5, 0]).double(), atol=0.02)
    # a is one of five units of variance that head 0 has, of which the label explains half of two
    view = metrics.view_share(heads, outs)
    assert torch.allclose(view[0], torch.tensor([0.2, 0, 0, 0]).double(), atol=0.02)
    damage = metrics.leace_damage(heads, outs)
    assert torch.allclose(damage, torch.eye(2).double(), atol=0.01)
    ladder = metrics.probe_r2(heads, outs)
    assert ladder[:, 0].tolist() == pytest.approx([0.5, 1.0], abs=0.02)
    assert ladder[:, 2].tolist() == pytest.approx([0, 0], abs=0.02)
    assert ladder[:, 3:].isnan().all()


def test_an_exclusive_or_is_in_no_linear_read_out_of_its_parts() -> None:
    """Cov(z, ab) = 0 exactly over all four combinations; a product makes it readable."""
    a, b = torch.tensor([[1.0, 1, -1, -1], [1, -1, 1, -1]]).double().repeat(1, 60)
    z = torch.stack([a, b], 1)
    heads = Heads(W_O=torch.eye(2).double().reshape(2, 1, 2))
    kind = torch.stack([(a * b > 0), (a * b < 0)], 1).double()
    sets = (LabelSet("xor", ("same", "other"), 0, (0.5, 0.5)),)
    outs = sums_of({"concat": z, "mlp_out": torch.stack([a * b, a], 1)}, kind, sets, document=8)
    cross = probes.fit(heads, outs, "concat", (0, 1, 2, 3, 4)).cross
    assert (cross == 0).all()
    found = metrics.probe_r2(heads, outs)[0]
    assert float(found[0]) == 0
    assert float(found[1]) == 0
    assert float(found[LADDER.index("mlp_out")]) > 0.9


def shuffled(seed: int, n: int = 400) -> tuple[Heads, ReadOuts]:
    """Heads and labels that have nothing to do with each other, of independent tokens."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    z = normal(n, 16) @ normal(16, 16) / 4
    heads = Heads(W_O=normal(4, 4, 20))
    kind, number = torch.randint(3, (n,), generator=g), normal(n, 1)
    dealt = kind[torch.randperm(n, generator=g)]
    Y = torch.cat([torch.eye(3)[kind], torch.eye(3)[dealt], number], 1).double()
    share = tuple((torch.bincount(kind, minlength=3) / n).tolist())
    sets = (
        LabelSet("kind", ("a", "b", "c"), 0, share),
        LabelSet("kind control", ("a", "b", "c"), 3, share, control=True),
        LabelSet("amount", (), 6),
    )
    return heads, sums_of({"concat": z, "resid_pre": normal(n, 20)}, Y, sets)


@pytest.mark.parametrize(("loud", "shift"), [(1.0, 3.0), (10.0, 10.0)])
def test_the_null_of_held_out_r2_holds_where_documents_differ(loud: float, shift: float) -> None:
    """Each fold has a loud direction and a mean of its own; 1000 labels of noise are read."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    z = normal(5, 60, 9)
    for fold in range(5):
        z[fold, :, fold] *= loud
        z[fold] += shift * normal(9)
    heads, labels = Heads(W_O=normal(3, 3, 9)), normal(300, 1000)
    sets = tuple(LabelSet(f"noise {n}", (), n) for n in range(1000))
    outs = sums_of({"concat": z.flatten(0, 1)}, labels, sets, document=60)
    for metric in (OWN["probe_r2"], OWN["head_probe_r2"]):
        value, (mean, sd) = metric(heads, outs), metric.null(heads, outs)
        there = ~value.isnan().any(0)
        value, mean, sd = (t.expand_as(value)[:, there] for t in (value, mean, sd))
        assert (((value.mean(0) - mean[0]) / sd[0]).abs() < 0.15).all()  # four of 1/√1000
        ratio = value.std(0) / sd[0]
        assert ((0.9 < ratio) & (ratio < 1.1)).all()  # four of 1/√2000


#: Metrics whose null says what unrelated labels give, and the share beyond 2 sd it may have: a
#: normal law has 2.3 % on the upper side; 300 runs of up to ten numbers measure it.
RATES = ("probe_r2", "head_probe_r2", "view_share", "view_share_unique", "probe_selectivity")


@pytest.fixture(scope="module")
def noise() -> list[tuple[Heads, ReadOuts]]:
    """300 runs, shared: what one metric derives from their sums, the next need not."""
    return [shuffled(seed) for seed in range(300)]


@pytest.mark.parametrize("name", RATES)
def test_on_shuffled_labels_nothing_is_found_more_often_than_the_null_says(
    noise: list[tuple[Heads, ReadOuts]], name: str
) -> None:
    metric = OWN[name]
    distances = []
    for heads, outs in noise:
        value, (mean, sd) = metric(heads, outs), metric.null(heads, outs)
        z = (value - mean) / sd
        distances.append(z[z.isfinite()].numpy().ravel())
    z = np.array(distances)
    runs = np.sqrt(len(z))
    print(f"{name}: mean {z.mean():+.3f}, sd {z.std():.3f}, beyond 2 sd {(z > 2).mean():.2%}")
    assert abs(z.mean()) < 4 / runs
    assert 0.85 < z.std() < (1.25 if name == "probe_selectivity" else 1.15)  # as its null says
    assert (z > 2).mean() < 0.05


def test_accuracy_on_shuffled_labels_is_no_better_than_the_most_frequent_class(
    noise: list[tuple[Heads, ReadOuts]],
) -> None:
    beyond = []
    for heads, outs in noise:
        value, (mean, sd) = (
            metrics.probe_accuracy(heads, outs),
            OWN["probe_accuracy"].null(heads, outs),
        )
        z = (value - mean) / sd
        beyond.append(float((z[z.isfinite()] > 2).double().mean()))
    assert np.mean(beyond) < 0.05


def test_shuffled_labels_save_no_description(noise: list[tuple[Heads, ReadOuts]]) -> None:
    found = [metrics.probe_mdl(*run) for run in noise]
    saved = torch.stack([m[~m.isnan()] for m in found])
    assert (saved > 0).double().mean() < 0.01


def test_where_a_random_direction_lies_follows_the_beta_law() -> None:
    """Concentration, gain and participation of labels in random directions of independent heads."""
    H, d, n = 4, 4, 4000
    kappa, gain, spread = [], [], []
    for seed in range(200):
        g = torch.Generator().manual_seed(seed)
        z = torch.randn(n, H * d, generator=g, dtype=torch.float64)
        w = torch.randn(H * d, 1, generator=g, dtype=torch.float64)
        y = z @ w / w.norm() + torch.randn(n, 1, generator=g, dtype=torch.float64)
        W_O = torch.linalg.qr(torch.randn(H * d, H * d, generator=g, dtype=torch.float64)).Q
        heads = Heads(W_O=W_O.reshape(H, d, H * d))
        outs = sums_of({"concat": z}, y, (LabelSet("y", (), 0),))
        kappa.append(metrics.head_concentration(heads, outs)[0].numpy())
        gain.append(float(metrics.multi_head_gain(heads, outs)))
        spread.append(float(metrics.probe_participation(heads, outs)))
    heads, outs = planted(100, torch.Generator().manual_seed(0))
    mean, sd = (float(v) for v in OWN["head_concentration"].null(heads, outs))
    assert np.mean(kappa) == pytest.approx(mean, abs=0.02)
    assert np.std(kappa) == pytest.approx(sd, rel=0.1)
    largest, spread_of_largest = (
        float(v)
        for v in metrics.probing._largest_share(heads)  # type: ignore[attr-defined]
    )
    assert np.mean(gain) == pytest.approx(0.5 * (1 - largest), abs=4 * spread_of_largest / 14)
    expected = float(OWN["probe_participation"].null(heads, outs)[0])
    assert np.mean(spread) == pytest.approx(expected, rel=0.1)


def test_what_a_probe_cannot_have_is_said() -> None:
    e = example()
    one = e.read_outs.select([0])
    with pytest.raises(NotApplicable, match="at least two folds, got 1"):
        metrics.probe_r2(e.heads, one)
    few = {n: x[:30] for n, x in stream_of(e).items()}
    with pytest.raises(NotApplicable, match="too few for the 24 directions of concat"):
        metrics.probe_r2(e.heads, sums_of(few, one_hot(e.codes)[:30], SETS))
    outs = sums_of(stream_of(e), e.codes[:, :1].double(), (LabelSet("amount", (), 0),))
    with pytest.raises(NotApplicable, match="these are numbers"):
        metrics.probe_accuracy(e.heads, outs)
    with pytest.raises(NotApplicable, match="needs two labels"):
        metrics.leace_damage(e.heads, outs)
    with pytest.raises(NotApplicable, match="another label"):
        metrics.view_share_unique(e.heads, outs)
    with pytest.raises(ValueError, match="24 wide in all"):
        metrics.probe_r2(example(d=5).heads, e.read_outs)
    with pytest.raises(ValueError, match="no label 'amount' with classes"):
        hm.logistic_accuracy(e.heads, outs, "concat", "amount")


def test_a_logistic_probe_of_the_sample_finds_what_there_is() -> None:
    e = example()
    found = hm.logistic_accuracy(e.heads, e.read_outs, "concat", "kind")
    dealt = hm.logistic_accuracy(e.heads, e.read_outs, "concat", "kind control")
    assert found > 0.6
    assert dealt < 0.45
