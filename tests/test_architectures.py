"""Both laws on tiny random models of every listed architecture, and on those that must fail."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from architectures import NAMED, OTHERS, VARIANTS, describe, tiny_config, tiny_model

import headmix as hm
from headmix import architectures
from headmix.registry import NotApplicable


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny matrices: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("model_type", NAMED | OTHERS)
@pytest.mark.filterwarnings("ignore")  # transformers' own, about tiny sizes
def test_both_laws_hold_and_the_table_says_what_they_say(model_type: str) -> None:
    found = describe(model_type, tiny_model(model_type, **(NAMED | OTHERS)[model_type]))
    listed = architectures.known(model_type)
    assert listed is not None, "run python tests/architectures.py"
    assert found.sum_error <= 1e-5
    assert (found.cls, found.layouts, found.heads, found.notes) == (
        listed.cls,
        listed.layouts,
        listed.heads,
        listed.notes,
    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.filterwarnings("ignore")
def test_both_laws_hold_on_variants_of_a_config(variant: str) -> None:
    model_type, fields = VARIANTS[variant]
    assert describe(variant, tiny_model(model_type, **fields)).sum_error <= 1e-5


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("BertForSequenceClassification", "bert"),
        ("DistilBertForSequenceClassification", "distilbert"),
        ("RobertaForTokenClassification", "roberta"),
        ("BertForMaskedLM", "bert"),
        ("GPT2LMHeadModel", "gpt2"),
        ("GPT2ForSequenceClassification", "gpt2"),
        ("LlamaForCausalLM", "llama"),
        ("T5ForConditionalGeneration", "t5"),
        ("T5EncoderModel", "t5"),
        ("WhisperForConditionalGeneration", "whisper"),
        ("ViTForImageClassification", "vit"),
        ("CLIPTextModelWithProjection", "clip_text_model"),
        ("BartForConditionalGeneration", "bart"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_both_laws_hold_under_every_kind_of_head(name: str, model_type: str) -> None:
    model = tiny_model(model_type, getattr(transformers, name))
    assert hm.verify(model).ok


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("bitnet", "which do not use it"),  # a norm over the concatenation
        ("diffllama", "which do not use it"),  # differences of heads, then a norm
        ("wavlm", "never reached"),  # calls its projections functionally
        ("convbert", "left part of heads"),  # half of the concatenation is a convolution
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_layout_that_does_not_hold_is_refused(model_type: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        hm.load(tiny_model(model_type))


@pytest.mark.parametrize("model_type", ["mamba", "rwkv", "fnet", "convnext"])
@pytest.mark.filterwarnings("ignore")
def test_models_without_heads_are_refused_by_name(model_type: str) -> None:
    model = tiny_model(model_type)
    with pytest.raises(ValueError, match=f"{model_type} has no softmax attention heads: it is "):
        hm.load(model)


@pytest.mark.filterwarnings("ignore")
def test_an_unlisted_architecture_loads_when_both_laws_hold(monkeypatch) -> None:
    """Nobody listed it, and its fused projection is not in the order its name suggests."""
    monkeypatch.setattr(architectures, "_listed", dict)
    monkeypatch.setattr("headmix.layouts.ORDER_OF", {})
    model = hm.load(tiny_model("gpt_bigcode", multi_query=False))
    assert {str(s.attention.layout) for s in model.sites.values()} == {"c_attn (grouped) → c_proj"}
    assert hm.verify(model).ok


@pytest.mark.filterwarnings("ignore")
def test_values_through_a_gate_leave_no_value_weights() -> None:
    model = hm.load(tiny_model("afmoe"))
    heads = model.heads(0)
    assert heads.W_V is None
    assert any("gate or norm" in note for note in model.sites["L0"].notes)
    assert "ov_spectrum" in hm.measure(model).attrs["skipped"]


@pytest.mark.filterwarnings("ignore")
def test_layer_names_tell_streams_apart() -> None:
    whisper = hm.load(tiny_model("whisper"))
    assert whisper.layers == [
        "encoder.L0", "encoder.L1",
        "decoder.L0", "decoder.L0.cross", "decoder.L1", "decoder.L1.cross",
    ]  # fmt: skip
    assert whisper.heads("decoder.L0.cross").kv_stream == "encoder"
    assert hm.load(tiny_model("clip")).layers == ["text.L0", "text.L1", "vision.L0", "vision.L1"]
    assert hm.load(tiny_model("albert", num_hidden_layers=3)).layers == ["L0", "L1", "L2"]


@pytest.mark.filterwarnings("ignore")
def test_loading_and_verifying_leave_a_model_as_it_was() -> None:
    model = tiny_model("gpt2").train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    source = hm.load(model)
    hm.measure(source)
    hm.verify(source)
    assert model.training
    assert all(m.training for m in model.modules())
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    assert not any(getattr(m, h) for m in model.modules() for h in hooks)


@pytest.mark.filterwarnings("ignore")
def test_hooks_are_removed_when_the_model_raises() -> None:
    model = tiny_model("gpt2")
    source = hm.load(model)
    with pytest.raises(Exception, match="inputs"):
        hm.verify(source, {"inputs": torch.zeros(1, 3)})
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_tiny_config_reaches_into_its_parts() -> None:
    config = tiny_config(transformers.CLIPConfig)
    assert (config.text_config.hidden_size, config.vision_config.num_hidden_layers) == (32, 2)


@pytest.mark.filterwarnings("ignore")
def test_without_a_batch_the_laws_say_what_to_pass() -> None:
    model = hm.load(torch.nn.TransformerEncoderLayer(16, 4, batch_first=True))
    with pytest.raises(NotApplicable, match="pass inputs="):
        hm.verify(model)
    assert hm.verify(model, torch.randn(2, 5, 16)).ok


def test_a_test_batch_leaves_every_training_flag() -> None:
    model = tiny_model("bert").train()
    frozen = [*model.encoder.layer[0].modules()]
    for module in frozen:
        module.eval()
    before = {name: module.training for name, module in model.named_modules()}
    assert {*before.values()} == {True, False}
    assert hm.verify(model).ok
    assert {name: module.training for name, module in model.named_modules()} == before


def test_a_layout_that_is_named_counts_on_a_path_and_in_memory_and_is_proven(
    tmp_path: Path,
) -> None:
    model = tiny_model("bert")
    model.save_pretrained(tmp_path)
    part = "attention.self"
    own = hm.Layout(
        o="attention.output.dense", v=f"{part}.value", q=f"{part}.query", k=f"{part}.key"
    )
    wrong = replace(own, v=own.q, q=own.v)
    for source in (model, str(tmp_path)):
        loaded = hm.load(source, layout=own)
        assert {site.attention.layout for site in loaded.sites.values()} == {own}
        assert torch.equal(loaded.heads(0).W_O, hm.load(model).heads(0).W_O)
        assert loaded.vocabulary().W_E.shape[0] == model.config.vocab_size
        with pytest.raises(ValueError, match=r"does not hold .* left part of heads"):
            hm.load(source, layout=wrong)
        with pytest.raises(ValueError, match=r"colour: no option for .*; it takes .*layout"):
            hm.load(source, colour="red")


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_a_folder_is_read_in_the_precision_it_runs_in_and_never_in_half(
    tmp_path: Path, dtype: str
) -> None:
    tiny_model("bert").save_pretrained(tmp_path)
    loaded = hm.load(str(tmp_path), dtype=dtype)
    read = torch.float64 if dtype == "float64" else torch.float32
    assert loaded.module is not None
    assert next(loaded.module.parameters()).dtype == getattr(torch, dtype)
    assert loaded.heads(0).W_O.dtype == loaded.heads(0).W_V.dtype == read
    assert loaded.vocabulary().W_E.dtype == read
    digest = hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    assert loaded.provenance["files"].startswith("model.safetensors ")
    assert loaded.provenance["files"].endswith(digest)
    assert loaded.provenance["dtype"] == dtype
