"""The tensors of a checkpoint as projections: [out, in] by module path, in order of depth."""

import re
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from headmix.layouts import Shapes
from headmix.sources.stores import BadCheckpoint, Store, Stored

#: The projections of the GPT-2 family, which its Conv1D stores [in, out].
_CONV1D = frozenset({"c_attn", "q_attn", "c_proj", "c_fc"})

#: Parts of names that come late: decoders after encoders, cross- after self-attention.
_LATE = re.compile(r"decoder|cross|enc(?!oder$)")


@dataclass(frozen=True, eq=False)
class Matrices:
    """Weight matrices of a store by the path of their module."""

    store: Store
    dtype: torch.dtype = torch.float32

    @cached_property
    def names(self) -> dict[str, str]:
        """The tensor of each path; ``in_proj_weight``, of no module of its own, stands as it is."""
        tensors = self.store.tensors
        ordered = sorted((n for n, s in tensors.items() if _is_matrix(s)), key=_depth)
        return {n.removesuffix(".weight"): n for n in ordered if n.endswith("weight")}

    @cached_property
    def transposed(self) -> frozenset[str]:
        """The paths of weights stored [in, out].

        The fused projection gives them away: queries, keys and values are wider than the stream.
        """
        fused = [p for p in self.names if _last(p) == "c_attn"]
        stored = [self.stored(p).shape for p in fused]
        if not any(columns > rows for rows, columns in stored):
            return frozenset()
        return frozenset(p for p in self.names if _last(p) in _CONV1D)

    @cached_property
    def shapes(self) -> Shapes:
        """(out features, in features) by path."""
        made = {}
        for path in self.names:
            rows, columns = self.stored(path).shape
            made[path] = (columns, rows) if path in self.transposed else (rows, columns)
        return made

    def stored(self, path: str) -> Stored:
        return self.store.tensors[self.names[path]]

    def weight(self, path: str) -> Float[Tensor, "out in"]:
        weight = self.store.read(self.names[path], self.dtype)
        return weight.T if path in self.transposed else weight

    def bias(self, path: str) -> Float[Tensor, "out"] | None:
        """Raises BadCheckpoint where it does not fit the weight."""
        name = self.names[path].removesuffix("weight") + "bias"
        if (stored := self.store.tensors.get(name)) is None:
            return None
        if stored.shape != self.shapes[path][:1]:
            raise BadCheckpoint(
                f"{name} has shape {list(stored.shape)}, expected [{self.shapes[path][0]}] to fit "
                f"{self.names[path]}"
            )
        return self.store.read(name, self.dtype)

    @property
    def packed(self) -> str:
        """The types of weights that are codes in integers, as quantisers keep them."""
        codes = {s.dtype for n, s in self.store.tensors.items() if "weight" in n and _is_packed(s)}
        return ", ".join(sorted(codes))


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _is_matrix(stored: Stored) -> bool:
    return len(stored.shape) == 2 and min(stored.shape) > 0 and not _is_packed(stored)


def _is_packed(stored: Stored) -> bool:
    integer = re.fullmatch(r"u?int\d+|bool", stored.dtype.lower())
    return bool(integer or re.fullmatch(r"[UI]\d+|BOOL", stored.dtype))


def _depth(name: str) -> list[tuple[int, int, str]]:
    """A sorting key that puts layers in the order in which a model runs them."""
    return [
        (0, int(p), "") if p.isdecimal() else (2 if _LATE.match(p) else 1, 0, p)
        for p in name.split(".")
    ]
