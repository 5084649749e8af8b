"""Planted models hold what they claim, by means that share nothing with how they were built."""

import math

import numpy as np
import pytest
import torch

import headmix as hm
from headmix.lab import planted
from headmix.lab.planted import Head

PLAN = [
    Head(token=1, back=1),
    Head(position=1),
    Head(token=0.3, position=0.7, back=2),
    Head(copy_of=0),
    Head(copy_of=0, angle=math.pi / 3),
]


def head_outputs(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """o_h of every token, [sequence, token, head, D]."""
    loaded, seen = hm.load(model), []
    with loaded.sites["L0"].watch(lambda z, out: seen.append(z)):
        loaded.forward(tokens)
    W_O = loaded.heads(0).W_O
    return torch.einsum("sthd,hdm->sthm", seen[0].unflatten(-1, W_O.shape[:2]), W_O)


def between(o: torch.Tensor, classes: torch.Tensor) -> float:
    """The share of variance between classes, as small as chance leaves it with so many tokens."""
    o, classes = o.flatten(0, -2), classes.flatten()
    o = o - o.mean(0)
    within = sum(
        (part - part.mean(0)).square().sum() for c in classes.unique() for part in [o[classes == c]]
    )
    return float(1 - within / o.square().sum())


def test_heads_carry_the_views_that_were_planted() -> None:
    model = planted.views(PLAN)
    tokens = planted.sequences(16, 400, 32)
    o = head_outputs(model, tokens)[:, 2:]  # from where on every head has its token
    positions = torch.arange(2, 32).expand(400, -1)
    for h, (back, token, position) in enumerate([(1, 1, 0), (0, 0, 1), (2, 0.3, 0.7)]):
        seen = tokens[:, 2 - back : 32 - back]
        assert between(o[:, :, h], seen) == pytest.approx(token, abs=0.03)
        assert between(o[:, :, h], positions) == pytest.approx(position, abs=0.03)


def test_overlap_and_redundancy_are_those_planted() -> None:
    model = planted.views(PLAN)
    batches = [planted.sequences(16, 40, 32, seed=n) for n in range(5)]
    metrics = ["projection_kernel", "cka", "loo_r2"]
    ds = hm.measure(model, text=batches, metrics=metrics)
    kernel, cka, loo = (ds[name].sel(layer="L0").values for name in metrics)
    expected = np.eye(5)
    expected[0, 3] = expected[3, 0] = 1
    expected[[0, 3, 4, 4], [4, 4, 0, 3]] = 0.25  # cos² of 60°
    np.testing.assert_allclose(kernel, expected, atol=1e-4)
    assert cka[0, 3] == pytest.approx(1, abs=1e-3)
    assert cka[0, 4] == pytest.approx(1, abs=1e-3)  # the same code, whatever it is written to
    assert abs(cka[0, 1]) < 0.05
    assert loo[0] > 0.99  # its copies say all of it
    assert loo[1] < 0.75  # position is only in part what head 2 says


def test_the_laws_hold_and_gauges_hide_what_was_planted() -> None:
    model = planted.views(PLAN)
    check = hm.verify(model)
    assert check.ok, check.rows
    W_O = hm.load(model).heads(0).W_O
    assert not torch.allclose(W_O[0], W_O[3], atol=0.1)  # the same function in another gauge


def test_only_the_head_that_is_read_decides_what_is_predicted() -> None:
    model = planted.views(PLAN[:3], reads=0)
    tokens = planted.sequences(16, 20, 32, period=2)
    logits = model(tokens)
    assert (logits.argmax(-1)[:, 1:-1] == tokens[:, 2:]).all()
    projection = model.layers[0].attention.o_proj
    for h, changes in enumerate([True, False, False]):
        kept = projection.weight.detach().clone()
        with torch.no_grad():
            projection.weight[:, 8 * h : 8 * h + 8] = 0
            moved = (model(tokens) - logits).abs().max() > 1e-2
            projection.weight.copy_(kept)
        assert bool(moved) is changes


@pytest.mark.parametrize("model", [planted.xor(5), planted.views(PLAN[:3], interact=(0, 1))])
def test_the_interaction_is_where_it_was_planted_and_nowhere_else(model) -> None:
    """Δ_ij f = f(ij) − f(i) − f(j) + f(∅) of heads taken away, by hand."""
    vocabulary = model.config.vocabulary
    tokens = planted.sequences(vocabulary, 20, 32, seed=1)
    layer, projection = model.layers[0], model.layers[0].attention.o_proj
    d, H = model.config.d_head, model.config.n_heads

    def outputs(*without: int) -> tuple[torch.Tensor, torch.Tensor]:
        kept, seen = projection.weight.detach().clone(), []
        hooks = [
            part.register_forward_hook(lambda module, inputs, out: seen.append(out))
            for part in (layer.attention, layer.mlp)
        ]
        with torch.no_grad():
            for h in without:
                projection.weight[:, d * h : d * h + d] = 0
            model(tokens)
            projection.weight.copy_(kept)
        for hook in hooks:
            hook.remove()
        return seen[0], seen[1]

    for i in range(H):
        for j in range(i):
            parts = zip(outputs(i, j), outputs(i), outputs(j), outputs(), strict=True)
            at_attention, at_mlp = (
                float((ij - a - b + none).abs().max()) for ij, a, b, none in parts
            )
            assert at_attention < 1e-5
            assert (at_mlp > 0.5) is ({i, j} == {0, 1})


def test_xor_is_solved_and_no_single_head_knows() -> None:
    model = planted.xor()
    bits = planted.sequences(2, 200, 32, seed=3)
    labels = planted.labels_of_xor(bits)
    assert (model(bits).argmax(-1) == labels).all()
    o = head_outputs(model, bits)[:, 4:]
    for h in range(4):
        assert between(o[:, :, h], labels[:, 4:]) < 0.01


def test_what_cannot_be_planted_is_refused() -> None:
    with pytest.raises(ValueError, match="equal groups of 2 heads look like one head each"):
        planted.views([Head(token=1), Head(position=1), Head(token=1, back=1), Head(copy_of=2)])
    with pytest.raises(ValueError, match="head 0 copies head 1: expected one before it"):
        planted.views([Head(copy_of=1), Head(token=1)])
    with pytest.raises(ValueError, match="codes of 8 numbers need more than 8 tokens"):
        planted.views([Head(token=1)], vocabulary=8)
    with pytest.raises(ValueError, match=r"reads names heads \(2,\), of 1 heads"):
        planted.views([Head(token=1)], reads=2)
