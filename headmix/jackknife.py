"""Intervals over documents, by leaving out one fold of them after the other."""

from collections.abc import Sequence
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor


def interval(
    estimate: Float[Tensor, "*shape"], replicates: Sequence[Float[Tensor, "*shape"]]
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """The 95 % delete-one-fold jackknife interval of a statistic.

    With θ_f the statistic without fold f of K: ``se² = (K−1)/K Σ_f (θ_f − θ̄)²``, and the interval
    is ``θ ± t_{K−1} se``. Tokens within a document are dependent; whole documents are left out
    together, so that the interval sees that dependence. It assumes folds of about equal size and a
    statistic that is smooth in the moments (Efron & Stein 1981; Busing et al. 1999).

    Returns:
        The lower and upper end, in the statistic's own shape.

    Raises:
        ValueError: fewer than two replicates.
    """
    K = len(replicates)
    if K < 2:
        raise ValueError(f"a jackknife needs at least two folds, got {K}")
    without = torch.stack(list(replicates))
    spread = (without - without.mean(0)).square().sum(0)
    half = _quantile(K - 1) * (spread * (K - 1) / K).sqrt()
    return estimate - half, estimate + half


@cache
def _quantile(degrees: int) -> float:
    """The 97.5 % quantile of Student's t."""
    from scipy.stats import t  # a second of import that most uses never need

    return float(t.ppf(0.975, degrees))
