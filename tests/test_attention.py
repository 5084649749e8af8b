"""Attention patterns: the sums in full, and what every source hands out."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from architectures import NAMED, OTHERS, tiny_model
from scipy.spatial.distance import jensenshannon
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import headmix as hm
from headmix.attention import AttentionPatterns, moved_on
from headmix.capture import Batch, Regrouped, capture
from headmix.model import AttentionModel, token_factors
from headmix.registry import NotApplicable

FOLDS, H = 2, 3

#: Layers whose patterns cannot be had, of a tiny model of each architecture, and why.
NONE = {
    "aimv2": "its pooling head calls torch's attention function itself",
    "data2vec-vision": "always sdpa",
    "gpt_oss": "sinks: rows do not sum to one",
    "groupvit": "its assignment layers are no softmax over keys",
    "led": "banded",
    "longformer": "banded",
    "longt5": "local, in blocks",
    "mobilevit": "returns its output alone",
    "nystromformer": "an approximation: its rows do not sum to one",
    "pegasus_x": "global and local, in blocks",
    "prophetnet": "several streams of queries in one",
    "sam_vision_model": "sdpa, or its own shape",
    "yoso": "hashing",
}

#: Where a shift of the values cannot prove a pattern.
UNPROVABLE = {
    "afmoe": "a gate stands between the values and z",
    "doge": "the mask itself is made from the values",
    "prophetnet": "several streams of queries in one",
}


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(5, 99, shape, generator=torch.Generator().manual_seed(seed))


def causal(*shape: int, seed: int = 0, window: int = 99, dtype: Any = torch.float64) -> Tensor:
    """Attention weights to a query's own key and so many before it."""
    n = shape[-1]
    back = torch.arange(n)[:, None] - torch.arange(n)
    unseen = (back < 0) | (back >= window)
    return (3 * noise(*shape, seed=seed)).masked_fill(unseen, -torch.inf).softmax(-1).to(dtype)


def summed(pattern: Tensor, keep: Tensor | None = None, fold: int = 0) -> AttentionPatterns:
    sums = AttentionPatterns.zeros(pattern.shape[1], folds=FOLDS)
    sums.update(pattern, keep, fold=fold)
    return sums


def assert_equal(a: AttentionPatterns, b: AttentionPatterns, rtol: float = 1e-9) -> None:
    for f in fields(AttentionPatterns):
        assert torch.allclose(getattr(a, f.name), getattr(b, f.name), rtol=rtol, atol=0), f.name


