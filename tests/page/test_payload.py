"""The numbers on their way to the page: complete, no more rounded than said, and few bytes."""

import json

import numpy as np
import pytest
import unpacked
from hypothesis import given, settings
from hypothesis import strategies as st
from small import any_layer, every_shape, on_text

from headmix.page import payload
from headmix.page.planes import EXACT, Planes, rounded


@pytest.fixture(scope="module")
def ds():
    return every_shape()


def metric(data, name):
    return next(m for m in data["metrics"] if m["name"] == name)


def test_numbers_reach_the_page_exactly(ds):
    data = payload.plain(ds)
    for name in ("per_layer", "per_head", "per_group", "eigen", "sigma", "cross", "seen"):
        held = unpacked.array(data, metric(data, name))
        np.testing.assert_array_equal(held, ds[name].values.astype("f4"))
    told = metric(data, "projection_kernel")
    assert told["mean"]["dims"] == []  # the same null everywhere is one number
    held = unpacked.array(data, told)
    apart = ~np.eye(4, dtype=bool)
    upper = np.triu(ds.projection_kernel.values)
    np.testing.assert_array_equal(held[:, apart], (upper + upper.mT)[:, apart])
    assert np.isnan(held[:, ~apart]).all()
    assert unpacked.words(data, metric(data, "words")["value"]) == [*ds.words.values.ravel()]


def test_what_no_panel_draws_does_not_travel(ds):
    assert "surprise" not in {m["name"] for m in payload.plain(ds)["metrics"]}


def test_intervals_reach_the_page_as_distances():
    ds = on_text()
    ds["head_on_text_high"] = ds.head_on_text + np.array([0.02, 0.02, 0.5, np.nan])
    data = payload.plain(ds)
    told = metric(data, "head_on_text")
    value, below, skew = (unpacked.array(data, told, part) for part in ("value", "below", "skew"))
    np.testing.assert_allclose(value - below, ds.head_on_text_low.values, atol=1e-7)
    np.testing.assert_allclose(value + below + skew, ds.head_on_text_high.values, atol=1e-7)
    same = ds.head_on_text_high - ds.head_on_text == ds.head_on_text - ds.head_on_text_low
    assert (skew[same.values] == 0).all()


def test_of_very_many_pairs_only_the_strongest_travel(ds, monkeypatch):
    monkeypatch.setattr(payload, "_MOST_PAIRS", 10)
    monkeypatch.setattr(payload, "_PARTNERS", 1)
    data = payload.plain(ds)
    kept = unpacked.array(data, metric(data, "cross"))
    whole = ds.cross.values.astype("f4")
    held = np.isfinite(kept)
    np.testing.assert_array_equal(kept[held], whole[held])
    assert held.sum() < np.isfinite(whole).sum() / 3
    kept = np.nan_to_num(kept, nan=-np.inf)
    for over in (("head", "head_b"), ("layer_b", "head_b"), ("layer", "head")):
        axes = tuple(ds.cross.dims.index(d) for d in over)
        best = np.nan_to_num(ds.cross.max(over), nan=-np.inf).astype("f4")
        np.testing.assert_array_equal(kept.max(axes), best)


def test_of_very_many_differences_those_largest_in_size_travel(ds, monkeypatch):
    monkeypatch.setattr(payload, "_MOST_PAIRS", 10)
    monkeypatch.setattr(payload, "_PARTNERS", 1)
    fell = ds.cross.where(ds.cross.isnull(), 0.01)
    at = tuple(np.argwhere(np.isfinite(ds.cross.values))[0])
    fell.values[at] = -0.9
    made = ds.assign(cross=fell.assign_attrs(ds.cross.attrs, range="[−∞, ∞]"))
    data = payload.plain(made)
    assert unpacked.array(data, metric(data, "cross"))[at] == np.float32(-0.9)


