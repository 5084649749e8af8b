"""TransformerLens: a TransformerBridge as it is, and its weight processing on a copy."""

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import PreTrainedModel

from headmix import architectures
from headmix.laws import SUM_TOLERANCE, prove, settle
from headmix.layouts import Attention, UnknownLayout, find_attention
from headmix.model import AttentionModel, Site
from headmix.neighbours import Vocabulary
from headmix.registry import NotApplicable
from headmix.sources import load, reads
from headmix.sources.assembly import streams_of
from headmix.sources.huggingface import example_batch, token_text
from headmix.sources.modules import ModuleSite, is_transposed

#: Where a bridge keeps its blocks, and what a block calls its attention.
STACKS = ("blocks", "encoder_blocks", "decoder_blocks")
ATTENTIONS = ("attn", "self_attn", "cross_attn")

#: Settings under which a bridge multiplies with the weights itself and calls no projection module.
BYPASSES = ("use_attn_result", "use_split_qkv_input", "use_attn_in")


def from_bridge(
    bridge: TransformerBridge,
    *,
    name: str | None = None,
    tokenizer: Any = None,
    dtype: torch.dtype = torch.float32,
) -> AttentionModel:
    """A bridge as it is, whether or not its weights were processed.

    The modules that a bridge wraps are read and hooked, not its hook points, so that the bridge's
    own hooks and caches go on as they were.

    Raises:
        ValueError: no block of the bridge has attention whose values and output projection are
            modules of their own.
    """
    processing = "folded" if bridge._weights_processed else "raw"
    sites: dict[str, Site] = {}
    for a in _find_attention(bridge):
        notes = _notes(bridge, a.path, processing)
        sites[a.name] = ModuleSite(a, bridge, dtype, processing, streams_of(a), notes=notes)
    original = bridge.original_model
    tokenizer = tokenizer or bridge.tokenizer
    source = AttentionModel(
        name=name or bridge.cfg.model_name,
        sites=sites,
        module=bridge,
        processing=processing,
        provenance={
            "source": "transformer_lens",
            "class": type(original).__name__,
            "dtype": str(next(bridge.parameters()).dtype).removeprefix("torch."),
        },
        vocabulary=lambda: _vocabulary(bridge, tokenizer, dtype),
        example=lambda: _example(bridge),
        tokenizer=tokenizer,
    )
    source = _settled(source, getattr(bridge.original_model.config, "model_type", ""))
    return replace(source, reads=lambda layer: reads.find_reads(source, layer))


def _settled(source: AttentionModel, model_type: str) -> AttentionModel:
    """The source with what is known of its architecture, or else what the laws find."""
    known = architectures.known(model_type)
    values = set(known.layouts.values()) if known else set()
    if known is None or len(values) != 1:
        return prove(source)
    for site in source.sites.values():
        site.notes += known.notes
        settle(site, *values)
    return source


def folded(model: Any, **options: Any) -> AttentionModel:
    """A model with norms folded into readers and writers centred, by TransformerLens, on a copy.

    Args:
        model: whatever ``load`` accepts and TransformerLens has an adapter for.
        **options: passed to ``load``.

    Raises:
        ValueError: TransformerLens cannot process this model; the message says why.
    """
    source = model if isinstance(model, AttentionModel) else load(model, **options)
    if source.processing == "folded":
        return source
    token = _token(source)
    dtype = getattr(next(iter(source.sites.values())), "dtype", torch.float32)
    if isinstance(source.module, TransformerBridge):
        bridge = copy.deepcopy(source.module)
    else:
        bridge = _boot(source)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what was left undone is in the layers' notes
            bridge.enable_compatibility_mode(disable_warnings=True)
        result = from_bridge(bridge, name=source.name, dtype=dtype)
    except Exception as reason:  # whatever an adapter trips over, the user's way out is the same
        raise _refusal(source, f"TransformerLens failed to process it: {reason!r:.300}") from reason
    _check_unchanged(source, result)
    for layer, site in result.sites.items():  # what was known of the weights stays true
        known = source.sites[layer].notes if layer in source.sites else ()
        site.notes = tuple(dict.fromkeys((*known, *site.notes)))
    vocabulary = result.vocabulary
    return replace(
        result,
        provenance={**source.provenance, "folded_by": "transformer_lens"},
        vocabulary=lambda: replace(vocabulary(), token=token),
        tokenizer=source.tokenizer,
    )


def _boot(source: AttentionModel) -> TransformerBridge:
    """A bridge around a copy of a transformers model.

    The copy is wrapped without a tokenizer: booting with one asks the network for another that
    prepends a beginning-of-sequence token.
    """
    model = source.module
    if not isinstance(model, PreTrainedModel):
        kind = "weights alone" if model is None else type(model).__name__
        raise _refusal(source, f"TransformerLens processes transformers models, this is {kind}")
    architecture = type(model).__name__
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise _refusal(source, f"TransformerLens has no adapter for {architecture}")
    twin = copy.deepcopy(model)
    try:
        twin.set_attn_implementation("eager")
        return build_bridge_from_module(
            twin, architecture, hf_config=twin.config, model_name=source.name
        )
    except Exception as reason:
        raise _refusal(source, f"TransformerLens failed to wrap it: {reason!r:.300}") from reason


