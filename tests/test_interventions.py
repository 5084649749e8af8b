"""Interventions: replayed passes, planted truths, nulls, and a model left as it was."""

import copy
import math
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from architectures import tiny_model
from torch import Tensor, nn
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

import headmix as hm
from headmix.capture import Batch
from headmix.causal import Runs, intervene
from headmix.effects import READ_OUTS, Effects, units
from headmix.excerpt import Pass
from headmix.heads import Heads, NotApplicable
from headmix.interventions import Interventions
from headmix.jackknife import interval
from headmix.lab.planted import Head, sequences, views, xor
from headmix.lab.transformer import Config, Transformer
from headmix.metrics import (
    ablation_interaction,
    cross_head_interaction_attn_out,
    cross_head_interaction_mlp_in,
    cross_head_interaction_mlp_out,
    cross_head_interaction_next_logits,
    group_ablation,
    head_ablation,
    head_ablation_kl,
    head_ablation_loss,
    head_ablation_mean,
    head_ablation_zero,
)
from headmix.model import AttentionModel
from headmix.packing import batches

FOLDS = 2


class Encoder(nn.Module):
    """PyTorch's own encoder on token ids; its attention calls the output projection itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(99, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        hidden = None if attention_mask is None else attention_mask == 0
        return self.encoder(self.embed(input_ids), src_key_padding_mask=hidden)


def bridge() -> AttentionModel:
    model = tiny_model("gpt2", AutoModelForCausalLM)
    return hm.load(build_bridge_from_module(model, "GPT2LMHeadModel", hf_config=model.config))


def masked() -> AttentionModel:
    model = tiny_model("bert", AutoModelForMaskedLM, vocab_size=30522)
    return hm.load(model, tokenizer=hm.load("demo").tokenizer)


def lab(**more: object) -> AttentionModel:
    torch.manual_seed(0)
    return hm.load(Transformer(Config(vocabulary=99, n_layers=3, **more)))


MODELS = {
    "bert": lambda: hm.load(tiny_model("bert")),
    "gpt2": lambda: hm.load(tiny_model("gpt2", AutoModelForCausalLM)),
    "llama": lambda: hm.load(tiny_model("llama", AutoModelForCausalLM, num_key_value_heads=2)),
    "gpt_neox": lambda: hm.load(tiny_model("gpt_neox")),
    "deberta-v2": lambda: hm.load(tiny_model("deberta-v2")),
    "albert": lambda: hm.load(tiny_model("albert", num_hidden_layers=3)),
    "t5": lambda: hm.load(tiny_model("t5", AutoModelForSeq2SeqLM)),
    "torch": lambda: hm.load(Encoder().eval()),
    "bridge": bridge,
    "lab": lab,
}
every_model = pytest.mark.parametrize("kind", MODELS)


def documents(n: int = 6, length: int = 12, seed: int = 0) -> list[list[int]]:
    """Random token ids that are special to nobody, in documents of two lengths."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [length - 4 * (k % 2) for k in range(n)]
    return [torch.randint(5, 99, (size,), generator=generator).tolist() for size in sizes]


def prepare(
    model: AttentionModel, text: object = None, *, tokens_per_batch: int = 48, **options: object
) -> Runs:
    options = {"tokens": 60, "interactions": 0} | options
    feed = batches(
        model, text or documents(), folds=FOLDS, max_length=16, tokens_per_batch=tokens_per_batch
    )
    heads = {name: model.heads(name) for name in model.layers}
    how = Interventions(**options)
    return Runs(model, heads, feed, how, folds=FOLDS, tokens_per_batch=tokens_per_batch)


def ran(model: AttentionModel, text: object = None, **options: object) -> Runs:
    runs = prepare(model, text, **options)
    intervene(runs)
    return runs


@contextmanager
def counted(module: nn.Module) -> Iterator[list[int]]:
    """How many times a module is run."""
    calls: list[int] = []
    real = module.forward

    def forward(*args: object, **kwargs: object) -> object:
        calls.append(1)
        return real(*args, **kwargs)

    module.forward = forward
    try:
        yield calls
    finally:
        del module.forward


