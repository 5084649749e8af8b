"""Every metric against something independent: matrices built in full, scipy, TransformerLens."""

import numpy as np
import pytest
import scipy.linalg
import torch
from example_layers import EXAMPLES, OWN, Example, example

import headmix.metrics.composition as composition
from headmix.heads import Heads
from headmix.registry import FROM_TEXT, NotApplicable

every_example = pytest.mark.parametrize("kind", EXAMPLES)


def ov_matrices(heads: Heads) -> np.ndarray:
    """M_h [head, d_in, D] in full."""
    return np.stack(
        [heads.W_V[g].numpy() @ heads.W_O[h].numpy() for h, g in enumerate(heads.kv_of_head)]
    )


def projectors(rows: list[np.ndarray]) -> np.ndarray:
    return np.stack([np.linalg.pinv(w) @ w for w in rows])


def write_projectors(heads: Heads) -> np.ndarray:
    return projectors(list(heads.W_O.numpy()))


def overlap(P: np.ndarray) -> np.ndarray:
    trace = np.einsum("iab,jba->ij", P, P)
    rank = np.round(np.diag(trace))
    return trace / np.sqrt(np.outer(rank, rank))


def frame(e: Example) -> np.ndarray:
    heads = e.layers[0]
    count = min(heads.n_heads * heads.d_head, heads.d_model)
    return np.linalg.eigvalsh(write_projectors(heads).sum(0))[::-1][:count]


def group_overlap(e: Example) -> np.ndarray:
    heads = e.layers[0]
    index = np.array(heads.kv_of_head)
    rows = [heads.W_O.numpy()[index == g].reshape(-1, heads.d_model) for g in set(index)]
    return overlap(projectors(rows))


def spectra(e: Example) -> np.ndarray:
    heads = e.layers[0]
    return np.linalg.svd(ov_matrices(heads))[1][:, : min(heads.d_head, heads.d_model)]


def effective_rank(sigma: np.ndarray) -> np.ndarray:
    p = sigma / sigma.sum(-1, keepdims=True)
    return np.exp(-np.sum(np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0), -1))


def cosines(e: Example) -> np.ndarray:
    flat = ov_matrices(e.layers[0]).reshape(e.layers[0].n_heads, -1)
    flat = flat / np.linalg.norm(flat, axis=1, keepdims=True)
    return flat @ flat.T


def copying(e: Example) -> np.ndarray:
    """Eigenvalues of the [token, token] map itself."""
    maps = [
        e.vocabulary.W_E.numpy() @ M @ e.vocabulary.W_U.numpy() for M in ov_matrices(e.layers[0])
    ]
    eigenvalues = np.linalg.eigvals(np.stack(maps))
    return eigenvalues.real.sum(-1) / np.abs(eigenvalues).sum(-1)


def shares(e: Example) -> np.ndarray:
    """[neuron, head]"""
    P, W = write_projectors(e.layers[0]), e.reads.W_in.numpy()
    return np.einsum("an,hab,bn->nh", W, P, W) / (W**2).sum(0)[:, None]


def composed(e: Example, kind: str) -> np.ndarray:
    L, H = len(e.layers), e.layers[0].n_heads
    out = np.full((L, H, L, H), np.nan)
    for i in range(L):
        for j in range(i + 1, L):
            M, reader = ov_matrices(e.layers[i]), e.layers[j]
            QK = np.stack(
                [
                    reader.W_Q[h].numpy() @ reader.W_K[g].numpy().T
                    for h, g in enumerate(reader.kv_of_head)
                ]
            )
            target = {"q": QK, "k": QK.transpose(0, 2, 1), "v": ov_matrices(reader)}[kind]
            product = np.linalg.norm(M[:, None] @ target[None], axis=(2, 3))
            norms = [np.linalg.norm(a, axis=(1, 2)) for a in (M, target)]
            out[i, :, j] = product / np.outer(*norms)
    return out


def mean_apart(A: np.ndarray) -> float:
    return A[~np.eye(len(A), dtype=bool)].mean()


ORACLES = {
    "projection_kernel": lambda e: overlap(write_projectors(e.layers[0])),
    "mean_overlap": lambda e: mean_apart(overlap(write_projectors(e.layers[0]))),
    "group_overlap": group_overlap,
    "head_frame_spectrum": frame,
    "joint_span": lambda e: frame(e).sum() ** 2 / (frame(e) ** 2).sum(),
    "joint_rank": lambda e: np.linalg.matrix_rank(
        e.layers[0].W_O.numpy().reshape(-1, e.layers[0].d_model)
    ),
    "ov_spectrum": spectra,
    "ov_stable_rank": lambda e: (spectra(e) ** 2).sum(-1) / spectra(e)[:, 0] ** 2,
    "ov_participation_ratio": lambda e: (spectra(e) ** 2).sum(-1) ** 2 / (spectra(e) ** 4).sum(-1),
    "ov_effective_rank": lambda e: effective_rank(spectra(e)),
    "ov_cosine": cosines,
    "ov_copying": copying,
    "ffn_read_share": lambda e: shares(e).mean(0),
    "ffn_read_participation": lambda e: (shares(e).sum(1) ** 2 / (shares(e) ** 2).sum(1)).mean(),
    "composition_q": lambda e: composed(e, "q"),
    "composition_k": lambda e: composed(e, "k"),
    "composition_v": lambda e: composed(e, "v"),
}
#: These have tests of their own in this file, or a closed form in the exact cases.
ELSEWHERE = {"principal_angles", "ov_vocabulary", "welch_floor", "ov_gap"}


