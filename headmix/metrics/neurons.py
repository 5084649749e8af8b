"""Who feeds the feed-forward: the heads whose write subspaces its neurons read."""

import torch
from jaxtyping import Float
from torch import Tensor

from headmix import linalg, nulls
from headmix.heads import Heads
from headmix.neighbours import NeuronReads
from headmix.registry import NotApplicable, metric

_SUBSPACE = ("gauge", "rotation", "scale", "head_scale")

#: Memory for the working blocks, in bytes.
BLOCK = 64 * 2**20


def _directions(heads: Heads, reads: NeuronReads) -> Float[Tensor, "d_model neuron"]:
    """Unit read vectors of the neurons that read anything."""
    if reads.W_in.shape[0] != heads.d_model:
        raise NotApplicable(
            f"heads write {heads.d_model} dimensions, neurons read {reads.W_in.shape[0]}"
        )
    norm = reads.W_in.norm(dim=0)
    if not (norm > 0).any():
        raise NotApplicable("the read weights of every neuron are zero")
    return reads.W_in[:, norm > 0] / norm[norm > 0]


def _moments(heads: Heads, reads: NeuronReads) -> tuple[Tensor, Tensor]:
    """Mean over neurons of the shares [head] and of N_eff [], a block of neurons at a time."""
    w, Q = _directions(heads, reads), heads.write_basis.Q
    H, k, _ = Q.shape
    total, participation = Q.new_zeros(H), Q.new_zeros(())
    for block in w.split(max(1, BLOCK // (H * k * w.element_size())), dim=1):
        share = (Q.flatten(0, 1) @ block).square().reshape(H, k, -1).sum(1)
        total += share.sum(1)
        participation += linalg.participation_ratio(share.T).nansum()
    return total / w.shape[1], participation / w.shape[1]


def _ffn_read_share_null(heads: Heads, reads: NeuronReads) -> tuple[Tensor, Tensor]:
    w, rank = _directions(heads, reads), heads.write_basis.rank
    gram = w @ w.T if len(w) < w.shape[1] else w.T @ w
    purity = gram.square().sum() / w.shape[1] ** 2
    return nulls.haar_inner_product(rank, rank, rank.new_ones(()), purity, heads.d_model)


@metric(
    title="Share of the feed-forward's reading",
    formula="mean over neurons n of ‖P_h w_n‖² / ‖w_n‖²",
    dims=("head",),
    range=(0, 1),
    null=_ffn_read_share_null,
    null_text="Haar-random write subspaces: mean d/D, exact variance given the layer's neurons",
    invariant=_SUBSPACE,
    reference="after Elhage et al. 2021, reading from and writing to the residual stream",
)
def ffn_read_share(heads: Heads, reads: NeuronReads) -> Float[Tensor, "head"]:
    """How much of an average neuron's read vector lies where a head can write.

    Shares of heads that overlap count the same direction twice, so they need not sum to 1.

    >>> import torch
    >>> heads = Heads(torch.eye(4).reshape(2, 2, 4))
    >>> ffn_read_share(heads, NeuronReads(torch.tensor([[3.0], [0.0], [4.0], [0.0]])))
    tensor([0.3600, 0.6400])
    """
    return _moments(heads, reads)[0]


def _ffn_read_participation_null(heads: Heads, reads: NeuronReads) -> tuple[Tensor, None]:
    """Shares of one direction in independent Haar subspaces are independent Beta variables."""
    rank, D = heads.write_basis.rank, heads.d_model
    half = (torch.stack([rank, D - rank], -1) / 2).double().cpu().clamp(min=1e-9)
    drawn = torch._standard_gamma(half.expand(4096, *half.shape), generator=nulls.generator())
    share = drawn[..., 0] / drawn.sum(-1)
    return linalg.participation_ratio(share).mean().to(rank), None


@metric(
    title="Heads read by a neuron",
    formula="mean over neurons n of (Σ_h s)² / Σ_h s², s_nh = ‖P_h w_n‖² / ‖w_n‖²",
    dims=(),
    range=(1, "H"),
    null=_ffn_read_participation_null,
    null_text="4096 simulated neurons before independent Haar-random write subspaces",
    invariant=_SUBSPACE,
    reference="participation ratio of the shares",
    unit="heads",
)
def ffn_read_participation(heads: Heads, reads: NeuronReads) -> Float[Tensor, ""]:
    """How many heads' write subspaces an average feed-forward neuron reads at once.

    1 where each neuron listens to one head, H where it listens to all alike: the feed-forward
    then mixes heads. Where a block runs attention and feed-forward in parallel, the neurons do
    not read their own block's heads, and the number describes geometry only.

    >>> import torch
    >>> heads = Heads(torch.eye(4).reshape(2, 2, 4))
    >>> ffn_read_participation(heads, NeuronReads(torch.tensor([[1.0], [0.0], [1.0], [0.0]])))
    tensor(2.)
    """
    return _moments(heads, reads)[1]
