"""config.json as the file says it: how many heads each part of a model has, without building it."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from headmix.layouts import HEAD_COUNTS, Attention

#: What a section of a config is called, and what the weights it speaks of are called.
_SYNONYMS = {"text": ("text", "language", "llm"), "vision": ("vision", "visual", "image")}

#: Names of the width of the residual stream.
_WIDTHS = ("hidden_size", "d_model", "n_embd")


@dataclass(frozen=True, eq=False)
class Config:
    """The fields of a transformers config. Nothing in it is ever run."""

    fields: Mapping[str, Any]

    @property
    def model_type(self) -> str:
        return str(self.fields.get("model_type", ""))

    @property
    def ties_embeddings(self) -> bool:
        """Whether the model has an unembedding that the file need not hold again."""
        heads = ("LMHead", "CausalLM", "MaskedLM", "ConditionalGeneration", "PreTraining")
        named = self.fields.get("architectures")
        first = str(named[0]) if isinstance(named, list) and named else ""
        return any(h in first for h in heads)

    def lookup(self, path: str, names: Iterable[str]) -> int | None:
        """The first of several fields, in the section that speaks of the weights at ``path``.

        Fields that the file leaves out have the default of their class in transformers.
        """
        names = tuple(names)
        for fields in (self.fields, self._complete):
            if (found := _find(fields, path, names)) is not None:
                return found[0]
        return None

    @cached_property
    def _complete(self) -> Mapping[str, Any]:
        """The fields with the defaults of transformers' own class for this model type."""
        try:
            from transformers import CONFIG_MAPPING

            made = CONFIG_MAPPING[self.model_type](**self.fields).to_dict()
        except Exception:  # an unknown model type, or fields its class refuses
            return {}
        return dict(made)

    def contradiction(self, a: Attention, d_model: int) -> str:
        """In words, where the shapes of a layer are not those that the config names; or nothing."""
        found = _find(self.fields, a.path, HEAD_COUNTS)
        if found is None or a.cross or a.layout.order == "latent":
            return ""
        numbers = {k: v for k, v in found[1].items() if _is_count(v)}
        if "multi_query" in found[1]:  # it overrides the number of KV heads
            numbers.pop("num_key_value_heads", None)
        d_head = a.o.features.shape[1]
        for what, value, names in (
            ("KV heads", a.n_kv_heads, [n for n in numbers if n.endswith("key_value_heads")]),
            ("values wide", d_head, [n for n in numbers if n.endswith("head_dim")]),
            ("d_model", d_model, list(numbers) if numbers.keys() & set(_WIDTHS) else []),
        ):
            if names and value not in {numbers[n] for n in names}:
                said = {n: numbers[n] for n in names if n in _WIDTHS or what != "d_model"}
                words = ", ".join(f"{n} = {v}" for n, v in said.items())
                return f"{value} {what} by the shapes, but config.json says {words}"
        return ""


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _find(
    fields: Mapping[str, Any], path: str, names: tuple[str, ...]
) -> tuple[int, Mapping[str, Any]] | None:
    """The value, and the section it was found in."""
    side = next((p for p in path.split(".") if p in ("encoder", "decoder")), "")
    for section in _sections(fields, path):
        for name in _ordered(section, names, side):
            value = section.get(name)
            if isinstance(value, list):  # one a stage, as in Swin
                stage = next((int(p) for p in path.split(".") if p.isdecimal()), 0)
                value = value[stage] if stage < len(value) else None
            if isinstance(value, int) and _is_count(value):
                return value, section
    return None


def _ordered(section: Mapping[str, Any], names: tuple[str, ...], side: str) -> list[str]:
    """The names to try: those of the path's own side first, those of the other side never."""
    if not side or "num_attention_heads" not in names:
        return list(names)
    sided = {n for n in section if re.search(r"(en|de)coder.*attention_heads$", n)}
    return [n for n in section if n in sided and side in n] + [n for n in names if n not in sided]


def _sections(fields: Mapping[str, Any], path: str, depth: int = 4) -> Iterator[Mapping[str, Any]]:
    """Those that may speak of ``path``, the likeliest first; no deeper than real configs nest."""
    parts = path.split(".")
    inner = {k: v for k, v in fields.items() if isinstance(v, dict) and depth > 0}
    places = {k: p for k in inner if (p := _mentioned(k, parts)) is not None}
    for key in sorted(places, key=lambda k: places[k]):
        yield from _sections(inner[key], path, depth - 1)
    yield fields
    for key in ("text_config", "language_config", "llm_config"):
        if key in inner and key not in places:
            yield from _sections(inner[key], path, depth - 1)


def _mentioned(key: str, parts: list[str]) -> int | None:
    """The position of the first part of a path that a section's name speaks of."""
    stem = key.removesuffix("_config")
    names = _SYNONYMS.get(stem, (stem,))
    return next((i for i, p in enumerate(parts) if any(n in p for n in names)), None)
