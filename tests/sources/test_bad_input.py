"""Bad files and bad weights: one clear error that names the thing, and nothing run or hung."""

import json
import os
import pickle
import shutil
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from architectures import tiny_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import headmix as hm
from headmix.layouts import UnknownLayout
from headmix.sources import stores
from headmix.sources.modules import UnreadableWeight, from_module
from headmix.sources.stores import BadCheckpoint

FUZZ = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing in this file may ask the network, not even in vain."""
    asked: list[Any] = []

    def refuse(*args: Any, **kwargs: Any) -> None:
        asked.append(args)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    yield
    assert not asked


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    tiny_model("llama", num_key_value_heads=2).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def change_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file)


def write_header(file: Path, header: Any, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


BOTH = pytest.mark.parametrize("weights_only", [True, False], ids=["weights", "model"])


# what a path leads to


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


# config.json


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


# safetensors

ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected a header length, found a file of 0 bytes"),
        (b"\xff" * 99, "expected a header of 18,446,744,073,709,551,615 bytes, found a file of 99"),
        (struct.pack("<Q", 500) + b"{}", "expected a header of 500 bytes, found a file of 10"),
    ],
    ids=["empty", "noise", "short"],
)
def test_truncated_safetensors(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(
        BadCheckpoint, match="m.safetensors is truncated or not safetensors: " + message
    ):
        hm.load(tmp_path / "m.safetensors", n_heads=2)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "the header is not JSON"),
        (b"[]", "the header holds a list"),
        (b'{"a": {}, "a": {}}', "the header names 'a' twice"),
        ({"a": 3}, "the entry of 'a' needs dtype, shape and data_offsets, got {}"),
        ({"a": ENTRY | {"shape": [2, -2]}}, r"needs dtype, shape and data_offsets, got .*-2"),
        ({"a": ENTRY | {"shape": [2, 2.0]}}, r"needs dtype, shape and data_offsets"),
        ({"a": ENTRY | {"shape": [True, 4]}}, r"needs dtype, shape and data_offsets"),
        ({"a": ENTRY | {"dtype": "F31"}}, "'a' has the unknown dtype 'F31'"),
        ({"a": ENTRY | {"shape": [2, 3]}}, r"shape \[2, 3\] of F32, expected 24 bytes, found 16"),
        ({"a": ENTRY | {"shape": [2**62] * 9}}, r"expected \d+ bytes, found 16"),
        ({"a": ENTRY | {"data_offsets": [8, 24]}}, "lies at bytes 8 to 24, but the file holds 16"),
        ({"a": ENTRY | {"data_offsets": [16, 0]}}, "lies at bytes 16 to 0"),
    ],
)
def test_malformed_safetensors_header(header: Any, message: str, tmp_path: Path) -> None:
    write_header(tmp_path / "m.safetensors", header, bytes(16))
    with pytest.raises(BadCheckpoint, match=r"m\.safetensors.*" + message):
        hm.load(tmp_path / "m.safetensors", n_heads=2)


def test_a_header_of_more_than_25_mb(tmp_path: Path) -> None:
    write_header(tmp_path / "m.safetensors", b"{}" + b" " * 25_000_000)
    with pytest.raises(BadCheckpoint, match="a header of 25,000,002 bytes; more than 25,000,000"):
        hm.load(tmp_path / "m.safetensors", n_heads=2)


def test_too_many_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headmix.sources.safetensors.MAX_TENSORS", 20)
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    write_header(tmp_path / "m.safetensors", dict.fromkeys(map(str, range(21)), empty))
    with pytest.raises(BadCheckpoint, match="names 21 tensors; more than 20 is refused"):
        hm.load(tmp_path / "m.safetensors", n_heads=2)


def test_a_truncated_model_names_tensor_expected_and_found(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    message = r"model.safetensors: '.*' lies at bytes \d+ to \d+, but the file holds \d+ bytes"
    for weights_only in (True, False):
        with pytest.raises(BadCheckpoint, match=message):
            hm.load(folder, weights_only=weights_only)


def test_a_file_that_shrinks_after_it_was_opened(folder: Path) -> None:
    model = hm.load(folder, weights_only=True)
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(BadCheckpoint, match=r"o_proj.weight cannot be read: .*header"):
        model.heads(0)


def test_a_bias_that_does_not_fit(folder: Path) -> None:
    name = "layers.1.self_attn.o_proj.bias"
    change_weights(folder, lambda w: w.update({name: torch.ones(3)}))
    model = hm.load(folder, weights_only=True)
    assert model.heads(0).b_O is None
    with pytest.raises(BadCheckpoint, match=rf"{name} has shape \[3\], expected \[32\] to fit"):
        model.heads(1)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8])
def test_quantised_weights_are_refused(dtype: torch.dtype, folder: Path) -> None:
    def quantise(weights: dict[str, torch.Tensor]) -> None:
        for name, weight in weights.items():
            if "self_attn" in name:
                weights[name] = weight.to(dtype) if dtype.is_floating_point else weight.byte()

    change_weights(folder, quantise)
    if dtype.is_floating_point:  # its shape is right, its numbers need scales
        with pytest.raises(BadCheckpoint, match=r"o_proj.weight is stored as F8_E4M3, quantised"):
            hm.load(folder, weights_only=True).heads(0)
    else:
        with pytest.raises(UnknownLayout, match="Weights stored as U8 are quantised: dequantise"):
            hm.load(folder, weights_only=True)


# the index of shards


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    return tmp_path / "sharded"


def change_index(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))


def outside(name: str) -> Callable[[dict[str, str]], None]:
    return lambda places: places.update({"layers.0.self_attn.q_proj.weight": name})


@BOTH
@pytest.mark.parametrize(
    "name",
    ["../other.safetensors", "/etc/passwd", "a/../../other.safetensors", "a\0b", "",
     "..\\other.safetensors", "C:\\other.safetensors"],
)  # fmt: skip
def test_an_index_never_leaves_its_folder(name: str, weights_only: bool, sharded: Path) -> None:
    save_file({"a": torch.ones(2)}, sharded.parent / "other.safetensors")
    change_index(sharded, outside(name))
    with pytest.raises(BadCheckpoint, match=r"index.json names the file .*outside .*: refused"):
        hm.load(sharded, weights_only=weights_only)


def test_a_link_out_of_the_folder_is_refused(sharded: Path) -> None:
    shard = next(sharded.glob("model-00001*"))
    shutil.move(shard, sharded.parent / "elsewhere")
    shard.symlink_to(sharded.parent / "elsewhere")
    with pytest.raises(BadCheckpoint, match=r"a link that leads outside .*: refused"):
        hm.load(sharded, weights_only=True)


def test_a_loop_of_links_is_refused(sharded: Path) -> None:
    shard = next(sharded.glob("model-00001*"))
    shard.unlink()
    shard.symlink_to(shard.name)
    with pytest.raises(BadCheckpoint, match=r"index.json names .*model-00001"):
        hm.load(sharded, weights_only=True)


def test_links_into_the_blobs_of_the_hub_cache_are_followed(sharded: Path) -> None:
    cache = sharded.parent / "models--tiny--llama"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted(sharded.iterdir())):
        shutil.move(file, cache / "blobs" / str(i))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(i))
    assert hm.load(snapshot, weights_only=True).heads(0).n_heads == 4


def test_an_index_that_does_not_say_what_is_there(sharded: Path) -> None:
    change_index(sharded, outside("model-00009-of-00001.safetensors"))
    with pytest.raises(BadCheckpoint, match=r"names the file 'model-00009.*which is not in"):
        hm.load(sharded, weights_only=True)
    wrong = next(f for f in sharded.glob("model-*") if "layers.0.self_attn.q_proj" not in str(
        list(load_file(f))
    ))  # fmt: skip
    change_index(sharded, outside(wrong.name))
    with pytest.raises(BadCheckpoint, match=r"puts 'layers.0.self_attn.q_proj.weight' in model-0"):
        hm.load(sharded, weights_only=True)
    for text in ('{"weight_map": []}', '{"weight_map": {"a": 1}}', "{}"):
        (sharded / "model.safetensors.index.json").write_text(text)
        with pytest.raises(BadCheckpoint, match=r"index.json has no weight_map from tensor names"):
            hm.load(sharded, weights_only=True)


# pickles


class Bomb:
    """Would make a file when unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


