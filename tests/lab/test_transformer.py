"""Every variant is a model like any other: laws, metrics, files; and W_O is what its name says."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

import headmix as hm
from headmix import lab

SMALL = {"vocabulary": 7, "length": 12, "n_layers": 2, "n_heads": 4, "d_head": 4, "d_model": 16}
TOKENS = torch.randint(7, (3, 12), generator=torch.Generator().manual_seed(0))


def build(variant: str, **more) -> lab.Transformer:
    torch.manual_seed(0)
    return lab.Transformer(lab.Config(**SMALL | lab.VARIANTS[variant] | more))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("variant", lab.VARIANTS)
def test_every_variant_passes_both_laws_and_is_measured(variant, causal) -> None:
    model = hm.load(build(variant, causal=causal))
    check = hm.verify(model)
    assert check.ok, check.rows
    assert {row.values for row in check.rows} == {"scaled" if "talking" in variant else "exact"}
    ds = hm.measure(model, text=[TOKENS], folds=1, metrics=["projection_kernel", "variance_share"])
    assert ds.valid.all()
    assert ds.variance_share.sum("head").values == pytest.approx(1)


@pytest.mark.parametrize("switches", [{"skip": False}, {"norm": False}, {"mlp": False}])
@pytest.mark.parametrize("shape", [{"d_head": 8}, {"d_head": 2}, {"offsets": (0, 1, 2, None)}])
def test_every_architecture_passes_both_laws(switches, shape) -> None:
    check = hm.verify(build("full", **switches, **shape))
    assert check.ok, check.rows


@pytest.mark.parametrize("causal", [True, False])
def test_causal_models_do_not_look_ahead_and_others_do(causal) -> None:
    model = build("talking", causal=causal)
    other = TOKENS.clone()
    other[:, -1] = (other[:, -1] + 1) % 7
    moved = (model(TOKENS) - model(other))[:, :-1].abs().max()
    assert (moved < 1e-6) if causal else (moved > 1e-4)


@pytest.mark.parametrize("offsets", [None, (0, 1, 2, None)])
@pytest.mark.parametrize("causal", [True, False])
def test_both_kernels_agree(causal, offsets) -> None:
    model = build("full", causal=causal, offsets=offsets)
    fused = model(TOKENS)
    for layer in model.layers:
        layer.attention.fused = False
    torch.testing.assert_close(model(TOKENS), fused)


def test_attention_patterns_can_be_watched() -> None:
    model, seen = hm.load(build("full", offsets=(0, 1, 2, None))), []
    with model.sites["L0"].watch_attention(seen.append):
        model.forward(TOKENS)
    (pattern,) = seen
    assert pattern.shape == (3, 4, 12, 12)
    torch.testing.assert_close(pattern[:, 1, 5], torch.eye(12)[4].expand(3, -1))


def test_heads_that_are_talking_are_mixed_by_the_matrices_of_the_paper() -> None:
    attention = build("talking").layers[0].attention
    q, k = torch.randn(2, 4, 5, 4), torch.randn(2, 4, 5, 4)
    logits = torch.einsum("bhqd,bhkd->bqkh", q, k) / 2 @ attention.talk_logits
    logits = logits.masked_fill(~torch.ones(5, 5).tril().bool()[:, :, None], -torch.inf)
    expected = (logits.softmax(2) @ attention.talk_weights).permute(0, 3, 1, 2)
    torch.testing.assert_close(attention.pattern(q, k), expected)


@pytest.mark.parametrize("kind", lab.OUTPUTS)
@pytest.mark.parametrize("d_head", [4, 8])
def test_all_kinds_begin_at_the_same_size(kind, d_head) -> None:
    torch.manual_seed(0)
    weight = lab.output_projection(kind, 4, d_head, 16).weight
    assert float(weight.detach().square().sum()) == pytest.approx(4 * d_head, rel=1e-4)


def train_a_little(model: lab.Transformer) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        model(TOKENS).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "free"),
    [
        ("identity", 0), ("random_orthogonal", 0), ("random_blocks", 0), ("hadamard", 16),
        ("shared", 4 * 16), ("block_diagonal", 4 * 4 * 4), ("low_rank", 4 * 32), ("full", 16 * 16),
    ],
)  # fmt: skip
def test_training_keeps_to_the_constraint(kind, free) -> None:
    model = build(kind, n_layers=1)
    projection = model.layers[0].attention.o_proj
    before = projection.weight.detach().clone()
    train_a_little(model)
    W = projection.weight.detach().T.unflatten(0, (4, 4))  # [head, d_head, D]
    moved = (projection.weight.detach() - before).abs().max()
    assert (moved > 1e-5) == (free > 0)
    if kind == "shared":
        torch.testing.assert_close(W[0], W[3])
    if kind == "block_diagonal":
        assert not W[0, :, 4:].any()
        assert not W[3, :, :12].any()
        assert W[3, :, 12:].all()
    if kind == "low_rank":
        assert torch.linalg.matrix_rank(projection.weight) == 4
    if kind == "hadamard":
        ratio = projection.weight.detach() / before
        torch.testing.assert_close(ratio, ratio[:, :1].expand(-1, 16))
    if kind == "random_orthogonal":
        torch.testing.assert_close(before @ before.T, torch.eye(16), atol=1e-5, rtol=0)
    counted = sum(p.numel() for n, p in projection.named_parameters() if "bias" not in n)
    assert counted == (4 * 4 * 16 if kind == "block_diagonal" else free)


def test_the_overlap_dial() -> None:
    """0 with identity, d/D on average with random, 1 with one matrix for all heads."""

    def overlap(kind: str) -> float:
        heads = hm.load(build(kind, n_heads=8, d_head=8, d_model=64)).heads(0)
        kernel = hm.metrics.projection_kernel(heads)
        i, j = torch.triu_indices(8, 8, offset=1)
        return float(kernel[i, j].mean())

    assert overlap("identity") == 0
    assert overlap("random_orthogonal") == pytest.approx(0, abs=1e-6)
    # 28 pairs; sd of one of tr = 8 · overlap is given by the moments of Haar subspaces
    d, D = 8, 64
    sd = (2 * d * d * (D - d) ** 2 / (D**2 * (D - 1) * (D + 2))) ** 0.5 / d
    assert overlap("random_blocks") == pytest.approx(d / D, abs=4 * sd / 28**0.5)
    assert overlap("shared") == pytest.approx(1, abs=1e-5)
    # more heads than the stream has room for overlap whatever W_O is
    forced = hm.load(build("identity", n_heads=8, d_head=8, d_model=32)).heads(0)
    assert float(hm.metrics.mean_overlap(forced)) == pytest.approx(
        float(hm.metrics.welch_floor(forced)), abs=1e-5
    )


@pytest.mark.parametrize("variant", lab.VARIANTS)
def test_files_hold_the_same_function(variant, tmp_path) -> None:
    model = build(variant, offsets=(0, 1, None, None))
    if variant not in ("identity", "random_orthogonal", "random_blocks", "talking_identity"):
        train_a_little(model)
    path = lab.save(model, tmp_path / "model.safetensors")
    opened = lab.open_model(path)
    assert opened.config == model.config
    torch.testing.assert_close(opened(TOKENS), model(TOKENS), atol=1e-5, rtol=1e-5)
    names = {n for n, _ in model.named_parameters()}
    assert {n for n, _ in opened.named_parameters()} == names
    train_a_little(opened)  # it can go on
    live, read = hm.load(model), hm.load(path)
    assert read.layers == ["L0", "L1"]
    for name in ("W_O", "W_V", "W_Q", "b_O"):
        torch.testing.assert_close(getattr(read.heads(1), name), getattr(live.heads(1), name))
    with safe_open(path, "pt") as file:
        assert "layers.1.attention.o_proj.weight" in file.keys()  # noqa: SIM118
        assert not [key for key in file.keys() if "parametrizations" in key]  # noqa: SIM118
        assert json.loads(file.metadata()["headmix_lab"])["output"] == model.config.output


def test_files_that_are_none_are_refused(tmp_path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(ValueError, match="there is no such file"):
        lab.open_model(path)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="is not a lab model"):
        lab.open_model(path)
    from safetensors.torch import save_file

    save_file({"a.weight": torch.ones(2, 2)}, path)
    with pytest.raises(ValueError, match="its metadata has no headmix_lab"):
        lab.open_model(path)
    save_file({"a": torch.ones(2, 2)}, path, {"headmix_lab": "[1]"})
    with pytest.raises(ValueError, match="not the config of a lab model"):
        lab.open_model(path)
    model = build("full")
    save_file({"lm_head.weight": torch.ones(2, 2)}, path, {"headmix_lab": model.config.to_json()})
    with pytest.raises(ValueError, match=r"embed_positions.weight: expected \[12, 16\], found not"):
        lab.open_model(path)


def test_bad_configs_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown output 'none'; known: identity"):
        lab.Config(5, output="none")
    with pytest.raises(ValueError, match="expected one a head, 4"):
        lab.Config(5, offsets=(1, 2))
    with pytest.raises(ValueError, match="= 24 and d_model = 32 must be powers of two"):
        lab.output_projection("hadamard", 3, 8, 32)
    with pytest.raises(ValueError, match="rank=0: expected 1 … 32"):
        lab.output_projection("low_rank", 4, 8, 32, rank=0)
    with pytest.raises(ValueError, match="20 tokens in a sequence: this model takes 12"):
        build("full")(torch.zeros(1, 20, dtype=torch.long))
    config = lab.Config(5, offsets=(1, None, 2, 0), d_ff=7)
    assert lab.Config.from_json(config.to_json()) == config
    assert replace(config, d_ff=None).width == 128


def test_documents_are_cut_to_what_the_model_takes_and_checked() -> None:
    model = build("full")
    documents = [torch.randint(7, (n,)) for n in (30, 12, 5)]
    ds = hm.measure(model, text=documents, folds=2, metrics=["variance_share"])
    assert (ds.n_tokens == 30 + 12 + 5).all()
    assert "windows of at most 12 tokens" in ds.attrs["text_rule"]
    with pytest.raises(ValueError, match="holds token id 7; the model's vocabulary has 7 tokens"):
        hm.measure(model, text=[[1, 2, 7, 3]], folds=2, metrics=["variance_share"])


def test_what_stands_next_to_attention_is_known() -> None:
    model = hm.load(build("full"))
    assert model.reads("L1").W_in.shape == (16, 64)
    assert model.reads("L1").folded == "layers.1.mlp_norm"
    assert model.vocabulary().W_U.shape == (16, 7)
    with pytest.raises(hm.NotApplicable, match="no feed-forward"):
        hm.load(build("full", mlp=False)).reads("L0")
