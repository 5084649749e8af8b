"""measure: what it skips, and why."""

import json

import numpy as np
import pytest
import torch
from architectures import tiny_model
from small import small_model

import headmix as hm
from headmix import measurement


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