@pytest.fixture
def pickled(folder: Path) -> Path:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    return folder


@BOTH
def test_pickles_are_refused_unless_allowed(weights_only: bool, pickled: Path, saved: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"pytorch_model.bin is a pickle.*allow_pickle=True"):
        hm.load(pickled, weights_only=weights_only)
    with pytest.raises(BadCheckpoint, match="is a pickle"):
        hm.load(pickled / "pytorch_model.bin")
    read = hm.load(pickled, weights_only=weights_only, allow_pickle=True).heads(1)
    assert torch.equal(read.W_V, hm.load(saved, weights_only=True).heads(1).W_V)


def test_pickles_in_shards_and_wrapped_are_read_too(pickled: Path, saved: Path) -> None:
    weights = torch.load(pickled / "pytorch_model.bin")
    torch.save({"state_dict": weights, "epoch": 3}, pickled / "last.ckpt")
    (pickled / "pytorch_model.bin").unlink()
    names = {n: f"part-{i % 2}.bin" for i, n in enumerate(weights)}
    for file in set(names.values()):
        part = {n: weights[n] for n in weights if names[n] == file}
        torch.save(part, pickled / file, _use_new_zipfile_serialization=file == "part-0.bin")
    index = pickled / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    whole = hm.load(saved, weights_only=True).heads(1)
    for path in (pickled, pickled / "last.ckpt"):
        read = hm.load(path, weights_only=True, allow_pickle=True).heads(1)
        assert torch.equal(read.W_Q, whole.W_Q)
    index.write_text(json.dumps({"weight_map": {"a": "../part-0.bin"}}))
    with pytest.raises(BadCheckpoint, match="outside"):
        hm.load(pickled, weights_only=True, allow_pickle=True)