def _check_unchanged(source: AttentionModel, result: AttentionModel) -> None:
    """Refuse a copy that does not compute what the model computes, on a tiny batch.

    Folding must leave the log-probabilities as they are; a bridge's own attention may not.
    """
    assert source.example is not None
    batch = source.example()
    before = getattr(source.forward(batch), "logits", None)
    after = result.forward(_bridge_batch(batch))
    if before is None or not isinstance(after, Tensor):
        return
    tolerance = 10 * SUM_TOLERANCE[before.dtype]  # the sum law's, over a whole model
    before, after = (x.double().log_softmax(-1) for x in (before, after))
    error = float((before - after).abs().max() / (before.max() - before.min()))
    if not error <= tolerance:
        raise _refusal(
            source,
            f"TransformerLens's {type(source.module).__name__} computes something else: on a tiny "
            f"batch the log-probabilities differ by {error:.1e} of their range",
        )


def _refusal(source: AttentionModel, reason: str) -> ValueError:
    return ValueError(f"cannot fold {source.name}: {reason}. Load it with processing='raw' instead")


def _token(source: AttentionModel) -> Callable[[int], str]:
    try:
        return source.vocabulary().token
    except NotApplicable:
        return token_text(None)


def _find_attention(bridge: TransformerBridge) -> list[Attention]:
    """The attention layers of all blocks, each projection by the path of the module it wraps."""
    layers: dict[str, Any] = {}
    for stack in STACKS:
        for i, block in enumerate(getattr(bridge, stack, ())):
            for part in ATTENTIONS:
                if part in block.submodules:
                    layers[f"{stack}.{i}.{part}"] = getattr(block, part)
    wrapped = {
        f"{layer}.{part}": original
        for layer, attention in layers.items()
        for part in ("q", "k", "v", "o")
        if part in attention.submodules
        and (original := getattr(attention, part).original_component) is not None
    }

    def heads(path: str, names: Iterable[str]) -> int | None:
        return getattr(layers[path.rpartition(".")[0]].config, "n_heads", None)

    shapes = {path: _out_in(module) for path, module in wrapped.items()}
    try:
        found = find_attention(shapes, heads)
    except UnknownLayout as reason:
        raise UnknownLayout(
            f"{bridge.cfg.model_name}: no attention in this bridge has a value projection and an "
            f"output projection of its own; its attention is {_kinds(layers.values())}"
        ) from reason
    paths = {id(module): path for path, module in bridge.named_modules()}

    def real(attention: Attention) -> Attention:
        parts = {p: part for p in "ovqk" if (part := getattr(attention, p)) is not None}
        path_of = {p: paths[id(wrapped[part.path])] for p, part in parts.items()}
        return replace(attention, **{p: replace(x, path=path_of[p]) for p, x in parts.items()})

    return [real(a) for a in found]


def _out_in(module: Any) -> tuple[int, int]:
    rows, columns = module.weight.shape
    return (columns, rows) if is_transposed(module) else (rows, columns)


def _kinds(attentions: Iterable[Any]) -> str:
    return ", ".join(sorted({type(a).__name__ for a in attentions})) or "none"


def _notes(bridge: TransformerBridge, layer: str, processing: str) -> tuple[str, ...]:
    """What changes the meaning of one layer's numbers, from the bridge's own state."""
    notes = []
    if processing == "folded" and not _norm_is_folded(bridge, layer):
        notes.append(
            "the norm that its values read through is not folded: TransformerLens does not do it "
            f"for {bridge.cfg.architecture} (and in post-norm models nothing folds exactly)"
        )
    if processing == "folded" and not getattr(
        bridge.adapter, "supports_center_writing_weights", True
    ):
        notes.append(
            f"writers are not centred: TransformerLens does not do it for {bridge.cfg.architecture}"
        )
    if used := [flag for flag in BYPASSES if getattr(bridge.cfg, flag, False)]:
        notes.append(
            f"{', '.join(used)} is on: the bridge then calls no projection, so that this layer can "
            f"be measured but not watched; switch it off with bridge.set_{used[0]}(False)"
        )
    return tuple(notes)


def _norm_is_folded(bridge: TransformerBridge, layer: str) -> bool:
    """Whether the block's first norm has nothing left to fold: a gain of one and no bias.

    Adapters say what they support, but some (Phi-3) fold by a way of their own all the same.
    """
    block, _, attention = layer.rpartition(".")
    norm = getattr(getattr(bridge.get_submodule(block), "ln1", None), "original_component", None)
    if norm is None or attention == "cross_attn":  # keys and values read the encoder's last norm
        return False
    gain, _ = reads.norm_gain(norm)
    bias = getattr(norm, "bias", None)
    return bool((gain - 1).abs().max() < 1e-4) and (bias is None or not bias.any())


def _vocabulary(bridge: TransformerBridge, tokenizer: Any, dtype: torch.dtype) -> Vocabulary:
    try:
        W_E, W_U = bridge.W_E, bridge.W_U
    except AttributeError as reason:
        raise NotApplicable(f"{bridge.cfg.model_name} has no token embeddings") from reason
    tied = W_E.data_ptr() == W_U.data_ptr()
    W_E, W_U = (W.detach().to("cpu", dtype) for W in (W_E, W_U))
    if W_U.shape != W_E.shape[::-1]:
        raise NotApplicable(
            f"embedding {list(W_E.shape)} and unembedding {list(W_U.shape)} differ in size"
        )
    return Vocabulary(W_E, W_U, token_text(tokenizer), "tied" if tied else "own")


def _example(bridge: TransformerBridge) -> Mapping[str, Tensor]:
    original: Any = bridge.original_model
    return _bridge_batch(example_batch(original))


def _bridge_batch(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keyword arguments of a transformers forward as those of a bridge's.

    A bridge asks for ``input`` whatever it is: tokens, or again the image or sound.
    """
    rest = dict(batch)
    tokens = rest.pop("input_ids", None)
    return {"input": next(iter(rest.values())) if tokens is None else tokens} | rest