@every_model
def test_a_pass_from_a_layer_on_is_the_whole_pass(kind: str) -> None:
    model = MODELS[kind]()
    quick, whole = prepare(model), prepare(model)
    whole.stage.replay.refused = dict.fromkeys(model.layers, "for comparison")
    assert not intervene(quick)[0].unseen["effects"]
    intervene(whole)
    assert not quick.stage.replay.refused
    for layer, expected in whole.found.effects.items():
        found = quick.found.effects[layer]
        for name in ("distance", "loss", "divergence"):
            a, b = getattr(found, name), getattr(expected, name)
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
        assert found.distance[:, :, 0].nan_to_num().sum() > 1e-3


def test_blocks_before_the_layer_are_not_run() -> None:
    model = MODELS["llama"]()
    runs = prepare(model, replacements=("zero",))
    first, last = (model.module.model.layers[n].mlp for n in (0, -1))
    with counted(first) as early, counted(last) as late:
        intervene(runs)
    passes, H = len(runs.text["effects"]), 4
    # as it is, each unit of the first layer, and once to prove that; the donors' pass ends early
    assert len(early) == passes * (1 + 1 + H) + 1
    assert len(late) == passes * (1 + 2 * H) + 2


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama", "t5", "torch", "lab"])
def test_zero_is_what_is_left_without_the_rows_of_W_O(kind: str) -> None:
    """An independent way: the same weights, those of one head set to zero."""
    model = MODELS[kind]()
    layer, head = model.layers[-1], 2
    runs = ran(model, replacements=("zero",))
    twin = copy.deepcopy(model.module)
    site = model.sites[layer]
    projection = twin.get_submodule(site.attention.o.path)
    columns = site.attention.o.features[head]
    with torch.no_grad():
        if type(projection).__name__ == "Conv1D":
            projection.weight[columns] = 0
        else:
            projection.weight[:, columns] = 0
    total, tokens = 0.0, 0
    torch.backends.mha.set_fastpath_enabled(False)
    for run in runs.text["effects"]:
        before, after = (last_hidden(module, run) for module in (model.module, twin))
        total += float(((after - before).norm(dim=-1) / before.norm(dim=-1)).sum())
        tokens += len(before)
    torch.backends.mha.set_fastpath_enabled(True)
    value = float(head_ablation_zero(runs.found.effects[layer])[head])
    assert value == pytest.approx(total / tokens, rel=1e-4)
    assert value > 1e-4


def last_hidden(module: nn.Module, run: Pass) -> Tensor:
    """The last hidden state of the tokens that count, read without headmix."""
    base = module.decoder if hasattr(module, "decoder") else getattr(module, "base_model", module)
    seen: list[Tensor] = []

    def hook(module: nn.Module, inputs: object, output: object) -> None:
        seen.append(output if isinstance(output, Tensor) else output[0])

    handle = base.register_forward_hook(hook)
    with torch.no_grad():
        module(**run.inputs) if isinstance(run.inputs, dict) else module(run.inputs)
    handle.remove()
    stream = "decoder" if "decoder" in run.keep else "residual"
    return seen[-1][run.keep[stream]]


@pytest.mark.parametrize("kind", ["bert", "albert", "torch"])
def test_resampling_takes_the_same_position_of_another_document(kind: str) -> None:
    model = MODELS[kind]()
    runs = prepare(model, replacements=("resample",))
    layer, head = model.layers[1], 1
    run = runs.text["effects"].passes[0]
    own, others, replaced = [], [], []
    with model.sites[layer].watch(lambda z, out: own.append(z.clone())):
        model.forward(run.inputs)
    with model.sites[layer].watch(lambda z, out: others.append(z.clone())):
        model.forward(run.donor)
    runs.stage.enter(run)
    members = torch.arange(4) == head
    whole = kind == "albert"  # watchers count the calls of its one module
    with (
        runs.stage.replaced(layer, members, "resample", whole=whole),
        model.sites[layer].watch(lambda z, out: replaced.append(z.clone())),
    ):
        model.forward(run.inputs)
    z = own[0].unflatten(-1, (4, -1)).clone()
    z[..., head, :] = others[0].unflatten(-1, (4, -1))[..., head, :]
    if kind != "torch":  # its watcher computes z once more, from what the layer was given
        torch.testing.assert_close(replaced[0], z.flatten(-2))
    keep = run.keep["residual"]
    ids, donors = run.inputs["input_ids"], run.donor["input_ids"]
    assert ids.shape == donors.shape
    assert (ids[keep] != donors[keep]).float().mean() > 0.9
    texts = [tuple(d) for d in documents()]
    for row, k in zip(donors, keep, strict=True):
        assert any(t[: int(k.sum())] == tuple(row[k].tolist()) for t in texts)


