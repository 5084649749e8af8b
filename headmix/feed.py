"""feed: rows of token ids as the input of one model's forward pass."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from headmix.capture import Batch
from headmix.model import AttentionModel
from headmix.registry import NotApplicable
from headmix.tokens import Tokeniser, Tokens, Window

#: Windows are this long unless the model takes less or the user says so.
WINDOW = 256

#: Where a transformers config says how many positions there are.
LIMITS = (
    "max_position_embeddings",
    "max_encoder_position_embeddings",
    "max_decoder_position_embeddings",
    "max_target_positions",
)


@dataclass(frozen=True, eq=False)
class TextBatch(Batch):
    """A batch of text that knows which part of which document is in each row."""

    windows: tuple[Window, ...] = ()


class Feed:
    """What must be known of a model to give it text.

    Attributes:
        tokeniser: its tokenizer.
        room: how many tokens of a document fit in one window, beside the special ones.
        max_length: the longest window, special tokens included.
        masks: whether its forward takes an attention mask; without, rows of unlike length cannot
            share a batch.
        two_streams: whether it has an encoder and a decoder that both take tokens.

    Raises:
        NotApplicable: only the weights were loaded.
        ValueError: ``max_length`` is more than the model takes, or leaves no room for text.
    """

    def __init__(self, model: AttentionModel, max_length: int | None = None) -> None:
        if model.module is None:
            raise NotApplicable(
                f"{model.name} was read for its weights alone and cannot be run on text: load the "
                "model itself"
            )
        self.module = model.module
        self.config = _config(model.module)
        self.streams = {n.rpartition(".L")[0] or "residual" for n in model.layers}
        self.takes = list(inspect.signature(model.module.forward).parameters)
        self.masks = "attention_mask" in self.takes
        self.two_streams = bool(getattr(self.config, "is_encoder_decoder", False)) and (
            "decoder_input_ids" in self.takes or "input" in self.takes
        )
        self.tokeniser = Tokeniser(model.tokenizer)
        self.start = _start(self.config)
        self.device = next((p.device for p in model.module.parameters()), torch.device("cpu"))
        self._set_room(model.name, max_length)

    def _set_room(self, name: str, max_length: int | None) -> None:
        limit = _limit(self.module, self.config)
        if max_length is not None and limit is not None and max_length > limit:
            raise ValueError(f"max_length={max_length}: {name} takes at most {limit} tokens")
        self.max_length = min(limit or WINDOW, WINDOW) if max_length is None else max_length
        prefix, suffix = len(self.tokeniser.prefix), len(self.tokeniser.suffix)
        added = prefix + suffix
        if self.two_streams:
            added = max(added, len(self.start) + prefix)
        self.room = self.max_length - added
        if self.room < 1:
            raise ValueError(
                f"max_length={self.max_length} leaves no room for text beside the {added} special "
                f"tokens of a window"
            )

    def check(self, tokens: Tokens) -> None:
        """Raises ValueError for token ids that the model has no embedding for."""
        if not len(tokens):
            return
        size = _vocabulary_size(self.module)
        low, high = int(tokens.ids.min()), int(tokens.ids.max())
        if low < 0 or (size is not None and high >= size):
            raise ValueError(
                f"document {tokens.name} holds token id {low if low < 0 else high}; the model's "
                f"vocabulary has {size} tokens, from 0: were they made by another tokenizer?"
            )

    def length(self, window: Window) -> int:
        """Tokens of the row that it becomes, in the longer stream."""
        prefix, suffix = len(self.tokeniser.prefix), len(self.tokeniser.suffix)
        added = prefix + suffix if window.tokens.bare else 0
        if self.two_streams:
            added = max(added, len(self.start) + (prefix if window.tokens.bare else 0))
        return len(window) + added

    def batch(self, windows: Sequence[Window]) -> TextBatch:
        """The windows as one forward pass, padded on the right.

        Padding behind the text disturbs neither positions nor causal attention, whichever side a
        tokenizer would pad for generation.
        """
        ids, keep, mask = self._rows(windows, decoder=False)
        keeps = {s: keep for s in self.streams}
        inputs: dict[str, Any] = {self._argument(): ids}
        if not mask.all():
            inputs["attention_mask"] = mask.long().to(self.device)
        if self.two_streams:
            ids, keep, mask = self._rows(windows, decoder=True)
            inputs["decoder_input_ids"] = ids
            keeps |= {s: keep for s in self.streams if s.startswith("decoder")}
            if not mask.all() and "decoder_attention_mask" in self.takes:
                inputs["decoder_attention_mask"] = mask.long().to(self.device)
        if "use_cache" in self.takes:
            inputs["use_cache"] = False
        plain = not ({"input_ids", "input"} & {*self.takes})
        return TextBatch(
            inputs=ids if plain and len(inputs) == 1 else inputs,
            fold=windows[0].fold,
            documents=sum(w.begins for w in windows),
            keep=keeps,
            windows=tuple(windows),
        )

    def _argument(self) -> str:
        return "input_ids" if "input_ids" in self.takes else self.takes[0]

    def _rows(
        self, windows: Sequence[Window], *, decoder: bool
    ) -> tuple[
        Int[Tensor, "sequence token"],
        Bool[Tensor, "sequence token"],
        Bool[Tensor, "sequence token"],
    ]:
        """Token ids, which of them count, and which are no padding."""
        rows, keeps = [], []
        for window in windows:
            bare = window.tokens.bare
            before = (self.start if decoder else []) + (self.tokeniser.prefix if bare else [])
            after = self.tokeniser.suffix if bare and not decoder else []
            rows.append(np.concatenate([before, window.tokens.ids, after]).astype(np.int64))
            keeps.append(np.pad(window.tokens.keep, (len(before), len(after))))
        lengths = torch.tensor([len(row) for row in rows])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        ids = torch.full(mask.shape, _pad(self.tokeniser.tokenizer, self.config))
        ids[mask] = torch.from_numpy(np.concatenate(rows))
        keep = torch.zeros_like(mask)
        keep[mask] = torch.from_numpy(np.concatenate(keeps))
        return ids.to(self.device), keep, mask

    def keep_of(self, inputs: Mapping[str, Any]) -> dict[str, Bool[Tensor, "sequence token"]]:
        """The tokens that count in a user's own input: those its attention masks let be seen."""
        keep: dict[str, Bool[Tensor, "sequence token"]] = {}
        for mask, ids in (
            ("attention_mask", "input_ids"),
            ("attention_mask", "input"),
            ("decoder_attention_mask", "decoder_input_ids"),
        ):
            if mask in inputs and ids in inputs and inputs[mask].shape == inputs[ids].shape:
                decoder = ids.startswith("decoder")
                of = {
                    s
                    for s in self.streams
                    if not self.two_streams or s.startswith("decoder") == decoder
                }
                keep |= {s: inputs[mask].bool().cpu() for s in of}
        return keep


def _config(module: nn.Module) -> Any:
    """The transformers config; that of its text part where it has several."""
    config = getattr(getattr(module, "original_model", module), "config", None)
    return getattr(config, "text_config", None) or config


def _limit(module: nn.Module, config: Any) -> int | None:
    """The longest input that a model has positions for."""
    sizes = [getattr(config, name, None) for name in LIMITS]
    limits = [size for size in sizes if isinstance(size, int) and size > 0]
    for name, part in module.named_modules():
        if "position" in name and isinstance(part, nn.Embedding) and part.padding_idx is not None:
            limits.append(part.num_embeddings - part.padding_idx - 1)  # RoBERTa counts from there
    return min(limits, default=None)


def _vocabulary_size(module: nn.Module) -> int | None:
    try:
        whole: Any = getattr(module, "original_model", module)
        embedding = whole.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return getattr(embedding, "num_embeddings", None)


def _pad(tokenizer: Any, config: Any) -> int:
    for holder in (tokenizer, config):
        if isinstance(found := getattr(holder, "pad_token_id", None), int) and found >= 0:
            return found
    return 0


def _start(config: Any) -> list[int]:
    """What a decoder reads first."""
    for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id"):
        if isinstance(found := getattr(config, name, None), int):
            return [found]
    return []
