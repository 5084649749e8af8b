"""torch.nn.MultiheadAttention in every option, alone and inside PyTorch's own layers."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional

import headmix as hm

E, H, T, S = 12, 4, 5, 7


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def lively(module):
    """The module with every bias and norm moved off its initial zeros and ones."""
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.add_(0.3 * noise(*parameter.shape, seed=i))
    return module


def hooks(module):
    kinds = ("_forward_hooks", "_forward_pre_hooks")
    return sum(len(getattr(m, kind)) for m in module.modules() for kind in kinds)


def triple(mha, batched=True, length=T, source=S):
    """query, key, value as a module wants them."""
    widths, lengths = (E, mha.kdim, mha.vdim), (length, source, source)
    shapes = [
        (2, n, w) if mha.batch_first else (n, 2, w) for n, w in zip(lengths, widths, strict=True)
    ]
    parts = [noise(*s, seed=i) for i, s in enumerate(shapes)]
    if not batched:
        parts = [p[0] if mha.batch_first else p[:, 0] for p in parts]
    return tuple(parts)


OPTIONS = {
    "plain": {},
    "batch_first": {"batch_first": True},
    "no bias": {"bias": False},
    "other widths": {"kdim": 8, "vdim": 10},
    "other widths, no bias": {"kdim": 8, "vdim": 10, "bias": False, "batch_first": True},
    "dropout": {"dropout": 0.5},
    "float64": {"dtype": torch.float64},
}
SINKS = {
    "add_bias_kv": {"add_bias_kv": True},
    "add_zero_attn": {"add_zero_attn": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
}


@pytest.mark.parametrize("options", (OPTIONS | SINKS).values(), ids=OPTIONS | SINKS)
@pytest.mark.parametrize("batched", [True, False])
def test_both_laws_hold_in_every_option(options, batched):
    mha = lively(nn.MultiheadAttention(E, H, **options))
    inputs = tuple(x.to(mha.out_proj.weight) for x in triple(mha, batched))
    check = hm.verify(mha, inputs)
    assert check.ok, check.rows
    # a sink takes a share of each row's attention, so that the shift arrives scaled
    expected = "scaled" if options.get("add_bias_kv") or options.get("add_zero_attn") else "exact"
    assert check.rows[0].values == expected
    assert hm.verify(mha).ok  # on the batch that headmix makes by itself


def masks():
    causal = torch.ones(T, T).triu(1).bool()
    padding = torch.tensor([[False] * T, [False] * 3 + [True] * 2])
    return {
        "causal": {"attn_mask": causal, "is_causal": True},
        "causal, not said": {"attn_mask": causal},
        "float": {"attn_mask": causal.float() * -3},
        "per head": {"attn_mask": noise(2 * H, T, T)},
        "padding": {"key_padding_mask": padding},
        "padding and causal": {"key_padding_mask": padding, "attn_mask": causal},
        "maps asked for": {"need_weights": True, "average_attn_weights": False},
        "maps not asked for": {"need_weights": False},
    }


@pytest.mark.parametrize("call", masks().values(), ids=masks())
@pytest.mark.parametrize("batch_first", [True, False])
def test_z_is_softmax_times_values_under_every_mask(call, batch_first):
    """Against attention spelled out head by head in float64."""
    mha = lively(nn.MultiheadAttention(E, H, batch_first=batch_first)).eval()
    x = noise(2, T, E)
    model, seen = hm.load(mha), []
    heads = model.heads(0).to(torch.float64)
    with model.sites["L0"].watch(lambda z, out: seen.append((z, out))), torch.no_grad():
        given = x if batch_first else x.transpose(0, 1)
        returned, _ = mha(given, given, given, **call)
    (z, out) = seen[0]
    assert torch.equal(out, returned if batch_first else returned.transpose(0, 1))

    b_Q, b_K, _ = mha.in_proj_bias.detach().double().unflatten(0, (3, H, -1))
    q, k, v = (
        torch.einsum("btd,hdk->bhtk", x.double(), W) + b[:, None]
        for W, b in ((heads.W_Q, b_Q), (heads.W_K, b_K), (heads.W_V, heads.b_V))
    )
    scores = q @ k.mT / q.shape[-1] ** 0.5
    for name in ("attn_mask", "key_padding_mask"):
        if (mask := call.get(name)) is not None:
            if mask.dtype == torch.bool:
                mask = torch.zeros(mask.shape).masked_fill(mask, -torch.inf)
            mask = mask.unflatten(0, (2, H)) if mask.ndim == 3 else mask
            scores = scores + (mask[:, None, None] if name == "key_padding_mask" else mask)
    expected = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(z.double(), expected, atol=1e-5, rtol=1e-5)


LAYERS = {
    "encoder layer": lambda **o: nn.TransformerEncoderLayer(E, H, 20, **o),
    "encoder": lambda **o: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(E, H, 20, **o), 2, enable_nested_tensor=False
    ),
    "decoder": lambda **o: nn.TransformerDecoder(nn.TransformerDecoderLayer(E, H, 20, **o), 2),
    "transformer": lambda **o: nn.Transformer(E, H, 2, 2, 20, **o),
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(
    "options",
    [
        dict(zip(("batch_first", "norm_first", "bias"), o, strict=True))
        for o in product([0, 1], repeat=3)
    ],
)
def test_pytorchs_own_layers(kind, options):
    module = lively(LAYERS[kind](**{k: bool(v) for k, v in options.items()}))
    x, memory = noise(2, T, E), noise(2, T, E, seed=1)
    check = hm.verify(module, (x, memory) if kind in ("decoder", "transformer") else x)
    assert check.ok, check.rows
    assert {row.values for row in check.rows} == {"exact"}
    names = [row.layer for row in check.rows]
    if kind == "transformer":
        assert names == ["encoder.L0", "encoder.L1"] + [
            f"decoder.L{i}{cross}" for i in (0, 1) for cross in ("", ".cross")
        ]
    assert module.training


def encoder_inputs():
    causal = nn.Transformer.generate_square_subsequent_mask(T)
    padding = torch.tensor([[False] * T, [False] * 3 + [True] * 2])
    return {
        "nothing": {},
        "mask": {"mask": causal},
        "causal": {"mask": causal, "is_causal": True},
        "padding": {"src_key_padding_mask": padding},
    }


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("call", encoder_inputs().values(), ids=encoder_inputs())
def test_the_fused_inference_kernel_does_not_pass_us_by(call, monkeypatch):
    """In evaluation without gradients an encoder layer is one kernel, and pads are packed away."""
    encoder = lively(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 20, batch_first=True), 2)
    ).eval()
    kernel, runs = torch._transformer_encoder_layer_fwd, []
    monkeypatch.setattr(
        torch, "_transformer_encoder_layer_fwd", lambda *a, **k: runs.append(1) or kernel(*a, **k)
    )
    model, x = hm.load(encoder), noise(2, T, E)
    with torch.no_grad():
        before = encoder(x, **call)
    assert runs  # the test would prove nothing if the kernel never ran
    check = hm.verify(model, {"src": x, **call})
    assert check.ok, check.rows
    with torch.no_grad():
        torch.testing.assert_close(encoder(x, **call), before, rtol=0, atol=0, equal_nan=True)


def test_the_module_is_left_as_it_was():
    module = lively(nn.TransformerEncoderLayer(E, H, 20, dropout=0.3)).train()
    module.self_attn.eval()  # a mixed setting must come back mixed
    before = {k: v.clone() for k, v in module.state_dict().items()}
    model = hm.load(module)
    assert hm.verify(model, noise(T, 2, E)).ok
    assert module.training
    assert module.dropout.training
    assert not module.self_attn.training
    assert hooks(module) == 0
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    model.heads(0).W_O.zero_()  # what is read is a copy
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())


def test_hooks_go_after_errors_inside_and_outside():
    mha = nn.MultiheadAttention(E, H)
    site = hm.load(mha).sites["L0"]

    def fail(z, out):
        raise RuntimeError("in the watcher")

    with pytest.raises(RuntimeError, match="in the watcher"), site.watch(fail):
        mha(*triple(mha))
    with pytest.raises(KeyError), site.watch(lambda z, out: None):
        raise KeyError
    with pytest.raises(AssertionError), site.shift_values(torch.ones(H, E // H)):
        mha(*(noise(T, 2, E + 1),) * 3)
    assert hooks(mha) == 0


def test_a_shift_of_values_is_gone_afterwards():
    mha = lively(nn.MultiheadAttention(E, H)).eval()
    inputs, site = triple(mha), hm.load(mha).sites["L0"]
    plain = mha(*inputs)[0]
    shift = noise(H, E // H)
    with site.shift_values(shift):
        moved = mha(*inputs)[0]
    expected = plain + functional.linear(shift.flatten(), mha.out_proj.weight)
    torch.testing.assert_close(moved, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(mha(*inputs)[0], plain)


def test_widths_of_keys_and_values_may_differ():
    heads = hm.load(nn.MultiheadAttention(E, H, kdim=8, vdim=10)).heads(0)
    assert heads.W_Q.shape == (H, E, E // H)
    assert heads.W_K.shape == (H, 8, E // H)
    assert heads.W_V.shape == (H, 10, E // H)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
def test_every_tower_reads_a_stream_of_its_own():
    """Cross layers read the encoder's stream; so encoder heads must be said to write to it."""
    model = hm.load(nn.Transformer(E, H, 1, 1, 20))
    streams = {n: (model.heads(n).stream, model.heads(n).kv_stream) for n in model.layers}
    assert streams == {
        "encoder.L0": ("encoder", "encoder"),
        "decoder.L0": ("decoder", "decoder"),
        "decoder.L0.cross": ("decoder", "encoder"),
    }
    scores = hm.measure(model, metrics=["composition_k", "composition_q"])

    def known(metric, layer_b):
        return scores[metric].sel(layer="encoder.L0", layer_b=layer_b).notnull().values

    assert known("composition_k", "decoder.L0.cross").all()
    assert not known("composition_q", "decoder.L0.cross").any()
    assert not known("composition_k", "decoder.L0").any()

    alone = hm.load(nn.TransformerDecoder(nn.TransformerDecoderLayer(E, H, 20), 1))
    streams = {n: (alone.heads(n).stream, alone.heads(n).kv_stream) for n in alone.layers}
    assert streams == {"L0": ("residual", "residual"), "L0.cross": ("residual", "encoder")}
