"""What stands next to attention in the residual stream: the vocabulary and the feed-forward."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Token embeddings and unembedding.

    Attributes:
        W_E: ``[token, d_model]``, what a token writes to the stream.
        W_U: ``[d_model, token]``, the direction each token's logit reads.
        token: the text of a token id.
        unembedding: where W_U comes from: "own", "tied" or "embeddings" (the model has no
            unembedding, so W_E stands in).
    """

    W_E: Float[Tensor, "token d_model"]
    W_U: Float[Tensor, "d_model token"]
    token: Callable[[int], str]
    unembedding: str = "own"

    def __post_init__(self) -> None:
        if self.W_E.shape != self.W_U.shape[::-1]:
            raise ValueError(
                f"W_E {list(self.W_E.shape)} and W_U {list(self.W_U.shape)} must be each other's "
                "transpose in shape"
            )

    @cached_property
    def token_gram(self) -> Float[Tensor, "d_model d_model"]:
        """``W_U W_E``: from what is written to the stream, over all tokens, back into it."""
        return self.W_U @ self.W_E


@dataclass(frozen=True, eq=False)
class NeuronReads:
    """Read weights of the feed-forward neurons of one block.

    Attributes:
        W_in: ``[d_model, neuron]``; where a norm stands between attention and the feed-forward its
            gain is multiplied in (and the LayerNorm's centring applied).
        folded: the name of that norm, or None.
    """

    W_in: Float[Tensor, "d_model neuron"]
    folded: str | None = None
