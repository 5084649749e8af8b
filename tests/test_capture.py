"""capture: the sums of a materialised float64 computation, and a model left as it was."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from architectures import tiny_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import headmix as hm
from headmix.capture import Batch, Regrouped, capture
from headmix.model import AttentionModel
from headmix.moments import Moments

H, D_HEAD, D = 4, 6, 20
FOLDS = 2

#: For each architecture, the layers in order and the module that is each one's output projection.
PROJECTIONS = {
    "gpt2": {f"L{i}": f"h.{i}.attn.c_proj" for i in range(2)},
    "bert": {f"L{i}": f"encoder.layer.{i}.attention.output.dense" for i in range(2)},
    "llama": {f"L{i}": f"layers.{i}.self_attn.o_proj" for i in range(2)},
    "t5": {
        f"{stream}.L{i}{kind}": f"{stream}.block.{i}.layer.{n}.{attention}.o"
        for stream, kind, n, attention in (
            ("encoder", "", 0, "SelfAttention"),
            ("decoder", "", 0, "SelfAttention"),
            ("decoder", ".cross", 1, "EncDecAttention"),
        )
        for i in range(2)
    },
    "albert": {
        f"L{i}": "encoder.albert_layer_groups.0.albert_layers.0.attention.dense" for i in range(3)
    },
}


class Attention(nn.Module):
    """Hand-written, under names of its own; two query heads a KV head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ask, self.answer = nn.Linear(D, H * D_HEAD), nn.Linear(D, H * D_HEAD // 2)
        self.tell, self.blend = nn.Linear(D, H * D_HEAD // 2), nn.Linear(H * D_HEAD, D)

    def z(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, D_HEAD)) for p in (self.ask, self.answer, self.tell))
        k, v = (t.repeat_interleave(2, -2) for t in (k, v))
        scores = torch.einsum("...qhd,...khd->...hqk", q, k) / D_HEAD**0.5
        return torch.einsum("...hqk,...khd->...qhd", scores.softmax(-1), v).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        return self.blend(self.z(x))


class Windowed(Attention):
    """Attends within windows of four tokens, which it makes rows of their own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unflatten(1, (-1, 4)).flatten(0, 1)).unflatten(0, (len(x), -1))


LAYOUT = hm.Layout("blend", "tell", "ask", "answer", n_heads=H)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(5, 99, shape, generator=torch.Generator().manual_seed(seed))


def captured(model: AttentionModel, batches: list[Batch], **options: int) -> dict[str, Moments]:
    heads = {name: model.heads(name) for name in model.layers}
    moments = {
        name: Moments.zeros(h.W_O, folds=FOLDS, pivot=noise(h.n_heads * h.d_head), **options)
        for name, h in heads.items()
    }
    capture(model, batches, heads, moments)
    return moments


@contextmanager
def recording(module: nn.Module, path: str) -> Iterator[list[Tensor]]:
    """Everything that goes into one module, call by call, by a hook of the test's own."""
    calls: list[Tensor] = []
    projection = module.get_submodule(path)
    handle = projection.register_forward_pre_hook(lambda m, args: calls.append(args[0].clone()))
    yield calls
    handle.remove()


def materialised(
    module: nn.Module, run: Callable[[], object], projections: dict[str, str]
) -> dict[str, Tensor]:
    """z of every layer in one full pass, ``[sequence, token, concat]``, float64."""
    found = {}
    for layer, path in projections.items():
        same = [n for n, p in projections.items() if p == path]
        with recording(module, path) as calls, torch.inference_mode():
            run()
        assert len(calls) == len(same)
        found[layer] = calls[same.index(layer)].double()
    return found


