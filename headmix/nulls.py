"""What unrelated heads would give: moments under random rotations, and seeded simulations.

A null here is a yardstick, not a test: trained heads are not independent draws. Simulations start
from the seed last given to ``torch.manual_seed``, each from a stream of its own, so that a null
does not depend on what was computed before it.
"""

import math
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from headmix import linalg

#: Simulated heads per layer shape.
DRAWS = 64


def generator() -> torch.Generator:
    """A fresh random stream that depends on the global seed only."""
    return torch.Generator().manual_seed(torch.initial_seed())


def haar_inner_product(
    trace_A: Tensor, square_A: Tensor, trace_B: Tensor, square_B: Tensor, D: int
) -> tuple[Tensor, Tensor]:
    """Exact mean and standard deviation of ``tr(A R B Rᵀ)`` over Haar-random rotations R.

    A and B are symmetric [D, D] matrices, given by their traces ``tr A`` and ``tr A²``, which
    broadcast:

        mean = tr A tr B / D
        var  = 2 (tr A² − (tr A)²/D)(tr B² − (tr B)²/D) / ((D − 1)(D + 2))

    Projectors of ranks a and b give the moments of the projection kernel; A = M₁ᵀM₁, B = M₂M₂ᵀ
    those of a squared composition score.
    """
    spread_A = (square_A - trace_A.square() / D).clamp(min=0)
    spread_B = (square_B - trace_B.square() / D).clamp(min=0)
    variance = 2 * spread_A * spread_B / (max(D - 1, 1) * (D + 2))
    return trace_A * trace_B / D, variance.sqrt()


def frame_edges(H: int, rank: int | float, D: int) -> tuple[float, float]:
    """Smallest and largest bulk eigenvalue of ``Σ_h P_h`` for H free projectors of one rank.

    ``(√((H−1)α) ∓ √(1−α))²`` with α = rank/D: the edges of the free binomial distribution.
    """
    a, b = math.sqrt((H - 1) * rank / D), math.sqrt(max(0.0, 1 - rank / D))
    return (a - b) ** 2, (a + b) ** 2


def frame_eigenvalues(H: int, rank: int | float, D: int, count: int) -> Float[Tensor, "eigen"]:
    """The ``count`` largest eigenvalues of ``Σ_h P_h``, as quantiles of the free binomial law.

    The law has density ``H √((x₊ − x)(x − x₋)) / (2π x (H − x))`` between ``frame_edges``, mass
    at 0 where heads leave directions unused, and mass at H where so wide heads must all meet.
    """
    everywhere = min(count, max(0, round(D - H * (D - rank))))
    low, high = frame_edges(H, rank, D)
    theta = (torch.arange(8192, dtype=torch.float64) + 0.5) * math.pi / 8192
    x = (high + low) / 2 + (high - low) / 2 * theta.cos()  # descending; never on an edge
    mass = theta.sin().square() / (x * (H - x).clamp(min=1e-12))
    below = mass.cumsum(0) / mass.sum()
    bulk = count - everywhere
    wanted = (torch.arange(bulk, dtype=torch.float64) + 0.5) / max(bulk, 1)
    found = x[torch.searchsorted(below, wanted).clamp(max=x.numel() - 1)]
    return torch.cat([torch.full((everywhere,), float(H), dtype=x.dtype), found])


def gaussian_ov_singular_values(d_in: int, d: int, D: int) -> Float[Tensor, "draw singular"]:
    """Singular values of ``W_V W_O`` for Gaussian W_V [d_in, d] and W_O [d, D], Σσ² = 1 a draw."""
    return _gaussian_ov_singular_values(d_in, d, D, torch.initial_seed())


@lru_cache(maxsize=64)
def _gaussian_ov_singular_values(d_in: int, d: int, D: int, seed: int) -> Tensor:
    stream = torch.Generator().manual_seed(seed)
    R_V, R_O = (gaussian_triangular_factor(n, d, stream) for n in (d_in, D))
    sigma = linalg.singular_values(R_V @ R_O.mT)
    return sigma / sigma.square().sum(-1, keepdim=True).sqrt()


def gaussian_triangular_factor(n: int, d: int, stream: torch.Generator) -> Tensor:
    """R of the QR factorisation of Gaussian [n, d] matrices, without drawing them (Bartlett)."""
    k = min(n, d)
    R = torch.randn(DRAWS, k, d, generator=stream, dtype=torch.float64).triu(1)
    freedom = torch.arange(n, n - k, -1, dtype=torch.float64)
    # torch's gamma sampler takes no generator through the distributions API
    chi_squared = 2 * torch._standard_gamma((freedom / 2).expand(DRAWS, k), generator=stream)
    R.diagonal(dim1=-2, dim2=-1).copy_(chi_squared.sqrt())
    return R


def held_out_noise(
    count: Float[Tensor, "fold"],
    p: Float[Tensor, "*unit"],
    dimensions: Float[Tensor, "*unit"],
) -> tuple[Float[Tensor, "*unit"], Float[Tensor, "*unit"]]:
    """Mean and standard deviation of held-out R² where p predictors are pure noise.

    Fitting p of them costs ``p/(n_train − p − 2)``, exactly for Gaussian data. The variance,
    to first order in p/n, counts products of residuals of two tokens: those of different folds
    come in as prediction and as test, those of one fold as prediction only.

    Args:
        count: independent tokens in each fold that holds some.
        p: predictors.
        dimensions: the participation ratio of the covariance of what is predicted.
    """
    n, K = count.sum(), len(count)
    each = count.reshape(-1, *[1] * p.ndim)
    mean = -(each * p / (n - each - p - 2)).sum(0) / n
    c = K / (K - 1)
    variance = 2 * p / dimensions * (c**3 + c**2 / K) / n**2
    inflation = 1 / (1 - (p + 2) * c / n)  # of the fit's noise, as in the mean
    return mean, variance.sqrt() * inflation
