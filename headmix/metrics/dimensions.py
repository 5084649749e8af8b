"""How many dimensions the activations of heads fill: one at a time, side by side, and added up.

Three statistics of three spectra. The spectra are the eigenvalues (variances λ, not their roots)
of Cov(o_h), of Cov(x), heads side by side before W_O adds them, and of Cov(Σo), after it.
"""

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from jaxtyping import Float
from torch import Tensor

from headmix import activity, linalg, nulls
from headmix.heads import Heads
from headmix.moments import Moments
from headmix.registry import metric

#: Simulated layers are shrunk to at most this many dimensions, all proportions kept.
SIMULATED = 192

Spectrum = Float[Tensor, "*row k"]
Statistic = Callable[[Spectrum], Float[Tensor, "*row"]]
Null = Callable[[Heads, Moments], tuple[Tensor, Tensor]]


def k99(variances: Float[Tensor, "*row k"]) -> Float[Tensor, "*row"]:
    """How many of the largest variances add up to 99 % of all; the last counts in part."""
    wanted = 0.99 * variances.sum(-1, keepdim=True)
    before = variances.cumsum(-1) - variances
    return ((wanted - before) / variances.clamp(min=1e-300)).clamp(0, 1).sum(-1) / (
        wanted[..., 0] > 0
    )


def head_spectra(heads: Heads, moments: Moments) -> Float[Tensor, "head k"]:
    """Eigenvalues of each Cov(o_h), descending."""
    return activity.whitening(heads, moments).variance


@activity.shared
def concat_spectrum(heads: Heads, moments: Moments) -> Float[Tensor, "k"]:
    """Eigenvalues of Cov(x), descending."""
    K = activity.covariance(heads, moments)
    concat = K.shape[0] * K.shape[1]
    return linalg.eigenvalues_symmetric(K.reshape(concat, concat)).flip(0).clamp(min=0)


@activity.shared
def output_spectrum(heads: Heads, moments: Moments) -> Float[Tensor, "k"]:
    """The min(Dc, D) largest eigenvalues of ``Cov(Σo) = W_Oᵀ Σ W_O``, descending."""
    activity.covariance(heads, moments)  # refuses layers that write nothing
    W = heads.W_O.flatten(0, 1).to(moments.first)
    if W.shape[0] < W.shape[1]:
        W = linalg.triangular_factor(W.T).T  # the same Gram matrix in fewer columns
    return linalg.eigenvalues_symmetric(W.T @ moments.covariance @ W).flip(0).clamp(min=0)


def _simulated_head(heads: Heads, n: int) -> tuple[Spectrum, float]:
    sigma = nulls.gaussian_ov_singular_values(n - 1, heads.d_head, heads.d_model)
    return sigma.square(), 1.0


def _simulated_output(heads: Heads, n: int) -> tuple[Spectrum, float]:
    sizes = (n - 1, heads.n_heads * heads.d_head, heads.d_model)
    shrunk = max(1.0, max(sizes[1:]) / SIMULATED)
    sigma = nulls.gaussian_ov_singular_values(*(max(1, round(s / shrunk)) for s in sizes))
    return sigma.square(), shrunk


