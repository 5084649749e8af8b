"""transformers: a hub id, a local directory, or a model in memory."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel

import transformers
from headmix import architectures
from headmix.layouts import UnknownLayout
from headmix.model import AttentionModel, Site
from headmix.neighbours import Vocabulary
from headmix.registry import NotApplicable
from headmix.sources import reads, torch_mha
from headmix.sources.modules import find_sites


def from_pretrained(
    model: str,
    *,
    revision: str | None = None,
    dtype: str | torch.dtype = "float32",
    device: str = "cpu",
    trust_remote_code: bool = False,
    local_files_only: bool = False,
    gguf_file: str | None = None,
    tokenizer: Any = None,
    allow_pickle: bool = False,
    name: str | None = None,
) -> AttentionModel:
    """Load with transformers: as the class the config names, so that an unembedding comes along.

    A directory is never a reason to ask the network. Pickled weights are refused unless allowed.
    """
    local = Path(model).is_dir()
    where: dict[str, Any] = {
        "revision": revision,
        "local_files_only": local_files_only or local,
        "trust_remote_code": trust_remote_code,
    }
    if gguf_file:
        where["gguf_file"] = gguf_file
    config = _config(model, where)
    build = AutoModel
    named = (config.architectures or [None])[0]
    if named and hasattr(transformers, named) and not gguf_file:
        build = getattr(transformers, named)
    elif gguf_file:
        build = transformers.AutoModelForCausalLM
    loaded = build.from_pretrained(
        model,
        config=config,
        dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype,
        use_safetensors=None if allow_pickle or gguf_file else True,
        **where,
    ).to(device)
    if tokenizer is None:
        tokenizer = _tokenizer(model, where)
    name = name or (Path(model).name if local else model)
    return from_model(loaded.eval(), name=name, tokenizer=tokenizer)


def _config(model: str, where: Mapping[str, Any]) -> Any:
    config_file = Path(model) / "config.json"
    if config_file.is_file():
        fields = json.loads(config_file.read_text())
        if "auto_map" in fields and not where["trust_remote_code"]:
            raise ValueError(
                f"{model}: its config asks for code of its own to be run (auto_map: "
                f"{sorted(fields['auto_map'])}); refused. Pass trust_remote_code=True if you have "
                "read that code and trust it, or weights_only=True to read the weights alone"
            )
        architectures.refuse(fields.get("model_type", ""))
    return AutoConfig.from_pretrained(model, **where)


def _tokenizer(model: str, where: Mapping[str, Any]) -> Any:
    try:
        return AutoTokenizer.from_pretrained(model, **where)
    except Exception:
        return None  # many directories hold no tokenizer; token ids then stand for themselves


def from_model(
    model: PreTrainedModel,
    *,
    name: str | None = None,
    tokenizer: Any = None,
    dtype: torch.dtype = torch.float32,
) -> AttentionModel:
    """A transformers model in memory, left as it is."""
    model_type = getattr(model.config, "model_type", "")
    architectures.refuse(model_type)
    known = architectures.known(model_type)
    sites: dict[str, Site] = {}
    try:
        sites |= find_sites(model, model_type=model_type, dtype=dtype)
    except UnknownLayout:
        if not (sites := dict(torch_mha.find_sites(model, dtype=dtype))):
            raise
    notes = known.notes if known else ()
    for layer, site in sites.items():
        site.notes += notes
    source = AttentionModel(
        name=name or getattr(model.config, "name_or_path", "") or type(model).__name__,
        sites=sites,
        module=model,
        provenance={
            "source": "transformers",
            "class": type(model).__name__,
            "model_type": model_type,
            "dtype": str(model.dtype).removeprefix("torch."),
            "revision": getattr(model.config, "_commit_hash", None) or "",
        },
        vocabulary=lambda: read_vocabulary(model, tokenizer, dtype),
        example=lambda: example_batch(model),
    )
    return replace(source, reads=lambda layer: reads.find_reads(source, layer))


def read_vocabulary(model: PreTrainedModel, tokenizer: Any, dtype: torch.dtype) -> Vocabulary:
    """Embedding and unembedding of a text model.

    Raises:
        NotApplicable: the model embeds no tokens, or its embeddings have another width.
    """
    try:
        embedding = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        embedding = None
    if not isinstance(embedding, nn.Embedding):
        raise NotApplicable(f"{type(model).__name__} has no token embeddings")
    output = model.get_output_embeddings()
    W_E = embedding.weight.detach().to("cpu", dtype)
    W_U = W_E.T if output is None else output.weight.detach().to("cpu", dtype).T
    if W_U.shape != W_E.shape[::-1]:
        raise NotApplicable(
            f"embedding {list(W_E.shape)} and unembedding {list(W_U.shape)} differ in size"
        )
    tied = output is not None and output.weight is embedding.weight
    kind = "embeddings" if output is None else "tied" if tied else "own"
    return Vocabulary(W_E, W_U, _token_text(tokenizer), kind)


def _token_text(tokenizer: Any) -> Callable[[int], str]:
    if tokenizer is None:
        return lambda i: f"#{i}"
    return lambda i: str(tokenizer.convert_ids_to_tokens(i))


def example_batch(model: PreTrainedModel, length: int = 6) -> dict[str, Tensor]:
    """A tiny batch of random input for any transformers model, from its config alone."""
    config = model.config
    generator = torch.Generator().manual_seed(0)
    text = getattr(config, "text_config", None) or config
    vision = getattr(config, "vision_config", None) or config
    main = getattr(model, "main_input_name", "input_ids")
    batch: dict[str, Tensor] = {}

    def ids() -> Tensor:
        size = getattr(text, "vocab_size", None) or 10
        return torch.randint(min(5, size - 1), size, (1, length), generator=generator)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(model.dtype)

    if main == "pixel_values" or hasattr(config, "vision_config"):
        size = getattr(vision, "image_size", 32)
        height, width = (size, size) if isinstance(size, int) else (size[0], size[1])
        batch["pixel_values"] = normal(1, getattr(vision, "num_channels", 3), height, width)
    if main == "input_features":
        mels = getattr(config, "num_mel_bins", None) or getattr(config, "feature_projection_input_dim", 80)
        frames = 2 * getattr(config, "max_source_positions", length)
        shape = (1, mels, frames) if model.config.model_type == "whisper" else (1, frames, mels)
        batch["input_features"] = normal(*shape)
    elif main == "input_values":
        bins = getattr(config, "num_mel_bins", None)
        batch["input_values"] = normal(1, config.max_length, bins) if bins else normal(1, 2000)
    elif main == "input_ids" or hasattr(config, "text_config"):
        batch["input_ids"] = ids()
    if getattr(config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = ids()
    return {k: v.to(model.device) for k, v in batch.items()}
