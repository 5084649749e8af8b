"""Where heads look: exact cases, the model's own attention maps in full, and measure."""

import json
import math

import numpy as np
import pytest
import torch
from architectures import tiny_model
from scipy.spatial.distance import jensenshannon
from torch import Tensor

import headmix as hm
from headmix.attention import AttentionPatterns
from headmix.metrics import attention_entropy, attention_js, sink_mass
from headmix.registry import NotApplicable

NAMES = ("attention_entropy", "sink_mass", "attention_js")


def patterns(pattern: Tensor) -> AttentionPatterns:
    """Of ``[head, query, key]``, one sequence."""
    sums = AttentionPatterns.zeros(pattern.shape[0], folds=1)
    sums.update(pattern[None].double(), fold=0)
    return sums


def values(pattern: Tensor) -> dict[str, np.ndarray]:
    sums = patterns(pattern)
    return {m.name: m(sums).numpy() for m in (attention_entropy, sink_mass, attention_js)}


def nulls(pattern: Tensor) -> dict[str, np.ndarray]:
    sums = patterns(pattern)
    return {m.name: m.null(sums)[0].numpy() for m in (attention_entropy, sink_mass, attention_js)}


class TestExactCases:
    def test_uniform_over_all_keys(self) -> None:
        A = torch.full((3, 5, 8), 1 / 8)
        found, null = values(A), nulls(A)
        assert np.allclose(found["attention_entropy"], math.log(8))
        assert np.allclose(found["sink_mass"], 1 / 8)
        assert np.allclose(found["attention_js"], 0, atol=1e-15)
        for name in NAMES:
            assert np.allclose(found[name], null[name], atol=1e-15)

    def test_uniform_over_what_is_not_later(self) -> None:
        A = torch.ones(2, 6, 6).tril()
        found, null = values(A / A.sum(-1, keepdim=True)), nulls(A / A.sum(-1, keepdim=True))
        assert np.allclose(found["attention_entropy"], np.log(range(1, 7)).mean())
        assert np.allclose(found["sink_mass"], np.mean(1 / np.arange(1, 7)))
        for name in NAMES:
            assert np.allclose(found[name], null[name], atol=1e-8)

    def test_one_key_each_and_never_the_same(self) -> None:
        A = torch.stack([torch.eye(4), torch.eye(4).roll(1, 1), torch.eye(4).roll(2, 1)])
        found = values(A)
        assert not found["attention_entropy"].any()
        assert np.allclose(found["attention_js"], math.log(2) * (1 - np.eye(3)))
        assert np.allclose(found["sink_mass"], 1 / 4)

    def test_all_on_the_first_key(self) -> None:
        A = torch.zeros(2, 6, 6)
        A[0, :, 0], A[1] = 1, torch.eye(6)
        assert values(A)["sink_mass"].tolist() == pytest.approx([1, 1 / 6])

    def test_heads_that_look_alike(self) -> None:
        A = torch.randn(1, 7, 9).softmax(-1).expand(3, 7, 9)
        assert not values(A)["attention_js"].any()
        assert (nulls(A)["attention_js"][~np.eye(3, dtype=bool)] > 0.01).all()

    def test_half_shared(self) -> None:
        """(1, 0) against (½, ½): JS = ¾ ln 4/3 + … by hand."""
        A = torch.tensor([[[1.0, 0.0]], [[0.5, 0.5]]])
        expected = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) - math.log(2) / 2
        assert values(A)["attention_js"][0, 1] == pytest.approx(expected)

    def test_nothing_seen(self) -> None:
        for metric in (attention_entropy, sink_mass, attention_js):
            with pytest.raises(NotApplicable, match="no query rows"):
                metric(AttentionPatterns.zeros(2, folds=3))

    def test_heads_that_have_nothing_to_do_with_each_other_meet_the_null(self) -> None:
        """Each looks sharply at places of its own, no place more often than another."""
        A = (4 * torch.randn(6, 400, 64, generator=torch.Generator().manual_seed(0))).softmax(-1)
        apart = ~np.eye(6, dtype=bool)
        found, null = values(A)["attention_js"][apart], nulls(A)["attention_js"][apart]
        assert np.allclose(found, null, rtol=0.03)
        shared = 0.7 * A[:1] + 0.3 * A
        found, null = values(shared)["attention_js"][apart], nulls(shared)["attention_js"][apart]
        assert (found < 0.5 * null).all()


def oracle(model: hm.AttentionModel, texts: list[str]) -> dict[str, np.ndarray]:
    """Every row of the maps that the model itself outputs, in float64, a text at a time."""
    module = model.module
    before = module.config._attn_implementation
    module.set_attn_implementation("eager")
    L, H = module.config.num_hidden_layers, module.config.num_attention_heads
    rows, entropy, first, js = 0, np.zeros((L, H)), np.zeros((L, H)), np.zeros((L, H, H))
    for text in texts:
        with torch.no_grad():
            maps = module(**model.tokenizer(text, return_tensors="pt"), output_attentions=True)
        A = torch.cat(maps.attentions).double().numpy()[:, :, 1:-1]  # not of [CLS] and [SEP]
        A /= A.sum(-1, keepdims=True)
        rows += A.shape[2]
        entropy -= (A * np.log(A)).sum((2, 3))
        first += A[..., 0].sum(2)
        js += (jensenshannon(A[:, :, None], A[:, None], axis=-1) ** 2).sum(-1)
    module.set_attn_implementation(before)
    return {
        "attention_entropy": entropy / rows,
        "sink_mass": first / rows,
        "attention_js": js / rows,
    }