def test_a_model_is_left_as_it_was() -> None:
    model = MODELS["llama"]()
    model.module.train()
    before = {n: p.clone() for n, p in model.module.state_dict().items()}
    ran(model, interactions=30)
    runs = prepare(model)
    runs.stage.enter(runs.text["effects"].passes[0])
    members = torch.ones(4, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="fails"), runs.stage.replaced("L1", members, "zero"):
        raise RuntimeError("it fails")
    for module in model.module.modules():
        assert module.training
        assert "forward" not in vars(module)
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    for name, value in model.module.state_dict().items():
        assert torch.equal(value, before[name])


def test_groups_are_replaced_together() -> None:
    model = MODELS["llama"]()
    heads = model.heads("L1")
    found = ran(model, replacements=("resample",), pairs={"L1": [(0, 1), (1, 2)]}).found
    effects = found.effects["L1"]
    value = group_ablation(heads, effects)
    pair = effects.distance.sum(0)[0, effects.unit([0, 1])] / effects.n
    assert float(value[0]) == pytest.approx(float(pair))
    assert value.shape == (2,)
    interaction = ablation_interaction(effects)
    assert interaction.isnan().sum() == 4 * 3 - 2 * 3
    with pytest.raises(ValueError, match=r"L1: no pair \(2, 2\)"):
        units(heads, [(2, 2)])


@pytest.mark.parametrize("kind", ["gpt2", "masked"])
def test_the_size_of_batches_changes_nothing_that_is_drawn(kind: str) -> None:
    """The same windows, donors and hidden tokens: only sums are rounded in another order."""
    model = MODELS[kind]() if kind in MODELS else masked()
    text = documents(9)
    if kind == "masked":
        text = [" ".join(f"word {n * k}" for k in range(9 - n % 3)) for n in range(9)]
    few, many = (
        ran(model, text, tokens_per_batch=size, tokens=50, interactions=20) for size in (16, 500)
    )
    assert len(few.text["effects"]) > len(many.text["effects"]) == 1
    for layer, expected in many.found.effects.items():
        found = few.found.effects[layer]
        assert torch.equal(found.predictions, expected.predictions)
        for name in ("clean_loss", "distance", "loss"):
            a, b = getattr(found, name), getattr(expected, name)
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5, equal_nan=True)
    for layer, expected in many.found.interactions.items():
        a, b = few.found.interactions[layer].joint, expected.joint
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-7)


def test_a_model_with_a_head_beside_its_decoder_is_read_before_the_head() -> None:
    model = MODELS["t5"]()
    runs = prepare(model)
    runs.stage.enter(runs.text["effects"].passes[0])
    assert runs.stage.clean.output.shape[1] == model.module.config.d_model
    assert runs.stage.clean.logits.shape[1] == model.module.config.vocab_size