class TestSums:
    @pytest.mark.parametrize("window", [99, 3])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_are_the_sums(self, window: int, dtype: torch.dtype) -> None:
        A = causal(4, H, 7, 7, window=window, dtype=dtype)
        keep = noise(4, 7) > -0.5
        sums = summed(A, keep, fold=1)
        entropy, first, js, uniform, uniform_first = 0.0, 0.0, np.zeros((H, H)), 0.0, 0.0
        for b, q in keep.nonzero().tolist():
            rows = A[b, :, q].double().numpy()
            t = min(q + 1, window)
            entropy = entropy - np.where(
                rows > 0, rows * np.log(np.where(rows > 0, rows, 1)), 0
            ).sum(1)
            first = first + rows[:, 0]
            uniform, uniform_first = uniform + math.log(t), uniform_first + (q < window) / t
            js += [[jensenshannon(p, r) ** 2 for r in rows] for p in rows]
        tolerance = 1e-12 if dtype == torch.float64 else 1e-6
        assert sums.count.tolist() == [0, int(keep.sum())]
        assert np.allclose(sums.entropy[1], entropy, atol=tolerance * len(keep.nonzero()))
        assert np.allclose(sums.divergence[1], js, atol=tolerance * len(keep.nonzero()))
        assert math.isclose(float(sums.uniform_entropy[1]), uniform)
        if window == 99:  # else the first key that any row sees may be a later one
            assert np.allclose(sums.first[1], first)
            assert math.isclose(float(sums.uniform_first[1]), uniform_first)

    def test_do_not_depend_on_how_the_text_is_cut(self) -> None:
        A, keep = causal(6, H, 9, 9), noise(6, 9, seed=1) > 0
        whole = summed(A, keep)
        by_sequence = AttentionPatterns.zeros(H, folds=FOLDS)
        for n in range(6):
            by_sequence.update(A[n : n + 1], keep[n : n + 1], fold=0)
        assert_equal(by_sequence, whole)
        assert_equal(summed(A[:2], keep[:2]) + summed(A[2:], keep[2:]), whole)

    def test_do_not_depend_on_padding(self) -> None:
        A = causal(2, H, 5, 5)
        wide = torch.zeros(2, H, 9, 9, dtype=A.dtype)
        right, left = wide.clone(), wide.clone()
        right[..., :5, :5], left[..., 4:, 4:] = A, A
        left[..., :4, :] = 1 / 9  # what softmax makes of a row that sees nothing
        keep = torch.zeros(2, 9, dtype=torch.bool)
        keep[:, :5] = True
        assert_equal(summed(right, keep), summed(A))
        padded, plain = summed(left, keep.flip(1)), summed(A)
        for name in ("count", "entropy", "first", "divergence", "uniform_entropy", "uniform_first"):
            assert torch.allclose(getattr(padded, name), getattr(plain, name)), name

    def test_do_not_depend_on_how_many_rows_are_taken_together(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        A = causal(3, H, 8, 8)
        whole = summed(A)
        monkeypatch.setattr("headmix.attention.ELEMENTS", 1)
        assert_equal(summed(A), whole)

    def test_leaving_a_fold_out_is_never_having_seen_it(self) -> None:
        A, B = causal(2, H, 6, 6), causal(3, H, 6, 6, seed=1)
        both = summed(A, fold=0) + summed(B, fold=1)
        assert torch.equal(both.without(0).entropy, summed(B, fold=1).entropy[1:])
        assert both.n == 30
        assert len(both.replicates) == FOLDS
        assert repr(both) == "AttentionPatterns(3 heads, 30 query rows of 0 documents in 2 folds)"

    def test_no_row_that_counts_adds_nothing(self) -> None:
        sums = summed(causal(2, H, 4, 4), torch.zeros(2, 4, dtype=torch.bool))
        assert sums.n == 0
        assert not sums.entropy.any()

    def test_half_precision_is_renormalised(self) -> None:
        A = causal(2, H, 40, 40)
        exact, rounded = summed(A), summed(A.bfloat16())
        assert torch.allclose(rounded.entropy, exact.entropy, rtol=5e-3)
        assert torch.allclose(rounded.first, exact.first, rtol=1e-2)

    def test_what_is_no_distribution_is_refused(self) -> None:
        with pytest.raises(NotApplicable, match=r"sum to 0\.5 … 0\.5, not to 1"):
            summed(causal(1, H, 4, 4) / 2)
        with pytest.raises(NotApplicable, match="sum to nan"):
            summed(causal(1, H, 4, 4) * torch.nan)

    def test_what_does_not_belong_together_is_not_added(self) -> None:
        with pytest.raises(ValueError, match=r"entropy has shape \[2, 3\] in one and \[2, 4\]"):
            AttentionPatterns.zeros(3, folds=2) + AttentionPatterns.zeros(4, folds=2)
        with pytest.raises(ValueError, match="2 folds cannot be added to 3"):
            AttentionPatterns.zeros(3, folds=2) + AttentionPatterns.zeros(3, folds=3)


class TestMovedOn:
    def test_keeps_every_row_as_sharp_and_within_what_it_sees(self) -> None:
        rows = causal(1, H, 30, 30)[0].transpose(0, 1)
        seen = rows[:, 0] > 0
        front, moved = moved_on(rows, seen, torch.arange(30))
        assert torch.equal(front.sort(-1).values, rows.sort(-1).values)
        assert torch.equal(moved.sort(-1).values, rows.sort(-1).values)
        assert torch.equal(moved[:, 0] > 0, front[:, 0] > 0)

    def test_every_key_meets_every_other_as_often(self) -> None:
        """Over many queries that see the same keys, the mean is that over all distances."""
        p, q = causal(1, 2, 16, 16)[0, :, -1]
        rows = torch.stack([p, q]).expand(2000, 2, 16)
        sums = AttentionPatterns.zeros(2, folds=1)
        sums.update(rows.transpose(0, 1)[None], fold=0)
        exact = np.mean([jensenshannon(p, q.roll(s)) ** 2 for s in range(16)])
        assert float(sums.shifted_divergence[0, 0, 1] / 2000) == pytest.approx(exact, rel=2e-3)
        assert float(sums.divergence[0, 0, 1] / 2000) == pytest.approx(jensenshannon(p, q) ** 2)


def watched(model: AttentionModel, inputs: Any) -> dict[str, Any]:
    """What each layer hands out in one pass."""
    found = {}
    for name in model.layers:
        with model.sites[name].watch_attention(lambda A, name=name: found.update({name: A})):
            model.forward(inputs)
    return found


def padded(*shape: int) -> dict[str, Tensor]:
    mask = torch.ones(shape, dtype=torch.long)
    mask[1, shape[1] - 3 :] = 0
    return {"input_ids": ids(*shape), "attention_mask": mask}


class TestTransformers:
    @pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "albert", "deberta-v2"])
    def test_are_those_the_model_outputs(self, name: str) -> None:
        module = tiny_model(name)
        found = watched(hm.load(module), padded(3, 10))
        module.set_attn_implementation("eager")
        with torch.no_grad():
            theirs = module(**padded(3, 10), output_attentions=True).attentions
        assert len(found) == len(theirs)
        for mine, A in zip(found.values(), theirs, strict=True):
            assert torch.equal(mine, A)
            assert A.shape == (3, 4, 10, 10)

    def test_of_encoder_decoders_stream_by_stream(self) -> None:
        module = tiny_model("t5")
        inputs = padded(2, 9) | {"decoder_input_ids": ids(2, 5)}
        found = watched(hm.load(module), inputs)
        module.set_attn_implementation("eager")
        with torch.no_grad():
            out = module(**inputs, output_attentions=True)
        for stream, kind, theirs in (
            ("encoder", "", out.encoder_attentions),
            ("decoder", "", out.decoder_attentions),
            ("decoder", ".cross", out.cross_attentions),
        ):
            for i, A in enumerate(theirs):
                assert torch.equal(found[f"{stream}.L{i}{kind}"], A)
        assert found["decoder.L0.cross"].shape == (2, 4, 5, 9)
        assert not found["decoder.L0.cross"][1, ..., 6:].any()

    @pytest.mark.parametrize("model_type", NAMED | OTHERS)
    @pytest.mark.filterwarnings("ignore")  # transformers' own, about tiny sizes
    def test_are_what_a_shift_of_the_values_says(self, model_type: str) -> None:
        """Shifted by another amount at each token, values reach z weighted by the pattern."""
        model = hm.load(tiny_model(model_type, **(NAMED | OTHERS)[model_type]))
        inputs = model.example()
        proven, none = set(), set()
        for name in model.layers:
            try:
                A = watched_layer(model, name, inputs)
            except NotApplicable:
                none.add(name)
                continue
            if A is not None and model_type not in UNPROVABLE:
                assert proves(model, name, inputs, A), name
                proven.add(name)
        assert bool(none) == (model_type in NONE)
        assert proven or none or model_type in UNPROVABLE

    @pytest.mark.parametrize("kernel", ["sdpa", "eager"])
    @pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "clip"])
    def test_leave_the_model_as_it_was(self, name: str, kernel: str) -> None:
        module = tiny_model(name)
        module.set_attn_implementation(kernel)
        model = hm.load(module)
        inputs = model.example()
        with untouched(module, inputs):
            watched(model, inputs)
        stopped = model.sites[model.layers[0]].watch_attention(stop)
        with untouched(module, inputs), pytest.raises(RuntimeError, match="stop"), stopped:
            model.forward(inputs)

    def test_where_a_module_has_none_it_says_so(self) -> None:
        found = watched(hm.load(tiny_model("longformer")), {"input_ids": ids(1, 6)})
        assert "LongformerAttention returned no attention weights" in str(found["L0"])
        with pytest.raises(NotApplicable, match="attention rows do not sum to one"):
            watched(hm.load(tiny_model("gpt_oss")), {"input_ids": ids(1, 6)})


