"""Activations: text through the model once, layer groups that fit in memory, resume, interrupts."""

import hashlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headmix.capture import Batch, capture
from headmix.files import whole_file
from headmix.heads import Heads
from headmix.model import AttentionModel
from headmix.moments import Moments
from headmix.packing import Batches


@dataclass(frozen=True)
class Plan:
    """What a pass over text will keep in memory, known before it starts.

    Attributes:
        groups: the layers of each pass; several where all do not fit.
        layer_bytes: the size of one layer's Moments.
        batches: forward passes for each group; None where a user's batches do not say.
        tokens: tokens that count; None likewise.
    """

    groups: tuple[tuple[str, ...], ...]
    layer_bytes: Mapping[str, int]
    batches: int | None
    tokens: int | None

    def __str__(self) -> str:
        most = max(sum(self.layer_bytes[n] for n in group) for group in self.groups)
        passes = f" in {len(self.groups)} passes over the text" if len(self.groups) > 1 else ""
        return (
            f"{self.tokens or '?'} tokens in {self.batches or '?'} batches; the sums of "
            f"{sum(map(len, self.groups))} layers take {most / 2**20:.0f} MiB{passes}"
        )


def plan(
    heads: Mapping[str, Heads],
    batches: Batches,
    *,
    folds: int,
    positions: int = 0,
    memory: float | None = None,
) -> Plan:
    """Which layers to take together.

    Args:
        heads: the weights of the layers to watch.
        batches: what will be run.
        folds: folds of documents.
        positions: positions whose means are kept.
        memory: bytes that the sums may take; all layers go together where None.

    Raises:
        ValueError: not even one layer fits; the message says how much it takes.
    """
    sizes = {}
    for name, h in heads.items():
        H, concat = h.n_heads, h.n_heads * h.d_head
        sums = concat * (1 + concat + H + positions) + H * (2 + H) + positions + 3
        sizes[name] = 8 * folds * sums
    groups: list[list[str]] = [[]]
    for name, size in sizes.items():
        if memory is not None and size > memory:
            raise ValueError(
                f"the sums of {name} alone take {size / 2**30:.2f} GiB, more than the "
                f"{memory / 2**30:.2f} GiB of memory allowed: allow more, or use fewer folds"
            )
        if memory is not None and sum(sizes[n] for n in groups[-1]) + size > memory:
            groups.append([])
        groups[-1].append(name)
    return Plan(tuple(map(tuple, groups)), sizes, batches.n_batches, batches.n_tokens)


def accumulate(
    model: AttentionModel,
    heads: Mapping[str, Heads],
    batches: Batches,
    *,
    folds: int,
    positions: int = 0,
    checkpoint: Path | None = None,
    seconds: float = 30.0,
    done: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, Moments], int]:
    """The Moments of a group of layers over all batches.

    With a checkpoint, the sums are written there every so often, whole or not at
    all; a later call with the same model, layers and batches goes on from it and ends with the
    very same sums, since batches are added one after the other in the same order.

    SIGINT (in the main thread) ends the pass after the batch in hand; a second one at once.

    Args:
        model: a model that can be run.
        heads: the weights of the layers to watch.
        batches: what to run.
        folds: folds of documents.
        positions: positions whose means are kept.
        checkpoint: where to keep the state; None keeps none.
        seconds: between two checkpoints.
        done: called with (tokens seen, tokens in all) after each batch.

    Returns:
        The Moments by layer, and how many batches they hold.
    """
    identity = _identity(model, heads, batches, folds, positions)
    state = _State.read(checkpoint, identity) if checkpoint else None
    seen = 0
    saved = time.monotonic()
    with _interrupt() as interrupted:
        for number, batch in enumerate(batches):
            seen += batch.tokens
            if state is None:
                state = _State(identity, _nothing_yet(model, heads, batch, folds, positions), 0)
            if number < state.batches:
                continue
            capture(model, [batch], heads, state.moments)
            state.batches += 1
            if done:
                done(seen, batches.n_tokens or 0)
            if interrupted():
                break
            if checkpoint and time.monotonic() - saved > seconds:
                state.write(checkpoint)
                saved = time.monotonic()
    if state is None:
        raise ValueError("there is not one batch to run")
    if checkpoint:
        state.write(checkpoint)
    return state.moments, state.batches


def _nothing_yet(
    model: AttentionModel, heads: Mapping[str, Heads], batch: Batch, folds: int, positions: int
) -> dict[str, Moments]:
    """Empty sums, about each layer's mean of z over one batch: near enough to that over all."""
    once = {name: Moments.zeros(h.W_O, folds=batch.fold + 1) for name, h in heads.items()}
    capture(model, [batch], heads, once)
    return {
        name: Moments.zeros(h.W_O, folds=folds, pivot=once[name].mean, positions=positions)
        for name, h in heads.items()
    }


def _identity(
    model: AttentionModel, heads: Mapping[str, Heads], batches: Batches, folds: int, positions: int
) -> str:
    """A hash of what the sums depend on: the model, its layers, the text and how it is cut."""
    about = [
        model.name,
        model.processing,
        folds,
        positions,
        batches.n_batches,
        *batches.attrs.values(),
    ]
    digest = hashlib.sha256(repr(about).encode())
    for name, h in heads.items():
        digest.update(name.encode() + h.W_O.contiguous().numpy().tobytes())
    return digest.hexdigest()


@dataclass
class _State:
    """What a checkpoint holds: the sums, and how many batches are in them."""

    identity: str
    moments: dict[str, Moments]
    batches: int

    def write(self, path: Path) -> None:
        tensors = {
            f"{layer}/{f.name}": getattr(sums, f.name).contiguous()
            for layer, sums in self.moments.items()
            for f in fields(sums)
        }
        about = {"identity": self.identity, "batches": str(self.batches)}
        with whole_file(path) as temporary:
            save_file(tensors, temporary, about)

    @classmethod
    def read(cls, path: Path, identity: str) -> "_State | None":
        """The state in a file; None where there is none.

        Raises:
            ValueError: the file is no checkpoint, or one of another run.
        """
        if not path.exists():
            return None
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata() or {}
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except SafetensorError as reason:
            raise ValueError(f"{path} is not a checkpoint of headmix: {reason}") from reason
        if about.get("identity") != identity:
            raise ValueError(
                f"{path} is the checkpoint of another run (other model, layers, text or folds): "
                "remove it, or name another one"
            )
        layers: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            layer, _, name = key.rpartition("/")
            layers.setdefault(layer, {})[name] = tensor
        return cls(identity, {n: Moments(**t) for n, t in layers.items()}, int(about["batches"]))


@contextmanager
def _interrupt() -> Iterator[Callable[[], bool]]:
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
