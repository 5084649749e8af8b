"""Lab models on disk and in ``headmix.load``: dense weights under plain names, and the config."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from headmix.files import whole_file
from headmix.lab.outputs import set_weight
from headmix.lab.transformer import Config, Transformer
from headmix.laws import prove
from headmix.model import AttentionModel
from headmix.neighbours import Vocabulary
from headmix.sources.modules import find_sites
from headmix.sources.reads import find_reads

#: On layers whose heads mix attention.
TALKING = "talking heads: a head's attention weights are a learned mixture over heads"

#: On layers whose heads see one token each.
PLANTED = "each head with an offset sees one token only, whatever its queries and keys"


def save(model: Transformer, path: str | os.PathLike[str]) -> Path:
    """Write a lab model as safetensors, whole or not at all.

    Every weight is the dense matrix that acts, W_O too, so that any reader of safetensors reads it
    (``headmix.load(path)`` does, for its weights alone); the config is JSON in the metadata.

    Raises:
        OSError: the file cannot be written.
    """
    tensors = {name: weight.detach().contiguous() for name, weight in _dense(model).items()}
    about = {"headmix_lab": model.config.to_json()}
    with whole_file(path) as temporary:
        try:
            save_file(tensors, temporary, about)
        except SafetensorError as reason:
            raise OSError(f"cannot write {path}: {reason}") from reason
    return Path(path)


def open_model(path: str | os.PathLike[str]) -> Transformer:
    """The model that ``save`` wrote: the same function, with W_O of the same kind.

    Nothing in the file is executed.

    Raises:
        ValueError: the file is not there, is damaged, or holds no lab model.
    """
    if not Path(path).is_file():
        raise ValueError(f"{path}: there is no such file")
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as reason:
        raise ValueError(f"{path} is not a lab model: {reason}") from reason
    if "headmix_lab" not in about:
        raise ValueError(f"{path} is not a lab model: its metadata has no headmix_lab")
    with torch.random.fork_rng():
        model = Transformer(Config.from_json(about["headmix_lab"]))
    _fill(model, tensors, str(path))
    return model


def _fill(model: Transformer, tensors: dict[str, Tensor], what: str) -> None:
    expected = _dense(model)
    if wrong := {
        name: (list(expected[name].shape) if name in expected else "nothing")
        for name in expected.keys() | tensors.keys()
        if name not in expected
        or name not in tensors
        or expected[name].shape != tensors[name].shape
    }:
        name, shape = min(wrong.items())
        found = list(tensors[name].shape) if name in tensors else "nothing"
        raise ValueError(f"{what}: {name}: expected {shape}, found {found}")
    projections = {
        f"{path}.weight": m for path, m in model.named_modules() if path.endswith("o_proj")
    }
    with torch.no_grad():
        for name, tensor in tensors.items():
            if isinstance(linear := projections.get(name), nn.Linear):
                set_weight(linear, tensor)
            else:
                expected[name].copy_(tensor)


def _dense(model: Transformer) -> dict[str, Tensor]:
    """Every weight by its plain name; W_O as the matrix that acts."""
    made: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if path.endswith("o_proj"):
            made[f"{path}.weight"] = module.weight
            made[f"{path}.bias"] = module.bias
        elif "o_proj" not in path:
            made |= {
                f"{path}.{name}".lstrip("."): p
                for name, p in module.named_parameters(recurse=False)
            }
    return made


def from_model(
    module: Transformer,
    *,
    name: str | None = None,
    tokenizer: Any = None,
    dtype: torch.dtype = torch.float32,
    inputs: Any = None,
) -> AttentionModel:
    """A lab model for ``headmix.load``: sites, vocabulary, feed-forward, both laws proven."""
    c = module.config
    sites = find_sites(module, dtype=dtype)
    for number, site in enumerate(sites.values()):
        site.notes += (TALKING,) * c.talking
        site.notes += (PLANTED,) * (number == 0 and c.offsets is not None)
    source = AttentionModel(
        name=name or f"lab ({'talking, ' * c.talking}{c.output})",
        sites=sites,
        module=module,
        provenance={"source": "headmix.lab", "config": c.to_json()},
        vocabulary=lambda: _vocabulary(module, tokenizer, dtype),
        example=(lambda: inputs) if inputs is not None else lambda: _example(module),
        tokenizer=tokenizer,
    )
    source = prove(source)
    return replace(source, reads=lambda layer: find_reads(source, layer))


def _example(module: Transformer) -> Tensor:
    """Two sequences of random tokens, as long as the model takes."""
    generator = torch.Generator().manual_seed(0)
    c = module.config
    ids = torch.randint(c.vocabulary, (2, min(c.length, 16)), generator=generator)
    return ids.to(module.lm_head.weight.device)


def _vocabulary(module: Transformer, tokenizer: Any, dtype: torch.dtype) -> Vocabulary:
    W_E, W_U = (
        m.weight.detach().to("cpu", dtype, copy=True) for m in (module.embed_tokens, module.lm_head)
    )
    kind = "own"
    if W_E.shape != W_U.shape:  # classes that are no tokens
        W_U, kind = W_E, "embeddings"
    text = getattr(tokenizer, "decode", None)
    return Vocabulary(W_E, W_U.T, lambda i: str(text([i])) if text else f"#{i}", kind)
