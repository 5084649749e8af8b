"""A checkpoint read for its weights alone, a layer at a time, without building the model.

Shapes come from headers; a layer's projections are read when its heads are asked for and not kept,
so that memory is one layer, whatever the size of the model. No code of the model's is ever run.
"""

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
from headmix.layouts import Attention, Layout, Lookup, Shapes, UnknownLayout, find_attention
from headmix.model import VALUES, AttentionModel, PatternWatcher, Replacer, Watcher
from headmix.registry import NotApplicable
from headmix.sources import gguf, llama_cpp
from headmix.sources.assembly import build_heads, streams_of
from headmix.sources.config import Config
from headmix.sources.embeddings import read_vocabulary
from headmix.sources.folders import local, open_store
from headmix.sources.matrices import Matrices
from headmix.sources.stores import BadCheckpoint, Store, parse_json, read_json


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
    sites = _sites(Matrices(store, precision), description, layout, n_heads, file)
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
        got = str(dtype).removeprefix("torch.")
        raise ValueError(f"weights are converted to float32 or float64, not {got}: pass dtype=")
    return precision


def _description(file: Path, store: Store) -> Config | llama_cpp.Metadata | None:
    if isinstance(store, gguf.GGUFStore):
        return llama_cpp.describe(store.metadata, store.tensors)
    lab = getattr(store, "metadata", {}).get("headmix_lab")
    if isinstance(lab, str):  # a model of headmix.lab carries its config in itself
        return Config(parse_json(lab.encode(), f"{file}: headmix_lab"))
    config = file.parent / "config.json"
    if not config.is_file():
        return None
    described = Config(read_json(config))
    architectures.refuse(described.model_type)
    return described


def _sites(
    matrices: Matrices,
    description: Config | llama_cpp.Metadata | None,
    layout: Layout | None,
    n_heads: int | None,
    file: Path,
) -> dict[str, "CheckpointSite"]:
    def lookup(path: str, names: Iterable[str]) -> int | None:
        names = tuple(names)
        if n_heads and "num_attention_heads" in names:
            return n_heads
        return description.lookup(path, names) if description else None

    model_type = description.model_type if description else ""
    layout = layout or getattr(description, "layout", None)
    try:
        found = _recognise(matrices.shapes, lookup, layout, model_type)
    except UnknownLayout as reason:
        packed = matrices.packed
        hint = f". Weights stored as {packed} are quantised: dequantise them" if packed else ""
        raise UnknownLayout(f"{file}: {reason}{hint}") from None
    for a in found:
        if description and (wrong := description.contradiction(a, matrices.shapes[a.o.path][0])):
            raise BadCheckpoint(f"{file}: {a.path}: {wrong}")
    sites = {a.name: CheckpointSite(a, matrices) for a in found}
    _settle(sites, model_type)
    return sites


def _recognise(
    shapes: Shapes, lookup: Lookup, layout: Layout | None, model_type: str
) -> list[Attention]:
    """The attention layers; those of nn.MultiheadAttention, as in live models, if no others."""
    modules = {p: s for p, s in shapes.items() if not p.endswith("in_proj_weight")}
    try:
        return find_attention(modules, lookup, layout=layout, model_type=model_type)
    except UnknownLayout:
        if len(modules) == len(shapes):
            raise
        return find_attention(shapes, lookup, layout=layout, model_type=model_type)


def _settle(sites: Mapping[str, "CheckpointSite"], model_type: str) -> None:
    """Write down what the table knows of the architecture, or that nothing proved the layout."""
    known = architectures.known(model_type)
    for site in sites.values():
        site.notes += site.quantisation()
        if known is None:
            site.notes += ("not proven by the laws: architecture not listed",)
            continue
        site.notes += known.notes
        values = known.layouts.get(str(site.attention.layout))
        if values is None:  # names of another format: take what is said of the architecture's worst
            site.notes += ("not proven by the laws: projections of other names than those listed",)
            values = min(known.layouts.values(), key=list(VALUES)[::-1].index)
        settle(site, values)


@dataclass(eq=False)
class CheckpointSite:
    """One attention layer of a checkpoint that was not built."""

    attention: Attention
    matrices: Matrices
    values: str = "exact"
    notes: tuple[str, ...] = ()

    def heads(self) -> Heads:
        return build_heads(
            self.attention,
            self.matrices.weight,
            self.matrices.bias,
            streams=streams_of(self.attention),
            values=self.values,
        )

    def quantisation(self) -> tuple[str, ...]:
        """A note where this layer's weights are quantised."""
        a = self.attention
        return gguf.quantisation_note(
            self.matrices.stored(p.path).dtype for p in (a.o, a.v, a.q, a.k) if p
        )

    def watch(self, watcher: Watcher) -> AbstractContextManager[None]:
        raise NotApplicable("only the weights were read: load the model itself to run it")

    def watch_attention(self, watcher: PatternWatcher) -> AbstractContextManager[None]:
        raise NotApplicable("only the weights were read: load the model itself to run it")

    def replace_z(self, replacer: Replacer, *, skipped: int = 0) -> AbstractContextManager[None]:
        raise NotApplicable("only the weights were read: load the model itself to run it")

    def shift_values(
        self, shift: Float[Tensor, "kv_head d_head"], *, uneven: bool = False
    ) -> AbstractContextManager[None]:
        raise NotApplicable("only the weights were read: load the model itself to run it")
