"""A small clean transformer whose every part that could stand in for W_O can be switched off."""

import json
from dataclasses import asdict, dataclass, fields

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import relu, scaled_dot_product_attention

from headmix.lab.outputs import OUTPUTS, Masked, output_projection

#: The variants of W_O that the experiments compare, as fields of a ``Config``.
VARIANTS: dict[str, dict[str, str | bool]] = {
    **{kind: {"output": kind} for kind in OUTPUTS},
    "talking": {"output": "full", "talking": True},
    "talking_identity": {"output": "identity", "talking": True},
}


@dataclass(frozen=True)
class Config:
    """The shape of a lab model.

    Attributes:
        vocabulary: number of token ids it reads.
        classes: width of its read-out at each token; the vocabulary by default.
        length: most tokens in a sequence.
        output: a key of ``OUTPUTS``: what W_O is.
        rank: of a ``low_rank`` W_O; a quarter of D by default.
        talking: whether heads mix attention logits before and attention weights after the softmax
            (Shazeer et al. 2020).
        skip, norm, mlp: whether there are skip connections, LayerNorms (before each part and at
            the end), and a feed-forward in each layer.
        causal: whether a token sees only itself and those before it.
        n_layers, n_heads, d_head, d_model, d_ff: sizes; heads × d_head need not be d_model. d_ff
            is four times d_model by default.
        offsets: for each head of the first layer, how many tokens back the only token stands that
            it sees (the first token of a sequence where there is none), or None where it sees all:
            views that are planted.

    Raises:
        ValueError: an unknown output, or offsets that are not one a head.
    """

    vocabulary: int
    classes: int | None = None
    length: int = 64
    output: str = "full"
    rank: int | None = None
    talking: bool = False
    skip: bool = True
    norm: bool = True
    mlp: bool = True
    causal: bool = True
    n_layers: int = 1
    n_heads: int = 4
    d_head: int = 8
    d_model: int = 32
    d_ff: int | None = None
    offsets: tuple[int | None, ...] | None = None

    def __post_init__(self) -> None:
        if self.output not in OUTPUTS:
            raise ValueError(f"unknown output {self.output!r}; known: {', '.join(OUTPUTS)}")
        offsets = self.offsets or ()
        if offsets and (len(offsets) != self.n_heads or min(o or 0 for o in offsets) < 0):
            raise ValueError(
                f"offsets={offsets}: expected one a head, {self.n_heads}, each None or the number "
                "of tokens back, 0 or more"
            )

    @property
    def width(self) -> int:
        """Neurons of the feed-forward."""
        return 4 * self.d_model if self.d_ff is None else self.d_ff

    @property
    def max_position_embeddings(self) -> int:
        """``length``, by the name under which text is cut to what a model takes."""
        return self.length

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Config":
        """The config that ``to_json`` wrote.

        Raises:
            ValueError: it is not one.
        """
        try:
            given = json.loads(text)
            if given["offsets"] is not None:
                given["offsets"] = tuple(given["offsets"])
            return cls(**{f.name: given[f.name] for f in fields(cls)})
        except (KeyError, TypeError, ValueError) as reason:
            raise ValueError(f"not the config of a lab model: {reason}") from None


