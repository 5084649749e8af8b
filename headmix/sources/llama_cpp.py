"""llama.cpp's names for weights, and what GGUF metadata says about heads."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headmix.layouts import HEAD_COUNTS, Attention, Layout

#: llama.cpp's converters write every fused projection as all queries, all keys, all values.
#: They also permute the rows of Llama's queries and keys inside each head, for their own rotary
#: embedding: the same permutation on both, so that ``W_Q W_Kᵀ`` of a head is what it was.
SEPARATE = Layout(o="attn_output", v="attn_v", q="attn_q", k="attn_k")
FUSED = Layout(o="attn_output", v="attn_qkv", order="thirds")


@dataclass(frozen=True, eq=False)
class Metadata:
    """The metadata of a GGUF file, asked as a ``Config`` is."""

    values: Mapping[str, Any]
    layout: Layout

    @property
    def model_type(self) -> str:
        return str(self.values.get("general.architecture", ""))

    @property
    def ties_embeddings(self) -> bool:
        return True  # a file without output.weight is a language model with tied embeddings

    @property
    def tokens(self) -> list[str] | None:
        tokens = self.values.get("tokenizer.ggml.tokens")
        return tokens if isinstance(tokens, list) else None

    def lookup(self, path: str, names: Iterable[str]) -> int | None:
        wanted = set(HEAD_COUNTS) & set(names)
        return self._of_layer("attention.head_count", path) if wanted else None

    def _of_layer(self, key: str, path: str) -> int | None:
        """A value of the architecture; some are lists with one item a layer."""
        value = self.values.get(f"{self.model_type}.{key}")
        if isinstance(value, list):
            layer = next((int(p) for p in path.split(".") if p.isdecimal()), 0)
            value = value[layer] if layer < len(value) else None
        return value if type(value) is int else None

    def contradiction(self, a: Attention, d_model: int) -> str:
        """In words, where a layer's shapes are not those that the metadata name; or nothing."""
        for what, value, key in (
            ("KV heads", a.n_kv_heads, "attention.head_count_kv"),
            ("values wide", a.o.features.shape[1], "attention.value_length"),
            ("d_model", d_model, "embedding_length"),
        ):
            said = self._of_layer(key, a.path)
            if said not in (None, value):
                return f"{value} {what} by the shapes, but {self.model_type}.{key} = {said}"
        return ""


def describe(values: Mapping[str, Any], names: Iterable[str]) -> Metadata:
    """The metadata, with the layout that the tensors' names call for."""
    fused = any(name.endswith(".attn_qkv.weight") for name in names)
    return Metadata(values, FUSED if fused else SEPARATE)