def test_a_masked_model_is_asked_for_what_is_hidden() -> None:
    model = masked()
    text = [f"word {n} and so on to the end of it, {n} times" for n in range(8)]
    runs = ran(model, text, tokens=80, masked_share=0.3, replacements=("resample",))
    effects = runs.found.effects["L0"]
    assert runs.stage.read.objective == "masked"
    assert 0.1 < float(effects.predictions.sum() / effects.n) < 0.5
    run = runs.text["effects"].passes[0]
    task = runs.stage.read.task(run)
    ids = task.run.inputs["input_ids"]
    mask = model.tokenizer.mask_token_id
    assert torch.equal(ids == mask, task.at)
    assert torch.equal(run.inputs["input_ids"][task.at], task.answers)
    assert not (task.at & ~run.keep["residual"]).any()
    # a model that knows nothing: every word is as likely
    mean = float(effects.clean_loss.sum() / effects.predictions.sum())
    assert mean == pytest.approx(math.log(30522), rel=0.2)
    assert head_ablation_kl(effects).min() > 0
    assert head_ablation_loss(effects).abs().max() < 1


@pytest.mark.parametrize("kind", ["opt", "qwen3_moe"])
def test_a_feed_forward_may_take_all_rows_behind_one_another(kind: str) -> None:
    model = hm.load(tiny_model(kind))
    found = ran(model, replacements=("resample",), interactions=30).found
    layer = model.layers[0]
    value = cross_head_interaction_mlp_out(found.interactions[layer])
    assert (value + torch.eye(len(value)) > 1e-6).all()
    assert not found.unseen["interactions"]


# planted truth

BITS = [row.tolist() for row in sequences(2, 60, 24, seed=3)]


def periodic() -> list[Batch]:
    """Sequences that repeat after four tokens, of which only what can be predicted counts."""
    ids = sequences(16, 80, 24, period=4, seed=1)
    keep = torch.arange(24).expand(8, 24) > 4
    rows = ids.split(8)
    return [
        Batch(row, fold=n % FOLDS, documents=8, keep={"residual": keep})
        for n, row in enumerate(rows)
    ]


def planted(model: Transformer, text: list, **options: object) -> Runs:
    options = {"tokens": 1200, "replacements": ("resample",), "interactions": 1200} | options
    loaded = hm.load(model)
    feed = batches(loaded, text, folds=FOLDS, max_length=32)
    heads = {name: loaded.heads(name) for name in loaded.layers}
    runs = Runs(loaded, heads, feed, Interventions(**options), folds=FOLDS)
    intervene(runs)
    return runs


def test_xor_interacts_in_the_feed_forward_alone() -> None:
    """|a − b| of two even bits: Δ = −(a′ − a)(b′ − b), δ_a = −(a′ − a) b: E Δ² = 4, E δ² = 2."""
    found = planted(xor(), BITS).found.interactions["L0"]
    assert cross_head_interaction_attn_out(found).max() < 1e-5
    at_mlp_in = cross_head_interaction_mlp_in(found)
    assert at_mlp_in.max() < 1e-5  # no norm
    value = cross_head_interaction_mlp_out(found)
    assert value[0, 1] == pytest.approx(1, abs=0.1)
    value[0, 1] = value[1, 0] = 0
    assert value.max() < 1e-5
    with pytest.raises(NotApplicable, match="no layer of the same stream comes next"):
        cross_head_interaction_next_logits(found)


def test_a_linear_feed_forward_leaves_effects_adding_up() -> None:
    model = xor()
    with torch.no_grad():
        model.layers[0].mlp.fc1.bias += 50  # every neuron is on
        model.layers[0].mlp.fc2.weight[:, 0] *= 2  # or a − b and b − a would cancel
    found = planted(model, BITS).found.interactions["L0"]
    assert cross_head_interaction_mlp_out(found).max() < 1e-4


def test_what_position_says_is_the_same_in_every_document() -> None:
    """A resampled head that carries position alone changes nothing; one at its mean does."""
    heads = [Head(token=1, back=1), Head(position=1, back=2), Head(token=0.5, position=0.5)]
    text = [row.tolist() for row in sequences(16, 80, 24, seed=1)]
    runs = planted(views(heads), text, replacements=("resample", "mean", "zero"))
    effects, found = runs.found.effects["L0"], runs.found.interactions["L0"]
    assert head_ablation(effects)[1] < 1e-6
    assert head_ablation_mean(effects)[1] > 0.01
    moved = found.single.sum(0)[list(READ_OUTS).index("attn_out")] / found.n
    # twice the variance that is not position's
    torch.testing.assert_close(moved, torch.tensor([2.0, 0, 1.0]).double(), rtol=0.1, atol=1e-6)
    with pytest.raises(NotApplicable, match="does not show where its feed-forward begins"):
        cross_head_interaction_mlp_in(found)


