"""Models that nobody trained: what each head carries, shares and combines is put there.

For the tests of every probe, overlap and intervention: the truth is known exactly. A planted model
is an ordinary ``Transformer`` of one layer, causal, with skip connections and without norms, whose
stream of width (heads + 3)·d is cut into orthogonal blocks of width d by a random rotation:

    block 0: a code of the token            block 1: a code of the position
    block 2 + h: what head h writes         last block: what the feed-forward writes

Codes are d numbers with mean 0 and covariance I/d over the vocabulary (over the positions), so that
a head has variance 1 in all. Each head has a random gauge: W_V^h and W_O^h look like nothing, their
product is what was planted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headmix.lab.transformer import Config, Transformer


@dataclass(frozen=True)
class Head:
    """What one planted head carries.

    Attributes:
        token: share of its variance that is the code of the token it sees.
        position: share that is the code of that token's position.
        back: which token it sees: so many places back; the first of the sequence where there is
            none.
        copy_of: an earlier head whose three properties above it takes over.
        angle: in radians, between what it writes to and what ``copy_of`` writes to (every
            principal angle): 0 is a perfect copy (overlap 1, CKA 1), π/2 writes elsewhere
            (overlap 0). Overlap is cos² of it.
    """

    token: int | float = 0.0
    position: int | float = 0.0
    back: int = 0
    copy_of: int | None = None
    angle: int | float = 0.0


def views(
    heads: Sequence[Head],
    *,
    vocabulary: int = 16,
    length: int = 32,
    d_head: int = 8,
    reads: int | None = None,
    interact: tuple[int, int] | None = None,
    seed: int = 0,
) -> Transformer:
    """A model whose heads carry what ``heads`` says, and nothing else.

    On sequences whose tokens are drawn independently and evenly (``sequences``), the share of head
    h's output variance between the tokens it sees is ``token / (token + position)`` in
    expectation, between positions the rest; two heads that see other tokens are independent.

    Args:
        heads: one a head. Heads that look alike must not come in equal groups, (0, 0, 1, 1) say,
            since that is how a layout with too many heads looks to the laws.
        vocabulary, length: how many tokens and positions; both more than d_head.
        d_head: width of a head and of each code.
        reads: a head whose token the model predicts (at every place, with certainty): the
            unembedding decodes what stands in that head's block, so that ablating any head that
            writes elsewhere changes no logit at all. None: the logits are random.
        interact: two heads between whose outputs the feed-forward computes |u_i − u_j| of the
            first coordinate of their blocks, and writes it to the last block: the only
            interaction in the model. None: no feed-forward.
        seed: of codes, rotation and gauges.

    Raises:
        ValueError: a head that is not there, or groups of heads that look alike.

    >>> import headmix as hm
    >>> model = views([Head(token=1, back=1), Head(position=1), Head(copy_of=0)])
    >>> kernel = hm.metrics.projection_kernel(hm.load(model).heads(0))
    >>> [round(float(kernel[0, h]), 3) for h in (1, 2)]
    [0.0, 1.0]
    """
    planted = _resolved(heads)
    H, d = len(planted), d_head
    if min(vocabulary, length) <= d:
        raise ValueError(
            f"codes of {d} numbers need more than {d} tokens and positions: vocabulary={vocabulary}"
            f", length={length}"
        )
    for name, named in (("reads", (reads,)), ("interact", interact or ())):
        if any(h is not None and not 0 <= h < H for h in named):
            raise ValueError(f"{name} names heads {named}, of {H} heads")
    generator = torch.Generator().manual_seed(seed)
    R = _rotation((H + 3) * d, generator).reshape(H + 3, d, -1)
    tokens, positions = _code(vocabulary, d, generator), _code(length, d, generator)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Transformer(_config(planted, vocabulary, length, d, interact is not None))
    layer: Any = model.layers[0]
    with torch.no_grad():
        model.embed_tokens.weight.copy_(tokens @ R[0])
        model.embed_positions.weight.copy_(positions @ R[1])
        for linear in (layer.attention.v_proj, layer.attention.o_proj):
            linear.weight.zero_()
        for h, head in enumerate(planted):
            gauge = _rotation(d, generator) * (0.5 + torch.rand(d, generator=generator))
            block = slice(h * d, (h + 1) * d)
            read = head.token**0.5 * R[0] + head.position**0.5 * R[1]  # [d, D]
            layer.attention.v_proj.weight[block] = (read.T @ gauge).T
            layer.attention.o_proj.weight[:, block] = (gauge.inverse() @ _writes(heads, h, R)).T
        if interact is not None:
            _plant_difference(model, R, *interact)
        if reads is not None:
            _plant_decoder(model, tokens, R[2 + reads])
    return model


def xor(n_heads: int = 4, *, length: int = 32, d_head: int = 1, seed: int = 0) -> Transformer:
    """Two bits, one head each, combined by the feed-forward alone.

    Tokens are bits; head h carries the bit h + 1 places back (as ±1, in one direction of the
    stream). The feed-forward of two neurons writes a ≠ b of the bits a, b of heads 0 and 1, and
    the model predicts it at every token with certainty: ``labels_of_xor``. Every other head is a
    distractor. At attn_out heads add; at mlp_out heads 0 and 1 interact, and no others.

    >>> bits = sequences(2, 3, 8)
    >>> bool((xor()(bits).argmax(-1) == labels_of_xor(bits)).all())
    True
    """
    planted = [Head(token=1, back=h + 1) for h in range(n_heads)]
    generator = torch.Generator().manual_seed(seed)
    R = _rotation((n_heads + 3) * d_head, generator).reshape(n_heads + 3, d_head, -1)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Transformer(_config(planted, 2, length, d_head, True))
    layer: Any = model.layers[0]
    with torch.no_grad():
        model.embed_tokens.weight.copy_(torch.tensor([[-1.0], [1.0]]) * R[0, 0])
        model.embed_positions.weight.zero_()
        for linear in (layer.attention.v_proj, layer.attention.o_proj):
            linear.weight.zero_()
        for h in range(n_heads):
            gauge = 0.5 + float(torch.rand((), generator=generator))
            layer.attention.v_proj.weight[h * d_head] = gauge * R[0, 0]
            layer.attention.o_proj.weight[:, h * d_head] = R[2 + h, 0] / gauge
        _plant_difference(model, R, 0, 1)
        model.lm_head.weight.copy_(torch.tensor([[-10.0], [10.0]]) * R[-1, 0])
        model.lm_head.bias.copy_(torch.tensor([10.0, -10.0]))  # |a − b| is 0 or 2
    return model


def labels_of_xor(bits: Int[Tensor, "*sequence token"]) -> Int[Tensor, "*sequence token"]:
    """What ``xor`` predicts: whether the bits one and two places back differ.

    >>> labels_of_xor(torch.tensor([0, 1, 1, 0])).tolist()
    [0, 0, 1, 0]
    """
    places = torch.arange(bits.shape[-1])
    return bits[..., (places - 1).clamp(min=0)] ^ bits[..., (places - 2).clamp(min=0)]


def sequences(
    vocabulary: int, n: int, length: int, *, period: int | None = None, seed: int = 0
) -> Int[Tensor, "sequence token"]:
    """Random sequences, tokens independent and even; repeating after ``period`` tokens if given.

    With a period p the next token is the one p − 1 places back: a model that ``reads`` a head with
    ``back = p − 1`` predicts every token from the p-th on.

    >>> sequences(9, 1, 6, period=2).tolist()[0][::2]
    [8, 8, 8]
    """
    generator = torch.Generator().manual_seed(seed)
    width = period or length
    drawn = torch.randint(vocabulary, (n, width), generator=generator)
    return drawn.repeat(1, -(-length // width))[:, :length]


def _resolved(heads: Sequence[Head]) -> list[Head]:
    """The heads with what copies take over filled in."""
    resolved: list[Head] = []
    for h, head in enumerate(heads):
        if head.copy_of is not None:
            if not 0 <= head.copy_of < h:
                raise ValueError(f"head {h} copies head {head.copy_of}: expected one before it")
            original = resolved[head.copy_of]
            head = Head(original.token, original.position, original.back, head.copy_of, head.angle)
        resolved.append(head)
    backs, H = [head.back for head in resolved], len(resolved)
    for size in range(2, H):
        groups = [set(backs[n : n + size]) for n in range(0, H, size)] if H % size == 0 else []
        if groups and all(len(g) == 1 for g in groups) and len(set(backs)) > 1:
            raise ValueError(
                f"heads see {backs} places back: equal groups of {size} heads look like one head "
                "each; put them in another order"
            )
    return resolved


def _config(heads: Sequence[Head], vocabulary: int, length: int, d: int, mlp: bool) -> Config:
    return Config(
        vocabulary=vocabulary,
        length=length,
        skip=True,
        norm=False,
        mlp=mlp,
        n_heads=len(heads),
        d_head=d,
        d_model=(len(heads) + 3) * d,
        d_ff=2,
        offsets=tuple(head.back for head in heads),
    )


def _writes(heads: Sequence[Head], h: int, R: Tensor) -> Float[Tensor, "d_head d_model"]:
    """An orthonormal basis of what head h writes to."""
    head, own = heads[h], R[2 + h]
    if head.copy_of is None:
        return own
    angle = torch.tensor(head.angle)
    return angle.cos() * _writes(heads, head.copy_of, R) + angle.sin() * own


def _plant_difference(model: Transformer, R: Tensor, i: int, j: int) -> None:
    """relu(u_i − u_j) + relu(u_j − u_i) in the last block, u the first coordinate of a block."""
    mlp: Any = model.layers[0].mlp
    apart = R[2 + i, 0] - R[2 + j, 0]
    mlp.fc1.weight.copy_(torch.stack([apart, -apart]))
    mlp.fc2.weight.copy_(R[-1, 0][:, None].expand(-1, 2))
    mlp.fc1.bias.zero_()
    mlp.fc2.bias.zero_()


def _plant_decoder(model: Transformer, tokens: Tensor, block: Tensor) -> None:
    """Logits of the nearest token code to what stands in a head's block."""
    sharp = 20 / torch.pdist(tokens).square().min()  # the nearest code wins by 10 nats
    model.lm_head.weight.copy_(sharp * tokens @ block)
    model.lm_head.bias.copy_(-0.5 * sharp * tokens.square().sum(-1))


def _code(n: int, d: int, generator: torch.Generator) -> Float[Tensor, "n d"]:
    """n points in d dimensions with mean 0 and covariance I/d exactly."""
    points = torch.randn(n, d, generator=generator, dtype=torch.float64)
    U = torch.linalg.qr(points - points.mean(0)).Q
    return (U * (n / d) ** 0.5).float()


def _rotation(n: int, generator: torch.Generator) -> Float[Tensor, "n n"]:
    Q, R = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    return (Q * R.diagonal().sign()).float()
