"""The output projection in all its variants: one ``nn.Linear`` with a constraint on its weight.

Each constraint is a parametrization (``torch.nn.utils.parametrize``) or a frozen buffer, so that
``projection.weight`` is always the dense matrix that acts, and whatever reads or hooks a linear
layer reads and hooks this one. Written for row vectors: ``W_O`` is [Dc, D] with Dc = heads × d_head
and row h·d + i belongs to coordinate i of head h; ``nn.Linear`` stores its transpose.

The overlap of what two heads can write to is a dial: 0 with ``identity``, ``block_diagonal``,
``hadamard`` and ``random_orthogonal`` (where Dc ≤ D), d/D on average with ``random_blocks``, 1 with
``shared``; ``full`` and ``low_rank`` begin orthogonal and go where training takes them.
"""

import math
from collections.abc import Callable

import scipy.linalg
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

#: What each kind is.
OUTPUTS = {
    "identity": "no W_O: coordinate i of the concatenation is coordinate i mod D of the output",
    "block_diagonal": "each head mixed within itself, written where identity would write it",
    "hadamard": "a fixed Hadamard matrix, then a learned factor for each output coordinate",
    "random_orthogonal": "a random orthogonal matrix, never trained",
    "random_blocks": "for each head random orthonormal rows of its own, never trained",
    "full": "a free matrix, as in every ordinary transformer",
    "low_rank": "the product of two thin matrices",
    "shared": "one matrix for all heads: the output is (Σ_h z_h) W",
}

#: Those that are never trained.
FROZEN = ("identity", "random_orthogonal", "random_blocks")


def output_projection(
    kind: str, n_heads: int, d_head: int, d_model: int, rank: int | None = None
) -> nn.Linear:
    """A linear layer from the concatenation [Dc] to the stream [D], of one of ``OUTPUTS``.

    All kinds begin with ‖W_O‖²_F = Dc, so that what a layer writes has the size of what its heads
    say, whatever the kind. Drawn from torch's global generator.

    Args:
        kind: a key of ``OUTPUTS``.
        n_heads: number of heads.
        d_head: width of a head.
        d_model: width of the stream; need not be heads × width.
        rank: of ``low_rank``; a quarter of D by default.

    Raises:
        ValueError: an unknown kind, a width that is no power of two for ``hadamard``, or a rank
            that is none.

    >>> projection = output_projection("shared", n_heads=4, d_head=2, d_model=8)
    >>> sum(p.numel() for n, p in projection.named_parameters() if "bias" not in n), "of", 8 * 8
    (16, 'of', 64)
    >>> bool((projection.weight[:, :2] == projection.weight[:, 6:]).all())
    True
    """
    if kind not in OUTPUTS:
        raise ValueError(f"unknown output projection {kind!r}; known: {', '.join(OUTPUTS)}")
    concat = n_heads * d_head
    rank = max(1, d_model // 4) if rank is None else rank
    if kind == "low_rank" and not 1 <= rank <= min(concat, d_model):
        raise ValueError(f"rank={rank}: expected 1 … {min(concat, d_model)} for low_rank")
    linear = nn.Linear(concat, d_model)
    nn.init.zeros_(linear.bias)
    with torch.no_grad():
        linear.weight.copy_(_initial(kind, n_heads, d_head, d_model, rank))
    if kind in FROZEN:
        frozen = linear.weight.detach().clone()
        del linear.weight
        linear.register_buffer("weight", frozen)
    elif kind != "full":
        constraint: nn.Module
        if kind == "block_diagonal":
            constraint = Masked(blocks(n_heads, d_head, d_model).T)
        elif kind == "hadamard":
            constraint = Rescaled(_hadamard(concat, d_model).T)
        elif kind == "shared":
            constraint = Repeated(n_heads)
        else:
            constraint = Product(rank)
        parametrize.register_parametrization(linear, "weight", constraint, unsafe=True)
    return linear


def set_weight(linear: nn.Linear, weight: Float[Tensor, "out in"]) -> None:
    """Give a projection the dense weight that is to act, whatever it is made of.

    Raises:
        ValueError: its kind has no such weight.
    """
    with torch.no_grad():
        if parametrize.is_parametrized(linear):
            linear.weight = weight
        else:
            linear.weight.copy_(weight)
    apart = float((linear.weight.detach() - weight).abs().max())
    if apart > 1e-4 * float(weight.abs().max()):
        name = type(linear.parametrizations.weight[0]).__name__  # type: ignore[index, union-attr]
        raise ValueError(f"a {name} projection cannot hold this weight: nearest is {apart:.1e} off")


def blocks(n_heads: int, d_head: int, d_model: int) -> Bool[Tensor, "concat d_model"]:
    """Which entries of W_O a block-diagonal one may use: each head's own d columns, mod D.

    >>> blocks(2, 2, 4).int().tolist()
    [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    """
    mask = torch.zeros(n_heads * d_head, d_model, dtype=torch.bool)
    rows = torch.arange(n_heads * d_head).reshape(n_heads, d_head)
    mask[rows[:, :, None], (rows % d_model)[:, None, :]] = True
    return mask


class Masked(nn.Module):
    """Only the entries of a mask."""

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask.contiguous(), persistent=False)

    def forward(self, free: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        return free * self.mask

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight * self.mask


class Repeated(nn.Module):
    """The same columns for every head."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, once: Float[Tensor, "out d_head"]) -> Float[Tensor, "out in"]:
        return once.repeat(1, self.times)

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight.unflatten(1, (self.times, -1)).mean(1)


class Product(nn.Module):
    """Two thin factors; of a given weight the nearest, by its singular values."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def forward(
        self, left: Float[Tensor, "out rank"], right: Float[Tensor, "rank in"]
    ) -> Float[Tensor, "out in"]:
        return left @ right

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        U, S, Vh = torch.linalg.svd(weight, full_matrices=False)
        root = S[: self.rank].sqrt()
        return (U[:, : self.rank] * root).contiguous(), root[:, None] * Vh[: self.rank]


