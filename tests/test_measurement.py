"""measure: what it skips, and why."""

import json
import os
import signal

import numpy as np
import pytest
import torch
from architectures import tiny_model
from small import small_model

import headmix as hm
from headmix import measurement
from headmix.activations import plan
from headmix.packing import batches


def test_metrics_over_all_layers_wait_to_be_asked_where_weights_are_many(monkeypatch) -> None:
    model = small_model()
    monkeypatch.setattr(measurement, "HELD", 2 * model.heads(0).nbytes)
    unasked = hm.measure(model)
    assert "composition_v" not in unasked
    assert "ask for it by name" in json.loads(unasked.attrs["skipped"])["composition_v"][""]
    assert "composition_v" in hm.measure(model, metrics=["composition_v"])


def test_the_users_random_numbers_are_left_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    hm.measure(small_model(), metrics=["ov_stable_rank"], seed=5)
    assert torch.equal(torch.rand(3), expected)


def test_metrics_of_activations_ask_for_text() -> None:
    with pytest.raises(ValueError, match="cka cannot be computed from weights alone: pass text="):
        hm.measure(small_model(), metrics=["cka"])


def test_what_no_metric_asked_for_makes_use_of_is_refused() -> None:
    text = [torch.randint(5, 30, (20,)) for _ in range(4)]
    for more, message in (
        ({"labels": ["position"]}, "none of the metrics asked for reads labels"),
        ({"causal": True}, "none of the metrics asked for replaces heads"),
    ):
        with pytest.raises(ValueError, match=message):
            hm.measure(tiny_model("bert"), text, metrics=["cka"], **more)


def test_unknown_names_are_answered_with_the_known() -> None:
    with pytest.raises(ValueError, match=r"unknown metric nonsense; known: .*projection_kernel"):
        hm.measure(small_model(), metrics=["nonsense"])
    with pytest.raises(ValueError, match="has no layer 'L9'; it has L0, L1, L2"):
        hm.measure(small_model(), layers=["L9"])


def test_alignment_across_layers_is_that_of_heads_side_by_side() -> None:
    """Within a layer it is the layer's own; no pass over the text is split where it is wanted."""
    model = hm.load(tiny_model("gpt2"))
    text = [list(range(5 + n, 45 + n)) for n in range(10)]
    both = hm.measure(model, text, metrics=["cka", "cka_across_layers"], folds=2)
    across = both.cka_across_layers
    assert across.dims == ("layer", "head", "layer_b", "head_b")
    for n in range(2):
        assert np.allclose(across[n, :, n], both.cka[n], atol=1e-9)
    assert np.allclose(across[0, :, 1], across[1, :, 0].T, atol=1e-12)
    assert {"cka_across_layers_low", "cka_across_layers_null_sd"} <= {*both}
    with pytest.raises(ValueError, match="the heads of all layers together take"):
        hm.measure(model, text, metrics=["cka_across_layers"], memory=1e5, folds=2)


def test_layers_are_taken_in_the_models_order_each_once() -> None:
    """Depth is what composition goes by, not the order in which layers were named."""
    model = small_model()
    named = hm.measure(model, layers=[2, "L0", "L2"], metrics="composition_v")
    assert named.layer.values.tolist() == ["L0", "L2"]
    whole = hm.measure(model, metrics=["composition_v"]).composition_v
    assert np.allclose(named.composition_v[0, :, 1], whole[0, :, 2], rtol=1e-5)
    assert np.isnan(named.composition_v[1, :, 0]).all()
    assert hm.measure(model, layers="L1", metrics="joint_span").layer.values.tolist() == ["L1"]
    with pytest.raises(ValueError, match="no layer was chosen; small has L0, L1, L2"):
        hm.measure(model, layers=[])


def test_a_model_without_one_usable_layer_runs_no_text() -> None:
    model = tiny_model("gpt2")
    with torch.no_grad():
        for block in model.h:
            block.attn.c_proj.weight[0, 0] = float("nan")
    ds = hm.measure(hm.load(model), [[5, 6, 7, 8]] * 6, folds=2)
    assert not ds.valid.any()
    assert "cka" not in ds


def test_activations_that_are_not_finite_are_told() -> None:
    model = tiny_model("gpt2")
    with torch.no_grad():
        model.h[0].mlp.c_proj.bias[0] = float("nan")
    ds = hm.measure(model, [list(range(5, 25))] * 6, folds=2)
    reasons = json.loads(ds.attrs["skipped"])
    assert ds.valid.all()
    for name in ("variance_share", "cka", "head_norm", "interference_ratio"):
        assert reasons[name] == {"L1": "the activations hold NaN or infinity"}


def test_held_out_prediction_asks_for_more_tokens_than_directions() -> None:
    """Between the predictors and all directions the fit is singular: refused, not huge."""
    model = hm.load(tiny_model("gpt2"))
    text = [list(range(5 + n, 13 + n)) for n in range(5)]  # 40 tokens; 32 outside a fold, 32 wide
    ds = hm.measure(model, text, metrics=["loo_r2"], folds=5)
    assert "loo_r2" not in ds
    assert "too few for the 32 directions" in json.loads(ds.attrs["skipped"])["loo_r2"]["L0"]


def test_a_users_metric_of_activations_may_return_an_array() -> None:
    @hm.metric(title="Mean", formula="E z", dims=["concat"], range=(-np.inf, np.inf))
    def mean_z(moments):
        return moments.mean.numpy()

    ds = hm.measure(
        hm.load(tiny_model("gpt2")), [list(range(5, 25))] * 6, metrics="mean_z", folds=2
    )
    assert {"mean_z", "mean_z_low", "mean_z_high"} <= {*ds}


def test_an_interrupt_in_the_first_group_leaves_the_weights_of_all_layers_measured() -> None:
    model = hm.load(tiny_model("gpt2", n_layer=4))
    text = [list(range(5 + n, 45 + n)) for n in range(12)]
    heads = {name: model.heads(name) for name in model.layers}
    one = plan(heads, batches(model, text, folds=2), folds=2).layer_bytes["L0"]
    done = []

    def stop(what: str, n: int, total: int) -> None:
        if what == "tokens" and not done:
            done.append(n)
            os.kill(os.getpid(), signal.SIGINT)

    ds = hm.measure(
        model, text, folds=2, memory=2.5 * one, tokens_per_batch=80, progress=stop,
        metrics=["projection_kernel", "composition_v", "variance_share"],
    )  # fmt: skip
    assert "not run: L2, L3" in ds.attrs["interrupted"]
    assert ds.layer.values.tolist() == ["L0", "L1", "L2", "L3"]
    assert not np.isnan(ds.projection_kernel).any()
    assert not np.isnan(ds.composition_v[2, :, 3]).any()
    assert np.isnan(ds.variance_share).any("head").values.tolist() == [False, False, True, True]
    reasons = json.loads(ds.attrs["skipped"])["variance_share"]
    assert reasons["L3"] == "the text ended before this layer's turn"
