"""How well heads are predicted by the others, on documents that were not fitted on."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headmix import activity, nulls
from headmix.heads import Heads
from headmix.moments import Moments
from headmix.registry import NotApplicable, metric


def _one_head_each(heads: Heads) -> list[list[int]]:
    if heads.n_heads == 1:
        raise NotApplicable("a single head has no others to predict it")
    return [[h] for h in range(heads.n_heads)]


def _rows(white: activity.Whitening, unit: Sequence[int]) -> Int[Tensor, "row"]:
    """Where the directions of a unit's heads are among those of all heads."""
    H, k = white.scale.shape
    return torch.arange(H * k, device=white.scale.device).reshape(H, k)[list(unit)].flatten()


def _predictors(
    heads: Heads, moments: Moments, units: Sequence[Sequence[int]]
) -> Float[Tensor, "unit"]:
    """How many directions of the other heads predict each unit.

    Raises:
        NotApplicable: fewer than two folds hold tokens, or a fold leaves too few to fit.
    """
    rank = activity.whitening(heads, moments).rank
    p = torch.stack([rank.sum() - rank[list(unit)].sum() for unit in units])
    filled = moments.count[moments.count > 0]
    if len(filled) < 2:
        raise NotApplicable(
            f"held-out R² needs tokens in at least two folds of documents, got {len(filled)}"
        )
    fewest = int(moments.n - filled.max())
    if fewest <= rank.sum() + 2:  # the covariance of all heads is inverted, the predicted included
        raise NotApplicable(
            f"{fewest} tokens outside one fold are too few for the {int(rank.sum())} directions "
            "that all heads have together"
        )
    return p


def _held_out_r2(
    heads: Heads, moments: Moments, units: Sequence[Sequence[int]]
) -> Float[Tensor, "unit"]:
    _predictors(heads, moments, units)
    known = _all_held_out_r2(heads, moments)
    return torch.stack([known[tuple(unit)] for unit in units])


@activity.shared
def _all_held_out_r2(heads: Heads, moments: Moments) -> dict[tuple[int, ...], Tensor]:
    """Held-out R² of every head and KV group from all other heads.

    Fitted without a fold and tested on it, for every fold. With P the inverse of the training
    covariance, what is left of unit g is ``P_gg⁻¹ P_g: (y − mean)``, the mean being the training
    mean. The ridge is as large as rounding, so that duplicated heads have a solution.
    """
    white = activity.whitening(heads, moments)
    A, Q = activity.frames(heads, moments)
    B, F = A @ white.map, white.writes(Q)
    members = {(h,) for h in range(heads.n_heads)}
    members |= {tuple(torch.where(heads.kv_index == g)[0].tolist()) for g in heads.kv_of_head or ()}
    units = {unit: _rows(white, unit) for unit in members}
    grams = {unit: F[rows] @ F[rows].T for unit, rows in units.items()}
    error, total = dict.fromkeys(units, F.new_zeros(())), dict.fromkeys(units, F.new_zeros(()))
    whole = _second_moments(moments, B)
    for fold in moments.count.nonzero().flatten().tolist():
        train, test = _train_and_test(moments, whole, fold, B)
        P = _inverse(train + torch.diag(white.noise.flatten()))
        P_test = P @ test
        for unit, rows in units.items():
            P_gg = P[rows][:, rows]
            half = torch.linalg.solve(P_gg, P_test[rows] @ P[rows].T)
            left = torch.linalg.solve(P_gg, half.T)  # scatter of what is left of the unit
            error[unit] = error[unit] + (left * grams[unit]).sum()
            total[unit] = total[unit] + (test[rows][:, rows] * grams[unit]).sum()
    return {unit: 1 - error[unit] / total[unit] for unit in units}


def _second_moments(
    moments: Moments, B: Float[Tensor, "head d k"]
) -> tuple[Float[Tensor, "y y"], Float[Tensor, "y"]]:
    """Σ y yᵀ and Σ y of ``y = u B``."""
    first = torch.einsum("hd,hdk->hk", moments.first.sum(0).unflatten(0, B.shape[:2]), B).flatten()
    return activity.sandwich(moments.scatter, B).reshape(len(first), len(first)), first