@pytest.mark.filterwarnings("ignore")  # PyTorch's remarks on strange files
@pytest.mark.parametrize("how", ["pickle", "torch", "text", "list"])
def test_a_pickle_that_holds_more_than_tensors_runs_nothing(how: str, pickled: Path) -> None:
    file, proof = pickled / "pytorch_model.bin", pickled / "proof"
    if how == "pickle":
        file.write_bytes(pickle.dumps({"a": Bomb(proof)}))
    elif how == "torch":
        torch.save({"a": Bomb(proof)}, file)
    elif how == "list":
        torch.save([torch.ones(2)], file)
    else:
        file.write_bytes(b"no pickle at all")
    wanted = "holds a list" if how == "list" else "cannot be read as tensors alone"
    with pytest.raises(BadCheckpoint, match=f"pytorch_model.bin {wanted}"):
        hm.load(pickled, weights_only=True, allow_pickle=True)
    assert not proof.exists()


# GGUF


def tiny_gguf(file: Path) -> bytes:
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_head_count(2)
    writer.add_token_list(["a", "b"])
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones((32, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file.read_bytes()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda b: b"GGML" + b[4:], r"is not GGUF: it begins with b'GGML'"),
        (lambda b: b[:4] + struct.pack(">I", 3) + b[8:], "GGUF version 50331648, expected 2 or 3"),
        (lambda b: b[:8] + b"\xff" * 8 + b[16:], "18,446,744,073,709,551,615 tensors and"),
        (lambda b: b[:30], "is truncated or malformed: expected .* bytes at byte"),
        (lambda b: b[:-9], r"'blk.0.*' \(F32 \[32, 32\]\) ends at byte \d+, but the file has"),
        (lambda b: b[:24] + b"\xff" * 8 + b[32:], "expected 18446744073709551615 bytes at byte 32"),
        (lambda b: b.replace(b"blk.0.attn_k", b"blk.0.attn_q"), "blk.0.attn_q.weight' twice"),
        (lambda b: b"", "expected 4 bytes at byte 0, the file ends at byte 0"),
    ],
    ids=["magic", "endian", "tensors", "header", "data", "text", "twice", "empty"],
)
def test_malformed_gguf(damage: Callable[[bytes], bytes], message: str, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(damage(tiny_gguf(file)))
    with pytest.raises(BadCheckpoint, match=r"m\.gguf.*" + message):
        hm.load(file)


def test_a_missing_gguf_package_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_gguf(tmp_path / "m.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r'needs the gguf package: pip install "headmix\[gguf\]"'):
        hm.load(tmp_path / "m.gguf")


def test_a_gguf_file_is_named_inside_its_folder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    tiny_gguf(tmp_path / "m.gguf")
    with pytest.raises(BadCheckpoint, match=r"gguf_file names the file '../m.gguf'.*refused"):
        hm.load(tmp_path / "a", gguf_file="../m.gguf", weights_only=True)


# whatever a stranger writes


def open_and_read(file: Path) -> None:
    """Either works or raises a ValueError that names the file."""
    try:
        model = hm.load(file, n_heads=2)
        for layer in model.layers:
            model.heads(layer)
    except ValueError as error:
        assert file.name in str(error)  # noqa: PT017


@FUZZ
@given(data=st.data())
def test_any_damage_to_safetensors_is_one_error(data: st.DataObject, saved: Path) -> None:
    whole = (saved / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, end - 1))
        damaged[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    damaged = damaged[: data.draw(st.one_of(st.just(len(damaged)), st.integers(0, len(damaged))))]
    file = saved.parent / "fuzzed.safetensors"
    file.write_bytes(damaged)
    open_and_read(file)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "F8_E4M3", "U8", "F4"]) | JSON,
        "shape": st.lists(st.integers(-1, 9), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(-1, 99), min_size=2, max_size=2) | JSON,
    },
)
NAMES = st.sampled_from([f"{i}.{p}_proj.weight" for i in range(2) for p in "qkvo"]) | st.text()


