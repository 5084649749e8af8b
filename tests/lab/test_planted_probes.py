"""Probes on models whose heads carry known views: what was planted is what is read, where it is."""

import pytest
import torch

import headmix as hm
from headmix.lab.planted import Head, labels_of_xor, sequences, views, xor

VOCABULARY, LENGTH, D_HEAD = 16, 32, 8
HEADS = [Head(token=1, back=1), Head(position=1), Head(token=0.5, position=0.5, back=2)]


@pytest.fixture(scope="module")
def ds():
    model = hm.load(views(HEADS, vocabulary=VOCABULARY, length=LENGTH, d_head=D_HEAD))
    ids = sequences(VOCABULARY, 200, LENGTH)
    place = torch.arange(LENGTH)
    one, two = (ids[:, (place - back).clamp(min=0)].flatten().numpy() for back in (1, 2))
    noise = torch.randint(5, (len(one),), generator=torch.Generator().manual_seed(9)).numpy()
    here = place.repeat(len(ids)).numpy()
    labels = {"one back": one, "two back": two, "place": here, "noise": noise}
    labels |= {"low one back": one < 8, "low two back": two < 8}
    return hm.measure(model, ids, labels=labels, max_length=LENGTH)


def at(ds, name: str, **where: object) -> list[float]:
    return ds[name].sel(layer="L0", **where).values.tolist()


def test_each_heads_view_is_the_planted_share_of_its_variance(ds):
    # the third head sees the place two back: two places share a code, so that a little is lost
    assert at(ds, "view_share", label="one back") == pytest.approx([1, 0, 0], abs=0.02)
    assert at(ds, "view_share", label="two back") == pytest.approx([0, 0, 0.5], abs=0.05)
    assert at(ds, "view_share", label="place") == pytest.approx([0, 1, 0.5], abs=0.1)
    assert at(ds, "view_share_unique", label="noise") == pytest.approx([0, 0, 0], abs=0.01)


def test_a_view_that_one_head_holds_is_concentrated_there(ds):
    assert at(ds, "head_concentration", label="one back") == pytest.approx([1, 0, 0], abs=0.03)
    assert at(ds, "multi_head_gain")[0] == pytest.approx(0, abs=0.02)
    assert at(ds, "probe_participation")[0] == pytest.approx(1, abs=0.1)
    assert at(ds, "probe_share", label="one back") == pytest.approx([1, 0, 0], abs=0.03)


def test_a_head_holds_as_many_directions_of_a_label_as_it_is_wide(ds):
    """Sixteen evenly drawn tokens have fifteen directions, a code of eight numbers eight."""
    found = at(ds, "head_probe_r2", label="one back")[0]
    without_ridge = D_HEAD / (VOCABULARY - 1)
    assert without_ridge * 0.85 < found < without_ridge * 1.02


def test_the_stream_before_attention_knows_no_token_but_its_own(ds):
    ladder = ds.probe_r2.sel(layer="L0")
    # the first token sees itself, one place in thirty-two
    assert abs(float(ladder.sel(label="one back", read_out="resid_pre"))) < 0.01
    assert float(ladder.sel(label="one back", read_out="resid_mid")) > 0.3
    assert float(ladder.sel(label="place", read_out="resid_pre")) > 0.15
    # no feed-forward in this model
    assert ladder.sel(read_out=["mlp_in", "mlp_out"]).isnull().all()


def test_erasing_one_view_leaves_the_others(ds):
    damage = ds.leace_damage.sel(layer="L0")
    assert float(damage.sel(label="low one back", label_b="low two back")) < 0.02
    assert float(damage.sel(label="low two back", label_b="low one back")) < 0.02
    # what the classes have in common with the token that they are made from
    assert float(damage.sel(label="one back", label_b="low one back")) > 0.98


def test_noise_is_found_nowhere(ds):
    z = (ds.probe_r2 - ds.probe_r2_null_mean) / ds.probe_r2_null_sd
    assert float(abs(z.sel(label="noise")).max()) < 4
    chance, sd = ds.probe_accuracy_null_mean, ds.probe_accuracy_null_sd
    beyond = (ds.probe_accuracy - chance) / sd
    assert float(beyond.sel(label="noise").max()) < 4


def test_an_exclusive_or_is_read_behind_the_feed_forward_and_nowhere_before():
    model = hm.load(xor())
    bits = sequences(2, 200, 32)
    kept = torch.arange(32) >= 4
    labels = labels_of_xor(bits).where(kept, torch.full_like(bits, 2))
    mine = labels.flatten().double().where(labels.flatten() < 2, torch.nan).numpy()
    found = hm.measure(
        model, bits, labels={"xor": mine}, metrics=["probe_r2", "head_probe_r2"], max_length=32
    )
    ladder = found.probe_r2.sel(layer="L0", label="xor")
    for name in ("concat", "attn_out", "resid_pre", "resid_mid"):
        assert abs(float(ladder.sel(read_out=name))) < 0.01
    assert float(ladder.sel(read_out="mlp_out")) > 0.95
