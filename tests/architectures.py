"""Tiny random models of many transformers architectures, and the table of what the laws find.

``python tests/architectures.py`` runs both laws on every one of them and rewrites
``headmix/architectures.json``. The tests check that the table still says what the laws say.
"""

import json
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedConfig, PreTrainedModel

from headmix.architectures import Architecture
from headmix.laws import verify
from headmix.model import AttentionModel
from headmix.registry import NotApplicable
from headmix.sources import huggingface, reads

TABLE = Path(__file__).parents[1] / "headmix" / "architectures.json"

#: Sizes for every config field of these names. Widths of heads differ from d_model / heads and the
#: widths of values from those of keys wherever a config can say so.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "projection_dim"), 32),
    **dict.fromkeys(("encoder_hidden_size", "decoder_hidden_size", "embedding_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "encoder_ffn_dim", "dim_ff"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "ffn_dim", "ffn_hidden_size", "hidden_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_intermediate_size"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 16),
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "vocab_size": 99,
    "head_dim": 12,
    "v_head_dim": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "d_kv": 8,
    "rotary_dim": 4,
    "image_size": 32,
    "patch_size": 8,
    "num_mel_bins": 16,
    "max_length": 32,
    "num_hidden_groups": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}

#: The architectures that headmix promises to read, and what their configs need beyond SMALL.
NAMED: dict[str, dict[str, Any]] = {
    # encoders
    "bert": {}, "roberta": {}, "xlm-roberta": {}, "camembert": {}, "distilbert": {}, "electra": {},
    "deberta": {}, "deberta-v2": {}, "albert": {"num_hidden_layers": 3}, "mpnet": {},
    "modernbert": {}, "roformer": {}, "longformer": {}, "big_bird": {}, "esm": {},
    # decoders
    "gpt2": {}, "openai-gpt": {}, "gptj": {}, "gpt_neox": {}, "opt": {}, "bloom": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "falcon": {}, "mpt": {}, "gpt_bigcode": {}, "starcoder2": {}, "codegen": {}, "ctrl": {},
    "llama": {}, "mistral": {}, "mixtral": {}, "qwen2": {}, "qwen3": {}, "qwen3_moe": {},
    "gemma": {}, "gemma2": {}, "gemma3_text": {}, "phi": {}, "phi3": {}, "olmo": {}, "olmo2": {},
    "cohere": {}, "cohere2": {}, "stablelm": {}, "granite": {}, "smollm3": {}, "persimmon": {},
    "gpt_oss": {}, "xglm": {}, "biogpt": {}, "helium": {"head_dim": 8}, "glm4": {}, "nemotron": {},
    "deepseek_v3": {"head_dim": 8}, "minicpm3": {},
    # encoder-decoders
    "t5": {}, "mt5": {}, "longt5": {}, "bart": {}, "mbart": {}, "marian": {}, "pegasus": {},
    "blenderbot": {}, "m2m_100": {}, "prophetnet": {}, "whisper": {}, "speech_to_text": {},
    "moonshine": {},
    # vision, audio, both
    "vit": {}, "deit": {}, "beit": {}, "dinov2": {}, "dinov2_with_registers": {},
    "clip": {}, "clip_text_model": {}, "clip_vision_model": {}, "siglip_vision_model": {},
    "vit_mae": {}, "hubert": {}, "wav2vec2": {}, "wav2vec2-conformer": {},
    "audio-spectrogram-transformer": {},
}  # fmt: skip

#: Variants whose config changes where the heads are.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon, multi-query": ("falcon", {"multi_query": True, "new_decoder_architecture": False}),
    "falcon, one KV head each": (
        "falcon",
        {"multi_query": False, "new_decoder_architecture": False},
    ),
    "falcon, grouped": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "gpt_bigcode, one KV head each": ("gpt_bigcode", {"multi_query": False}),
    "gpt_bigcode, multi-query": ("gpt_bigcode", {"multi_query": True}),
    "bloom, sequential": ("bloom", {"apply_residual_connection_post_layernorm": True}),
    "gpt_neox, sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "mixtral, multi-query": ("mixtral", {"num_key_value_heads": 1}),
    "albert, two groups": ("albert", {"num_hidden_layers": 4, "num_hidden_groups": 2}),
    "deepseek_v3, no query latent": ("deepseek_v3", {"head_dim": 8, "q_lora_rank": None}),
}

#: More architectures that both laws hold on as they are.
OTHERS: dict[str, dict[str, Any]] = {
    name: {} for name in (
    "afmoe", "aimv2", "altclip", "apertus", "arcee", "aria_text", "bert-generation",
    "bigbird_pegasus", "blenderbot-small", "canine", "chinese_clip", "clipseg", "cpmant", "cwm",
    "data2vec-audio", "data2vec-text", "data2vec-vision", "deepseek_v2", "dinov3_vit", "doge",
    "dpr", "dpt", "ernie", "ernie4_5", "ernie4_5_moe", "eurobert", "exaone4", "flex_olmo", "fsmt",
    "fuyu", "git", "glm", "glm4_moe", "gpt-sw3", "gpt_neox_japanese", "granitemoe",
    "granitemoeshared", "groupvit", "hunyuan_v1_dense", "hunyuan_v1_moe", "ijepa", "imagegpt",
    "layoutlm", "led", "lfm2", "llama4_text", "markuplm", "megatron-bert", "minimax_m2",
    "ministral", "mlcd", "mobilebert", "mobilevit", "modernbert-decoder", "mvp", "nllb-moe",
    "nystromformer", "olmo3", "olmoe", "owlv2", "owlvit", "pegasus_x", "phimoe", "plbart",
    "qwen2_moe", "qwen3_vl_text", "rembert", "roberta-prelayernorm", "roc_bert",
    "sam_vision_model", "seed_oss", "sew", "sew-d", "siglip", "solar_open", "splinter",
    "switch_transformers", "t5gemma", "tapas", "umt5", "unispeech", "unispeech-sat", "vaultgemma",
    "visual_bert", "vit_msn", "vitdet", "vits", "wav2vec2-bert", "xlm-roberta-xl", "yoso",
    )
}  # fmt: skip