def test_only_the_head_that_is_read_has_an_effect_on_the_loss() -> None:
    heads = [Head(token=1, back=3), Head(token=1, back=1), Head(token=1, back=2)]
    runs = planted(views(heads, reads=0), periodic(), objective="causal", interactions=0)
    loss = head_ablation_loss(runs.found.effects["L0"])
    assert loss[0] > 1
    assert loss[1:].abs().max() < 1e-6
    assert head_ablation_kl(runs.found.effects["L0"])[1:].max() < 1e-6


def test_two_copies_stand_in_for_each_other() -> None:
    """Either may go at some cost, both at more than the sum; as the weights say, by hand."""
    planted_heads = [Head(token=1, back=3), Head(copy_of=0), Head(token=1, back=1)]
    pairs = {"L0": [(0, 1), (0, 2)]}
    model = views(planted_heads, reads=0)
    runs = planted(model, periodic(), objective="causal", interactions=0, pairs=pairs)
    effects = runs.found.effects["L0"]
    assert effects.clean_loss.sum() / effects.predictions.sum() < 1e-3
    alone, pair = head_ablation_loss(effects), ablation_interaction(effects)
    by_hand = torch.stack([direct_loss(runs, model, who) for who in ((), (0,), (1,), (0, 1))])
    added = by_hand[1:] - by_hand[0]
    torch.testing.assert_close(alone[:2], added[:2], rtol=1e-4, atol=1e-5)
    assert pair[0, 1] == pytest.approx(float(added[2] - added[0] - added[1]), rel=1e-3)
    assert pair[0, 1] > alone[0] > 0.1
    assert pair[0, 2].abs() < 1e-6


def direct_loss(runs: Runs, model: Transformer, heads: tuple[int, ...]) -> Tensor:
    """The loss with z resampled, from what the last map reads: there is nothing else after W_O."""
    W_O, losses = runs.heads["L0"].W_O, []
    for run in runs.text["effects"]:
        own, stream = written(runs.stage.model, model, run.inputs)
        other, _ = written(runs.stage.model, model, run.donor)
        for h in heads:
            stream = stream + (other - own)[..., h, :] @ W_O[h]
        with torch.no_grad():
            logits = model.lm_head(stream)[:, :-1]
        counts = run.keep["residual"][:, 1:]
        answers = run.inputs[:, 1:][counts]
        losses.append(nn.functional.cross_entropy(logits[counts], answers, reduction="none"))
    return torch.cat(losses).double().mean()


def written(loaded: AttentionModel, model: Transformer, ids: Tensor) -> list[Tensor]:
    """z of each head, and the stream that the last map reads."""
    seen: list[Tensor] = []
    handle = model.lm_head.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    with loaded.sites["L0"].watch(lambda z, out: seen.append(z.unflatten(-1, (3, -1)))):
        loaded.forward(ids)
    handle.remove()
    return seen


# nulls


def null_effect(seed: int) -> bool:
    """Whether the interval covers 0 where the next token has nothing to do with the head."""
    torch.manual_seed(seed)
    config = Config(
        vocabulary=8, n_heads=1, d_head=4, d_model=8, length=8, skip=False, mlp=False, norm=False
    )
    module = Transformer(config)
    with torch.no_grad():
        module.lm_head.weight.mul_(5)
    text = [row.tolist() for row in sequences(8, 40, 8, seed=seed)]
    loaded = hm.load(module)
    feed = batches(loaded, text, folds=5, max_length=8)
    heads = {"L0": loaded.heads("L0")}
    options = Interventions(
        tokens=300, replacements=("resample",), interactions=0, objective="causal"
    )
    runs = Runs(loaded, heads, feed, options, folds=5, seed=seed)
    intervene(runs)
    effects = runs.found.effects["L0"]
    low, high = interval(
        head_ablation_loss(effects), [head_ablation_loss(r) for r in effects.replicates]
    )
    return bool(low[0] <= 0 <= high[0])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_intervals_of_a_null_effect_cover_zero_as_often_as_they_say() -> None:
    """z of another document is as good as the own: what comes next depends on neither."""
    covered = sum(null_effect(seed) for seed in range(300))
    assert 0.95 - 3 * (0.95 * 0.05 / 300) ** 0.5 < covered / 300