def _simulated_concat(heads: Heads, n: int) -> tuple[Spectrum, float]:
    H, d, D = heads.n_heads, heads.d_head, heads.d_model
    width = min(d, SIMULATED // 4)
    count = min(H, SIMULATED // width)
    shrunk = H * d / (count * width)
    tokens, stream = max(1, round((n - 1) / shrunk)), max(1, round(D * width / d))
    return _gaussian_concat(tokens, count, width, stream, torch.initial_seed()), shrunk


@lru_cache(maxsize=64)
def _gaussian_concat(n: int, H: int, d: int, D: int, seed: int) -> Spectrum:
    """Spectra of Cov(x) for n tokens of Gaussian z and Gaussian W_O."""
    stream = torch.Generator().manual_seed(seed)
    Z = nulls.gaussian_triangular_factor(n, H * d, stream).unflatten(-1, (H, d))
    A = [nulls.gaussian_triangular_factor(D, d, stream).mT for _ in range(H)]
    x = torch.cat([Z[:, :, h] @ A[h] for h in range(H)], -1)
    return linalg.singular_values(x).square()


def _null(simulated: Callable[[Heads, int], tuple[Spectrum, float]], statistic: Statistic) -> Null:
    def null(heads: Heads, moments: Moments) -> tuple[Tensor, Tensor]:
        variances, shrunk = simulated(heads, max(2, round(moments.n)))
        drawn = statistic(variances.to(moments.first))
        # dimensions grow with the layer, their fluctuations do not
        return drawn.mean() * shrunk, drawn.std()

    return null


_GAUSSIAN = (
    "64 simulated layers with Gaussian W_O and as many independent tokens of isotropic z; "
    "tokens of one document are not independent"
)
_PR = "(Σλ)² / Σλ²"
_ENTROPY = "exp(−Σ p ln p), p = λ/Σλ"
_K99 = "how many λ, the largest first, make 99 % of Σλ"
_of_head = partial(
    metric, dims=("head",), range=(0, "d"), unit="dimensions", within_position=True,
    null_text=_GAUSSIAN, invariant=("gauge", "rotation", "scale", "head_scale"),
)  # fmt: skip
_of_concat = partial(
    metric, dims=(), range=(0, "Dc"), unit="dimensions", within_position=True,
    null_text=_GAUSSIAN, invariant=("gauge", "rotation", "scale"),
)  # fmt: skip
_of_output = partial(
    metric, dims=(), range=(0, "min(Dc, D)"), unit="dimensions", within_position=True,
    null_text=_GAUSSIAN, invariant=("gauge", "rotation", "scale"),
)  # fmt: skip


@_of_head(
    title="Participation ratio of a head's output",
    formula=_PR + ", λ = eig Cov(o_h)",
    null=_null(_simulated_head, linalg.participation_ratio),
    reference="participation ratio of variances",
)
def head_participation_ratio(heads: Heads, moments: Moments) -> Float[Tensor, "head"]:
    """How many dimensions a head's output fills on text, weighted by variance; 1 to d_head.

    Of the eigenvalues of Cov(o_h). ``ov_participation_ratio`` is what the weights alone allow.
    NaN for a head whose output does not vary.
    """
    return linalg.participation_ratio(head_spectra(heads, moments))


@_of_head(
    title="Effective rank of a head's output",
    formula=_ENTROPY + ", λ = eig Cov(o_h)",
    null=_null(_simulated_head, linalg.effective_rank),
    reference="Roy & Vetterli 2007: entropy of variances",
    default=False,
)
def head_effective_rank(heads: Heads, moments: Moments) -> Float[Tensor, "head"]:
    """How many dimensions a head's output fills on text, by the entropy of its variances.

    Larger than the participation ratio, because weak directions count for more.
    """
    return linalg.effective_rank(head_spectra(heads, moments))


@_of_head(
    title="Dimensions with 99 % of a head's variance",
    formula=_K99 + ", λ = eig Cov(o_h)",
    null=_null(_simulated_head, k99),
    reference="principal components",
    default=False,
)
def head_k99(heads: Heads, moments: Moments) -> Float[Tensor, "head"]:
    """How many principal directions carry 99 % of the variance of a head's output.

    The last direction counts in part, so that the number moves smoothly with the data.
    """
    return k99(head_spectra(heads, moments))


@_of_concat(
    title="Participation ratio before heads are added",
    formula=_PR + ", λ = eig Cov(x_1 … x_H)",
    null=_null(_simulated_concat, linalg.participation_ratio),
    reference="participation ratio of variances",
)
def concat_participation_ratio(heads: Heads, moments: Moments) -> Float[Tensor, ""]:
    """How many dimensions the heads' outputs fill side by side, before W_O adds them up.

    Of the eigenvalues of the covariance of ``(x_1 … x_H)``, ``x_h`` being o_h in d_head
    coordinates. That of z itself would depend on each head's arbitrary basis.
    Beside it, ``output_participation_ratio`` says how many are left after the sum.
    """
    return linalg.participation_ratio(concat_spectrum(heads, moments))


@_of_concat(
    title="Effective rank before heads are added",
    formula=_ENTROPY + ", λ = eig Cov(x_1 … x_H)",
    null=_null(_simulated_concat, linalg.effective_rank),
    reference="Roy & Vetterli 2007: entropy of variances",
    default=False,
)
def concat_effective_rank(heads: Heads, moments: Moments) -> Float[Tensor, ""]:
    """How many dimensions the heads' outputs fill side by side, by the entropy of variances.

    Of the eigenvalues of the covariance of ``(x_1 … x_H)``, ``x_h`` being o_h in d_head
    coordinates.
    """
    return linalg.effective_rank(concat_spectrum(heads, moments))


@_of_concat(
    title="Dimensions with 99 % of the variance before heads are added",
    formula=_K99 + ", λ = eig Cov(x_1 … x_H)",
    null=_null(_simulated_concat, k99),
    reference="principal components",
    default=False,
)
def concat_k99(heads: Heads, moments: Moments) -> Float[Tensor, ""]:
    """How many principal directions carry 99 % of the variance of the heads side by side.

    Of the eigenvalues of the covariance of ``(x_1 … x_H)``, ``x_h`` being o_h in d_head
    coordinates; the last direction counts in part.
    """
    return k99(concat_spectrum(heads, moments))


@_of_output(
    title="Participation ratio of the attention output",
    formula=_PR + ", λ = eig W_Oᵀ Σ W_O",
    null=_null(_simulated_output, linalg.participation_ratio),
    reference="participation ratio of variances; Wang 2025 on low-dimensional attention outputs",
)
def output_participation_ratio(heads: Heads, moments: Moments) -> Float[Tensor, ""]:
    """How many dimensions of the residual stream the attention output fills, by variance.

    Of the eigenvalues of ``Cov(Σ_h o_h) = W_Oᵀ Σ W_O``. Read it beside its null: a Gaussian W_O
    on isotropic z already gives only Dc·D/(Dc + D + 1), half of D where Dc = D.
    """
    return linalg.participation_ratio(output_spectrum(heads, moments))


@_of_output(
    title="Effective rank of the attention output",
    formula=_ENTROPY + ", λ = eig W_Oᵀ Σ W_O",
    null=_null(_simulated_output, linalg.effective_rank),
    reference="Roy & Vetterli 2007: entropy of variances",
    default=False,
)
def output_effective_rank(heads: Heads, moments: Moments) -> Float[Tensor, ""]:
    """How many dimensions the attention output fills, by the entropy of its variances.

    Of the eigenvalues of ``W_Oᵀ Σ W_O``; variances λ, not their roots, are the weights.
    """
    return linalg.effective_rank(output_spectrum(heads, moments))


@_of_output(
    title="Dimensions with 99 % of the attention output's variance",
    formula=_K99 + ", λ = eig W_Oᵀ Σ W_O",
    null=_null(_simulated_output, k99),
    reference="Wang 2025 on low-dimensional attention outputs",
)
def output_k99(heads: Heads, moments: Moments) -> Float[Tensor, ""]:
    """How many principal directions carry 99 % of the variance of the attention output.

    Read it beside its null: a Gaussian W_O on isotropic z already leaves about 77 % of D where
    Dc = D. The last direction counts in part.
    """
    return k99(output_spectrum(heads, moments))
