"""Paths and configs that cannot be used, and weights that cannot be read: one clear error."""

import shutil
from pathlib import Path

import pytest
import torch
import transformers
from architectures import tiny_model
from damage import BOTH, change_config, change_weights
from safetensors.torch import load_file
from torch import nn

import headmix as hm
from headmix.layouts import UnknownLayout
from headmix.sources.modules import UnreadableWeight, from_module
from headmix.sources.stores import BadCheckpoint


@BOTH
def test_a_path_that_is_not_there(weights_only: bool, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no file or directory .*nowhere"):
        hm.load(tmp_path / "nowhere", weights_only=weights_only)


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"holds no weights: expected .*, found nothing"):
        hm.load(tmp_path, weights_only=True)
    with pytest.raises(FileNotFoundError, match=r"has no config.json.*it holds nothing"):
        hm.load(tmp_path)


def test_a_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"no config.json beside it.*n_heads="):
        hm.load(folder, weights_only=True)
    with pytest.raises(FileNotFoundError, match=r"it holds .*model.safetensors.*weights_only=True"):
        hm.load(folder)


@BOTH
def test_a_folder_without_weights(weights_only: bool, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match=r"holds no weights: .*found config.json"):
        hm.load(folder, weights_only=weights_only)


def test_a_file_of_another_kind(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"config.json is a file: expected a folder, or one of"):
        hm.load(folder / "config.json")


def test_several_files_and_no_index(folder: Path) -> None:
    shutil.move(folder / "model.safetensors", folder / "a.safetensors")
    shutil.copy(folder / "a.safetensors", folder / "b.safetensors")
    with pytest.raises(BadCheckpoint, match=r"several weight files and no index: name one of a\.s"):
        hm.load(folder, weights_only=True)


@BOTH
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{nope", r"config.json is not JSON: Expecting property name"),
        (b"\xff\xfe", r"config.json is not JSON: .*codec can't decode"),
        (b"[1]", r"config.json holds a list, expected an object"),
        (b"[" * 100_000, r"config.json is not JSON: maximum recursion"),
        (b'{"n": 1' + b"0" * 5000 + b"}", r"config.json is not JSON: Exceeds the limit"),
        (b'{"a": 1, "a": 2}', r"config.json names 'a' twice"),
        (b" " * 25_000_001, r"config.json has 25,000,001 bytes; more than 25,000,000 is refused"),
    ],
    ids=["syntax", "encoding", "list", "depth", "integer", "twice", "size"],
)
def test_malformed_config(weights_only: bool, text: bytes, message: str, folder: Path) -> None:
    (folder / "config.json").write_bytes(text)
    with pytest.raises(BadCheckpoint, match=message):
        hm.load(folder, weights_only=weights_only)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 48}, r"layers.0.self_attn: 32 d_model by the shapes, .* hidden_size = 48"),
        ({"num_key_value_heads": 4}, r"2 KV heads by the shapes, .* num_key_value_heads = 4"),
        ({"head_dim": 16}, r"\d+ values wide by the shapes, .* head_dim = 16"),
    ],
)
def test_shapes_must_fit_the_config(fields: dict[str, int], message: str, folder: Path) -> None:
    change_config(folder, **fields)
    with pytest.raises(BadCheckpoint, match=message):
        hm.load(folder, weights_only=True)


def test_heads_that_do_not_divide(folder: Path) -> None:
    change_config(folder, num_attention_heads=7)
    with pytest.raises(UnknownLayout, match=r"takes \d+ features, which do not divide among 7"):
        hm.load(folder, weights_only=True)


@pytest.mark.filterwarnings("ignore")
def test_a_model_built_from_the_wrong_config(folder: Path) -> None:
    change_config(folder, intermediate_size=80)
    with pytest.raises(BadCheckpoint, match=r"mlp.* has shape \[.*48.*\], but by its config .*80"):
        hm.load(folder)


def test_weights_that_are_missing_are_not_made_up(folder: Path) -> None:
    change_weights(folder, lambda w: w.pop("layers.1.self_attn.v_proj.weight"))
    with pytest.raises(BadCheckpoint, match=r"hold no layers.1.self_attn.v_proj.weight.* in L1"):
        hm.load(folder)


@BOTH
def test_an_architecture_without_heads_is_refused_by_name(weights_only: bool, folder: Path) -> None:
    change_config(folder, model_type="mamba")
    with pytest.raises(ValueError, match="mamba has no softmax attention heads: it is a state-spa"):
        hm.load(folder, weights_only=weights_only)


def test_code_of_the_models_own_is_refused_and_never_needed_for_weights(folder: Path) -> None:
    (folder / "own.py").write_text("raise SystemExit('this code was run')")
    change_config(folder, auto_map={"AutoModel": "own.Model"}, trust_remote_code=True)
    with pytest.raises(ValueError, match=r"asks for code of its own.*own\.Model.*refused"):
        hm.load(folder)
    assert hm.load(folder, weights_only=True).layers == ["L0", "L1"]


@BOTH
def test_a_config_cannot_trust_its_own_code(weights_only: bool, folder: Path) -> None:
    change_config(folder, trust_remote_code=True, allow_pickle=True)
    assert hm.load(folder, weights_only=weights_only).layers == ["L0", "L1"]
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(BadCheckpoint, match="is a pickle"):
        hm.load(folder, weights_only=weights_only)


def test_nan_marks_the_layer_and_the_run_goes_on(folder: Path) -> None:
    def spoil(weights: dict[str, torch.Tensor]) -> None:
        weights["layers.0.self_attn.o_proj.weight"][3, 3] = torch.nan

    change_weights(folder, spoil)
    ds = hm.measure(folder, weights_only=True, metrics=["projection_kernel"])
    assert ds.valid.values.tolist() == [False, True]
    assert ds.invalid_reason.values.tolist() == ["NaN or infinity in W_O", ""]
    assert ds.projection_kernel.sel(layer="L0").isnull().all()
    assert ds.projection_kernel.sel(layer="L1").notnull().all()


class Linear4bit(nn.Module):
    """As bitsandbytes keeps it: packed codes in place of the weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        packed = torch.zeros(linear.weight.numel() // 2, 1, dtype=torch.uint8)
        self.weight = nn.Parameter(packed, requires_grad=False)


def test_quantised_modules_are_refused_by_name() -> None:
    model = tiny_model("llama")
    for layer in model.layers:
        layer.self_attn.o_proj = Linear4bit(layer.self_attn.o_proj)
    with pytest.raises(
        UnreadableWeight, match=r"o_proj.weight is quantised \(Linear4bit, torch.ui"
    ):
        from_module(model).heads("L0")


def test_weights_on_the_meta_device_are_refused() -> None:
    with torch.device("meta"):
        model = transformers.LlamaModel(tiny_model("llama").config)
    with pytest.raises(
        UnreadableWeight, match=r"o_proj.weight is on the meta device.*weights_only"
    ):
        hm.load(model).heads("L0")


def test_one_layer_on_the_meta_device_leaves_the_others() -> None:
    model = tiny_model("llama")
    model.layers[1].self_attn.to("meta")
    source = from_module(model)
    assert source.heads("L0").n_heads == 4
    with pytest.raises(UnreadableWeight, match=r"layers.1.self_attn.o_proj.weight is on the meta"):
        source.heads("L1")
