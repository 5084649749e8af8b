"""The read-outs of a block are what the block itself computes, on every kind of architecture."""

from collections.abc import Callable

import pytest
import torch
from architectures import NAMED, tiny_model
from torch import Tensor, nn

import headmix as hm
from headmix.blocks import READ_OUTS, Block, find_block, find_blocks
from headmix.model import AttentionModel
from headmix.registry import NotApplicable


def tiny(model_type: str) -> AttentionModel:
    return hm.load(tiny_model(model_type, **NAMED[model_type]))


def seen(model: AttentionModel, block: Block) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    with block.watch(model, lambda name, value: found.update({name: value.clone()})):
        model.forward(model.example())
    return found


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5)


SEQUENTIAL: dict[str, tuple[Callable[..., nn.Module], Callable[..., nn.Module]]] = {
    "gpt2": (lambda m: m.h[1].ln_2, lambda m: m.h[1].mlp),
    "llama": (lambda m: m.layers[1].post_attention_layernorm, lambda m: m.layers[1].mlp),
    "mixtral": (lambda m: m.layers[1].post_attention_layernorm, lambda m: m.layers[1].mlp),
    "vit": (lambda m: m.layers[1].layernorm_after, lambda m: m.layers[1].mlp),
}


@pytest.mark.parametrize("model_type", SEQUENTIAL)
def test_a_block_with_norms_before_its_parts(model_type: str) -> None:
    model = tiny(model_type)
    norm, mlp = (find(model.module) for find in SEQUENTIAL[model_type])
    at = seen(model, find_block(model, 1))
    assert list(at) == sorted(at, key=list(at).index)
    assert set(at) == set(READ_OUTS)
    assert close(at["resid_mid"], at["resid_pre"] + at["attn_out"])
    with torch.no_grad():
        assert close(at["mlp_in"], norm(at["resid_mid"]))
        made = mlp(at["mlp_in"])
    assert close(at["mlp_out"], made)
    assert close(at["resid_post"], at["resid_mid"] + at["mlp_out"])


def test_a_block_with_norms_after_its_parts() -> None:
    model = tiny("bert")
    layer = model.module.encoder.layer[1]
    at = seen(model, find_block(model, 1))
    assert close(at["resid_mid"], at["resid_pre"] + at["attn_out"])
    with torch.no_grad():
        assert close(at["mlp_in"], layer.attention.output.LayerNorm(at["resid_mid"]))
        assert close(at["mlp_out"], layer.output.dense(layer.intermediate(at["mlp_in"])))
        assert close(at["resid_post"], layer.output.LayerNorm(at["mlp_out"] + at["mlp_in"]))


@pytest.mark.parametrize("model_type", ["bert", "gpt2", "llama", "albert", "gemma2", "bloom"])
def test_the_ends_are_the_models_own_hidden_states(model_type: str) -> None:
    model = tiny(model_type)
    with torch.no_grad():
        states = model.module(**model.example(), output_hidden_states=True).hidden_states
    for n, block in enumerate(find_blocks(model).values()):
        at = seen(model, block)
        assert close(at["resid_pre"], states[n])
        if n < len(model.layers) - 1:  # the last one may have gone through a final norm
            assert close(at["resid_post"], states[n + 1])


def test_a_norm_on_what_attention_wrote_belongs_to_its_contribution() -> None:
    model = tiny("gemma2")
    layer = model.module.layers[0]
    at = seen(model, find_block(model, 0))
    with torch.no_grad():
        written = layer.post_attention_layernorm(at["attn_out"])
    assert close(at["resid_mid"], at["resid_pre"] + written)
    assert close(at["resid_post"], at["resid_mid"] + at["mlp_out"])


def test_a_factor_before_the_sum_is_seen_through() -> None:
    model = hm.load(tiny_model("granite", residual_multiplier=0.3))
    at = seen(model, find_block(model, 0))
    assert close(at["resid_mid"], at["resid_pre"] + 0.3 * at["attn_out"])
    assert close(at["resid_post"], at["resid_mid"] + 0.3 * at["mlp_out"])


@pytest.mark.parametrize("model_type", ["gptj", "gpt_neox", "falcon", "cohere", "phi"])
def test_parallel_parts_have_nothing_between_them(model_type: str) -> None:
    model = tiny(model_type)
    block = find_block(model, 0)
    assert set(block.absent) == {"resid_mid", "mlp_in"}
    assert "in parallel" in block.absent["resid_mid"]
    at = seen(model, block)
    assert close(at["resid_post"], at["resid_pre"] + at["attn_out"] + at["mlp_out"])
    with pytest.raises(NotApplicable, match=r"L0 has no resid_mid: .* in parallel"):
        block.watch(model, lambda name, value: None, ["resid_mid"]).__enter__()


@pytest.mark.parametrize("model_type", ["t5", "bart", "whisper"])
def test_what_cross_attention_stands_before_is_not_read_from_self_attention(model_type: str):
    model = tiny(model_type)
    blocks = find_blocks(model)
    assert "another attention" in blocks["decoder.L0"].absent["mlp_in"]
    assert not blocks["decoder.L0.cross"].absent
    assert not blocks["encoder.L0"].absent


def test_cross_attention_adds_to_what_self_attention_left() -> None:
    model = tiny("t5")
    own, cross = (seen(model, find_block(model, n)) for n in ("decoder.L0", "decoder.L0.cross"))
    assert close(cross["resid_mid"], own["resid_mid"] + cross["attn_out"])


class NoSkip(nn.Module):
    """Attention, then a feed-forward, with or without skips and norms around them."""

    def __init__(self, skip: bool, norm: bool, mlp: bool) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8) if norm else None
        self.fc1, self.fc2 = (nn.Linear(8, 16), nn.Linear(16, 8)) if mlp else (None, None)
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        out = self.attn(x, x, x)[0]
        x = x + out if self.skip else out
        if self.fc1 is None:
            return x
        out = self.fc2(self.fc1(x if self.norm is None else self.norm(x)).relu())
        return x + out if self.skip else out


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("mlp", [True, False])
def test_blocks_without_some_of_their_parts(skip: bool, norm: bool, mlp: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 5, 8)
    module = NoSkip(skip, norm, mlp).eval()
    model = hm.load(module, inputs=(x,))
    block = find_block(model, 0, (x,))
    found: dict[str, Tensor] = {}
    with block.watch(model, lambda name, value: found.update({name: value})):
        out = model.forward((x,))
    assert close(found["resid_mid"], found["attn_out"] + (x if skip else 0))
    assert close(found["resid_post"], out)
    if mlp:
        assert close(found["resid_post"], found["mlp_out"] + (found["resid_mid"] if skip else 0))
        assert set(found) == set(READ_OUTS)
    else:
        assert block.absent["mlp_out"] == "the block has no feed-forward"


def test_nothing_is_left_on_the_model() -> None:
    model = tiny("gpt2")
    block, batch = find_block(model, 0), model.example()
    with pytest.raises(RuntimeError, match="mine"), block.watch(model, _fail):
        model.forward(batch)
    left = [m for m in model.module.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert left == []


def _fail(name: str, value: Tensor) -> None:
    raise RuntimeError("mine")


def test_an_unknown_read_out_is_refused_with_those_there_are() -> None:
    model = tiny("gpt2")
    with pytest.raises(ValueError, match="'mlp' is no read-out; those are resid_pre, "):
        find_block(model, 0).watch(model, lambda name, value: None, ["mlp"]).__enter__()
