"""An index that leads elsewhere, and pickles: refused, and nothing run."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import tiny_model
from damage import BOTH
from safetensors.torch import load_file, save_file

import headmix as hm
from headmix.sources.stores import BadCheckpoint


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
