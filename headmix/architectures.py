"""What is known of each transformers architecture, and which are refused by name.

The table ``architectures.json`` is not written by hand: ``python tests/architectures.py`` builds a
tiny random model of every listed architecture, runs both laws on it and writes down what it found.
An architecture that is not listed still loads when both laws hold on the model at hand.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

#: Model types without softmax attention heads, and what they have instead.
REFUSED = {
    "mamba": "a state-space model",
    "mamba2": "a state-space model",
    "falcon_mamba": "a state-space model",
    "rwkv": "a linear recurrence",
    "fnet": "Fourier mixing, no heads",
    "xlstm": "a recurrent network",
    "recurrent_gemma": "a gated linear recurrence beside local attention",
    "poolformer": "pooling in place of attention",
    "convnext": "a convolutional network",
    "convnextv2": "a convolutional network",
    "resnet": "a convolutional network",
    "hyena": "long convolutions in place of attention",
}


@dataclass(frozen=True)
class Architecture:
    """What the laws found on a tiny model of one architecture.

    Attributes:
        model_type: as in a transformers config.
        cls: the transformers class that was built.
        layouts: the projections' names and order for each kind of layer, with how values reach z
            there (a key of ``headmix.model.VALUES``).
        heads: query heads, KV heads, width of values and of the stream in the tiny model.
        notes: what changes the meaning of the numbers.
        sum_error: the largest error of the sum law over the tiny model's layers.
    """

    model_type: str
    cls: str
    layouts: Mapping[str, str]
    heads: str
    notes: tuple[str, ...]
    sum_error: float


@cache
def _listed() -> dict[str, Architecture]:
    rows = json.loads(files("headmix").joinpath("architectures.json").read_text("utf-8"))
    return {r["model_type"]: Architecture(**r | {"notes": tuple(r["notes"])}) for r in rows}


def known(model_type: str) -> Architecture | None:
    """What is known of a model type, or None."""
    return _listed().get(model_type)


def table() -> list[Architecture]:
    """Every listed architecture, by name."""
    return [_listed()[name] for name in sorted(_listed())]


def refuse(model_type: str) -> None:
    """Raise ValueError for a model type that has no softmax attention heads."""
    if model_type in REFUSED:
        raise ValueError(
            f"{model_type} has no softmax attention heads: it is {REFUSED[model_type]}. headmix "
            "takes output projections of attention heads apart, so there is nothing to measure"
        )
