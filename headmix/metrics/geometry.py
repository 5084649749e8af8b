"""Where heads write: overlap of the subspaces that the blocks of W_O span."""

import torch
from jaxtyping import Float
from torch import Tensor

from headmix.heads import Heads
from headmix.registry import metric


def _projection_kernel_null(heads: Heads) -> tuple[Tensor, Tensor]:
    """Moments of tr(P_i P_j) for independent Haar-random subspaces of the heads' ranks."""
    r, D = heads.write_basis.rank, heads.d_model
    ri, rj = r[:, None], r[None, :]
    norm = (ri * rj).sqrt()
    variance = 2 * ri * rj * (D - ri) * (D - rj) / (D**2 * (D - 1) * (D + 2))
    return ri * rj / D / norm, variance.sqrt() / norm


@metric(
    title="Write-subspace overlap",
    formula="tr(P_i P_j) / √(d_i d_j)",
    dims=("head", "head_b"),
    range=(0, 1),
    null=_projection_kernel_null,
    null_text="Haar-random subspaces of the same ranks: mean √(d_i d_j)/D, exact variance",
    invariant=("gauge", "rotation", "scale", "head_scale"),
    reference="Yamagiwa 2026; mean squared cosine of the principal angles",
)
def projection_kernel(heads: Heads) -> Float[Tensor, "head head"]:
    """How far two heads write into the same directions of the residual stream.

    ``tr(P_i P_j) / √(d_i d_j)``, with P_h the orthogonal projector onto the row space of
    ``W_O[h]``: the mean squared cosine of the principal angles. 0 is orthogonal, 1 the same
    subspace. Works for rank-deficient heads, whose own rank then takes the place of d_head.

    >>> import torch
    >>> blocks = torch.eye(6).reshape(3, 2, 6)
    >>> projection_kernel(Heads(blocks))
    tensor([[1., 0., 0.],
            [0., 1., 0.],
            [0., 0., 1.]])
    """
    Q, rank = heads.write_basis.Q, heads.write_basis.rank
    H, d, D = Q.shape
    flat = Q.reshape(H * d, D)
    overlap = torch.stack(
        [(q @ flat.T).square().reshape(d, H, d).sum((0, 2)) for q in Q]  # one [d, H·d] block each
    )
    return overlap / (rank[:, None] * rank[None, :]).sqrt()
