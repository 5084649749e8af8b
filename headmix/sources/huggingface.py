"""transformers: a hub id, a local directory, or a model in memory."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
)

from headmix import architectures
from headmix.laws import prove, settle
from headmix.layouts import Layout, UnknownLayout
from headmix.model import AttentionModel, Site, evaluating
from headmix.neighbours import Vocabulary
from headmix.registry import NotApplicable
from headmix.sources import FILES, reads, torch_mha
from headmix.sources.folders import open_store
from headmix.sources.gguf import quantisation_note
from headmix.sources.modules import find_sites
from headmix.sources.stores import BadCheckpoint, read_json


def from_pretrained(
    model: str,
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    trust_remote_code: bool = False,
    local_files_only: bool = False,
    gguf_file: str | None = None,
    tokenizer: Any = None,
    allow_pickle: bool = False,
    name: str | None = None,
    layout: Layout | None = None,
) -> AttentionModel:
    """Load with transformers: as the class the config names, so that an unembedding comes along.

    A directory is never a reason to ask the network. Pickled weights are refused unless allowed.
    The model runs in ``dtype``; its weights are read in float64 where that is what it runs in,
    else in float32. Of a directory the provenance holds the fingerprints of its weight files.
    """
    local = Path(model).exists()
    where: dict[str, Any] = {
        "revision": revision,
        "local_files_only": local_files_only or local,
        "trust_remote_code": trust_remote_code,
    }
    if gguf_file:
        where["gguf_file"] = gguf_file
    config = _config(model, where)
    notes: tuple[str, ...] = ()
    files: dict[str, str] = {}
    if local:  # malformed and pickled files are refused before transformers meets them
        _, store = open_store(Path(model), gguf_file=gguf_file, allow_pickle=allow_pickle)
        notes = quantisation_note(t.dtype for name, t in store.tensors.items() if "attn" in name)
        files["files"] = store.provenance["files"]
    named = (config.architectures or [None])[0]
    build: Any = AutoModelForCausalLM if gguf_file else getattr(transformers, str(named), None)
    if not hasattr(build, "from_pretrained"):
        build = AutoModel
    loaded, info = build.from_pretrained(
        model,
        config=config,
        dtype=dtype,
        use_safetensors=None if allow_pickle or gguf_file else True,
        ignore_mismatched_sizes=True,  # so that they come back in info, to be named below
        output_loading_info=True,
        **where,
    )
    for weight, found, expected in sorted(info["mismatched_keys"]):
        raise BadCheckpoint(
            f"{model}: {weight} has shape {list(found)}, but by its config it is {list(expected)}"
        )
    if tokenizer is None:
        tokenizer = _tokenizer(model, where)
    name = name or (Path(model).name if local else model)
    source = from_model(
        loaded.to(device).eval(),
        name=name,
        tokenizer=tokenizer,
        dtype=torch.float64 if dtype == torch.float64 else torch.float32,
        layout=layout,
    )
    _require_read(source, info["missing_keys"])
    for site in source.sites.values():
        site.notes += notes
    return replace(source, provenance={**source.provenance, **files})


def _require_read(source: AttentionModel, missing: Collection[str]) -> None:
    """Refuse random numbers, which is what transformers puts where the files hold no weight."""
    for layer, site in source.sites.items():
        a = site.attention
        for path in (p.path for p in (a.o, a.v, a.q, a.k) if p is not None):
            if f"{path}.weight" in missing:
                raise BadCheckpoint(
                    f"{source.name}: the files hold no {path}.weight, which its config calls for "
                    f"in {layer}"
                )


def _config(model: str, where: Mapping[str, Any]) -> Any:
    if Path(model).is_file():
        raise ValueError(f"{model} is a file: expected a folder, or one of {', '.join(FILES)}")
    config_file = Path(model) / "config.json"
    if config_file.is_file():
        fields = read_json(config_file)
        if "auto_map" in fields and not where["trust_remote_code"]:
            raise ValueError(
                f"{model}: its config asks for code of its own to be run (auto_map: "
                f"{fields['auto_map']!s:.200}); refused. Pass trust_remote_code=True if you have "
                "read that code and trust it, or weights_only=True to read the weights alone"
            )
        architectures.refuse(str(fields.get("model_type", "")))
    elif Path(model).is_dir() and "gguf_file" not in where:
        held = ", ".join(sorted(f.name for f in Path(model).iterdir())[:10]) or "nothing"
        raise FileNotFoundError(
            f"{model} has no config.json, so that the model cannot be built; it holds {held}. For "
            "a GGUF file name it: gguf_file=...; for bare weights: weights_only=True, n_heads=..."
        )
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
    inputs: Any = None,
    layout: Layout | None = None,
) -> AttentionModel:
    """A transformers model in memory, left as it is.

    The layout of a listed architecture was proven when the table was made. Anything else, and a
    ``layout`` that is named, is proven here, on a tiny batch (``inputs``, or one made from the
    config), before it is returned.
    """
    model_type = getattr(model.config, "model_type", "")
    architectures.refuse(model_type)
    source = AttentionModel(
        name=name or getattr(model.config, "name_or_path", "") or type(model).__name__,
        sites={},
        module=model,
        provenance={
            "source": "transformers",
            "class": type(model).__name__,
            "model_type": model_type,
            "dtype": str(model.dtype).removeprefix("torch."),
            "revision": getattr(model.config, "_commit_hash", None) or "",
        },
        vocabulary=lambda: read_vocabulary(model, tokenizer, dtype),
        example=(lambda: inputs) if inputs is not None else lambda: example_batch(model),
        tokenizer=tokenizer,
    )
    if layout is None:
        source = _settled(source, model, model_type, dtype)
    else:
        named = dict[str, Site](find_sites(model, layout=layout, dtype=dtype))
        source = prove(replace(source, sites=named))
    return replace(source, reads=lambda layer: reads.find_reads(source, layer))


def _settled(
    source: AttentionModel, model: PreTrainedModel, model_type: str, dtype: torch.dtype
) -> AttentionModel:
    """The source with its sites: by the table where that fits, else by the laws."""
    known = architectures.known(model_type)
    sites = _find_sites(model, model_type, None, dtype)
    layouts = {name: str(site.attention.layout) for name, site in sites.items()}
    if known and set(layouts.values()) <= known.layouts.keys():
        for name, site in sites.items():
            site.notes += known.notes
            settle(site, known.layouts[layouts[name]])
        return replace(source, sites=sites)
    try:
        return prove(replace(source, sites=sites))
    except ValueError as reason:
        if not any(site.attention.layout.fused for site in sites.values()):
            raise
        for order in ("grouped", "thirds", "codegen"):
            try:
                return prove(replace(source, sites=_find_sites(model, model_type, order, dtype)))
            except ValueError:
                continue
        raise reason from None


def _find_sites(
    model: PreTrainedModel, model_type: str, order: str | None, dtype: torch.dtype
) -> dict[str, Site]:
    try:
        return dict(find_sites(model, model_type=model_type, order=order, dtype=dtype))
    except UnknownLayout:
        sites: dict[str, Site] = dict(torch_mha.find_sites(model, dtype=dtype))
        if not sites:
            raise
        return sites


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
    return Vocabulary(W_E, W_U, token_text(tokenizer), kind)


def token_text(tokenizer: Any) -> Callable[[int], str]:
    if tokenizer is None:
        return lambda i: f"#{i}"
    # a token may hold half a surrogate pair, which no file takes
    return lambda i: str(tokenizer.convert_ids_to_tokens(i)).encode("utf-8", "replace").decode()


def example_batch(model: PreTrainedModel, length: int = 6) -> dict[str, Tensor]:
    """A tiny batch of random input for a transformers model, made from its config alone.

    Raises:
        NotApplicable: no batch was found that its forward takes.
    """
    whole = {k: v.to(model.device) for k, v in _random_inputs(model, length).items()}
    text = {k: v for k, v in whole.items() if k.endswith("input_ids")}
    error: Exception | None = None
    for batch in (whole, text):  # many multimodal models want matching placeholders: text will do
        if not batch:
            continue
        try:
            with evaluating(model), torch.inference_mode():
                model(**batch)
            return batch
        except Exception as reason:
            error = error or reason
    raise NotApplicable(
        f"no test batch is known for {type(model).__name__} (tried {list(whole)}: {error}); "
        "pass inputs=, keyword arguments for its forward"
    )


def _random_inputs(model: PreTrainedModel, length: int) -> dict[str, Tensor]:
    config = model.config
    generator = torch.Generator().manual_seed(0)
    text = getattr(config, "text_config", None) or config
    vision = getattr(config, "vision_config", None) or config
    audio = getattr(config, "audio_config", None) or config
    main = getattr(model, "main_input_name", "input_ids")
    batch: dict[str, Tensor] = {}

    def ids() -> Tensor:
        size = getattr(text, "vocab_size", None) or 10
        return torch.randint(min(5, size - 1), size, (1, length), generator=generator)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(model.dtype)

    channels = getattr(vision, "num_channels", 3)
    if main == "pixel_values" or hasattr(config, "vision_config"):
        size = getattr(vision, "image_size", None) or 32
        sides = (size, size) if isinstance(size, int) else (size[0], size[1])
        batch["pixel_values"] = normal(1, channels, *sides)
    bins: Any = getattr(audio, "num_mel_bins", None)
    if main == "input_features":
        frames = 2 * getattr(audio, "max_source_positions", 2 * length)
        width = bins or getattr(audio, "feature_projection_input_dim", 80)
        shape = (
            (width, frames) if getattr(audio, "model_type", "") == "whisper" else (frames, width)
        )
        batch["input_features"] = normal(1, *shape)
    elif main == "input_values":
        batch["input_values"] = normal(1, config.max_length, bins) if bins else normal(1, 2000)
    elif main == "input_ids" or hasattr(config, "text_config"):
        batch["input_ids"] = ids()
    if getattr(config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = ids()
    return batch
