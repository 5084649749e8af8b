"""Pickled checkpoints: refused unless asked for, and then tensors only."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headmix.sources.stores import BadCheckpoint, Stored, dtypes, fingerprint, inside, read_json

#: Endings of pickled checkpoints.
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, eq=False)
class PickleStore:
    """Tensors of pickled state dicts, left in their mapped files where the format allows it."""

    held: Mapping[str, Tensor]
    tensors: Mapping[str, Stored]
    provenance: Mapping[str, str]

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = self.held[name]
        if tensor.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            raise BadCheckpoint(
                f"{name} is stored as {tensor.dtype}, quantised: dequantise it first"
            )
        return tensor.detach().to(dtype, copy=True)


def refuse(path: Path) -> BadCheckpoint:
    """What to say where only a pickle is there."""
    return BadCheckpoint(
        f"{path} is a pickle, which can run code when it is opened: refused. Convert it to "
        "safetensors, or pass allow_pickle=True to read the tensors in it and nothing else"
    )


def open_pickles(path: Path) -> PickleStore:
    """A pickled state dict, or the shards that an index names; with ``weights_only=True``.

    Raises:
        BadCheckpoint: it holds more than tensors, is malformed, or a shard lies outside the folder.
    """
    shards = [path]
    if path.suffix == ".json":
        places = read_json(path).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(f, str) for f in places.values()):
            raise BadCheckpoint(f"{path} has no weight_map from tensor names to file names")
        shards = [inside(path.parent, n, path.name) for n in sorted(set(places.values()))]
    held = {name: t for shard in shards for name, t in _state_dict(shard)}
    tensors = {n: Stored(tuple(t.shape), str(t.dtype)[len("torch.") :]) for n, t in held.items()}
    hashes = "; ".join(fingerprint(shard, None) for shard in shards)
    return PickleStore(held, tensors, {"files": hashes, "dtype": dtypes(tensors.values())})


def _state_dict(path: Path) -> Iterable[tuple[str, Tensor]]:
    try:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the format before zip archives cannot be mapped
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # a malformed pickle may raise anything
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise BadCheckpoint(f"{path} cannot be read as tensors alone: {reason:.300}") from None
    for wrapper in ("state_dict", "model_state_dict", "model"):
        if isinstance(loaded, dict) and isinstance(loaded.get(wrapper), dict):
            loaded = loaded[wrapper]
    if not isinstance(loaded, dict):
        raise BadCheckpoint(f"{path} holds a {type(loaded).__name__}, expected a state dict")
    return [(str(n), t) for n, t in loaded.items() if _is_plain(t)]


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided
