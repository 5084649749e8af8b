"""The exact facts about W_O, checked in float64 where rounding leaves no doubt."""

import math

import pytest
import torch

from headmix import lab
from headmix.lab.outputs import set_weight

TOKENS = torch.randint(7, (4, 10), generator=torch.Generator().manual_seed(0))
SHAPE = {"vocabulary": 7, "length": 10, "n_heads": 4, "d_head": 4, "d_model": 16}


def random(**more) -> lab.Transformer:
    """A model with random weights everywhere, biases too, in float64."""
    model = lab.build(lab.Config(**SHAPE | more), 0).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def same(a: lab.Transformer, b: lab.Transformer) -> None:
    torch.testing.assert_close(a(TOKENS), b(TOKENS), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(
    "more", [{}, {"norm": False, "skip": False}, {"d_model": 8}, {"d_head": 2}]
)
def test_a_block_diagonal_output_is_identity_with_other_values(more) -> None:
    model = random(output="block_diagonal", n_layers=2, **more)
    twin = lab.absorb_blocks(model)
    assert twin.config.output == "identity"
    same(model, twin)


def test_a_full_output_is_not() -> None:
    with pytest.raises(ValueError, match=r"layer 0: W_O is not block-diagonal: .* outside"):
        lab.absorb_blocks(random(output="full"))


@pytest.mark.parametrize("output", ["full", "shared", "low_rank", "hadamard", "random_orthogonal"])
def test_of_one_bare_layer_the_output_goes_into_the_read_out(output) -> None:
    model = random(output=output, skip=False, norm=False, mlp=False)
    twin = lab.absorb_output(model)
    torch.testing.assert_close(twin.layers[0].attention.o_proj.weight, torch.eye(16).double())
    same(model, twin)


@pytest.mark.parametrize("more", [{"skip": True}, {"n_layers": 2}, {"mlp": True}, {"d_head": 8}])
def test_with_anything_between_it_does_not(more) -> None:
    bare = {"skip": False, "norm": False, "mlp": False}
    with pytest.raises(ValueError, match="only one layer of attention alone"):
        lab.absorb_output(random(**bare | more))


def outside(W: torch.Tensor) -> float:
    """The share of a matrix that is outside the heads' blocks: all that W_V cannot absorb."""
    mask = ~torch.block_diag(*[torch.ones(4, 4)] * 4).bool()
    W = W.detach()
    return float(W[mask].square().sum() / W.square().sum())


def test_with_skips_a_change_of_basis_absorbs_one_layer() -> None:
    model = random(n_layers=2, norm=False)
    first, second = (layer.attention.o_proj.weight.T for layer in model.layers)
    for absorbed in (first, second):
        twin = lab.change_basis(model, absorbed.detach().inverse())
        same(model, twin)
        left = [outside(layer.attention.o_proj.weight.T) for layer in twin.layers]
        assert sorted(left)[0] < 1e-20
        assert sorted(left)[1] > 0.5  # 3/4 of the entries of any matrix are there
    # both would go only where one is the other times blocks
    related = torch.block_diag(*torch.randn(4, 4, 4).double()) @ first
    set_weight(model.layers[1].attention.o_proj, related.T.detach())
    twin = lab.change_basis(model, first.detach().inverse())
    same(model, twin)
    assert max(outside(layer.attention.o_proj.weight.T) for layer in twin.layers) < 1e-20


def test_a_norm_forbids_the_change_of_basis() -> None:
    with pytest.raises(ValueError, match="a norm does not commute"):
        lab.change_basis(random(), torch.eye(16).double())


CELLS = torch.cartesian_prod(torch.arange(2), torch.arange(2))


def on_the_four_cells(model: lab.Transformer, rest: torch.Tensor) -> torch.Tensor:
    """The logit of XOR on (0, 0), (0, 1), (1, 0), (1, 1)."""
    tokens = torch.cat([rest.expand(4, -1), CELLS, torch.full((4, 1), 2)], 1)
    logits = model(tokens)[:, -1]
    return (logits[:, 1] - logits[:, 0]).detach()


@pytest.mark.parametrize("output", lab.OUTPUTS)
@pytest.mark.parametrize("skip", [True, False])
def test_no_output_makes_heads_that_see_one_bit_each_compute_xor(output, skip) -> None:
    """The logit is additive whatever W_O, so its loss is log 2 or more; a feed-forward bends it."""
    task = lab.TASKS["xor"]()
    for seed in range(3):
        rest = torch.randint(2, (1, 6), generator=torch.Generator().manual_seed(seed))
        for mlp in (False, True):
            shape = task.config(output=output, skip=skip, norm=False, mlp=mlp)
            model = lab.build(shape, seed).double()
            a, b, c, d = on_the_four_cells(model, rest)
            bent = float(a - b - c + d)
            assert (abs(bent) < 1e-10) is not mlp
            if not mlp:
                signs = torch.tensor([1.0, -1, -1, 1]).double()
                loss = torch.nn.functional.softplus(signs * torch.stack([a, b, c, d])).mean()
                assert loss >= math.log(2) - 1e-12


def test_a_norm_does_make_them_interact() -> None:
    task = lab.TASKS["xor"]()
    model = lab.build(task.config(norm=True, mlp=False), 0).double()
    a, b, c, d = on_the_four_cells(model, torch.zeros(1, 6, dtype=torch.long))
    assert abs(float(a - b - c + d)) > 1e-4
