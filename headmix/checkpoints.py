"""checkpoints: sums kept on disk while a run goes on, and how a run stops and is known again."""

import hashlib
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from headmix.capture import Batch
from headmix.files import whole_file
from headmix.heads import Heads
from headmix.model import AttentionModel
from headmix.packing import Batches

#: Tensors by kind of sums, layer and name.
Parts = dict[str, dict[str, dict[str, Tensor]]]


def write(path: Path, identity: str, parts: Parts, about: Mapping[str, str]) -> None:
    """Keep tensors, by kind, layer and name, and a few words, whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    tensors = {
        f"{kind}/{layer}/{name}": tensor.contiguous()
        for kind, layers in parts.items()
        for layer, named in layers.items()
        for name, tensor in named.items()
    }
    with whole_file(path) as temporary:
        try:
            save_file(tensors, temporary, {"identity": identity, **about})
        except SafetensorError as reason:  # a full disk, say
            raise OSError(f"cannot write the checkpoint {path}: {reason}") from reason


def read(path: Path, identity: str) -> tuple[Parts, dict[str, str]] | None:
    """The tensors and words that ``write`` kept; None where there is no file.

    Raises:
        ValueError: the file is no checkpoint, or one of another run.
    """
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            # copies: where a tensor begins in memory has a say in how its sums are rounded
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    except SafetensorError as reason:
        raise ValueError(f"{path} is not a checkpoint of headmix: {reason}") from reason
    if about.get("identity") != identity:
        raise another_run(path)
    parts: Parts = {}
    for key, tensor in tensors.items():
        kind, layer, name = key.split("/", 2)
        parts.setdefault(kind, {}).setdefault(layer, {})[name] = tensor
    return parts, about


def another_run(path: Path | None) -> ValueError:
    return ValueError(
        f"{path} is the checkpoint of another run (other model, layers, text or folds): "
        "remove it, or name another one"
    )


def identity_of(
    model: AttentionModel,
    heads: Mapping[str, Heads],
    folds: int,
    positions: int,
    kinds: Collection[str],
    batches: Batches,
) -> str:
    """A hash of what the sums depend on beside the batches: the model, its layers, the labels."""
    labels = batches.labelling.digest if batches.labelling is not None else ""
    about = (model.name, model.processing, folds, positions, sorted(kinds), labels)
    digest = hashlib.sha256(repr(about).encode())
    for name, h in heads.items():
        digest.update(name.encode() + bytes_of(h.W_O))
    module = model.module or nn.Module()
    for name, weight in [*module.named_parameters(), *module.named_buffers()]:
        digest.update(f"{name} {weight.dtype} {list(weight.shape)}".encode())
        if type(weight.data) is Tensor and not weight.is_meta:
            # a sample: training moves every number, and all of them would take minutes to hash
            digest.update(bytes_of(weight.data.flatten()[:: weight.numel() // 1000 + 1]))
    return digest.hexdigest()


def chained(before: str, batch: Batch) -> str:
    """A hash of all batches so far, the last of which is given."""
    digest = hashlib.sha256(f"{before} {batch.fold} {batch.documents}".encode())

    def add(part: Any) -> None:
        if isinstance(part, Tensor):
            digest.update(f"{part.dtype} {list(part.shape)}".encode() + bytes_of(part))
        elif isinstance(part, Mapping):
            for key in sorted(part):
                add(key)
                add(part[key])
        elif isinstance(part, tuple | list):
            for item in part:
                add(item)
        elif isinstance(part, str | float | int | None):
            digest.update(repr(part).encode())

    add((batch.inputs, batch.keep))
    return digest.hexdigest()


def bytes_of(values: Tensor) -> bytes:
    plain = values.detach().to("cpu").contiguous().flatten()
    return plain.view(torch.uint8).numpy().tobytes()


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Turns a first SIGINT into a flag that is looked at between batches."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    asked = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