def _train_and_test(
    moments: Moments, whole: tuple[Tensor, Tensor], fold: int, B: Float[Tensor, "head d k"]
) -> tuple[Float[Tensor, "y y"], Float[Tensor, "y y"]]:
    """Covariance without a fold, and the fold's scatter, both about the mean without the fold."""
    second, first = _second_moments(moments.select([fold]), B)
    n_test = moments.count[fold]
    n_train = moments.n - n_test
    mean = (whole[1] - first) / n_train
    outer, cross = torch.outer(mean, mean), torch.outer(first, mean)
    train = (whole[0] - second) / n_train - outer
    return train, second - cross - cross.T + n_test * outer


def _inverse(M: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    L, failed = torch.linalg.cholesky_ex(M)
    return torch.linalg.pinv(M, hermitian=True) if failed else torch.cholesky_inverse(L)


def _held_out_null(
    heads: Heads, moments: Moments, units: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """Held-out R² of predictors that are pure noise."""
    p = _predictors(heads, moments, units)
    dimensions = torch.stack([_participation(heads, moments, unit) for unit in units])
    return nulls.held_out_noise(moments.count[moments.count > 0], p, dimensions)


def _participation(heads: Heads, moments: Moments, unit: Sequence[int]) -> Float[Tensor, ""]:
    """The participation ratio of the covariance of what a unit's heads write together."""
    white = activity.whitening(heads, moments)
    rows = _rows(white, unit)
    F = white.writes(activity.frames(heads, moments)[1])[rows]
    R = activity.correlation(heads, moments).flatten(2).flatten(0, 1)
    C = R[rows][:, rows] @ F @ F.T
    return C.trace().square() / (C * C.T).sum()


_HELD_OUT_NULL = (
    "predictors of pure noise: mean −p/(n_train − p − 2), exact for Gaussian data, sd to first "
    "order in p/n; p directions of other heads" + activity.INDEPENDENT
)


@metric(
    title="Held-out R² from the other heads",
    formula="1 − Σ‖o_h − ô_h‖² / Σ‖o_h − ō_h‖², ô_h least squares on the others, K-fold",
    dims=("head",),
    range=(float("-inf"), 1),
    null=lambda heads, moments: _held_out_null(heads, moments, _one_head_each(heads)),
    null_text=_HELD_OUT_NULL,
    invariant=("gauge", "rotation", "scale", "head_scale"),
    reference="multivariate least squares; Schur complement of Σ; K-fold over documents",
    within_position=True,
)
def loo_r2(heads: Heads, moments: Moments) -> Float[Tensor, "head"]:
    """How well the other heads together predict what a head writes, on documents not fitted on.

    1 − R² is the relative error that deleting the head leaves at the attention output when the
    others' blocks of W_O may be refitted. Negative where fitting does worse than the mean. NaN for
    a head whose output does not vary.

    Raises:
        NotApplicable: one head, one fold, or too few tokens to fit.
    """
    return _held_out_r2(heads, moments, _one_head_each(heads))


@metric(
    title="Held-out R² of a KV group from the other groups",
    formula="1 − Σ‖o_g − ô_g‖² / Σ‖o_g − ō_g‖², o_g = Σ_{h∈g} o_h, K-fold",
    dims=("kv_head",),
    range=(float("-inf"), 1),
    null=lambda heads, moments: _held_out_null(heads, moments, activity.kv_groups(heads)),
    null_text=_HELD_OUT_NULL,
    invariant=("gauge", "rotation", "scale"),
    reference="multivariate least squares; K-fold over documents",
    within_position=True,
)
def group_loo_r2(heads: Heads, moments: Moments) -> Float[Tensor, "kv_head"]:
    """How well the other KV groups predict what a group's query heads write together.

    Only a whole group frees its keys and values, so this is the number to ask before one goes.

    Raises:
        NotApplicable: groups are heads, there is one group or fold, or too few tokens to fit.
    """
    return _held_out_r2(heads, moments, activity.kv_groups(heads))