class Attention(nn.Module):
    """Multi-head attention whose output projection, ``o_proj``, is one of ``OUTPUTS``.

    Called with ``output_attentions`` it also returns the weights, [sequence, head, query, key].
    """

    talk_logits: nn.Parameter
    talk_weights: nn.Parameter

    def __init__(self, config: Config, *, first: bool) -> None:
        super().__init__()
        c = config
        self.n_heads, self.causal = c.n_heads, c.causal
        self.offsets = c.offsets if first else None
        concat = c.n_heads * c.d_head
        self.q_proj = nn.Linear(c.d_model, concat)
        self.k_proj = nn.Linear(c.d_model, concat)
        self.v_proj = nn.Linear(c.d_model, concat)
        self.o_proj = output_projection(c.output, c.n_heads, c.d_head, c.d_model, c.rank)
        for linear in (self.q_proj, self.k_proj, self.v_proj):
            nn.init.zeros_(linear.bias)
        self.talking = c.talking
        if c.talking:  # near to no mixing at first
            noise = 0.1 * c.n_heads**-0.5
            for name in ("talk_logits", "talk_weights"):
                mix = torch.eye(c.n_heads) + noise * torch.randn(c.n_heads, c.n_heads)
                self.register_parameter(name, nn.Parameter(mix))
        self.fused = True  # torch's own kernel where it will do; it has no rule for vmap
        self._masks: dict[int, Tensor | None] = {}

    def mask(self, length: int) -> Float[Tensor, "*head query key"] | None:
        """What is added to the logits: −∞ where a head may not look; None where it may anywhere."""
        if length not in self._masks:
            with torch.inference_mode(False):  # it is kept, and training may come later
                self._masks[length] = _mask(length, self.causal, self.offsets)
        return self._masks[length]

    def pattern(
        self,
        q: Float[Tensor, "*sequence head query d_head"],
        k: Float[Tensor, "*sequence head key d_head"],
    ) -> Float[Tensor, "*sequence head query key"]:
        """Attention weights; of talking heads, after both mixings (rows need not sum to one)."""
        logits = (q * q.shape[-1] ** -0.5) @ k.mT
        if self.talking:
            logits = torch.einsum("...gqk,gh->...hqk", logits, self.talk_logits)
        if (mask := self.mask(k.shape[-2])) is not None:
            logits = logits + mask.to(logits)
        weights = logits.softmax(-1)
        if self.talking:
            weights = torch.einsum("...gqk,gh->...hqk", weights, self.talk_weights)
        return weights

    def forward(
        self, x: Float[Tensor, "*sequence token d_model"], output_attentions: bool = False
    ) -> Float[Tensor, "*sequence token d_model"] | tuple[Tensor, Tensor]:
        q, k, v = (
            p(x).unflatten(-1, (self.n_heads, -1)).transpose(-3, -2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        weights = None
        if self.fused and not self.talking and not output_attentions:
            plain = self.causal and self.offsets is None
            mask = None if plain else self.mask(x.shape[-2])
            mask = mask if mask is None else mask.to(q)
            z = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=plain)
        else:
            weights = self.pattern(q, k)
            z = weights @ v
        out = self.o_proj(z.transpose(-3, -2).flatten(-2))
        return (out, weights) if output_attentions and weights is not None else out


class FeedForward(nn.Module):
    """Two linear maps around a ReLU, which leaves exact what is planted in it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.d_model, config.width)
        self.fc2 = nn.Linear(config.width, config.d_model)

    def forward(self, x: Float[Tensor, "*token d_model"]) -> Float[Tensor, "*token d_model"]:
        return self.fc2(relu(self.fc1(x)))


class Layer(nn.Module):
    """Attention, then a feed-forward; each with a norm before it and a skip around it, or not."""

    def __init__(self, config: Config, *, first: bool) -> None:
        super().__init__()
        self.skip = config.skip
        self.attention = Attention(config, first=first)
        self.attention_norm = nn.LayerNorm(config.d_model) if config.norm else None
        self.mlp = FeedForward(config) if config.mlp else None
        self.mlp_norm = nn.LayerNorm(config.d_model) if config.norm and config.mlp else None

    def forward(
        self, x: Float[Tensor, "*sequence token d_model"]
    ) -> Float[Tensor, "*sequence token d_model"]:
        written = self.attention(x if self.attention_norm is None else self.attention_norm(x))
        written = written[0] if isinstance(written, tuple) else written
        x = x + written if self.skip else written
        if self.mlp is None:
            return x
        written = self.mlp(x if self.mlp_norm is None else self.mlp_norm(x))
        return x + written if self.skip else written


class Transformer(nn.Module):
    """Token and position embeddings, layers, a linear read-out at every token.

    ``headmix.load`` takes it as it is, and proves both laws on it.

    >>> model = Transformer(Config(vocabulary=5, output="identity", length=6))
    >>> model(torch.tensor([[0, 1, 2, 3]])).shape
    torch.Size([1, 4, 5])
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocabulary, config.d_model)
        self.embed_positions = nn.Embedding(config.length, config.d_model)
        self.layers = nn.ModuleList(Layer(config, first=n == 0) for n in range(config.n_layers))
        self.norm = nn.LayerNorm(config.d_model) if config.norm else None
        self.lm_head = nn.Linear(config.d_model, config.classes or config.vocabulary)

    def forward(
        self, input_ids: Int[Tensor, "*sequence token"]
    ) -> Float[Tensor, "*sequence token class"]:
        if input_ids.shape[-1] > self.config.length:
            raise ValueError(
                f"{input_ids.shape[-1]} tokens in a sequence: this model takes {self.config.length}"
            )
        x = self.embed_tokens(input_ids) + self.embed_positions.weight[: input_ids.shape[-1]]
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x if self.norm is None else self.norm(x))

    def get_input_embeddings(self) -> nn.Embedding:
        """The token embeddings, as transformers' models give them."""
        return self.embed_tokens

    @property
    def n_parameters(self) -> int:
        """Numbers that training may change: of a masked matrix only those that act."""
        masks = [m.mask for m in self.modules() if isinstance(m, Masked)]
        return sum(p.numel() for p in self.parameters()) - sum(int((~m).sum()) for m in masks)


def _mask(
    length: int, causal: bool, offsets: tuple[int | None, ...] | None
) -> Float[Tensor, "*head query key"] | None:
    query, key = torch.arange(length)[:, None], torch.arange(length)[None]
    allowed = key <= query if causal else torch.ones(length, length, dtype=torch.bool)
    if offsets is not None:
        allowed = torch.stack(
            [allowed if o is None else key == (query - o).clamp(min=0) for o in offsets]
        )
    elif not causal:
        return None
    return torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)