class Rescaled(nn.Module):
    """A fixed matrix with a learned factor for each output coordinate."""

    fixed: Tensor

    def __init__(self, fixed: Tensor) -> None:
        super().__init__()
        self.register_buffer("fixed", fixed.contiguous(), persistent=False)

    def forward(self, factor: Float[Tensor, "out"]) -> Float[Tensor, "out in"]:
        return factor[:, None] * self.fixed

    def right_inverse(self, weight: Tensor) -> Tensor:
        return (weight * self.fixed).sum(1) / self.fixed.square().sum(1)


def _initial(kind: str, H: int, d: int, D: int, rank: int) -> Float[Tensor, "out in"]:
    """The first W_O, transposed."""

    def identity() -> Tensor:
        return torch.eye(D).repeat(-(-H * d // D), 1)[: H * d]

    def block_diagonal() -> Tensor:
        mask = blocks(H, d, D)
        W_O = torch.zeros(H * d, D)
        for h in range(H):
            rows = slice(h * d, (h + 1) * d)
            W_O[rows, mask[h * d]] = _orthogonal(d, d)
        return W_O

    first: dict[str, Callable[[], Tensor]] = {
        "identity": identity,
        "block_diagonal": block_diagonal,
        "hadamard": lambda: _hadamard(H * d, D),
        "low_rank": lambda: _orthogonal(H * d, rank) @ _orthogonal(rank, D),
        "random_blocks": lambda: torch.cat([_orthogonal(d, D) for _ in range(H)]),
        "shared": lambda: _orthogonal(d, D).repeat(H, 1),
    }
    W_O = first.get(kind, lambda: _orthogonal(H * d, D))()
    return (W_O * math.sqrt(H * d) / W_O.norm()).T


def _orthogonal(rows: int, columns: int) -> Tensor:
    return nn.init.orthogonal_(torch.empty(rows, columns))


def _hadamard(rows: int, columns: int) -> Float[Tensor, "rows columns"]:
    size = max(rows, columns)
    if any(n & (n - 1) for n in (rows, columns)):
        raise ValueError(
            f"hadamard: heads × d_head = {rows} and d_model = {columns} must be powers of two"
        )
    signs = torch.as_tensor(scipy.linalg.hadamard(size)[:rows, :columns], dtype=torch.float32)
    return signs / math.sqrt(columns)