def tiny_config(config_class: type[PreTrainedConfig], **more: Any) -> PreTrainedConfig:
    """The config of a tiny model: SMALL sizes wherever the class has such a field."""
    default = config_class()
    fields = default.to_dict().keys() | set(config_class.attribute_map.values())
    sizes = {name: size for name, size in SMALL.items() if name in fields}
    if getattr(default, "num_key_value_heads", 0) == getattr(default, "num_attention_heads", None):
        sizes.pop("num_key_value_heads", None)
        sizes |= {"num_key_value_heads": 4} if "num_key_value_heads" in fields else {}
    for name in config_class.sub_configs:
        part = getattr(default, name, None)
        if isinstance(part, PreTrainedConfig):
            sizes[name] = tiny_config(type(part)).to_dict()
    return config_class(**sizes | more)


def tiny_model(model_type: str, model_class: Any = AutoModel, **more: Any) -> PreTrainedModel:
    """A tiny random model, its biases and norms moved off their initial zeros and ones."""
    config = tiny_config(CONFIG_MAPPING[model_type], **more)
    build = getattr(model_class, "from_config", None) or model_class._from_config
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def describe(model_type: str, model: PreTrainedModel) -> Architecture:
    """What the laws find on a model, as a row of the table.

    Raises:
        AssertionError: a law fails on a layer that was reached, or no layer was.
    """
    source = huggingface.from_model(model)
    check = verify(source)
    failed = {r.layer: r.reason for r in check.rows if r.ran and not r.ok}
    assert not failed, f"{model_type}: {failed}"
    ran = {r.layer: r for r in check.rows if r.ran}
    assert ran, f"{model_type}: no layer was reached"
    layouts = {
        str(source.sites[name].attention.layout): row.values for name, row in sorted(ran.items())
    }
    heads = source.heads(next(iter(ran)))
    return Architecture(
        model_type=model_type,
        cls=type(model).__name__,
        layouts=layouts,
        heads=f"{heads.n_heads}/{heads.n_kv_heads} heads, {heads.d_head} of {heads.d_model}",
        notes=tuple(_notes(source, next(iter(ran)))),
        sum_error=max(r.sum_error for r in ran.values()),
    )


def _notes(source: AttentionModel, layer: str) -> Iterator[str]:
    """What changes the meaning of the numbers, found by looking and by experiment."""
    attention = source.sites[layer].attention
    inside = {n for n, _ in source.module.get_submodule(attention.path).named_modules()}
    if any(re.fullmatch(r"(q|k|query|key)_(layer)?norm", n.rpartition(".")[2]) for n in inside):
        yield "norms on queries and keys: composition through Q and K is an approximation"
    if attention.layout.order == "latent":
        yield "multi-head latent attention: values read a latent, not the residual stream"
    if attention.call or any(s.attention.call for s in source.sites.values()):
        yield "layers share one W_O"
    if _post_norm(source, attention.path):
        yield (
            "post-norm: a norm sits on the residual stream itself, so nothing folds exactly and "
            "composition across layers is an approximation"
        )
    try:
        reads.find_reads(source, layer)
    except reads.StandsBetween:
        yield "a norm or scale stands between the output projection and what reads the stream next"
    except reads.Parallel:
        yield "attention and feed-forward in parallel: the block's neurons do not read its heads"
    except NotApplicable:
        pass


def _post_norm(source: AttentionModel, path: str) -> bool:
    """Whether the block around an attention module returns what a norm inside it returns."""
    normed: list[torch.Tensor] = []
    found = False

    def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        nonlocal found
        out = output[0] if isinstance(output, tuple | list) else output
        if "norm" in type(module).__name__.lower():
            normed.append(out)
        elif isinstance(out, torch.Tensor):
            found = found or any(out is n for n in normed)

    block = path
    while block and not block.rpartition(".")[2].isdigit():
        block = block.rpartition(".")[0]
    root = source.module.get_submodule(block)
    handles = [m.register_forward_hook(hook) for m in root.modules()]
    try:
        source.forward(source.example())
    finally:
        for handle in handles:
            handle.remove()
    return found


def main(names: list[str]) -> int:
    """Rewrite the table, all of it or the named rows."""
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    specs = NAMED | OTHERS
    torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other
    old = {} if not names else {r["model_type"]: r for r in json.loads(TABLE.read_text())}
    failures = 0
    for model_type in names or specs:
        try:
            row = describe(model_type, tiny_model(model_type, **specs[model_type]))
        except Exception as reason:
            failures += 1
            print(f"{model_type}: {type(reason).__name__}: {reason}"[:300], file=sys.stderr)
            continue
        old[model_type] = vars(row) | {"sum_error": float(f"{row.sum_error:.1e}")}
        print(model_type, row.layouts, row.heads, row.notes, f"{row.sum_error:.1e}")
    rows = [json.dumps(old[name], ensure_ascii=False) for name in sorted(old)]
    TABLE.write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")
    return failures


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
