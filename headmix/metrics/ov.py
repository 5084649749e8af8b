"""What each head moves: its output-value matrix ``M_h = W_V^h W_O^h``, never built in full."""

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from headmix import linalg, nulls
from headmix.heads import Heads
from headmix.neighbours import Vocabulary
from headmix.registry import NotApplicable, metric

_SPECTRUM_SHAPE = ("gauge", "rotation", "scale", "head_scale")
_GAUSSIAN = "64 simulated products of Gaussian W_V and W_O of the layer's shape"

#: Leading singular directions that are put into words.
DIRECTIONS = 3


def _sigma(heads: Heads) -> Float[Tensor, "head singular"]:
    """Singular values of each M_h, descending."""
    sigma = heads.ov_singular_values
    if not sigma.any():
        raise NotApplicable("the output-value matrix of every head is zero")
    return sigma


def _gaussian_sigma(heads: Heads) -> Float[Tensor, "draw singular"]:
    sigma = nulls.gaussian_ov_singular_values(heads.values.shape[1], heads.d_head, heads.d_model)
    return sigma.to(heads.W_O)


def _stable_rank(sigma: Float[Tensor, "row singular"]) -> Float[Tensor, "row"]:
    return sigma.square().sum(-1) / sigma[:, 0].square()


def _relative_gaps(sigma: Float[Tensor, "row singular"]) -> Float[Tensor, "row direction"]:
    """Distance of each leading singular value to its nearest neighbour, over its own size."""
    gaps = sigma - torch.cat([sigma[:, 1:], torch.zeros_like(sigma[:, :1])], 1)
    above = torch.cat([torch.full_like(gaps[:, :1], torch.inf), gaps[:, :-1]], 1)
    return (torch.minimum(above, gaps) / sigma)[:, :DIRECTIONS]


def _mean_and_sd(draws: Float[Tensor, "draw *rest"]) -> tuple[Tensor, Tensor]:
    return draws.mean(0), draws.std(0)


def _ov_spectrum_null(heads: Heads) -> tuple[Tensor, Tensor]:
    mean, sd = _mean_and_sd(_gaussian_sigma(heads))
    norm = _sigma(heads).square().sum(-1, keepdim=True).sqrt()
    return norm * mean, norm * sd


@metric(
    title="Singular values of the OV matrix",
    formula="σ_k(W_V^h W_O^h)",
    dims=("head", "singular"),
    range=(0, float("inf")),
    null=_ov_spectrum_null,
    null_text=_GAUSSIAN + ", scaled to the head's own ‖M_h‖_F",
    invariant=("gauge", "rotation"),
    reference="Elhage et al. 2021; Millidge & Black 2022",
)
def ov_spectrum(heads: Heads) -> Float[Tensor, "head singular"]:
    """Singular values of what a head moves from its input to its output, descending.

    ``[head, min(d_in, d_head, d_model)]``. The spectrum of W_O[h] alone depends on an arbitrary
    choice of basis inside the head; that of ``M_h = W_V W_O`` does not. It comes from the
    triangular factors of both, so no [d_model, d_model] matrix is ever built.

    >>> import torch
    >>> W_O = torch.diag(torch.tensor([3.0, 1.0])).reshape(1, 2, 2)
    >>> ov_spectrum(Heads(W_O, W_V=2 * torch.eye(2).reshape(1, 2, 2)))
    tensor([[6., 2.]])
    """
    return _sigma(heads)


@metric(
    title="Stable rank of the OV matrix",
    formula="Σσ² / σ₁²",
    dims=("head",),
    range=(1, "d"),
    null=lambda heads: _mean_and_sd(_stable_rank(_gaussian_sigma(heads))),
    null_text=_GAUSSIAN,
    invariant=_SPECTRUM_SHAPE,
    reference="Rudelson & Vershynin 2007",
    unit="dimensions",
)
def ov_stable_rank(heads: Heads) -> Float[Tensor, "head"]:
    """How many directions as strong as the strongest one would carry the head's energy.

    ``‖M_h‖²_F / ‖M_h‖²_2``, from 1 to d_head. NaN for a head that writes nothing.

    >>> import torch
    >>> ov_stable_rank(Heads(torch.eye(4).reshape(2, 2, 4), W_V=torch.eye(4).reshape(2, 4, 2)))
    tensor([2., 2.])
    """
    return _stable_rank(_sigma(heads))


