"""Token embeddings of a checkpoint that was not built."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from headmix.neighbours import Vocabulary
from headmix.registry import NotApplicable
from headmix.sources.gguf import GGUFStore
from headmix.sources.stores import Store

#: Names of token embeddings and unembeddings, as the last parts of a path.
EMBEDDINGS = (
    "embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "shared",
    "token_embedding", "tokens_embed", "token_embd",
)  # fmt: skip
UNEMBEDDINGS = ("lm_head", "embed_out", "cls.predictions.decoder", "lm_head.decoder", "output")


def read_vocabulary(
    store: Store, tied: bool, tokenizer: Any, folder: Path, dtype: torch.dtype
) -> Vocabulary:
    """Token embeddings and unembedding; where the file holds none, ``tied`` says if it had one.

    Raises:
        NotApplicable: the checkpoint holds no token embeddings of a known name.
    """
    embedding = _first_ending(store, EMBEDDINGS)
    if embedding is None:
        raise NotApplicable(f"no token embeddings found (looked for {', '.join(EMBEDDINGS)})")
    W_E = store.read(embedding, dtype)
    output = _first_ending(store, UNEMBEDDINGS)
    if output and store.tensors[output].shape != store.tensors[embedding].shape:
        output = None
    kind = "own" if output else "tied" if tied else "embeddings"
    W_U = (store.read(output, dtype) if output else W_E).T
    return Vocabulary(W_E, W_U, _token_text(store, tokenizer, folder), kind)


def _first_ending(store: Store, names: Iterable[str]) -> str | None:
    """The tensor whose path ends in the first name that one has; the shortest of several."""
    for name in names:
        ends = (f"{name}.weight", f".{name}.weight")
        found = [n for n in store.tensors if n == ends[0] or n.endswith(ends[1])]
        if found:
            return min(found, key=lambda n: (len(n), n))
    return None


def _token_text(store: Store, tokenizer: Any, folder: Path) -> Callable[[int], str]:
    if tokenizer is None and isinstance(store, GGUFStore):
        tokens = store.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list):
            return lambda i: str(tokens[i]) if i < len(tokens) else f"#{i}"
    from headmix.sources import huggingface

    if tokenizer is None:
        offline = {"local_files_only": True, "trust_remote_code": False}
        tokenizer = huggingface._tokenizer(str(folder), offline)
    return huggingface.token_text(tokenizer)
