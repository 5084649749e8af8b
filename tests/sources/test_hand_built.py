"""Hand-built attention: a layout in one line, proven by the laws, and wrong ones refused."""

import pytest
import torch
from torch import Tensor, nn

import headmix as hm
from headmix.layouts import UnknownLayout

H, KV, D_HEAD, D = 6, 3, 4, 20
X = torch.randn(2, 7, D, generator=torch.Generator().manual_seed(0))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention over [batch, head, token, feature], heads concatenated."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def heads_of(x: Tensor, n: int) -> Tensor:
    return x.unflatten(-1, (n, -1)).transpose(1, 2)


class Attention(nn.Module):
    """Projections apart, under names of its own; query and key wider than values."""

    n_kv = H

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ask = nn.Linear(D, H * 6)
        self.answer = nn.Linear(D, self.n_kv * 6)
        self.tell = nn.Linear(D, self.n_kv * D_HEAD)
        self.blend = nn.Linear(H * D_HEAD, D)

    def expand(self, x: Tensor) -> Tensor:
        """[batch, KV head, …] to [batch, head, …]: consecutive heads share."""
        return x.repeat_interleave(H // self.n_kv, 1)

    def z(self, x: Tensor) -> Tensor:
        k, v = (self.expand(heads_of(p(x), self.n_kv)) for p in (self.answer, self.tell))
        return attend(heads_of(self.ask(x), H), k, v)

    def forward(self, x: Tensor) -> Tensor:
        return self.blend(self.z(x))


class Grouped(Attention):
    """Two query heads a KV head."""

    n_kv = KV


class Interleaved(Grouped):
    """Head h uses KV head h mod 3."""

    def expand(self, x: Tensor) -> Tensor:
        return x.repeat(1, H // self.n_kv, 1, 1)


class Fused(nn.Module):
    """One projection holding, for each KV head, its queries, its key and its value."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.everything = nn.Linear(D, (H + 2 * KV) * D_HEAD)
        self.blend = nn.Linear(H * D_HEAD, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.everything(x).unflatten(-1, (KV, H // KV + 2, D_HEAD))
        q, k, v = parts.permute(0, 2, 3, 1, 4).split([H // KV, 1, 1], dim=2)
        k, v = (t.repeat(1, 1, H // KV, 1, 1) for t in (k, v))
        q, k, v = (t.flatten(1, 2) for t in (q, k, v))
        return self.blend(attend(q, k, v))


class Shuffled(Attention):
    """Heads are written down last first."""

    def z(self, x: Tensor) -> Tensor:
        return super().z(x).unflatten(-1, (H, -1)).flip(-2).flatten(-2)


class Strided(Attention):
    """Coordinate i of every head, then coordinate i + 1: features run over heads first."""

    def z(self, x: Tensor) -> Tensor:
        return super().z(x).unflatten(-1, (H, -1)).mT.flatten(-2)


class Talking(Attention):
    """Heads are mixed after the softmax."""

    def z(self, x: Tensor) -> Tensor:
        mix = torch.eye(H) + 0.3 * torch.randn(H, H, generator=torch.Generator().manual_seed(1))
        return torch.einsum("hg,btgd->bthd", mix, super().z(x).unflatten(-1, (H, -1))).flatten(2)


class NormedHeads(Attention):
    """A norm over each head between attention and the output projection."""

    def z(self, x: Tensor) -> Tensor:
        z = super().z(x).unflatten(-1, (H, -1))
        return nn.functional.rms_norm(z, (D_HEAD,)).flatten(-2)


class NormedConcatenation(Attention):
    """A norm over all heads together: they interact before W_O."""

    def z(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(super().z(x), (H * D_HEAD,))


class Gated(Attention):
    """Each coordinate of z passes through a gate of its own."""

    def z(self, x: Tensor) -> Tensor:
        return super().z(x) * self.ask(x)[..., : H * D_HEAD].sigmoid()


class GatedHeads(Attention):
    """One gate for each head: values arrive scaled."""

    def z(self, x: Tensor) -> Tensor:
        gate = self.ask(x)[..., :H, None].sigmoid()
        return (super().z(x).unflatten(-1, (H, -1)) * gate).flatten(-2)


def layout(**more: object) -> hm.Layout:
    own = {"o": "blend", "v": "tell", "q": "ask", "k": "answer", "n_heads": H}
    return hm.Layout(**own | more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("build", [Attention, Grouped])
def test_projections_apart_in_one_line(build, dtype):
    module = build().to(dtype)
    model = hm.load(module, layout=hm.Layout("blend", "tell", "ask", "answer", n_heads=H))
    check = hm.verify(model, X.to(dtype))
    assert check.ok, check.rows
    assert check.rows[0].values == "exact"
    heads = model.heads(0)
    assert (heads.n_heads, heads.n_kv_heads, heads.d_head) == (H, build.n_kv, D_HEAD)
    W_O = module.blend.weight.detach().float()
    torch.testing.assert_close(heads.W_O[4], W_O[:, 4 * D_HEAD : 5 * D_HEAD].T)
    torch.testing.assert_close(heads.W_V[2], module.tell.weight[2 * D_HEAD : 3 * D_HEAD].T.float())
    assert heads.W_Q.shape == (H, D, 6)


def test_a_fused_grouped_projection_in_one_line():
    own = hm.Layout("blend", "everything", order="grouped", n_heads=H)
    module = Fused()
    model = hm.load(module, layout=own)
    assert hm.verify(model, X).ok
    heads = model.heads(0)
    assert heads.kv_of_head == (0, 0, 1, 1, 2, 2)
    # the second KV head's rows: two queries, a key, a value
    rows = module.everything.weight.detach().unflatten(0, (KV, 4, D_HEAD))[1]
    for ours, theirs in zip(
        (heads.W_Q[2], heads.W_Q[3], heads.W_K[1], heads.W_V[1]), rows, strict=True
    ):
        torch.testing.assert_close(ours.T, theirs)


def test_interleaved_groups_can_be_said():
    module = Interleaved()
    said = layout(kv_of_head=(0, 1, 2, 0, 1, 2))
    model = hm.load(module, layout=said)
    assert hm.verify(model, X).ok
    assert model.heads(0).kv_of_head == (0, 1, 2, 0, 1, 2)


def refusal(module: nn.Module, own: hm.Layout) -> str:
    """Why a layout is refused, having made sure that the sum law alone would not refuse it."""
    (row,) = hm.verify(module, X, layout=own).rows
    assert row.sum_error is not None
    assert row.sum_error < 1e-5
    return row.reason


@pytest.mark.parametrize(
    ("module", "own", "reason"),
    [
        pytest.param(
            Interleaved(), layout(),
            "shifting the values of KV head 0 moved heads [3], which do not use it and left part "
            "of heads [1] still, which do", id="interleaved groups taken for consecutive",
        ),
        pytest.param(
            Grouped(), layout(kv_of_head=(0, 1, 2, 0, 1, 2)),
            "moved heads [1], which do not use it and left part of heads [3] still",
            id="consecutive groups taken for interleaved",
        ),
        pytest.param(
            Fused(), hm.Layout("blend", "everything", order="thirds", n_heads=H),
            "which do not use it", id="grouped taken for thirds",
        ),
        pytest.param(
            Shuffled(), layout(), "shifting the values of KV head 0 moved heads [5], which do not "
            "use it and left part of heads [0] still, which do", id="heads in another order",
        ),
        pytest.param(
            Strided(), layout(), "and left part of heads [0] still, which do",
            id="features run over heads first",
        ),
        pytest.param(
            Attention(), layout(n_heads=H // 2),
            "the coordinates of heads [0, 1, 2] attend with different weights, so that each holds "
            "several heads: n_heads is too small", id="too few heads",
        ),
        pytest.param(
            Attention(), layout(n_heads=1, q=None, k=None),
            "the coordinates of heads [0] attend with different weights", id="one head",
        ),
        pytest.param(
            Attention(), layout(n_heads=2 * H),
            "heads [0, 1] and [2, 3] and [4, 5] and [6, 7] and [8, 9] and [10, 11] attend with the "
            "very same weights, so that each group is one head: n_heads is too large",
            id="too many heads",
        ),
        pytest.param(
            Grouped(), layout(n_heads=2 * H), "which do not use it", id="too many grouped heads"
        ),
        pytest.param(Talking(), layout(), "moved heads [1, 2, 3, 4, 5]", id="talking heads"),
        pytest.param(
            NormedConcatenation(), layout(), "moved heads [1, 2, 3, 4, 5]",
            id="a norm over the concatenation",
        ),
    ],
)  # fmt: skip
def test_the_independence_law_refuses_what_the_sum_law_lets_pass(module, own, reason):
    found = refusal(module, own)
    assert found.startswith("independence law: ")
    assert reason in found


@pytest.mark.parametrize(
    ("build", "values"),
    [(NormedHeads, "not linear"), (Gated, "not linear"), (GatedHeads, "scaled")],
)
def test_what_stands_between_values_and_z_is_told(build, values):
    check = hm.verify(build(), X, layout=layout())
    assert check.ok, check.rows
    assert check.rows[0].values == values


def test_a_norm_after_the_projection_is_not_what_heads_sum_to():
    class Posted(Attention):
        def __init__(self):
            super().__init__()
            self.blend = nn.Sequential(self.blend, nn.LayerNorm(D))

    module = Posted()
    assert hm.verify(module, X, layout=layout(o="blend.0")).ok
    heads = hm.load(module, layout=layout(o="blend.0")).heads(0)
    z = module.z(X).unflatten(-1, (H, -1))
    summed = torch.einsum("bthd,hdm->btm", z, heads.W_O) + heads.b_O
    torch.testing.assert_close(summed, module.blend[0](module.z(X)), atol=1e-5, rtol=1e-5)


def test_many_layers_are_found_by_one_line():
    stack = nn.ModuleDict({"layers": nn.ModuleList(Grouped() for _ in range(3))})
    assert hm.load(stack, layout=layout()).layers == ["L0", "L1", "L2"]


def test_names_that_nobody_knows_get_a_line_to_fill_in():
    with pytest.raises(UnknownLayout) as caught:
        hm.load(Attention())
    message = str(caught.value)
    assert "answer, ask, blend, tell" in message
    assert "layout=headmix.Layout(o=..., v=..., q=..., k=..., n_heads=...)" in message


def test_an_error_in_a_watcher_leaves_no_hook():
    module = Attention()
    model = hm.load(module, layout=layout())

    def fail(z, out):
        raise RuntimeError("in the watcher")

    with pytest.raises(RuntimeError, match="in the watcher"), model.sites["L0"].watch(fail):
        model.forward(X)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    assert module.training


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("build", "values"),
    [
        (Attention, "exact"),
        (Grouped, "exact"),
        (NormedHeads, "not linear"),
        (Gated, "not linear"),
        (GatedHeads, "scaled"),
    ],
)
def test_rounding_in_half_precision_is_no_gate(build, values, dtype):
    """A shift of values comes back rounded to 8 or 11 bits: that bends nothing."""
    for seed in range(6):
        module, generator = build(), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        inputs = torch.randn(2, 7, D, generator=generator).to(dtype)
        model = hm.load(module.to(dtype), layout=layout(), inputs=inputs)
        assert model.sites["L0"].values == values
        assert (model.heads(0).W_V is None) == (values == "not linear")


def test_an_option_of_another_kind_of_source_is_named():
    with pytest.raises(
        ValueError,
        match=r"revision: no option for a module in memory; it takes "
        "layout, name, tokenizer, dtype, inputs",
    ):
        hm.load(Attention(), layout=layout(), revision="main")
    with pytest.raises(ValueError, match="colour: no option for a module with torch"):
        hm.load(nn.MultiheadAttention(8, 2), colour="red")
    loaded = hm.load(Attention(), layout=layout())
    assert hm.load(loaded) is loaded
    for options in ({"layout": layout()}, {"dtype": "float64"}):
        with pytest.raises(ValueError, match="no option for an AttentionModel, which is loaded"):
            hm.load(loaded, **options)


@pytest.mark.parametrize("dtype", ["float16", torch.bfloat16])
def test_weights_in_memory_are_not_read_in_half_precision(dtype):
    for module, own in ((Attention(), layout()), (nn.MultiheadAttention(8, 2), None)):
        with pytest.raises(ValueError, match=r"float16: the weights .* in float32 or float64"):
            hm.load(module, layout=own, dtype=dtype)
    assert hm.load(Attention(), layout=layout(), dtype="float64").heads(0).W_O.dtype == (
        torch.float64
    )


def test_weights_alone_are_read_from_files_only() -> None:
    for there in (nn.MultiheadAttention(8, 2), hm.load(nn.MultiheadAttention(8, 2))):
        with pytest.raises(
            ValueError, match=r"weights_only reads a checkpoint, and a .* in memory"
        ):
            hm.load(there, weights_only=True)
