import math
import os
import time
from collections.abc import Iterator

import pytest
import torch

from headmix import linalg

F64 = torch.float64


def test_basis_is_orthonormal_and_spans_the_rows() -> None:
    W = torch.randn(5, 3, 8, dtype=F64)
    basis = linalg.row_space(W)
    assert torch.allclose(basis.Q @ basis.Q.mT, torch.eye(3, dtype=F64).expand(5, 3, 3))
    assert torch.allclose(W @ basis.Q.mT @ basis.Q, W)
    assert torch.allclose(basis.factor @ basis.Q, W)
    assert basis.rank.tolist() == [3] * 5


def test_basis_of_blocks_that_lack_rank() -> None:
    W = torch.randn(3, 4, 8, dtype=F64)
    W[1] = torch.outer(torch.ones(4), W[1, 0])
    W[2] = 0
    basis = linalg.row_space(W)
    assert basis.rank.tolist() == [4, 1, 0]
    assert torch.allclose(W @ basis.Q.mT @ basis.Q, W)
    assert torch.allclose(basis.factor @ basis.Q, W)
    projector = basis.Q.mT @ basis.Q
    assert torch.allclose(projector @ projector, projector)
    assert (basis.Q[2] == 0).all()


def test_basis_of_more_rows_than_columns() -> None:
    W = torch.randn(2, 7, 3, dtype=F64)
    basis = linalg.row_space(W)
    assert basis.Q.shape == (2, 3, 3)
    assert torch.allclose(basis.Q.mT @ basis.Q, torch.eye(3, dtype=F64).expand(2, 3, 3))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_rank_is_decided_at_the_tolerance(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    W = torch.eye(8, dtype=dtype)[None, :2].clone()
    for size, rank in ((8 * eps * 3, 2), (8 * eps / 3, 1)):
        W[0, 1, 1] = size
        assert linalg.row_space(W).rank.tolist() == [rank]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _decompositions(W: torch.Tensor) -> list[torch.Tensor]:
    basis = linalg.row_space(W)
    parts = [basis.Q, basis.factor, basis.rank, *linalg.svd(W), linalg.singular_values(W)]
    return [*parts, linalg.triangular_factor(W.mT)]


def test_blocks_are_the_same_on_one_core_and_on_two(two_threads: None) -> None:
    W = torch.randn(5, 6, 20, dtype=F64)
    W[3, 2] = 0  # also where a block lacks rank
    spread = _decompositions(W)
    torch.set_num_threads(1)
    assert all(map(torch.equal, spread, _decompositions(W)))


def test_gradients_pass_through_on_two_cores(two_threads: None) -> None:
    W = torch.randn(3, 4, 9, dtype=F64, requires_grad=True)
    linalg.singular_values(W).square().sum().backward()
    assert W.grad is not None
    assert torch.allclose(W.grad, 2 * W.detach())
    with torch.no_grad():
        assert not linalg.singular_values(W).requires_grad


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # that is what is tested
def test_a_forked_process_decomposes_too(two_threads: None) -> None:
    linalg.singular_values(torch.randn(4, 3, 3))  # the threads that a fork leaves behind
    child = os.fork()
    if child == 0:
        torch.set_num_threads(2)
        linalg.singular_values(torch.randn(4, 3, 3))
        os._exit(0)
    deadline = time.monotonic() + 30
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.05)
    if ended == (0, 0):
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended == (child, 0)


def test_nothing_to_span_is_said() -> None:
    with pytest.raises(linalg.LinalgError, match=r"all 2 blocks of shape \(3, 4\) are zero"):
        linalg.row_space(torch.zeros(2, 3, 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(linalg.LinalgError, match=f"got {dtype}; convert first"):
        linalg.singular_values(torch.ones(2, 2, dtype=dtype))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    A = torch.eye(3)
    A[1, 1] = bad
    for decompose in (linalg.svd, linalg.eigenvalues, linalg.triangular_factor):
        with pytest.raises(linalg.LinalgError, match=r"\(3, 3\) holds NaN or infinity"):
            decompose(A)


@pytest.mark.parametrize("name", ["svd", "svdvals", "eigvals"])
def test_one_retry_in_double_precision(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {"svd": linalg.svd, "svdvals": linalg.singular_values, "eigvals": linalg.eigenvalues}
    real = getattr(torch.linalg, name)

    def fails_in_single(A, **options):
        if A.dtype == torch.float32:
            raise torch.linalg.LinAlgError("did not converge")
        return real(A, **options)

    A = torch.randn(4, 4)
    expected = ours[name](A)
    monkeypatch.setattr(torch.linalg, name, fails_in_single)
    again = ours[name](A)
    for a, b in zip(
        *((r,) if isinstance(r, torch.Tensor) else r for r in (again, expected)), strict=True
    ):
        assert a.dtype == b.dtype
        if not a.is_complex():
            assert torch.allclose(a.abs(), b.abs(), atol=1e-5)


def test_giving_up_names_the_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(A):
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "svdvals", fails)
    with pytest.raises(
        linalg.LinalgError, match=r"convergence for shape \(2, 3\), also in float64"
    ):
        linalg.singular_values(torch.ones(2, 3))


def test_triangular_factor_keeps_inner_products() -> None:
    A = torch.randn(2, 9, 4, dtype=F64)
    R = linalg.triangular_factor(A)
    assert R.shape == (2, 4, 4)
    assert torch.allclose(R.mT @ R, A.mT @ A)


def test_counting_weights() -> None:
    even = torch.ones(3, 5, dtype=F64)
    assert torch.allclose(linalg.participation_ratio(even), even.sum(-1))
    assert torch.allclose(linalg.effective_rank(even), even.sum(-1))
    one = torch.tensor([2.0, 0, 0])
    assert linalg.participation_ratio(one) == linalg.effective_rank(one) == 1
    uneven = torch.tensor([3.0, 1.0], dtype=F64)
    assert linalg.participation_ratio(uneven) == 1.6
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert math.isclose(linalg.effective_rank(uneven), math.exp(entropy))
