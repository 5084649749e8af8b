"""TransformerBridges are read as they are; folding works on a copy and tells the truth."""

import copy
import socket
import subprocess

import pytest
import torch
import transformers
from architectures import NAMED, tiny_model
from tokenizers import Tokenizer, models
from transformer_lens.model_bridge import TransformerBridge

import headmix as hm
from headmix.registry import NotApplicable

#: What TransformerLens can boot, with the class that it boots.
BOOTED = {
    "gpt2": "GPT2LMHeadModel",
    "gpt_neo": "GPTNeoForCausalLM",
    "gptj": "GPTJForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "gpt_bigcode": "GPTBigCodeForCausalLM",
    "opt": "OPTForCausalLM",
    "bloom": "BloomForCausalLM",
    "falcon": "FalconForCausalLM",
    "mpt": "MptForCausalLM",
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "cohere": "CohereForCausalLM",
    "bert": "BertForMaskedLM",
    "t5": "T5ForConditionalGeneration",
    "bart": "BartForConditionalGeneration",
}


def tiny(model_type, cls=None, **more):
    """A tiny model whose norms have gains and biases well away from one and zero."""
    cls = cls or BOOTED[model_type]
    model = tiny_model(model_type, getattr(transformers, cls), **NAMED.get(model_type, {}) | more)
    model.config.architectures = [cls]
    return model


def tokenizer(size=99):
    words = Tokenizer(models.WordLevel({f"word{i}": i for i in range(size)}, unk_token="word0"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="word1", eos_token="word2"
    )


def boot(model):
    """A bridge as a user boots it, around a copy."""
    return TransformerBridge.boot_transformers(
        "tiny", hf_model=copy.deepcopy(model), tokenizer=tokenizer(), device="cpu"
    )


def hooks(module):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(m, kind)) for m in module.modules() for kind in kinds)


def weights(model):
    """Every weight of every layer, by name."""
    return {
        (layer, name): getattr(heads, name)
        for layer in model.layers
        for heads in [model.heads(layer)]
        for name in ("W_O", "W_V", "W_Q", "W_K", "b_V", "b_O")
        if getattr(heads, name) is not None
    }


@pytest.fixture
def offline(monkeypatch):
    """No name is looked up, no connection made, no program run."""

    def refuse(*args, **kwargs):
        raise AssertionError(f"reached outside: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)


@pytest.mark.parametrize("model_type", BOOTED)
def test_a_bridge_gives_the_heads_of_the_model_it_wraps(model_type):
    model = tiny(model_type)
    raw, bridged = hm.load(model), hm.load(boot(model))
    assert (bridged.processing, bridged.layers) == ("raw", raw.layers)
    check = hm.verify(bridged)
    assert check.ok, [row.reason for row in check.rows]
    ours, theirs = weights(bridged), weights(raw)
    for key in theirs:
        assert torch.equal(ours[key], theirs[key]), key
    assert ours.keys() == theirs.keys()
    for layer in raw.layers:
        assert bridged.heads(layer).kv_of_head == raw.heads(layer).kv_of_head
        assert bridged.sites[layer].values == raw.sites[layer].values


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "bert", "t5"])
@pytest.mark.parametrize("compatible", [False, True])
@pytest.mark.filterwarnings("ignore:.*does not support fold_ln:UserWarning")
def test_a_bridge_is_left_as_it_was(model_type, compatible):
    bridge = boot(tiny(model_type))
    if compatible:
        bridge.enable_compatibility_mode(disable_warnings=True)
    tokens = torch.arange(5, 11)[None]
    fired = []
    name = "decoder_blocks.0.self_attn.hook_out" if model_type == "t5" else "blocks.1.attn.hook_z"
    bridge.add_hook(name, lambda value, hook: fired.append(value.clone()))
    bridge.train()
    before = {k: v.clone() for k, v in bridge.state_dict().items()}
    bridge.eval()
    logits, count = bridge(tokens), hooks(bridge)
    bridge.train()

    loaded = hm.load(bridge)
    assert hm.verify(loaded).ok
    hm.measure(loaded, metrics=["projection_kernel"])

    assert hooks(bridge) == count
    assert bridge.training
    bridge.eval()
    fired.clear()
    assert torch.equal(bridge(tokens), logits)
    assert len(fired) == 1
    after = bridge.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[k], before[k]) for k in before)