@FUZZ
@given(header=st.dictionaries(NAMES, ENTRIES | JSON, max_size=9), size=st.integers(0, 99))
def test_any_header_is_one_error(header: dict[str, Any], size: int, tmp_path: Path) -> None:
    write_header(tmp_path / "m.safetensors", header, bytes(size))
    open_and_read(tmp_path / "m.safetensors")


@FUZZ
@given(data=st.data())
def test_any_damage_to_gguf_is_one_error(data: st.DataObject, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    damaged = bytearray(tiny_gguf(file))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 400))
        damaged[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    file.write_bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    open_and_read(file)


@FUZZ
@given(fields=st.dictionaries(
    st.sampled_from(["model_type", "num_attention_heads", "hidden_size", "text_config",
                     "encoder", "architectures", "num_key_value_heads"]) | st.text(max_size=5),
    JSON,
))  # fmt: skip
def test_any_config_is_one_error(fields: dict[str, Any], saved: Path) -> None:
    folder = saved.parent / "fuzzed"
    folder.mkdir(exist_ok=True)
    shutil.copy(saved / "model.safetensors", folder)
    (folder / "config.json").write_text(json.dumps(fields))
    try:
        model = hm.load(folder, weights_only=True)
        model.heads(0)
    except ValueError as error:
        assert "model.safetensors" in str(error) or "no softmax" in str(error)  # noqa: PT017


def test_a_name_of_a_megabyte_does_not_become_the_message(tmp_path: Path) -> None:
    write_header(tmp_path / "m.safetensors", {"a" * 1_000_000: 3})
    with pytest.raises(BadCheckpoint) as error:
        hm.load(tmp_path / "m.safetensors", n_heads=2)
    assert len(str(error.value)) < 1000


def test_limits_are_those_promised() -> None:
    assert (stores.MAX_HEADER_BYTES, stores.MAX_TENSORS) == (25_000_000, 200_000)


# weights that are there but cannot be used


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