def test_sums_add_up() -> None:
    model = MODELS["llama"]()
    runs = prepare(model, replacements=("resample", "zero"))
    intervene(runs)
    whole = runs.found.effects["L1"]
    again = prepare(model, replacements=("resample", "zero"))
    parts = []
    for run in again.text["effects"]:
        again.stage.enter(run)
        parts.append(again.work["effects"].run("L1", lambda: None))
    assert len(parts) > 1
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    for name in Effects.sums():
        a, b = getattr(total, name), getattr(whole, name)
        torch.testing.assert_close(a, b, equal_nan=True)
    assert whole.n == sum(int(run.keep["residual"].sum()) for run in again.text["effects"])
    other = Effects.zeros(torch.eye(3, dtype=torch.bool), folds=FOLDS)
    with pytest.raises(ValueError, match="members differs"):
        _ = whole + other


# resumed, interrupted


def test_a_resumed_run_ends_with_the_same_sums(tmp_path) -> None:
    model = MODELS["bert"]()
    expected = ran(model, interactions=30).found
    file = tmp_path / "kept"
    first = prepare(model, interactions=30)
    stops = iter([False] * 4)

    def kill(done: int, total: int) -> None:
        if first.found.steps == 3 and next(stops, True):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        intervene(first, checkpoint=file, seconds=0, done=kill)
    second = prepare(model, interactions=30)
    counts: list[int] = []
    found, interrupted = intervene(
        second, checkpoint=file, done=lambda done, total: counts.append(done)
    )
    assert not interrupted
    assert found.steps == expected.steps
    assert counts[0] > 1
    assert counts[-1] == second.total
    for kind in ("effects", "interactions"):
        for layer, sums in getattr(expected, kind).items():
            for name in type(sums).sums():
                got = getattr(getattr(found, kind)[layer], name)
                assert torch.equal(got.nan_to_num(-1), getattr(sums, name).nan_to_num(-1))
    other = prepare(model, interactions=20)
    with pytest.raises(ValueError, match="is the checkpoint of another run"):
        intervene(other, checkpoint=file)


def test_an_interrupted_run_measures_what_it_saw() -> None:
    model = MODELS["bert"]()

    def progress(what: str, done: int, total: int) -> None:
        if what == "heads replaced" and done == 2:
            os.kill(os.getpid(), signal.SIGINT)

    ds = hm.measure(
        model, documents(), folds=FOLDS, max_length=16, progress=progress, metrics="head_ablation",
        causal=Interventions(tokens=60, replacements=("resample",), interactions=0),
    )  # fmt: skip
    assert "forward passes with heads replaced were run" in ds.attrs["interrupted"]
    assert ds.n_tokens.values[0] > 0
    assert ds.head_ablation.sel(layer="L0").notnull().all()
    assert ds.head_ablation.sel(layer="L1").isnull().all()


# through measure


def test_measure_gives_them_with_the_rest() -> None:
    model = MODELS["llama"]()
    options = Interventions(tokens=40, interactions=20)
    ds = hm.measure(model, documents(), folds=FOLDS, max_length=16, causal=options)
    for name in ("head_ablation", "head_ablation_loss", "head_ablation_kl", "group_ablation"):
        assert ds[name].notnull().all()
        assert (ds[f"{name}_low"] <= ds[name]).all()
    assert (ds.cross_head_interaction_attn_out < 1e-5).all()
    assert (ds.cross_head_interaction_mlp_out.max(("head", "head_b")) > 1e-3).all()
    assert ds.cross_head_interaction_next_logits.sel(layer="L0").max() > 1e-4
    assert "variance_share" in ds
    assert "40 tokens" in ds.attrs["causal"]
    assert "loss on the next token" in ds.attrs["causal"]
    without = hm.measure(model, documents(), folds=FOLDS, max_length=16)
    assert "head_ablation" not in without
    assert ds.ablation_interaction.notnull().sum(("head", "head_b")).values.tolist() == [8, 8]