TEXTS = [
    "The cat sat on the mat, and then it left again.",
    "Attention heads look at tokens.",
    "Nobody expected that the bridge would be closed for repairs until the following spring.",
    "Short.",
    "Rivers carry sand to the sea.",
    "He asked whether the numbers had been checked, and they had not.",
]


def test_equals_the_maps_that_a_real_model_outputs() -> None:
    model = hm.load("demo")
    ds = hm.measure(model, TEXTS, metrics=NAMES, folds=3)
    for name, expected in oracle(model, TEXTS).items():
        assert np.abs(ds[name].values - expected).max() < 1e-6, name
        assert (ds[f"{name}_low"] <= ds[name]).all()
        assert (ds[f"{name}_high"] >= ds[name]).all()
        assert (ds[f"{name}_high"] - ds[f"{name}_low"]).max() > 0.01
    assert "ran with eager attention" in ds.attrs["attention"]
    assert ds.attention_entropy.attrs["units"] == "nats"
    assert (ds.attention_entropy < ds.attention_entropy_null_mean).all()
    assert "attention_entropy_null_sd" not in ds


def documents(count: int = 10) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 99, (20 + 3 * n,), generator=generator) for n in range(count)]


class TestMeasure:
    def test_only_when_asked_for_by_name(self) -> None:
        model = hm.load(tiny_model("llama"))
        ds = hm.measure(model, documents())
        assert "attention" not in ds.attrs
        assert not set(NAMES) & set(ds)
        with pytest.raises(ValueError, match=r"sink_mass cannot be computed from weights alone"):
            hm.measure(model, metrics=["sink_mass"])

    def test_alone_or_with_moments_gives_the_same(self) -> None:
        model = hm.load(tiny_model("llama"))
        alone = hm.measure(model, documents(), metrics=NAMES)
        moments = hm.measure(model, documents(), metrics=["cka"])
        both = hm.measure(model, documents(), metrics=["cka", *NAMES])
        assert np.allclose(both.cka, moments.cka, atol=1e-4)  # another kernel rounds another way
        for name in NAMES:
            assert (both[name] == alone[name]).all()
        assert (alone.n_tokens == moments.n_tokens).all()
        assert (alone.n_documents == moments.n_documents).all()

    def test_batches_do_not_matter(self) -> None:
        model = hm.load(tiny_model("gpt2").double())
        few = hm.measure(model, documents(), metrics=NAMES, tokens_per_batch=1000)
        many = hm.measure(model, documents(), metrics=NAMES, tokens_per_batch=1)
        for name in NAMES:
            for suffix in ("", "_null_mean", "_low", "_high"):
                assert np.allclose(few[name + suffix], many[name + suffix], rtol=1e-9)

    def test_layers_without_patterns_are_skipped_with_the_reason(self) -> None:
        model = hm.load(tiny_model("gpt_oss"))
        ds = hm.measure(model, documents(), metrics=["variance_share", "sink_mass"])
        assert "variance_share" in ds
        reasons = json.loads(ds.attrs["skipped"])["sink_mass"]
        assert set(reasons) == {"L0", "L1"}
        assert "attention rows do not sum to one" in reasons["L0"]

    def test_cross_attention_looks_at_the_other_stream(self) -> None:
        model = hm.load(tiny_model("t5"))
        text = [
            {"input_ids": torch.randint(5, 99, (1, 12)), "decoder_input_ids": ids}
            for ids in torch.randint(5, 99, (4, 1, 5))
        ]
        ds = hm.measure(model, text, metrics=["attention_entropy"], folds=2)
        null = dict(
            zip(ds.layer.values.tolist(), ds.attention_entropy_null_mean.values, strict=True)
        )
        assert null["decoder.L0.cross"] == pytest.approx(math.log(12))
        assert null["encoder.L0"] == pytest.approx(math.log(12))
        assert null["decoder.L0"] == pytest.approx(np.log(range(1, 6)).mean())

    def test_a_checkpoint_of_other_sums_is_refused(self, tmp_path) -> None:
        model, file = hm.load(tiny_model("gpt2")), tmp_path / "sums"
        first = hm.measure(model, documents(), metrics=NAMES, checkpoint=file)
        again = hm.measure(model, documents(), metrics=NAMES, checkpoint=file)
        assert all((first[name] == again[name]).all() for name in NAMES)
        with pytest.raises(ValueError, match="checkpoint of another run"):
            hm.measure(model, documents(), metrics=["cka", *NAMES], checkpoint=file)

    def test_a_checkpoint_keeps_the_reasons(self, tmp_path) -> None:
        model, file = hm.load(tiny_model("gpt_oss")), tmp_path / "sums"
        first = hm.measure(model, documents(), metrics=["cka", "sink_mass"], checkpoint=file)
        again = hm.measure(model, documents(), metrics=["cka", "sink_mass"], checkpoint=file)
        assert again.attrs["skipped"] == first.attrs["skipped"] != "{}"
