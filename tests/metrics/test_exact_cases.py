"""Layers whose numbers are known by hand, and by theorem."""

import math

import numpy as np
import pytest
import torch

import headmix as hm
from headmix.heads import Heads
from headmix.neighbours import NeuronReads, Vocabulary
from headmix.registry import NotApplicable

F64 = torch.float64
m = hm.metrics


def close(value: torch.Tensor, expected: object, tolerance: float = 1e-12) -> bool:
    return np.allclose(np.asarray(value), np.asarray(expected), rtol=tolerance, atol=tolerance)


def haar(n: int, seed: int = 0) -> torch.Tensor:
    stream = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(n, n, generator=stream, dtype=F64)).Q


@pytest.fixture
def orthogonal() -> Heads:
    """Four heads that share the stream out between them: Dc = D = 12, W_O orthogonal."""
    blocks = haar(12).reshape(4, 3, 12)
    return Heads(blocks, W_V=haar(12, 1).reshape(4, 3, 12).mT)


@pytest.fixture
def duplicated() -> Heads:
    """Heads 0 and 1 are the same; head 2 is orthogonal to both."""
    first, other = haar(12)[:6].reshape(2, 3, 12)
    W_V = haar(12, 1)[:6].reshape(2, 3, 12).mT
    return Heads(torch.stack([first, first, other]), W_V=W_V[[0, 0, 1]])


def test_orthogonal_blocks(orthogonal: Heads) -> None:
    assert close(m.projection_kernel(orthogonal), np.eye(4))
    assert close(m.mean_overlap(orthogonal), 0)
    assert close(m.welch_floor(orthogonal), 0)
    assert close(m.head_frame_spectrum(orthogonal), np.ones(12))
    assert close(m.joint_span(orthogonal), 12)
    assert close(m.joint_rank(orthogonal), 12)
    apart = ~np.eye(4, dtype=bool)
    assert close(m.principal_angles(orthogonal)[apart], math.pi / 2)
    assert close(m.ov_cosine(orthogonal), np.eye(4))
    assert close(m.ov_spectrum(orthogonal), np.ones((4, 3)))
    for rank in (m.ov_stable_rank, m.ov_participation_ratio, m.ov_effective_rank):
        assert close(rank(orthogonal), np.full(4, 3))
    assert close(m.ov_gap(orthogonal), np.zeros((4, 3)))


def test_an_orthogonal_layer_shares_every_read_vector_out(orthogonal: Heads) -> None:
    reads = NeuronReads(haar(12, 3)[:, :5])
    assert close(m.ffn_read_share(orthogonal, reads).sum(), 1)