def stop(pattern: object) -> None:
    raise RuntimeError("stop")


@contextmanager
def untouched(module: nn.Module, inputs: Any) -> Iterator[None]:
    """Nothing about a module is another afterwards: output, kernels, config, training, hooks."""

    def state() -> list[Any]:
        hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in module.modules()]
        configs = [m.config for m in module.modules() if hasattr(m, "config")]
        kernels = [c._attn_implementation for c in configs]
        with torch.no_grad():
            output = module.eval()(**inputs)[0].tolist()
        module.train()
        return [
            hooks,
            kernels,
            [m.training for m in module.modules()],
            module.config.to_dict(),
            output,
        ]

    before = state()
    yield
    assert all(m.training for m in module.modules())
    assert state() == before


def watched_layer(model: AttentionModel, name: str, inputs: Any) -> Tensor | None:
    """The pattern of one layer; None where the input does not reach it."""
    found: list[Any] = []
    with model.sites[name].watch_attention(found.append):
        model.forward(inputs)
    if found and isinstance(found[0], NotApplicable):
        raise found[0]
    return found[0] if found else None


def proves(
    model: AttentionModel, name: str, inputs: Any, A: Tensor, *, sequence_first: bool = False
) -> bool:
    """Whether values shifted by another amount at each token reach z weighted by a pattern."""
    site, heads = model.sites[name], model.heads(name)
    zs: list[Tensor] = []
    shift = noise(heads.n_kv_heads, heads.d_head, dtype=torch.float32)
    with site.watch(lambda z, out: zs.append(z.clone())):
        model.forward(inputs)
        with site.shift_values(shift, uneven=True):
            model.forward(inputs)
    sequences, _, queries, keys = A.shape
    moved = (zs[1] - zs[0]).reshape(sequences, queries, heads.n_heads, heads.d_head)
    shape = (keys, sequences, 1) if sequence_first else (sequences, keys, 1)
    factors = token_factors(torch.zeros(shape)).squeeze(-1)
    factors = factors.T if sequence_first else factors
    reached = torch.einsum("bhqk,bk->bqh", A, factors)[..., None] * shift[heads.kv_index]
    return bool((moved - reached).abs().max() <= 1e-4 * reached.abs().max())