@metric(
    title="Participation ratio of the OV matrix",
    formula="(Σσ²)² / Σσ⁴",
    dims=("head",),
    range=(1, "d"),
    null=lambda heads: _mean_and_sd(linalg.participation_ratio(_gaussian_sigma(heads).square())),
    null_text=_GAUSSIAN,
    invariant=_SPECTRUM_SHAPE,
    reference="participation ratio of σ²",
    unit="dimensions",
)
def ov_participation_ratio(heads: Heads) -> Float[Tensor, "head"]:
    """How many directions a head moves, weighted by energy σ², from 1 to d_head.

    NaN for a head that writes nothing.

    >>> import torch
    >>> W_O = torch.diag(torch.tensor([2.0, 1.0])).reshape(1, 2, 2)
    >>> ov_participation_ratio(Heads(W_O, W_V=torch.eye(2).reshape(1, 2, 2)))
    tensor([1.4706])
    """
    return linalg.participation_ratio(_sigma(heads).square())


@metric(
    title="Effective rank of the OV matrix",
    formula="exp(−Σ p ln p), p = σ / Σσ",
    dims=("head",),
    range=(1, "d"),
    null=lambda heads: _mean_and_sd(linalg.effective_rank(_gaussian_sigma(heads))),
    null_text=_GAUSSIAN,
    invariant=_SPECTRUM_SHAPE,
    reference="Roy & Vetterli 2007: entropy of σ, not of σ²",
    unit="dimensions",
)
def ov_effective_rank(heads: Heads) -> Float[Tensor, "head"]:
    """How many directions a head moves, by the entropy of its singular values σ (not σ²).

    From 1 to d_head; larger than the participation ratio, because weak directions count for more.
    NaN for a head that writes nothing.

    >>> import torch
    >>> ov_effective_rank(Heads(torch.eye(4).reshape(2, 2, 4), W_V=torch.eye(4).reshape(2, 4, 2)))
    tensor([2., 2.])
    """
    return linalg.effective_rank(_sigma(heads))


@metric(
    title="Isolation of the leading OV directions",
    formula="min(σ_{k−1} − σ_k, σ_k − σ_{k+1}) / σ_k",
    dims=("head", "direction"),
    range=(0, 1),
    null=lambda heads: _mean_and_sd(_relative_gaps(_gaussian_sigma(heads))),
    null_text=_GAUSSIAN,
    invariant=_SPECTRUM_SHAPE,
    reference="Davis & Kahan 1970: the gap bounds how far a direction turns when weights move",
)
def ov_gap(heads: Heads) -> Float[Tensor, "head direction"]:
    """How well defined each leading singular direction is: its relative gap to the nearest one.

    Near 0 the direction is degenerate: a small change of the weights turns it freely within the
    span of its neighbours, and the words ``ov_vocabulary`` gives for it mean little. NaN where
    the singular value is zero.

    >>> import torch
    >>> W_O = torch.diag(torch.tensor([4.0, 2.0, 2.0])).reshape(1, 3, 3)
    >>> ov_gap(Heads(W_O, W_V=torch.eye(3).reshape(1, 3, 3)))
    tensor([[0.5000, 0.0000, 0.0000]])
    """
    return _relative_gaps(_sigma(heads))