def test_hooks_go_when_the_forward_pass_fails():
    bridge = boot(tiny("llama"))
    model = hm.load(bridge)
    model.forward(model.example())  # transformers puts hooks of its own on a model's first pass
    count = hooks(bridge)

    def watcher(z, out):
        raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"), model.sites["L1"].watch(watcher):
        model.forward(model.example())
    with pytest.raises(IndexError), model.sites["L0"].shift_values(torch.ones(2, 12)):
        model.forward({"input": torch.tensor([[10_000]])})
    assert hooks(bridge) == count


def test_what_a_bridge_went_through_is_told():
    model = tiny("gpt2")
    bridge = boot(model)
    bridge.enable_compatibility_mode(disable_warnings=True, no_processing=True)
    assert hm.load(bridge).processing == "raw"
    bridge = boot(model)
    bridge.enable_compatibility_mode(disable_warnings=True)
    assert hm.load(bridge).heads(0).processing == "folded"
    bridge = boot(model)
    bridge.set_use_attn_result(True)
    (note,) = hm.load(bridge).sites["L0"].notes
    assert "use_attn_result is on" in note
    assert "bridge.set_use_attn_result(False)" in note


def test_a_bridge_knows_its_vocabulary_and_feed_forward():
    model = tiny("llama")
    bridged, raw = hm.load(boot(model)), hm.load(model, tokenizer=tokenizer())
    ours, theirs = bridged.vocabulary(), raw.vocabulary()
    assert torch.equal(ours.W_E, theirs.W_E)
    assert torch.equal(ours.W_U, theirs.W_U)
    assert (ours.token(7), ours.unembedding) == ("word7", theirs.unembedding)
    torch.testing.assert_close(bridged.reads("L1").W_in, raw.reads("L1").W_in)


def test_attention_without_a_value_projection_is_refused_with_its_kind():
    with pytest.raises(ValueError, match="its attention is MLAAttentionBridge"):
        hm.load(boot(tiny("deepseek_v3", "DeepseekV3ForCausalLM")))


def test_layer_norm_is_folded_into_readers_and_writers_are_centred():
    model = tiny("gpt2")
    raw, folded = hm.load(model), hm.load(model, processing="folded")
    assert hm.verify(folded).ok
    assert folded.layers == raw.layers
    for layer, block in zip(raw.layers, model.transformer.h, strict=True):
        before, after = raw.heads(layer).to(torch.float64), folded.heads(layer)
        gain, bias = block.ln_1.weight.detach().double(), block.ln_1.bias.detach().double()
        W_V = gain[:, None] * before.W_V
        W_V = W_V - W_V.mean(1, keepdim=True)  # the norm's own centring, folded in as well
        b_V = before.b_V + torch.einsum("d,hdk->hk", bias, before.W_V)
        W_O = before.W_O - before.W_O.mean(-1, keepdim=True)
        b_O = before.b_O - before.b_O.mean() + torch.einsum("hk,hkd->d", b_V, W_O)
        for ours, theirs in ((W_V, after.W_V), (W_O, after.W_O), (b_O, after.b_O)):
            torch.testing.assert_close(theirs.double(), ours, atol=1e-6, rtol=1e-5)
        assert not after.b_V.any()
        assert after.processing == "folded"
        assert folded.sites[layer].notes == raw.sites[layer].notes


def test_rms_norm_is_folded_and_nothing_centred():
    model = tiny("llama")
    raw, folded = hm.load(model), hm.load(model, processing="folded")
    gain = model.model.layers[0].input_layernorm.weight.detach()
    torch.testing.assert_close(folded.heads(0).W_V, gain[:, None] * raw.heads(0).W_V)
    torch.testing.assert_close(folded.heads(0).W_O, raw.heads(0).W_O)