def assert_sums(moments: Moments, heads: hm.Heads, z: list[Tensor]) -> None:
    """The sums are those over the given tokens ``[token, concat]``, a tensor for each fold."""
    W_O = heads.W_O.double()
    assert moments.count.tolist() == [len(part) for part in z]
    for fold, part in enumerate(z):
        own = moments.select([fold])
        u = part - own.pivot
        each, centred = (
            torch.einsum("thd,hdm->thm", t.unflatten(1, W_O.shape[:2]), W_O) for t in (part, u)
        )
        n = centred.square().sum(-1)
        expected = {
            "first": u.sum(0),
            "square": n.sum(0),
            "square_pairs": n.T @ n,
            "weighted": u.T @ n,
            "norm": each.norm(dim=-1).sum(0),
        }
        for name, sums in expected.items():
            # norms of single tokens are taken in the model's own float32
            tolerance = (1e-9 if name == "first" else 1e-6) * sums.abs().max()
            assert (getattr(own, name)[0] - sums).abs().max() <= tolerance, name
        torch.testing.assert_close(own.scatter, u.T @ u, rtol=1e-9, atol=1e-9)
        # taken from what the projection returned, in the model's own float32
        joint = (part @ W_O.flatten(0, 1)).norm(dim=-1).sum()
        torch.testing.assert_close(own.joint_norm[0], joint, rtol=1e-6, atol=1e-9)


def assert_alike(a: dict[str, Moments], b: dict[str, Moments], tolerance: float) -> None:
    """Every sum within a tolerance of its own largest entry."""
    assert a.keys() == b.keys()
    for layer, mine in a.items():
        for name in Moments.sums():
            left, right = getattr(mine, name), getattr(b[layer], name)
            apart = (left - right).abs().max() if left.numel() else torch.tensor(0.0)
            scale = right.abs().max() if right.numel() else 1.0
            assert apart <= tolerance * scale, f"{layer}: {name} differs by {apart / scale:.1e}"


def hooks(module: nn.Module) -> int:
    kinds = [k for k in vars(nn.Module()) if k.endswith("_hooks")]
    return sum(len(getattr(m, kind) or ()) for m in module.modules() for kind in kinds)


@pytest.mark.parametrize("name", PROJECTIONS)
def test_moments_are_those_of_the_materialised_concatenations(name):
    more = {"num_hidden_layers": 3} if name == "albert" else {}
    module = tiny_model(name, **more)
    model = hm.load(module)
    assert set(model.layers) == set(PROJECTIONS[name])
    batches = []
    expected: dict[str, list[Tensor]] = {layer: [] for layer in model.layers}
    for fold, shape in enumerate([(2, 7), (1, 9)]):
        inputs = {"input_ids": ids(*shape, seed=fold)}
        keep = {s: torch.ones(shape, dtype=torch.bool) for s in ("residual", "encoder", "decoder")}
        keep["residual"][:, 0] = keep["encoder"][0, 2:4] = False
        if name == "t5":
            inputs["decoder_input_ids"] = ids(shape[0], 5, seed=fold)
            keep["decoder"] = torch.arange(5).expand(shape[0], 5) > 1
        batches.append(Batch(inputs, fold, documents=shape[0], keep=keep))
        every = materialised(module, lambda given=inputs: module(**given), PROJECTIONS[name])
        for layer, z in every.items():
            expected[layer].append(z[keep[layer.rpartition(".L")[0] or "residual"]])
    moments = captured(model, batches)
    for layer in model.layers:
        assert_sums(moments[layer], model.heads(layer), expected[layer])
        assert moments[layer].documents.tolist() == [2, 1]


def test_layers_that_share_one_projection_are_told_apart():
    moments = captured(hm.load(tiny_model("albert", num_hidden_layers=3)), [Batch(ids(2, 7))])
    means = [m.mean for m in moments.values()]
    assert not torch.allclose(means[0], means[1], rtol=1e-3)
    assert not torch.allclose(means[1], means[2], rtol=1e-3)