def _ov_inner_products(heads: Heads) -> tuple[Tensor, Tensor]:
    """⟨M_i, M_j⟩ and ‖M_iᵀM_j‖_F, both [head, head], a row of heads at a time."""
    L, Q = heads.ov_reader, heads.write_basis.Q
    H, k, _ = Q.shape
    readers, writers = L.permute(1, 0, 2).flatten(1), Q.flatten(0, 1)
    inner, crossed = [], []
    for i in range(H):
        reading = (L[i].T @ readers).reshape(k, H, k)
        writing = (Q[i] @ writers.T).reshape(k, H, k)
        inner.append((reading * writing).sum((0, 2)))
        crossed.append(reading.square().sum((0, 2)).sqrt())
    return torch.stack(inner), torch.stack(crossed)


def _ov_norms(heads: Heads) -> tuple[Tensor, Tensor]:
    """‖M_i‖_F as a column and as a row."""
    norm = heads.ov_reader.square().sum((1, 2)).sqrt()
    return norm[:, None], norm[None, :]


def _ov_cosine_null(heads: Heads) -> tuple[Tensor, Tensor]:
    _, crossed = _ov_inner_products(heads)
    n_i, n_j = _ov_norms(heads)
    shared = heads.kv_index[:, None] == heads.kv_index[None, :]
    apart = torch.tensor((heads.values.shape[1] * heads.d_model) ** -0.5).to(crossed)
    sd = torch.where(shared, crossed / (n_i * n_j * heads.d_model**0.5), apart)
    return torch.zeros((), dtype=sd.dtype), sd


@metric(
    title="Cosine between OV matrices",
    formula="⟨M_i, M_j⟩ / (‖M_i‖ ‖M_j‖)",
    dims=("head", "head_b"),
    range=(-1, 1),
    null=_ov_cosine_null,
    null_text=(
        "Haar rotation of what a head reads and of what it writes: mean 0, sd 1/√(d_in D) exactly; "
        "heads that share W_V: of what it writes alone, sd ‖M_iᵀM_j‖/(√D ‖M_i‖ ‖M_j‖)"
    ),
    invariant=_SPECTRUM_SHAPE,
    reference="Frobenius cosine",
)
def ov_cosine(heads: Heads) -> Float[Tensor, "head head"]:
    """How alike two heads' OV matrices are: 1 the same map up to scale, −1 its negative.

    ``tr(W_V^iᵀ W_V^j W_O^j W_O^iᵀ)``, normalised. NaN for a head that writes nothing.

    >>> import torch
    >>> W_O = torch.eye(2).expand(2, 2, 2) * torch.tensor([1.0, -3.0])[:, None, None]
    >>> ov_cosine(Heads(W_O, W_V=torch.eye(2).expand(2, 2, 2))).round(decimals=4)
    tensor([[ 1., -1.],
            [-1.,  1.]])
    """
    inner, _ = _ov_inner_products(heads)
    n_i, n_j = _ov_norms(heads)
    return inner / (n_i * n_j)


def _need_one_stream(heads: Heads, vocabulary: Vocabulary) -> None:
    """The vocabulary speaks of the residual stream: heads must read it and write to it."""
    D = vocabulary.W_E.shape[1]
    if heads.kv_stream != heads.stream:
        raise NotApplicable(f"values read {heads.kv_stream}, but outputs go to {heads.stream}")
    if (heads.values.shape[1], heads.d_model) != (D, D):
        raise NotApplicable(
            f"heads read {heads.values.shape[1]} and write {heads.d_model} dimensions, "
            f"token embeddings have {D}"
        )
    if not heads.W_O.any():
        raise NotApplicable("W_O is zero: no head writes anything")


def _copying_score(A: Float[Tensor, "head d d"]) -> Float[Tensor, "head"]:
    eigenvalues = linalg.eigenvalues(A)
    return eigenvalues.real.sum(-1) / eigenvalues.abs().sum(-1)