def test_naming_a_metric_is_asking_for_it() -> None:
    model = MODELS["bert"]()
    ds = hm.measure(
        model, documents(), folds=FOLDS, max_length=16, metrics=["head_ablation"], layers="L1"
    )
    assert ds.head_ablation.shape == (1, 4)
    assert ds.n_tokens.item() == 60
    assert "pairs" not in ds.attrs["causal"]
    name = "cross_head_interaction_attn_out"
    alone = hm.measure(model, documents(), folds=FOLDS, max_length=16, metrics=[name])
    assert alone[name].max() < 1e-5
    assert alone.attrs["causal"].startswith("pairs of 8 heads resampled on 60 tokens")
    with pytest.raises(ValueError, match="head_ablation cannot be computed from weights alone"):
        hm.measure(model, metrics="head_ablation")


def test_what_cannot_be_run_has_a_reason() -> None:
    alone = hm.measure(
        MODELS["bert"](), [documents()[0]], folds=1, max_length=16, metrics="head_ablation"
    )
    assert "not run: replacement resample" in alone.attrs["skipped"]
    assert "Nothing was resampled" in alone.attrs["causal"]
    with pytest.raises(ValueError, match="unknown replacement median; known: resample"):
        Interventions(replacements=("median",))
    with pytest.raises(ValueError, match="interactions=-1, most_pairs=100: expected no tokens or"):
        Interventions(interactions=-1)
    with pytest.raises(ValueError, match="expected no tokens or more, and one pair or more"):
        Interventions(most_pairs=0)
    pairs = Interventions(tokens=20, pairs={"L0": [(0, 1)]})
    with pytest.raises(ValueError, match="pairs of L0, which is not among the layers measured: L1"):
        hm.measure(MODELS["bert"](), documents(), folds=FOLDS, layers="L1", causal=pairs)
    with pytest.raises(ValueError, match="heads are replaced while text runs: pass text="):
        hm.measure(MODELS["bert"](), causal=True)
    with pytest.raises(ValueError, match="objective 'next': expected one of causal"):
        prepare(MODELS["bert"](), objective="next")
    with pytest.raises(ValueError, match="its tokenizer has no mask token"):
        prepare(MODELS["bert"](), objective="masked")
    effects = ran(MODELS["bert"](), replacements=("zero",)).found.effects["L0"]
    with pytest.raises(NotApplicable, match="neither a causal nor a masked language model"):
        head_ablation_loss(effects)
    with pytest.raises(NotApplicable, match="not run: replacement resample"):
        head_ablation(effects)


def test_images_are_resampled_from_the_next() -> None:
    model = hm.load(tiny_model("vit"))
    images = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    options = Interventions(interactions=10)
    ds = hm.measure(model, images, folds=3, causal=options, metrics=["head_ablation"])
    assert ds.head_ablation.min() > 1e-4
    assert "all tokens of 6 documents" in ds.attrs["causal"]


def test_what_has_no_output_for_each_token_keeps_the_rest() -> None:
    class Summary(Encoder):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return super().forward(input_ids, attention_mask).mean(1)

    model = hm.load(Summary().eval())
    ds = hm.measure(
        model, documents(), folds=FOLDS, max_length=16, metrics=["head_ablation", "head_norm"]
    )
    assert "head_ablation" not in ds
    assert "tokens are regrouped on the way" in ds.attrs["skipped"]
    assert ds.head_norm.notnull().all()


def test_units_are_heads_groups_and_pairs() -> None:
    heads = Heads(W_O=torch.ones(3, 1, 4), kv_of_head=(0, 0, 0))
    assert units(heads).sum(1).tolist() == [1, 1, 1, 3]