def test_every_metric_has_an_oracle() -> None:
    # test_moments_oracles.py, test_attention.py
    on_text = {n for n, m in OWN.items() if {*FROM_TEXT} & {*m.needs}}
    assert set(ORACLES) | ELSEWHERE | on_text == set(OWN)


@pytest.mark.parametrize("name", ORACLES)
@every_example
def test_equals_the_matrices_built_in_full(name: str, kind: str) -> None:
    e = example(**EXAMPLES[kind])
    try:
        value = e.value(OWN[name])
    except NotApplicable as reason:
        pytest.skip(str(reason))
    # a Gram matrix squares: what is zero comes out as √ε
    assert np.allclose(value, ORACLES[name](e), rtol=1e-7, atol=3e-8, equal_nan=True)


@every_example
def test_angles_equal_scipy(kind: str) -> None:
    heads = example(**EXAMPLES[kind]).layers[0]
    angles = OWN["principal_angles"](heads)
    for i in range(heads.n_heads):
        for j in range(heads.n_heads):
            rows = [scipy.linalg.orth(heads.W_O[h].numpy().T) for h in (i, j)]
            expected = np.sort(scipy.linalg.subspace_angles(*rows))
            known = angles[i, j][~angles[i, j].isnan()].numpy()
            assert np.allclose(known, expected, atol=1e-7)


@every_example
def test_both_forms_of_composition_agree(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = example(**EXAMPLES[kind]).layers
    writers, readers = [layers[0]], [layers[1].ov_reader, layers[2].ov_reader]
    D = layers[0].d_model
    factors = composition._squares_by_factors(writers, readers, D)
    assert torch.allclose(composition._squares_by_grams(writers, readers, D), factors)
    monkeypatch.setattr(composition, "BLOCK", 1)  # one row of the Gram matrices at a time
    assert torch.allclose(composition._squares_by_grams(writers, readers, D), factors)


def test_words_equal_those_of_the_full_matrix() -> None:
    e = example()
    heads, vocabulary = e.layers[0], e.vocabulary
    words = OWN["ov_vocabulary"](heads, vocabulary)
    assert words.shape == (6, 3, 2, 2, 5)
    for h, M in enumerate(ov_matrices(heads)):
        U, _, Vh = np.linalg.svd(M)
        for k in range(3):
            read = vocabulary.W_E.numpy() @ U[:, k]
            write = Vh[k] @ vocabulary.W_U.numpy()
            centred = write - write.mean()
            sign = 1 if centred.max() >= -centred.min() else -1
            for side, score in enumerate((sign * read, sign * write)):
                for place, order in enumerate((np.argsort(-score), np.argsort(score))):
                    assert words[h, k, side, place].tolist() == [f"token {t}" for t in order[:5]]


def test_overlap_and_angles_equal_transformer_lens() -> None:
    from transformer_lens.tools.analysis.projection_kernel import (
        orthonormal_subspace,
        projection_kernel,
    )

    heads = example(**EXAMPLES["lacking rank"]).layers[0]
    value, angles = OWN["projection_kernel"](heads), OWN["principal_angles"](heads)
    subspaces = [orthonormal_subspace(w.T) for w in heads.W_O]
    assert heads.write_basis.rank.tolist() == [s.rank for s in subspaces]
    for i, a in enumerate(subspaces):
        for j, b in enumerate(subspaces):
            theirs = projection_kernel(a, b)
            assert torch.isclose(value[i, j], theirs.normalized)
            if i != j:
                assert torch.allclose(angles[i, j, : a.rank], theirs.angles.sort().values)


def test_spectra_and_composition_equal_transformer_lens() -> None:
    from transformer_lens.FactoredMatrix import FactoredMatrix
    from transformer_lens.utilities.matrix import composition_scores

    e = example()
    first, second = (FactoredMatrix(h.W_V[h.kv_index], h.W_O) for h in e.layers[:2])
    assert torch.allclose(OWN["ov_spectrum"](e.layers[0]), first.svd()[1])
    W_K = e.layers[1].W_K[e.layers[1].kv_index]
    QK = FactoredMatrix(e.layers[1].W_Q, W_K.mT)
    for name, right in (("q", QK), ("k", QK.T), ("v", second)):
        theirs = composition_scores(first, right)
        assert torch.allclose(OWN[f"composition_{name}"](e.layers[:2])[0, :, 1], theirs)