def _ov_copying_null(heads: Heads, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    _need_one_stream(heads, vocabulary)
    W_O, reading = heads.write_factor, vocabulary.token_gram @ heads.values
    stream = nulls.generator()
    small = []
    for draw in range(nulls.DRAWS):
        h = draw % heads.n_heads
        # Gaussian rows stand for a random basis of the head's write subspace
        rows = torch.randn(W_O.shape[2], heads.d_model, generator=stream, dtype=W_O.dtype)
        small.append(W_O[h] @ (rows.to(W_O.device) @ reading[heads.kv_index[h]]))
    score = _copying_score(torch.stack(small))
    score = score[score.isfinite()]
    return score.mean(), score.std()


@metric(
    title="Copying score",
    formula="Σλ / Σ|λ|, λ = eig(W_O^h W_U W_E W_V^h)",
    dims=("head",),
    range=(-1, 1),
    null=_ov_copying_null,
    null_text="64 simulated heads of the layer, each writing to a random subspace instead",
    invariant=_SPECTRUM_SHAPE,
    reference="Elhage et al. 2021",
)
def ov_copying(heads: Heads, vocabulary: Vocabulary) -> Float[Tensor, "head"]:
    """Whether a head, attending to a token, raises the logit of that token.

    From the eigenvalues of the [d_head, d_head] matrix ``W_O W_U W_E W_V``, which are the non-zero
    ones of the [token, token] map: 1 when all are positive (copying), −1 when all are negative.
    Norms and feed-forwards between are left out. NaN for a head that writes nothing.

    >>> import torch
    >>> vocabulary = Vocabulary(W_E=torch.eye(2), W_U=torch.eye(2), token="ab".__getitem__)
    >>> W_O = torch.eye(2).expand(2, 2, 2) * torch.tensor([1.0, -3.0])[:, None, None]
    >>> ov_copying(Heads(W_O, W_V=torch.eye(2).expand(2, 2, 2)), vocabulary)
    tensor([ 1., -1.])
    """
    _need_one_stream(heads, vocabulary)
    reading = vocabulary.token_gram @ heads.values
    return _copying_score(heads.W_O @ reading[heads.kv_index])


@metric(
    title="Tokens of the leading OV directions",
    formula="top tokens of W_E u_k (read) and v_k W_U (write), M_h = Σ_k σ_k u_k v_kᵀ",
    dims=("head", "direction", "side", "sign", "place"),
    range=(float("-inf"), float("inf")),
    null_text="none: words, not numbers; see ov_gap for directions that are not well defined",
    invariant=_SPECTRUM_SHAPE,
    reference="Millidge & Black 2022",
)
def ov_vocabulary(
    heads: Heads, vocabulary: Vocabulary, directions: int = DIRECTIONS, tokens: int = 5
) -> Shaped[np.ndarray, "head direction side sign place"]:
    """In words, what the strongest directions of a head read and write.

    For each leading singular direction the tokens whose embedding it reads most strongly
    (``side`` "read") and those whose logit it then changes most ("write"). A direction has no
    sign of its own but its two sides share one: tokens read at ``sign`` "+" raise the tokens
    written at "+", and those at "−" raise those at "−". The more extreme logit is put at "+".
    Empty where the singular value is zero.
    """
    _need_one_stream(heads, vocabulary)
    U, sigma, Vh = linalg.svd(heads.ov_reader)
    n = min(directions, sigma.shape[1])
    read = vocabulary.W_E @ U[:, :, :n].permute(1, 0, 2).flatten(1)
    write = (Vh[:, :n] @ heads.write_basis.Q).flatten(0, 1) @ vocabulary.W_U
    centred = write - write.mean(1, keepdim=True)  # a constant over all logits changes nothing
    flip = torch.where(centred.amax(1) >= -centred.amin(1), 1.0, -1.0).to(write)
    scores = torch.stack([read.T * flip[:, None], write * flip[:, None]], 1)
    top = torch.stack([s.topk(min(tokens, s.shape[-1])).indices for s in (scores, -scores)], 2)
    words = [vocabulary.token(t) for t in top.flatten().tolist()]
    out = np.array(words, dtype=object).reshape(heads.n_heads, n, *top.shape[1:])
    out[(sigma[:, :n] <= linalg.tolerance(sigma, *heads.ov_reader.shape[1:])[:, None]).numpy()] = ""
    return out