@pytest.mark.parametrize("model_type", BOOTED)
def test_folding_holds_the_laws_and_says_what_was_left_undone(model_type):
    model = tiny(model_type)
    folded = hm.load(model, processing="folded")
    check = hm.verify(folded)
    assert check.ok, [row.reason for row in check.rows]
    raw = hm.load(model)
    for layer in folded.layers:
        unchanged = torch.equal(folded.heads(layer).W_V, raw.heads(layer).W_V)
        said = any("is not folded" in note for note in folded.sites[layer].notes)
        assert said == unchanged, folded.sites[layer].notes
    assert model_type not in ("bert", "t5", "bart", "olmo2") or said


def test_the_users_model_is_left_as_it_was(offline):
    model = tiny("llama").train()
    seen = []
    model.model.layers[0].register_forward_hook(lambda *args: seen.append(1))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    modules = {name: type(m) for name, m in model.named_modules()}
    settings = (hooks(model), model.config._attn_implementation, model.config.to_dict())

    hm.load(model, processing="folded")

    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert {name: type(m) for name, m in model.named_modules()} == modules
    assert (hooks(model), model.config._attn_implementation, model.config.to_dict()) == settings
    assert all(m.training for m in model.modules())


def test_every_way_to_the_same_fold(tmp_path, offline):
    model = tiny("gpt2")
    model.save_pretrained(tmp_path / "m")
    tokenizer().save_pretrained(tmp_path / "m")
    raw = hm.load(model, tokenizer=tokenizer())
    ways = [raw, tmp_path / "m", str(tmp_path / "m"), boot(model)]
    expected = weights(hm.load(model, processing="folded"))
    for way in ways:
        folded = hm.load(way, processing="folded")
        assert folded.processing == "folded"
        assert folded.vocabulary().token(7) == "word7"
        for key, value in weights(folded).items():
            torch.testing.assert_close(value, expected[key], msg=str(key))
    assert hm.load(folded, processing="folded") is folded
    assert weights(raw).keys() == expected.keys()


@pytest.mark.parametrize(
    ("model_type", "cls", "reason"),
    [
        ("distilbert", "DistilBertForMaskedLM", "has no adapter for DistilBertForMaskedLM"),
        ("gpt2", "GPT2Model", "has no adapter for GPT2Model"),
        ("vit", "ViTForImageClassification", "failed to process it: KeyError"),
        ("deepseek_v3", "DeepseekV3ForCausalLM", "its attention is MLAAttentionBridge"),
    ],
)
def test_what_transformer_lens_cannot_fold_is_refused(model_type, cls, reason, offline):
    model = tiny(model_type, cls)
    with pytest.raises(ValueError, match=reason) as caught:
        hm.load(model, processing="folded")
    assert f"cannot fold {cls}: " in str(caught.value)
    assert str(caught.value).endswith("Load it with processing='raw' instead")
    assert hm.verify(model).ok


def test_a_copy_that_computes_something_else_is_refused():
    """One rotated dimension a head: TransformerLens's attention then differs from the model's."""
    model = tiny("stablelm", "StableLmForCausalLM", hidden_size=16)
    with torch.no_grad():
        for parameter in model.parameters():  # so that attention matters to the logits
            parameter.mul_(10)
    with pytest.raises(
        ValueError, match=r"computes something else: .* differ by \S+ of their range"
    ):
        hm.load(model, processing="folded")


def test_modules_and_weights_alone_cannot_be_folded(tmp_path):
    with pytest.raises(ValueError, match="processes transformers models, this is MultiheadAtt"):
        hm.load(torch.nn.MultiheadAttention(8, 2), processing="folded")
    tiny("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="this is weights alone"):
        hm.load(tmp_path, processing="folded", weights_only=True)


def test_a_model_without_token_embeddings_has_no_vocabulary():
    bridge = boot(tiny("vit", "ViTForImageClassification"))
    assert hm.verify(bridge).ok
    with pytest.raises(NotApplicable, match="no token embeddings"):
        hm.load(bridge).vocabulary()
