"""AttentionModel: what every source turns a model into."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headmix.heads import Heads
from headmix.layouts import Attention
from headmix.neighbours import NeuronReads, Vocabulary
from headmix.registry import NotApplicable

#: Called with z, the concatenated head outputs, and with what the projection returned.
Watcher = Callable[[Float[Tensor, "*token concat"], Float[Tensor, "*token d_model"]], None]

#: Called with a layer's attention weights, or with the reason why they cannot be had.
PatternWatcher = Callable[[Float[Tensor, "sequence head query key"] | NotApplicable], None]

#: Takes z, the concatenated head outputs, and returns what the projection is to get in its place.
Replacer = Callable[[Float[Tensor, "*token concat"]], Float[Tensor, "*token concat"]]

#: What a constant added to a head's values becomes on its way to z (found by the independence
#: law), and what that means for the numbers.
VALUES = {
    "exact": "",
    "scaled": "attention rows do not sum to one (sinks): b_V W_O is not a constant of the output",
    "not linear": "a gate or norm stands between the values and z: W_V alone does not say what a "
    "head writes, so OV metrics are left out",
}


class Enough(Exception):
    """Raised by a watcher that has seen what it wanted: the forward pass ends there."""


class RefusedLayer(ValueError):
    """The laws failed on this layer, so that its heads are not known; the message says how."""


@runtime_checkable
class Site(Protocol):
    """One attention layer inside a model: its weights, and how to watch and disturb it.

    Attributes:
        attention: where its projections are.
        notes: what changes the meaning of the layer's numbers; reaches the report.
        values: a key of ``VALUES``; where "not linear", ``heads`` leaves W_V and b_V out.
    """

    attention: Attention
    notes: tuple[str, ...]
    values: str

    def heads(self) -> Heads:
        """The layer's weights, read now."""

    def watch(self, watcher: Watcher) -> AbstractContextManager[Any]:
        """Call ``watcher(z, out)`` on every forward pass inside the context."""

    def watch_attention(self, watcher: PatternWatcher) -> AbstractContextManager[Any]:
        """Call ``watcher(pattern)`` on every forward pass inside the context.

        Where the model's own kernel never has the pattern, it runs one that does; the model is as
        it was afterwards.

        Raises:
            NotApplicable: known beforehand, the layer has no pattern.
        """

    def replace_z(self, replacer: Replacer, *, skipped: int = 0) -> AbstractContextManager[Any]:
        """Give the output projection ``replacer(z)`` in place of z inside the context.

        ``skipped``: how many earlier calls of the same module a forward pass leaves out, where
        layers share one.
        """

    def shift_values(
        self, shift: Float[Tensor, "kv_head d_head"], *, uneven: bool = False
    ) -> AbstractContextManager[Any]:
        """Add a constant to every token's values inside the context.

        ``uneven``: multiplied by ``token_factors`` of the values, another number for each token.
        """


def token_factors(values: Float[Tensor, "*token feature"]) -> Float[Tensor, "*token 1"]:
    """A random number for each token, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*values.shape[:-1], 1, generator=generator).to(values)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the context; each submodule's own training flag comes back."""
    training = [m for m in module.modules() if m.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _no_vocabulary() -> Vocabulary:
    raise NotApplicable("this source knows no token embeddings")


def _no_reads(layer: str) -> NeuronReads:
    raise NotApplicable(f"this source knows no feed-forward for {layer}")


@dataclass(frozen=True, eq=False, repr=False)
class AttentionModel:
    """The attention layers of one model, in order of depth.

    Attributes:
        name: what the user called it.
        sites: the layers by name: "L0", "L1", …; "encoder.L0", "decoder.L0.cross" where there are
            several streams.
        module: the model itself, untouched; None for a checkpoint read for its weights alone.
        processing: "raw" or "folded".
        provenance: source, class, revision or file hashes, dtype: saved with every result.
        vocabulary: reads the token embeddings; raises NotApplicable where there are none.
        reads: reads the feed-forward's read weights of a layer; raises NotApplicable likewise.
        example: makes a tiny batch of input for ``module``, for the laws.
        refused: layers on which a law failed, with the reason.
        tokenizer: turns text into what ``module`` takes; None where none came with it.
    """

    name: str
    sites: Mapping[str, Site]
    module: nn.Module | None = None
    processing: str = "raw"
    provenance: Mapping[str, str] = field(default_factory=dict)
    vocabulary: Callable[[], Vocabulary] = _no_vocabulary
    reads: Callable[[str], NeuronReads] = _no_reads
    example: Callable[[], Any] | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    tokenizer: Any = None

    @property
    def layers(self) -> list[str]:
        return list(self.sites)

    def layer_name(self, layer: str | int) -> str:
        """The full name of a layer given by name, or by position.

        Raises:
            ValueError: there is no such layer; the message lists those there are.
        """
        names = self.layers
        if isinstance(layer, int) or (layer not in self.sites and layer.lstrip("-").isdigit()):
            position = int(layer)
            if -len(names) <= position < len(names):
                return names[position]
        elif layer in self.sites:
            return layer
        raise ValueError(f"{self.name} has no layer {layer!r}; it has {', '.join(names)}")

    def heads(self, layer: str | int) -> Heads:
        """The per-head weights of one layer.

        Raises:
            RefusedLayer: a law failed on it.

        >>> import headmix as hm, torch
        >>> model = hm.load(torch.nn.MultiheadAttention(8, 2))
        >>> model.heads(0)
        Heads(L0: 2 heads on 2 KV heads, d_head=4, d_model=8, raw)
        """
        name = self.layer_name(layer)
        if name in self.refused:
            raise RefusedLayer(f"{self.name}: {name} is refused: {self.refused[name]}")
        return self.sites[name].heads()

    def forward(self, inputs: Mapping[str, Any] | Tensor | tuple[Any, ...]) -> Any:
        """One forward pass in evaluation mode without gradients; the training flags come back.

        A watcher may end the pass early by raising ``Enough``; None is returned then.
        A model that draws random numbers even then (masks, say) draws the same ones every time.

        Raises:
            NotApplicable: only the weights were loaded, so that there is nothing to run.
        """
        if self.module is None:
            raise NotApplicable(
                f"{self.name} was read for its weights alone and cannot be run: load the model "
                "itself"
            )
        with (
            evaluating(self.module),
            torch.inference_mode(),
            torch.random.fork_rng(),
            suppress(Enough),
        ):
            torch.manual_seed(0)
            if isinstance(inputs, Mapping):
                return self.module(**inputs)
            return self.module(*inputs) if isinstance(inputs, tuple) else self.module(inputs)
        return None

    def __repr__(self) -> str:
        n = len(self.sites)
        return (
            f"AttentionModel({self.name}: {n} attention layer{'s' * (n != 1)}, {self.processing})"
        )
