"""controls: what probes find where there is nothing to find, or nothing was learnt."""

import copy
from typing import Any

import torch
from torch import nn

from headmix.model import AttentionModel
from headmix.registry import NotApplicable
from headmix.sources import load


def untrained(model: AttentionModel, *, seed: int = 0) -> AttentionModel:
    """The same architecture with fresh random weights: what labels cost no learning to read.

    A probe of an untrained model finds what words and positions alone say, mixed at random. The
    model given is not changed.

    Args:
        model: one that can be run: a transformers model, one of ``headmix.lab``, or a module all of
            whose parameters belong to modules that can be reset.
        seed: of the weights.

    Raises:
        NotApplicable: it was read for its weights alone, or some of its parameters cannot be drawn
            anew; the message names them.

    >>> import headmix as hm
    >>> model = hm.load(torch.nn.TransformerEncoderLayer(8, 2, batch_first=True))
    >>> bool((untrained(model).heads(0).W_O == model.heads(0).W_O).any())
    False
    """
    if model.module is None:
        raise NotApplicable(f"{model.name} was read for its weights alone: load the model itself")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        fresh = _fresh(model.module)
    fresh.train(model.module.training)
    options: dict[str, Any] = {"name": f"{model.name}, untrained", "tokenizer": model.tokenizer}
    if not hasattr(model.module, "config") and model.example is not None:
        options["inputs"] = model.example()
    return load(fresh, **options)


def _fresh(module: nn.Module) -> nn.Module:
    first = next(module.parameters())
    if getattr(module, "config", None) is not None:
        made: nn.Module = type(module)(module.config)
        return made.to(first.device, first.dtype)
    made = copy.deepcopy(module)
    left = {name: p.detach().clone() for name, p in made.named_parameters()}
    for part in made.modules():
        reset = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
        if callable(reset):
            reset()
            for name, p in made.named_parameters():
                if any(p is own for own in part.parameters(recurse=True)):
                    left.pop(name, None)
    if left:
        raise NotApplicable(
            f"{type(module).__name__} says not how to draw {', '.join(left)} anew: build an "
            "untrained one yourself and load it"
        )
    return made
