"""What every metric of the catalogue must keep: its declared invariances and no others, its range,
its shape, its type, and a reason where it has no value."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from example_layers import EXAMPLES, OWN, TRANSFORM, Example, each_head, each_layer, example

import headmix as hm
from headmix.heads import Heads
from headmix.linalg import LinalgError
from headmix.moments import Moments
from headmix.registry import CAUSAL, FROM_TEXT, TRANSFORMATIONS, Metric, NotApplicable

every_metric = pytest.mark.parametrize("metric", OWN.values(), ids=OWN.keys())
every_example = pytest.mark.parametrize("kind", EXAMPLES)
CLAIMS = [pytest.param(m, t, id=f"{m.name}-{t}") for m in OWN.values() for t in TRANSFORM]
DECLARED = [p for p in CLAIMS if p.values[1] in p.values[0].invariant]
WITHIN = [p for p in DECLARED if p.values[0].within_position]
#: What a metric asks for that comes from text.
ON_TEXT = {*FROM_TEXT}
#: Where the metric sees a transformation: an injective W_O hides its scale from all that is linear.
SEEN_WHERE = {("leace_damage", "head_scale"): EXAMPLES["Dc > D"]}
UNDECLARED = [p for p in CLAIMS if p.values[1] not in p.values[0].invariant]


def same(a: np.ndarray, b: np.ndarray, tolerance: float) -> bool:
    if a.dtype == object:
        return bool((a == b).all())
    return np.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def unchanged(metric: Metric, before: Example, transformation: str, tolerance: float) -> bool:
    after = TRANSFORM[transformation](before, torch.Generator().manual_seed(5))
    return same(before.value(metric), after.value(metric), tolerance)


def value_or_skip(metric: Metric, e: Example) -> np.ndarray:
    try:
        return e.value(metric)
    except NotApplicable as reason:
        pytest.skip(str(reason))


def test_the_catalogue_is_all_of_the_public_metrics() -> None:
    assert set(OWN) == set(hm.metrics.__all__)
    assert set(TRANSFORM) == set(TRANSFORMATIONS)


@every_metric
def test_definition_is_complete(metric: Metric) -> None:
    assert metric.title
    assert metric.formula
    assert metric.reference
    assert metric.null_text
    assert len(metric.__doc__.splitlines()) > 2
    assert metric.null is not None or metric.name in ("welch_floor", "ov_vocabulary")


@pytest.mark.parametrize(("metric", "transformation"), DECLARED)
@every_example
def test_declared_invariances_hold(metric: Metric, kind: str, transformation: str) -> None:
    e = example(**EXAMPLES[kind])
    value_or_skip(metric, e)
    assert unchanged(metric, e, transformation, 1e-7)


@pytest.mark.parametrize(("metric", "transformation"), WITHIN)
def test_declared_invariances_hold_within_positions(metric: Metric, transformation: str) -> None:
    e = replace(example(), within_position=True)
    assert unchanged(metric, e, transformation, 1e-7)
    assert not same(e.value(metric), example().value(metric), 1e-3)


@pytest.mark.parametrize(("metric", "transformation"), UNDECLARED)
def test_undeclared_invariances_fail(metric: Metric, transformation: str) -> None:
    e = example(**SEEN_WHERE.get((metric.name, transformation), {}))
    assert not unchanged(metric, e, transformation, 1e-3)


def raw_stable_rank(heads: Heads) -> torch.Tensor:
    """The tempting mistake: a spectrum of W_O alone."""
    return heads.W_O.square().sum((1, 2)) / torch.linalg.matrix_norm(heads.W_O, 2).square()


def test_the_contract_sees_a_false_declaration() -> None:
    false = Metric(raw_stable_rank, "", "", ("head",), (1, "d"), None, "", frozenset(["gauge"]), "")
    assert not unchanged(false, example(), "gauge", 1e-3)
    assert unchanged(false, example(), "head_scale", 1e-7)


def raw_activation_share(heads: Heads, moments: Moments) -> torch.Tensor:
    """The same mistake with activations: a statistic of z, not of what is written."""
    variance = moments.covariance.diagonal().unflatten(0, (heads.n_heads, -1)).sum(1)
    return variance / variance.sum()


def test_the_contract_sees_a_metric_of_raw_activations() -> None:
    false = Metric(raw_activation_share, "", "", ("head",), (0, 1), None, "", frozenset(), "")
    assert not unchanged(false, example(), "gauge", 1e-3)
    assert unchanged(false, example(), "head_scale", 1e-7)


def first_coordinate(heads: Heads) -> torch.Tensor:
    return heads.W_O[:, 0, 0] / heads.W_O.norm()


def test_the_rotation_moves_what_depends_on_coordinates() -> None:
    false = Metric(first_coordinate, "", "", ("head",), (-1, 1), None, "", frozenset(), "")
    assert not unchanged(false, example(), "rotation", 1e-3)
    assert unchanged(false, example(), "scale", 1e-7)


@every_metric
@every_example
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shape_type_and_range(metric: Metric, kind: str, dtype: torch.dtype) -> None:
    e = example(**EXAMPLES[kind], dtype=dtype)
    value = value_or_skip(metric, e)
    assert value.ndim == len(metric.dims)
    if value.dtype == object:
        assert all(isinstance(v, str) for v in value.flat)
        return
    kept = torch.float64 if ON_TEXT & {*metric.needs} else dtype  # sums are in double precision
    assert value.dtype == np.dtype(str(kept).removeprefix("torch."))
    low, high = metric.bounds(e.layers[0])
    seen = value[~np.isnan(value)]
    assert seen.size
    assert (seen >= low - 1e-5).all()
    assert (seen <= high * (1 + 1e-5)).all()
    if metric.null:
        mean, sd = e.null(metric)
        np.broadcast_to(mean, value.shape)
        known = mean[~np.isnan(mean)]
        assert (known >= low - 1e-5).all()
        assert (known <= high * (1 + 1e-5) + 1e-5).all()
        assert sd is None or ((sd >= 0) | np.isnan(sd)).all()
        assert sd is None or np.broadcast_to(sd, value.shape).shape == value.shape


@every_metric
@every_example
def test_single_precision_is_enough(metric: Metric, kind: str) -> None:
    double = value_or_skip(metric, example(**EXAMPLES[kind]))
    single = example(**EXAMPLES[kind], dtype=torch.float32).value(metric)
    if metric.name == "ov_gap":  # a difference of neighbours, which may be equal
        assert np.allclose(single, double, atol=1e-3, equal_nan=True)
    else:
        assert same(single, double, 1e-4)


@every_metric
@every_example
def test_heads_may_come_in_any_order(metric: Metric, kind: str) -> None:
    e = example(**EXAMPLES[kind])
    value = value_or_skip(metric, e)
    order = torch.randperm(e.layers[0].n_heads, generator=torch.Generator().manual_seed(1))

    def change(h: Heads) -> Heads:
        grouping = [h.kv_of_head[i] for i in order]
        return replace(h, W_O=h.W_O[order], W_Q=h.W_Q[order], kv_of_head=grouping)

    for axis, dim in enumerate(metric.dims):
        if dim in ("head", "head_b"):
            value = value.take(order, axis)
    z, *deeper = (each_head(z, lambda z: z[:, order], len(order)) for z in (e.z, *e.deeper))
    looks = e.pattern[:, order]
    reordered = replace(each_layer(e, change), z=z, deeper=tuple(deeper), pattern=looks)
    assert same(reordered.value(metric), value, 1e-9)


#: Metrics of amounts: a head that writes nothing has none.
ZERO_WHERE_SILENT = (
    "ov_spectrum", "ffn_read_share", "variance_share", "head_norm",
    *(n for n, m in OWN.items() if {*CAUSAL} & {*m.needs}),
)  # fmt: skip


@every_metric
def test_a_silent_head_is_nan_alone(metric: Metric) -> None:
    def silence(h: Heads) -> Heads:
        W_O = h.W_O.clone()
        W_O[2] = 0
        return replace(h, W_O=W_O)

    e = example()
    value, changed = e.value(metric), each_layer(e, silence).value(metric)
    if metric.needs == ("attention",):
        assert same(changed, value, 0)  # where a head looks does not depend on what it writes
        return
    if value.dtype == object:
        assert (changed[2] == "").all()
        assert same(np.delete(changed, 2, 0), np.delete(value, 2, 0), 0)
        return
    if metric.name.startswith("composition"):
        readers_too = metric.name == "composition_v"  # queries and keys do not need W_O
        silent = np.isnan(changed) & ~np.isnan(value)
        expected = np.zeros_like(silent)
        expected[:, 2] = True
        expected[..., 2] |= readers_too
        assert (silent == (expected & ~np.isnan(value))).all()
        return
    axes = [axis for axis, dim in enumerate(metric.dims) if dim in ("head", "head_b")]
    others = changed
    for axis in axes:
        others = np.delete(others, 2, axis)
    assert not np.isnan(others).any()
    if axes and metric.name not in ZERO_WHERE_SILENT:
        assert np.isnan(changed.take(2, axes[0])).all()
    elif axes:
        assert (changed.take(2, axes[0]) == 0).all()


@every_metric
def test_a_silent_layer_has_a_reason(metric: Metric) -> None:
    e = example()
    silent = replace(e.layers[0], W_O=torch.zeros_like(e.layers[0].W_O))
    quiet = replace(e, layers=(silent, *e.layers[1:]))
    if metric.needs == ("attention",):
        assert same(quiet.value(metric), e.value(metric), 0)
    elif "effects" in metric.needs:
        assert not quiet.value(metric).any()  # replacing nothing changes nothing
    elif "layers" in metric.needs:
        value = quiet.value(metric)
        assert np.isnan(value[0]).all()
        assert not np.isnan(value[1, :, 2]).any()
    else:
        with pytest.raises((NotApplicable, LinalgError), match="zero"):
            quiet.value(metric)


@every_metric
def test_layers_without_values_are_refused_by_what_needs_them(metric: Metric) -> None:
    e = each_layer(example(), lambda h: replace(h, W_V=None))
    writes_only = metric.family in ("geometry", "neurons") or ON_TEXT & {*metric.needs}
    if writes_only:
        assert same(e.value(metric), example().value(metric), 0)
    else:
        with pytest.raises(NotApplicable, match="W_V"):
            e.value(metric)


@every_metric
def test_same_seed_same_null(metric: Metric) -> None:
    if metric.null is None:
        pytest.skip("no null")
    torch.manual_seed(3)
    first = example().null(metric)
    torch.randn(10)  # whatever was drawn in between does not matter
    again = example().null(metric)
    assert all(same(a, b, 0) for a, b in zip(first, again, strict=True) if a is not None)