@pytest.mark.parametrize("causal", [False, True])
def test_torch_s_own_encoder(causal):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D, H, 16, batch_first=True)
    module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = noise(3, 5, D)
    mask = torch.ones(5, 5).triu(1).bool() if causal else None  # True: not to be seen
    keep = torch.arange(5).expand(3, 5) < torch.tensor([[5], [3], [4]])
    inputs = {"src": x, "mask": mask, "src_key_padding_mask": ~keep}
    batch = Batch(inputs, keep={"residual": keep})
    model = hm.load(module)
    moments = captured(model, [batch])
    twin = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double().eval()
    twin.load_state_dict(module.state_dict())
    h = x.double()
    for n, part in enumerate(twin.layers):
        W, b = part.self_attn.in_proj_weight, part.self_attn.in_proj_bias
        q, k, v = ((h @ W.T + b).unflatten(-1, (3, H, -1))).unbind(2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / (D // H) ** 0.5
        scores = scores.masked_fill(~keep[:, None, None], -torch.inf)
        if mask is not None:
            scores = scores.masked_fill(mask, -torch.inf)
        z = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2).detach()[keep]
        own, u = moments[f"L{n}"], z - moments[f"L{n}"].pivot
        assert own.n == keep.sum()
        torch.testing.assert_close(own.first[0], u.sum(0), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(own.scatter, u.T @ u, rtol=1e-5, atol=1e-5)
        h = part(h, mask, ~keep)


def test_a_hand_written_class():
    module = Attention()
    model = hm.load(module, layout=LAYOUT)
    x = [noise(2, 5, D), noise(3, 4, D, seed=1)]
    moments = captured(model, [Batch(x[0]), Batch((x[1],), fold=1, documents=3)])
    with torch.inference_mode():
        z = [module.z(part).flatten(0, 1).double() for part in x]
    assert_sums(moments["L0"], model.heads(0), z)
    assert moments["L0"].documents.tolist() == [1, 3]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_padding_on_either_side_changes_nothing(name, side):
    model = hm.load(tiny_model(name))
    rows, longest = [ids(n, seed=n) for n in (9, 4, 6)], 9
    alone = [Batch({"input_ids": row[None]}, documents=1) for row in rows]
    padded, mask = torch.zeros(3, longest, dtype=torch.long), torch.zeros(3, longest)
    for n, row in enumerate(rows):
        where = slice(longest - len(row), None) if side == "left" else slice(len(row))
        padded[n, where], mask[n, where] = row, 1
    inputs = {
        "input_ids": padded,
        "attention_mask": mask.long(),
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0).long(),
    }
    together = Batch(inputs, documents=3, keep={"residual": mask.bool()})
    assert_alike(captured(model, [together]), captured(model, alone), 1e-5)


def test_every_token_counts_where_none_are_named():
    model = hm.load(tiny_model("gpt2"))
    everything = torch.ones(2, 6, dtype=torch.bool)
    with_keep = captured(model, [Batch(ids(2, 6), keep={"residual": everything})])
    assert_alike(captured(model, [Batch(ids(2, 6))]), with_keep, 0.0)


def test_positions_are_those_in_the_row():
    model = hm.load(tiny_model("gpt2"))
    keep = torch.tensor([[False, True, True, True], [False, True, True, False]])
    moments = captured(model, [Batch(ids(2, 4), keep={"residual": keep})], positions=6)
    assert moments["L1"].position_count[0].tolist() == [0, 2, 2, 1, 0, 0]
    torch.testing.assert_close(moments["L1"].position_first.sum(1), moments["L1"].first)


def test_kernels_agree():
    eager, sdpa = tiny_model("llama"), tiny_model("llama")
    eager.set_attn_implementation("eager")
    sdpa.set_attn_implementation("sdpa")
    batch = Batch(ids(2, 20))
    assert_alike(captured(hm.load(eager), [batch]), captured(hm.load(sdpa), [batch]), 1e-5)


def test_half_precision_runs_and_says_so():
    whole, half = tiny_model("llama"), tiny_model("llama").to(torch.bfloat16)
    model = hm.load(half)
    assert model.provenance["dtype"] == "bfloat16"
    inputs = {"input_ids": ids(4, 50)}
    moments = captured(model, [Batch(inputs)])
    assert {getattr(moments["L0"], name).dtype for name in Moments.sums()} == {torch.float64}
    assert_alike(moments, captured(hm.load(whole), [Batch(inputs)]), 2e-2)
    outputs = []
    projection = half.layers[0].self_attn.o_proj
    handle = projection.register_forward_hook(lambda m, i, out: outputs.append(out.double()))
    with torch.inference_mode():
        half(**inputs)
    handle.remove()
    exact = outputs[0].norm(dim=-1).sum()  # the model rounds to 3 digits, the sums must not
    torch.testing.assert_close(moments["L0"].joint_norm[0], exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("watched", [["L0"], ["L1"], ["L0", "L1"]])
def test_nothing_behind_the_last_watched_layer_is_run(watched):
    module = tiny_model("gpt2", AutoModelForCausalLM)
    model = hm.load(module)
    ran: list[str] = []
    for name, part in module.named_modules():
        part.register_forward_hook(lambda *_, name=name: ran.append(name))
    model.forward(ids(1, 5))
    assert {"lm_head", "transformer.ln_f", "transformer.h.1.mlp"} <= set(ran)
    ran.clear()
    heads = {name: model.heads(name) for name in watched}
    moments = {name: Moments.zeros(h.W_O, folds=1) for name, h in heads.items()}
    capture(model, [Batch(ids(1, 5))], heads, moments)
    last = int(watched[-1][1])
    assert f"transformer.h.{last}.attn.c_attn" in ran
    behind = {"lm_head", "transformer.ln_f", f"transformer.h.{last}.mlp"}
    behind |= {f"transformer.h.{n}.attn.c_attn" for n in range(last + 1, 2)}
    assert not behind & set(ran)


@pytest.mark.parametrize("name", ["gpt2", "t5", "albert"])
def test_the_model_is_left_as_it_was(name):
    module = tiny_model(name).train()
    module.get_submodule(next(iter(PROJECTIONS[name].values()))).eval()
    inputs = {"input_ids": ids(2, 6)} | ({"decoder_input_ids": ids(2, 5)} if name == "t5" else {})
    model = hm.load(module)

    def state() -> tuple[object, ...]:
        training = [m.training for m in module.modules()]
        grads = [(p.requires_grad, p.grad) for p in module.parameters()]
        return hooks(module), training, grads, torch.get_rng_state().tolist()

    weights = {n: w.clone() for n, w in module.state_dict().items()}
    everything = {"output_hidden_states": True, "return_dict": True}
    expected = model.forward(inputs | everything)
    before = state()
    captured(model, [Batch(inputs), Batch(inputs, fold=1)])
    assert state() == before
    for n, w in module.state_dict().items():
        assert torch.equal(w, weights[n])
    again = model.forward(inputs | everything)
    assert again.keys() == expected.keys()
    assert torch.equal(again.last_hidden_state, expected.last_hidden_state)
    module(**inputs).last_hidden_state.sum().backward()  # autograd still works


def test_an_error_in_the_pass_leaves_nothing_behind():
    module = tiny_model("gpt2").train()
    before = hooks(module)
    model = hm.load(module)
    failing = module.h[1].register_forward_pre_hook(lambda m, args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        captured(model, [Batch(ids(1, 5))])
    failing.remove()
    assert hooks(module) == before
    assert all(m.training for m in module.modules())


def test_regrouped_tokens_are_refused():
    model = hm.load(Windowed(), layout=LAYOUT)
    x = noise(2, 8, D)
    with pytest.raises(Regrouped) as caught:
        captured(model, [Batch(x, keep={"residual": torch.ones(2, 8, dtype=torch.bool)})])
    assert str(caught.value) == (
        "L0: its rows have shape [4, 4], the batch's tokens [2, 8]: tokens are regrouped on the "
        "way (windows, packing), so that padding cannot be told from text. Pass batches without "
        "keep="
    )
    assert not hooks(model.module)
    assert captured(model, [Batch(x)])["L0"].n == 16


def test_a_layer_that_is_never_reached_is_named():
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Attention() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](x)

    model = hm.load(Sometimes(), layout=LAYOUT, name="sometimes")
    message = (
        r"^sometimes: the batch never reached L0, L2; leave these layers out \(layers=...\) or "
        "pass batches that do reach them$"
    )
    with pytest.raises(ValueError, match=message):
        captured(model, [Batch(noise(1, 4, D))])
    assert not hooks(model.module)


def test_what_a_batch_says_of_itself():
    keep = {"encoder": torch.ones(2, 7, dtype=torch.bool), "decoder": torch.eye(3).bool()}
    assert (Batch(None, keep=keep).tokens, Batch(None, keep=keep).length) == (14, 7)
    assert (Batch(None).tokens, Batch(None).length) == (0, 0)
