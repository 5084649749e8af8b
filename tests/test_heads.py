from dataclasses import FrozenInstanceError, replace

import jaxtyping
import pytest
import torch

from headmix.heads import Heads, NotApplicable

H, KV, D, D_HEAD = 6, 3, 16, 4


def weights(**changes) -> dict:
    return {
        "W_O": torch.randn(H, D_HEAD, D),
        "W_V": torch.randn(KV, D, D_HEAD),
        "W_Q": torch.randn(H, D, 5),
        "W_K": torch.randn(KV, D, 5),
        "b_V": torch.randn(KV, D_HEAD),
        "b_O": torch.randn(D),
        "layer": "L7",
    } | changes


def test_shapes_are_read_off() -> None:
    heads = Heads(**weights())
    assert (heads.n_heads, heads.n_kv_heads, heads.d_head, heads.d_model) == (H, KV, D_HEAD, D)
    assert heads.kv_of_head == (0, 0, 1, 1, 2, 2)
    assert heads.kv_index.tolist() == [0, 0, 1, 1, 2, 2]
    assert heads.kv_stream == heads.stream == "residual"
    assert repr(heads) == "Heads(L7: 6 heads on 3 KV heads, d_head=4, d_model=16, raw)"


def test_W_O_alone_is_enough() -> None:
    heads = Heads(torch.randn(3, 2, 8))
    assert heads.n_kv_heads == 3
    with pytest.raises(NotApplicable, match="there is no W_V"):
        _ = heads.values


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"W_V": torch.ones(KV, D, 3)},
            r"W_V has shape \[3, 16, 3\], expected \[3, 'any', 4\]",
        ),
        ({"W_Q": torch.ones(4, D, 5)}, r"W_Q has shape \[4, 16, 5\], expected \[6"),
        ({"W_K": torch.ones(KV, D, 7)}, r"W_K has shape \[3, 16, 7\], expected \[3, 'any', 5\]"),
        ({"b_V": torch.ones(2, D_HEAD)}, r"b_V has shape \[2, 4\], expected \[3, 4\]"),
        ({"b_O": torch.ones(D + 1)}, r"b_O has shape \[17\], expected \[16\]"),
        ({"W_O": torch.ones(H, 0, D)}, "no empty axis"),
        ({"W_V": torch.ones(4, D, D_HEAD)}, "6 query heads do not divide evenly over 4 KV heads"),
        ({"kv_of_head": (0, 0, 0, 1, 1, 1)}, "one of 3 KV heads for each of 6 query heads"),
        ({"kv_of_head": (0, 1, 2)}, "one of 3 KV heads for each of 6 query heads"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_sides(
    changes: dict, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # outside the tests nothing checks annotations first
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match="L7: .*" + message):
        Heads(**weights(**changes))


def test_heads_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Heads(**weights()).W_O = torch.ones(1, 1, 1)


def test_uneven_groups_are_allowed_when_named() -> None:
    heads = Heads(**weights(kv_of_head=[0, 0, 0, 1, 2, 2]))
    assert heads.kv_of_head == (0, 0, 0, 1, 2, 2)


def test_factors_multiply_to_the_ov_matrix() -> None:
    heads = Heads(**weights()).to(torch.float64)
    M = torch.stack([heads.W_V[g] @ heads.W_O[h] for h, g in enumerate(heads.kv_of_head)])
    assert torch.allclose(heads.ov_reader @ heads.write_basis.Q, M)
    assert torch.allclose(heads.write_factor @ heads.write_basis.Q, heads.W_O)
    assert torch.allclose(heads.ov_singular_values, torch.linalg.svdvals(M)[:, :D_HEAD])
    alone = replace(heads).ov_singular_values  # where no basis was wanted before
    assert torch.allclose(alone, heads.ov_singular_values)


def test_what_is_not_finite_is_named() -> None:
    W_V = torch.ones(KV, D, D_HEAD)
    W_V[0, 0, 0] = torch.nan
    assert Heads(**weights()).nonfinite() is None
    assert Heads(**weights(W_V=W_V, b_O=torch.full((D,), torch.inf))).nonfinite() == "W_V, b_O"


def test_moving_keeps_everything_else() -> None:
    heads = Heads(**weights(processing="folded", stream="dec", kv_stream="enc"))
    moved = heads.to(torch.float64)
    assert moved.W_O.dtype == moved.b_V.dtype == torch.float64
    assert (moved.layer, moved.processing) == ("L7", "folded")
    assert (moved.stream, moved.kv_stream, moved.kv_of_head) == ("dec", "enc", heads.kv_of_head)
