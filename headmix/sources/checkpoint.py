"""A checkpoint read for its weights alone, a layer at a time, without building the model.

Shapes come from headers; a layer's projections are read when its heads are asked for and not kept,
so that memory is one layer, whatever the size of the model. No code of the model's is ever run.
"""

import re
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from headmix import architectures
from headmix.heads import Heads
from headmix.laws import settle
from headmix.layouts import Attention, Layout, UnknownLayout, find_attention
from headmix.model import AttentionModel, Watcher
from headmix.registry import NotApplicable
from headmix.sources import gguf, llama_cpp
from headmix.sources.assembly import build_heads, streams_of
from headmix.sources.config import Config
from headmix.sources.embeddings import read_vocabulary
from headmix.sources.folders import local, open_store
from headmix.sources.stores import BadCheckpoint, Store, Stored, read_json

#: The GPT-2 family, whose weights are stored [in, out].
_CONV1D = frozenset({"c_attn", "q_attn", "c_proj", "c_fc"})


def open_checkpoint(
    path: str | Path,
    *,
    layout: Layout | None = None,
    n_heads: int | None = None,
    dtype: str | torch.dtype = torch.float32,
    name: str | None = None,
    tokenizer: Any = None,
    revision: str | None = None,
    local_files_only: bool = False,
    gguf_file: str | None = None,
    allow_pickle: bool = False,
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> AttentionModel:
    """A folder, a hub id, or a .safetensors, .gguf or (if allowed) pickled file, not yet read.

    Args:
        path: of the folder or file; for a file, config.json is looked for beside it.
        layout: where the projections are, if their names are not known.
        n_heads: the number of query heads, where no config says it.
        dtype: float32 or float64: what weights are converted to.
        name: what to call the model; by default the name of the folder or file.
        tokenizer: for the text of tokens; by default the folder's own, or the GGUF file's.
        revision: branch, tag or commit, for a hub id.
        local_files_only: do not ask the network for a hub id. With a path it is never asked.
        gguf_file: which GGUF file of the folder.
        allow_pickle: read pickled weights, as tensors and nothing else.
        device: "cpu"; weights read from a file are measured there.
        trust_remote_code: without meaning here: no code of the model's is run either way.

    Raises:
        BadCheckpoint: a file is malformed, or its shapes contradict its config.
        UnknownLayout: no attention layer was recognised in the names and shapes.
        ValueError: no config says how many heads there are.
        OSError: there is no such folder or file.
    """
    if torch.device(device).type != "cpu":
        raise ValueError(f"a checkpoint read for its weights is measured on the CPU, not {device}")
    precision = _precision(dtype)
    where = local(str(path), revision, local_files_only)
    file, store = open_store(where, gguf_file=gguf_file, allow_pickle=allow_pickle)
    description = _description(file, store)
    if description is None and not n_heads and not (layout and layout.n_heads):
        raise ValueError(
            f"{file}: there is no config.json beside it, so that nothing says how many heads the "
            "model has: name them, n_heads=... (or layout=headmix.Layout(..., n_heads=...))"
        )
    sites = _sites(store, description, layout, n_heads, precision, file)
    tied = description is not None and description.ties_embeddings
    return AttentionModel(
        name=name or (where.name if where.is_dir() else file.stem),
        sites=sites,
        provenance={
            "source": "checkpoint",
            "model_type": description.model_type if description else "",
            **store.provenance,
        },
        vocabulary=lambda: read_vocabulary(store, tied, tokenizer, file.parent, precision),
    )


def _precision(dtype: str | torch.dtype) -> torch.dtype:
    precision = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if precision not in (torch.float32, torch.float64):
        raise ValueError(f"dtype must be float32 or float64, got {dtype}")
    return precision


def _description(file: Path, store: Store) -> Config | llama_cpp.Metadata | None:
    if isinstance(store, gguf.GGUFStore):
        return llama_cpp.describe(store.metadata, store.tensors)
    config = file.parent / "config.json"
    if not config.is_file():
        return None
    described = Config(read_json(config))
    architectures.refuse(described.model_type)
    return described


def _sites(
    store: Store,
    description: Config | llama_cpp.Metadata | None,
    layout: Layout | None,
    n_heads: int | None,
    dtype: torch.dtype,
    file: Path,
) -> dict[str, "CheckpointSite"]:
    names = {_path(n): n for n in sorted(store.tensors, key=_depth) if n.endswith("weight")}
    names = {p: n for p, n in names.items() if _is_matrix(store.tensors[n])}
    transposed = _stored_in_out(names, store)
    shapes = {
        p: (s[1], s[0]) if p in transposed else (s[0], s[1])
        for p, n in names.items()
        if (s := store.tensors[n].shape)
    }

    def lookup(path: str, wanted: Iterable[str]) -> int | None:
        wanted = tuple(wanted)
        if n_heads and "num_attention_heads" in wanted:
            return n_heads
        return description.lookup(path, wanted) if description else None

    model_type = description.model_type if description else ""
    layout = layout or getattr(description, "layout", None)
    try:
        found = find_attention(shapes, lookup, layout=layout, model_type=model_type)
    except UnknownLayout as reason:
        raise UnknownLayout(f"{file}: {reason}{_packed(store)}") from None
    for a in found:
        if description and (wrong := description.contradiction(a, shapes[a.o.path][0])):
            raise BadCheckpoint(f"{file}: {a.path}: {wrong}")
    sites = {a.name: CheckpointSite(a, store, names, transposed, dtype) for a in found}
    _settle(sites, model_type)
    return sites


def _path(tensor: str) -> str:
    """The path of a module from the name of its weight; ``in_proj_weight`` is its own module."""
    return tensor.removesuffix(".weight")


def _depth(name: str) -> list[tuple[int, int, str]]:
    """A sorting key that puts layers in the order in which a model runs them."""
    last = re.compile(r"decoder|cross|enc")  # decoders after encoders, cross- after self-attention
    return [
        (0, int(p), "") if p.isdecimal() else (2 if last.match(p) and p != "encoder" else 1, 0, p)
        for p in name.split(".")
    ]


def _is_matrix(stored: Stored) -> bool:
    packed = stored.dtype.upper().startswith(("U", "I", "BOOL")) and not gguf.bits(stored.dtype)
    return len(stored.shape) == 2 and min(stored.shape) > 0 and not packed


def _stored_in_out(names: Mapping[str, str], store: Store) -> frozenset[str]:
    """The paths of weights stored [in, out], as GPT-2's Conv1D does.

    Its fused projection gives it away: queries, keys and values together are wider than the stream.
    """
    shapes = {p: store.tensors[n].shape for p, n in names.items()}
    fused = [s for p, s in shapes.items() if p.rpartition(".")[2] == "c_attn"]
    if not any(columns > rows for rows, columns in fused):
        return frozenset()
    return frozenset(p for p in names if p.rpartition(".")[2] in _CONV1D)


def _packed(store: Store) -> str:
    """What to add when nothing was recognised because weights are packed integers."""
    packed = sorted(
        {s.dtype for n, s in store.tensors.items() if "weight" in n and len(s.shape) == 2}
        & {"U8", "I8", "I32", "uint8", "int8", "int32"}
    )
    if not packed:
        return ""
    return f". Many weights are stored as {', '.join(packed)}, quantised: dequantise them first"


def _settle(sites: Mapping[str, "CheckpointSite"], model_type: str) -> None:
    """Write down what the table knows of the architecture, or that nothing proved the layout."""
    known = architectures.known(model_type)
    layouts = {str(site.attention.layout) for site in sites.values()}
    fits = known is not None and layouts <= known.layouts.keys()
    for site in sites.values():
        if known is None or not fits:
            site.notes += ("not proven by the laws: architecture not listed",)
        else:
            site.notes += known.notes
            settle(site, known.layouts[str(site.attention.layout)])
        site.notes += site.quantisation()


@dataclass(eq=False)
class CheckpointSite:
    """One attention layer of a checkpoint that was not built."""

    attention: Attention
    store: Store
    names: Mapping[str, str]
    transposed: frozenset[str]
    dtype: torch.dtype
    values: str = "exact"
    notes: tuple[str, ...] = ()

    def heads(self) -> Heads:
        return build_heads(
            self.attention,
            self._weight,
            self._bias,
            streams=streams_of(self.attention),
            values=self.values,
        )

    def _weight(self, path: str) -> Float[Tensor, "out in"]:
        weight = self.store.read(self.names[path], self.dtype)
        return weight.T if path in self.transposed else weight

    def _bias(self, path: str) -> Float[Tensor, "out"] | None:
        name = self.names[path].removesuffix("weight") + "bias"
        return self.store.read(name, self.dtype) if name in self.store.tensors else None

    def quantisation(self) -> tuple[str, ...]:
        """A note where this layer's weights are quantised."""
        a = self.attention
        used = {self.store.tensors[self.names[p.path]].dtype for p in (a.o, a.v, a.q, a.k) if p}
        packed = {d: b for d in sorted(used) if (b := gguf.bits(d))}
        if not packed:
            return ()
        low, high = min(packed.values()), max(packed.values())
        width = f"{low}-bit" if low == high else f"{low}- to {high}-bit"
        return (
            f"{width} weights ({', '.join(packed)}): spectra and ranks carry quantisation noise",
        )

    def watch(self, watcher: Watcher) -> AbstractContextManager[None]:
        raise NotApplicable("only the weights were read: load the model itself to run it")

    def shift_values(self, shift: Float[Tensor, "kv_head d_head"]) -> AbstractContextManager[None]:
        raise NotApplicable("only the weights were read: load the model itself to run it")