def test_a_null_of_two_layers_is_there_for_pairs_of_one_layer_too():
    ds = any_layer()
    apart = abs(np.subtract.outer(np.arange(3), np.arange(3))) + 0.1
    null = ("layer", "layer_b"), apart[: ds.sizes["layer"], : ds.sizes["layer"]]
    data = payload.plain(ds.assign(alike_null_mean=null))
    mean = metric(data, "alike")["mean"]
    assert not mean.get("half")
    assert unpacked.floats(data, mean["numbers"])[0] == np.float32(0.1)


def test_of_very_many_pairs_without_order_each_travels_once(monkeypatch):
    monkeypatch.setattr(payload, "_MOST_PAIRS", 10)
    monkeypatch.setattr(payload, "_PARTNERS", 1)
    ds = any_layer()
    data = payload.plain(ds)
    at = np.cumsum(unpacked.whole(data, metric(data, "alike")["value"]["at"]))
    first, second = np.divmod(at, 12)
    assert (first < second).all()
    kept = unpacked.array(data, metric(data, "alike"))
    np.testing.assert_array_equal(kept, kept.transpose(2, 3, 0, 1))
    apart = ds.alike.where(ds.alike < 2)  # a head with itself is the only larger one
    best = apart.max(("layer_b", "head_b")).values.astype("f4")
    np.testing.assert_array_equal(np.nan_to_num(kept, nan=-np.inf).max((2, 3)), best)


def test_only_very_many_numbers_are_rounded_and_the_page_says_so(monkeypatch):
    ds = on_text()
    assert payload.plain(ds)["precision"] == payload.EXACTLY
    monkeypatch.setattr(payload, "_MANY", 40)
    data = payload.plain(ds)
    assert data["precision"] == payload.ROUNDED
    few = unpacked.array(data, metric(data, "head_on_text"))
    np.testing.assert_array_equal(few, ds.head_on_text.values.astype("f4"))
    told = metric(data, "pair_on_text")
    for part, truth, error in (
        ("value", ds.pair_on_text, 1.53e-5),
        ("mean", ds.pair_on_text_null_mean, 1.53e-5),
        ("sd", ds.pair_on_text_null_sd, 1.23e-4),
        ("below", ds.pair_on_text - ds.pair_on_text_low, 1e-3),
    ):
        held = unpacked.array(data, told, part)
        truth = truth.values if held.shape else truth.values[0, 0, 0]
        there = np.isfinite(held)
        apart = np.abs(held - truth)[there] / np.abs(np.broadcast_to(truth, held.shape)[there])
        assert apart.max() <= error
    assert apart.max() > 1e-7  # it is rounded, or this says nothing


@settings(deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1),
    st.integers(5, EXACT),
)
def test_rounding_is_to_the_nearest(values, bits):
    exact = np.array(values, np.float32)
    near = rounded(exact, bits)
    held = np.abs(exact) >= np.finfo("f4").tiny  # subnormal numbers have fewer bits to begin with
    held &= np.isfinite(near)
    apart = np.abs(near.astype("f8") - exact) / np.where(held, np.abs(exact.astype("f8")), 1)
    assert (apart[held] <= 2.0 ** -(bits + 1)).all()
    assert (near.view(np.uint32) & ((1 << (EXACT - bits)) - 1) == 0).all()


def test_rounding_leaves_what_is_no_number():
    odd = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0], np.float32)
    np.testing.assert_array_equal(rounded(odd, 9), odd)
    assert np.signbit(rounded(odd, 9)[4])


def test_planes_are_the_same_bytes_every_time_and_smaller_than_the_numbers():
    numbers = np.random.default_rng(0).random(50_000)

    def packed(bits):
        planes = Planes()
        planes.floats(numbers, bits)
        return planes.packed()

    assert packed(15) == packed(15)
    assert len(packed(15)) * 3 / 4 < 0.65 * 4 * numbers.size
    assert len(packed(9)) < len(packed(15)) < len(packed(EXACT))


def test_the_dictionary_is_plain_json_and_the_same_every_time():
    ds = on_text()
    assert payload.script_json(payload.plain(ds)) == payload.script_json(payload.plain(ds))
    assert json.loads(payload.script_json(payload.plain(ds))) == payload.plain(ds)