def test_duplicated_head(duplicated: Heads) -> None:
    same = [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    assert close(m.projection_kernel(duplicated), same)
    assert close(m.ov_cosine(duplicated), same)
    assert close(m.head_frame_spectrum(duplicated), [2] * 3 + [1] * 3 + [0] * 3, 1e-9)
    assert close(m.joint_rank(duplicated), 6)
    assert close(m.joint_span(duplicated), 9**2 / (3 * 2**2 + 3 * 1**2))
    assert close(m.mean_overlap(duplicated), 1 / 3)
    assert close(m.principal_angles(duplicated, pairs=[(0, 1)]), 0, 1e-7)


def test_the_same_subspace_is_not_the_same_head(duplicated: Heads) -> None:
    """Overlap sees where a head writes, the cosine also what it writes there."""
    turned = Heads(duplicated.W_O, W_V=haar(12, 1)[:9].reshape(3, 3, 12).mT)
    assert close(m.projection_kernel(turned)[0, 1], 1)
    assert close(m.ov_cosine(turned)[0, 1], 0)


@pytest.mark.parametrize("degrees", [1e-4, 10, 30, 60, 90])
def test_planted_angle(degrees: float) -> None:
    theta = math.radians(degrees)
    axes = haar(8)
    first = axes[:3]
    second = math.cos(theta) * axes[:3] + math.sin(theta) * axes[3:6]
    heads = Heads(torch.stack([first, second]))
    cosine = math.cos(theta)
    assert close(m.projection_kernel(heads)[0, 1], cosine**2)
    assert close(m.principal_angles(heads, pairs=[(0, 1)]), [[theta] * 3], 1e-11)
    assert close(m.head_frame_spectrum(heads), [1 + cosine] * 3 + [1 - cosine] * 3)
    assert close(m.joint_span(heads), 6 / (1 + cosine**2))


def test_small_angles_keep_their_digits_in_single_precision() -> None:
    theta = 1e-5  # its cosine is 1 in float32
    heads = Heads(torch.tensor([[[1.0, 0.0, 0.0]], [[math.cos(theta), math.sin(theta), 0.0]]]))
    assert close(m.principal_angles(heads, pairs=[(0, 1)]), theta, 1e-7)


def test_angles_beyond_the_smaller_rank_do_not_exist() -> None:
    plane, line = torch.eye(4)[:2], torch.stack([torch.eye(4)[0], torch.zeros(4)])
    angles = m.principal_angles(Heads(torch.stack([plane, line])))
    assert close(angles[0, 1, 0], 0, 1e-6)
    assert angles[0, 1, 1].isnan()


def test_forced_overlap_meets_the_welch_floor_in_a_tight_frame() -> None:
    """Three lines at 60° in the plane, and every coordinate plane of space."""
    lines = torch.tensor([[[math.cos(a), math.sin(a)]] for a in (0, math.pi / 3, 2 * math.pi / 3)])
    planes = torch.eye(3)[torch.tensor([[0, 1], [0, 2], [1, 2]])]
    for heads, floor in ((Heads(lines), 1 / 4), (Heads(planes), 1 / 2)):
        assert close(m.welch_floor(heads), floor, 1e-6)
        assert close(m.mean_overlap(heads), floor, 1e-6)


def test_group_overlap_sees_the_union_of_a_group() -> None:
    """Two groups of two lines: single heads are orthogonal or equal, the groups share one line."""
    e = torch.eye(4)
    heads = Heads(e[[0, 1, 1, 2]][:, None], kv_of_head=(0, 0, 1, 1))
    assert close(m.group_overlap(heads), [[1, 0.5], [0.5, 1]], 1e-6)
    uneven = Heads(e[[0, 1, 0]][:, None], kv_of_head=(0, 0, 1))
    assert close(m.group_overlap(uneven)[0, 1], 1 / math.sqrt(2), 1e-6)


def test_one_head_has_no_pairs() -> None:
    for metric in (m.mean_overlap, m.welch_floor):
        with pytest.raises(NotApplicable, match="single head"):
            metric(Heads(torch.ones(1, 2, 4)))


@pytest.mark.parametrize(
    ("kv_of_head", "reason"), [((0, 1), "its own KV head"), ((0, 0), "share one KV head")]
)
def test_groups_need_more_than_one_and_fewer_than_heads(
    kv_of_head: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(NotApplicable, match=reason):
        m.group_overlap(Heads(torch.randn(2, 2, 4), kv_of_head=kv_of_head))


def test_planted_spectrum() -> None:
    sigma = torch.tensor([4.0, 2.0, 1.0], dtype=F64)
    heads = Heads((sigma[:, None] * haar(6)[:3])[None], W_V=haar(6, 1)[None, :, :3])
    energy, p = sigma**2, sigma / sigma.sum()
    assert close(m.ov_spectrum(heads), sigma[None])
    assert close(m.ov_stable_rank(heads), energy.sum() / energy[0])
    assert close(m.ov_participation_ratio(heads), energy.sum() ** 2 / (energy**2).sum())
    assert close(m.ov_effective_rank(heads), (-(p * p.log()).sum()).exp())
    assert close(m.ov_gap(heads), [[0.5, 0.5, 1]])


def one_direction(write: int, read: int, D: int = 5) -> dict[str, torch.Tensor]:
    """A head that reads one coordinate by value, query and key, and writes another."""
    axes = torch.eye(D, dtype=F64)
    reader = axes[None, :, read : read + 1]
    return {"W_O": axes[None, None, write], "W_V": reader, "W_Q": reader, "W_K": reader}


@pytest.mark.parametrize("metric", [m.composition_q, m.composition_k, m.composition_v])
@pytest.mark.parametrize(("read", "expected"), [(3, 1.0), (2, 0.0)])
def test_composition_is_one_when_the_reader_reads_what_was_written(
    metric, read: int, expected: float
) -> None:
    writer, reader = Heads(**one_direction(3, 0)), Heads(**one_direction(4, read))
    score = metric([writer, reader])
    assert close(score[0, 0, 1, 0], expected)
    assert score[[0, 1, 1], 0, [0, 0, 1], 0].isnan().all()  # only earlier to later


def test_queries_and_keys_are_told_apart() -> None:
    axes = torch.eye(5, dtype=F64)[:, :, None]
    reader = one_direction(4, 0) | {"W_Q": axes[3:4], "W_K": axes[2:3]}
    pair = [Heads(**one_direction(3, 0)), Heads(**reader)]
    assert close(m.composition_q(pair)[0, 0, 1, 0], 1)
    assert close(m.composition_k(pair)[0, 0, 1, 0], 0)


def test_streams_do_not_mix() -> None:
    """Encoder, then a decoder block: self-attention and cross-attention onto the encoder."""

    def layer(stream: str, kv_stream: str) -> Heads:
        return Heads(**one_direction(3, 3), stream=stream, kv_stream=kv_stream)

    layers = [layer("enc", "enc"), layer("dec", "dec"), layer("dec", "enc"), layer("dec", "dec")]
    reached = {
        m.composition_q: {(1, 2), (1, 3), (2, 3)},
        m.composition_k: {(0, 2), (1, 3), (2, 3)},
        m.composition_v: {(0, 2), (1, 3), (2, 3)},
    }
    for metric, pairs in reached.items():
        score = metric(layers)[:, 0, :, 0]
        assert {tuple(p) for p in (~score.isnan()).nonzero().tolist()} == pairs


def test_a_layer_without_values_loses_only_its_own_pairs() -> None:
    whole = Heads(**one_direction(3, 3))
    latent = Heads(**one_direction(3, 3) | {"W_V": None})
    score = m.composition_v([whole, latent, whole])[:, 0, :, 0]
    assert {tuple(p) for p in (~score.isnan()).nonzero().tolist()} == {(0, 2)}
    score = m.composition_q([whole, latent, whole])[:, 0, :, 0]
    assert {tuple(p) for p in (~score.isnan()).nonzero().tolist()} == {(0, 1), (0, 2)}


def test_layers_of_different_widths_are_padded() -> None:
    small = Heads(torch.randn(2, 3, 8), W_V=torch.randn(2, 8, 3))
    large = Heads(torch.randn(4, 2, 8), W_V=torch.randn(4, 8, 2))
    score = m.composition_v([small, large])
    assert score.shape == (2, 4, 2, 4)
    assert not score[0, :2, 1].isnan().any()
    assert score[0, 2:].isnan().all()


def test_nothing_to_compose_is_said() -> None:
    with pytest.raises(NotApplicable, match="no layer reads what an earlier one writes"):
        m.composition_v([Heads(**one_direction(3, 3))])


def tokens(D: int = 4) -> Vocabulary:
    return Vocabulary(torch.eye(D), torch.eye(D), token="abcd".__getitem__)


def test_copying_and_its_opposite() -> None:
    axes = torch.eye(4).reshape(2, 2, 4)
    heads = Heads(torch.stack([axes[0], -axes[1]]), W_V=axes.mT)
    assert close(m.ov_copying(heads, tokens()), [1, -1], 1e-6)


def test_words_of_a_planted_direction() -> None:
    """The head reads a against b and writes d against c, so that a raises d and b raises c."""
    read, write = torch.tensor([1.0, -1, 0, 0]), torch.tensor([0.0, 0, -1, 2])
    heads = Heads(write[None, None], W_V=read[None, :, None])
    words = m.ov_vocabulary(heads, tokens(), tokens=1)
    assert words.shape == (1, 1, 2, 2, 1)
    assert words[0, 0, :, :, 0].tolist() == [["a", "b"], ["d", "c"]]


def test_the_vocabulary_needs_one_stream() -> None:
    heads = Heads(torch.randn(2, 2, 4), W_V=torch.randn(2, 4, 2), stream="dec", kv_stream="enc")
    narrow = Heads(torch.randn(2, 2, 4), W_V=torch.randn(2, 3, 2))
    for metric in (m.ov_copying, m.ov_vocabulary):
        with pytest.raises(NotApplicable, match="values read enc, but outputs go to dec"):
            metric(heads, tokens())
        with pytest.raises(NotApplicable, match="read 3 and write 4 dimensions"):
            metric(narrow, tokens())


def test_neurons_hear_the_heads_they_read() -> None:
    heads = Heads(torch.eye(4).reshape(2, 2, 4))
    W_in = torch.tensor([[2.0, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]]).T  # one head, both, none
    reads = NeuronReads(W_in)
    assert close(m.ffn_read_share(heads, reads), [0.75, 0.25], 1e-6)
    assert close(m.ffn_read_participation(heads, reads), 1.5, 1e-6)
    for metric in (m.ffn_read_share, m.ffn_read_participation):
        with pytest.raises(NotApplicable, match="heads write 4 dimensions, neurons read 3"):
            metric(heads, NeuronReads(torch.ones(3, 2)))
        with pytest.raises(NotApplicable, match="zero"):
            metric(heads, NeuronReads(torch.zeros(4, 2)))
