"""Which feed-forward weights read what attention wrote, found by experiment."""

import pytest
import torch
from architectures import tiny_model

import headmix as hm
from headmix.sources.reads import Parallel, StandsBetween


def test_reads_are_gate_and_up_with_the_norms_gain() -> None:
    module = tiny_model("llama")
    reads = hm.load(module).reads("L1")
    block = module.layers[1]
    weights = torch.cat([block.mlp.gate_proj.weight, block.mlp.up_proj.weight]).T
    assert reads.folded == "layers.1.post_attention_layernorm"
    assert torch.allclose(reads.W_in, block.post_attention_layernorm.weight[:, None] * weights)


def test_a_huge_entry_of_the_stream_does_not_pass_for_a_norm_in_between() -> None:
    module = tiny_model("llama")
    plain = hm.load(module).reads("L0").W_in
    with torch.no_grad():
        module.embed_tokens.weight[:, 3] = 3e5  # where float32 is good to 0.03 only
    assert torch.equal(hm.load(module).reads("L0").W_in, plain)


@pytest.mark.parametrize(("model_type", "why"), [("gptj", Parallel), ("gemma2", StandsBetween)])
def test_what_does_not_read_the_heads_is_refused(model_type: str, why: type[Exception]) -> None:
    with pytest.raises(why):
        hm.load(tiny_model(model_type)).reads("L0")