class TestOtherSources:
    def test_bridge(self) -> None:
        from transformer_lens.model_bridge.sources import build_bridge_from_module

        module = tiny_model("gpt2", AutoModelForCausalLM)
        plain = watched(hm.load(module), {"input_ids": ids(2, 7)})
        bridge = build_bridge_from_module(
            tiny_model("gpt2", AutoModelForCausalLM), "GPT2LMHeadModel", hf_config=module.config,
            model_name="tiny",
        )  # fmt: skip
        found = watched(hm.load(bridge), {"input": ids(2, 7)})
        _, cache = bridge.run_with_cache(ids(2, 7))
        for i, name in enumerate(plain):
            assert torch.allclose(found[name], plain[name], atol=1e-6)
            assert torch.equal(found[name], cache[f"blocks.{i}.attn.hook_pattern"])

    @pytest.mark.parametrize("batch_first", [True, False])
    def test_multihead_attention(self, batch_first: bool) -> None:
        mha = nn.MultiheadAttention(12, 3, batch_first=batch_first).eval()
        q, k = noise(2, 4, 12, dtype=torch.float32), noise(2, 6, 12, seed=1, dtype=torch.float32)
        if not batch_first:
            q, k = q.transpose(0, 1), k.transpose(0, 1)
        padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
        inputs = {"query": q, "key": k, "value": k, "key_padding_mask": padding}
        found = watched(hm.load(mha), inputs)["L0"]
        _, theirs = mha(**inputs, average_attn_weights=False)
        assert torch.allclose(found, theirs)
        assert found.shape == (2, 3, 4, 6)
        assert not found[1, ..., 4:].any()

    def test_one_sequence_alone(self) -> None:
        x = noise(5, 12, dtype=torch.float32)
        assert watched(hm.load(nn.MultiheadAttention(12, 3)), (x, x, x))["L0"].shape == (1, 3, 5, 5)

    def test_transformer_encoder(self) -> None:
        layer = nn.TransformerEncoderLayer(12, 3, batch_first=True)
        model = hm.load(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
        x = noise(2, 5, 12, dtype=torch.float32)
        for name, A in watched(model, x).items():
            assert proves(model, name, x, A, sequence_first=True)

    def test_hand_built_modules_may_hand_them_out(self) -> None:
        class Attention(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.q, self.k, self.v, self.o = (nn.Linear(12, 12) for _ in range(4))

            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                q, k, v = (p(x).unflatten(-1, (3, 4)) for p in (self.q, self.k, self.v))
                A = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
                return self.o(torch.einsum("bhqk,bkhd->bqhd", A, v).flatten(-2)), A

        class Quiet(Attention):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x)[0]

        layout = hm.Layout(o="o", v="v", q="q", k="k", n_heads=3)
        x = noise(2, 5, 12, dtype=torch.float32)
        model = hm.load(Attention(), layout=layout)
        assert proves(model, "L0", x, watched(model, x)["L0"])
        reason = watched(hm.load(Quiet(), layout=layout), x)["L0"]
        assert "Quiet returned no attention weights" in str(reason)


class TestCapture:
    def test_takes_both_kinds_in_one_pass_and_counts_what_the_batch_keeps(self) -> None:
        model = hm.load(tiny_model("llama"))
        heads = {name: model.heads(name) for name in model.layers}
        inputs = padded(2, 8)
        keep = inputs["attention_mask"].bool()
        sums = {n: AttentionPatterns.zeros(h.n_heads, folds=2) for n, h in heads.items()}
        assert capture(model, [Batch(inputs, 1, 2, {"residual": keep})], heads, {}, sums) == {}
        found = watched(model, inputs)
        for name, looks in sums.items():
            expected = summed(found[name], keep, fold=1)
            expected.documents[1] += 2
            assert_equal(looks, expected)
        assert float(sums["L0"].n) == 13

    def test_tells_why_a_layer_has_none(self) -> None:
        model = hm.load(tiny_model("longformer"))
        heads = {name: model.heads(name) for name in model.layers}
        sums = {n: AttentionPatterns.zeros(h.n_heads, folds=1) for n, h in heads.items()}
        reasons = capture(model, [Batch({"input_ids": ids(1, 6)})] * 2, heads, {}, sums)
        assert set(reasons) == set(heads)
        assert all("returned no attention weights" in reason for reason in reasons.values())
        assert not any(looks.n or looks.documents.any() for looks in sums.values())

    def test_refuses_rows_that_are_not_the_batch_s_tokens(self) -> None:
        model = hm.load(tiny_model("gpt2"))
        heads = {"L0": model.heads("L0")}
        batch = Batch({"input_ids": ids(1, 6)}, keep={"residual": torch.ones(1, 5).bool()})
        with pytest.raises(
            Regrouped, match=r"rows have shape \[1, 6\], the batch's tokens \[1, 5\]"
        ):
            capture(model, [batch], heads, {}, {"L0": AttentionPatterns.zeros(4, folds=1)})
