"""A small model without a network behind it, and a Dataset with every shape of result."""

import json
from dataclasses import dataclass

import numpy as np
import torch
import xarray as xr

from headmix.heads import Heads
from headmix.measurement import measure
from headmix.model import AttentionModel


@dataclass(frozen=True)
class WeightsOnly:
    """A site that knows its weights and nothing else."""

    weights: Heads
    attention: object = None
    notes: tuple[str, ...] = ()
    values: str = "exact"

    def heads(self) -> Heads:
        return self.weights

    def watch(self, watcher):
        raise NotImplementedError

    def watch_attention(self, watcher):
        raise NotImplementedError

    def replace_z(self, replacer, *, skipped=0):
        raise NotImplementedError

    def shift_values(self, shift):
        raise NotImplementedError


def small_model(
    layers: int = 3, heads: int = 4, d_head: int = 4, d_model: int = 16, kv_heads: int = 2
) -> AttentionModel:
    """Random heads on grouped values; the second head of each layer copies the first."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    sites = {}
    for n in range(layers):
        W_O = random(heads, d_head, d_model)
        W_O[1] = W_O[0] + 0.1 * random(d_head, d_model)
        weights = Heads(
            W_O=W_O,
            W_V=random(kv_heads, d_model, d_head),
            W_Q=random(heads, d_model, d_head),
            W_K=random(kv_heads, d_model, d_head),
            layer=f"L{n}",
        )
        sites[f"L{n}"] = WeightsOnly(weights, notes=("values are shared by two heads",))
    return AttentionModel("small", sites, provenance={"source": "random"})


def describe(title: str, **more: str) -> dict[str, str]:
    """The attributes that ``measure`` gives a metric's variable."""
    return {
        "title": title,
        "units": "",
        "formula": "f(h)",
        "range": "[0, 1]",
        "null": "flat",
        "invariant": "gauge",
        "reference": "Someone 2020",
        "family": "own",
        "doc": "What it says.\n\nMore of it.",
    } | more


def every_shape() -> xr.Dataset:
    """What ``measure`` gives for the small model, plus made-up results of each other shape."""
    ds = measure(small_model(), metrics=["projection_kernel"])
    random = np.random.default_rng(0)
    L, H = ds.sizes["layer"], ds.sizes["head"]

    def add(name, dims, values, mean=None, sd=None, **attrs):
        ds[name] = (dims, values, describe(f"Title of {name}", **attrs))
        if mean is not None:
            ds[f"{name}_null_mean"] = mean
        if sd is not None:
            ds[f"{name}_null_sd"] = sd

    add("per_layer", ("layer",), random.random(L), ("layer", np.full(L, 0.5)), ("layer", [0.1] * L))
    add("per_head", ("layer", "head"), random.random((L, H)), ("layer", [0.5] * L), units="nat")
    add("per_group", ("layer", "kv_head"), random.random((L, 2)))
    add("eigen", ("layer", "eigenvalue"), np.sort(random.random((L, 6)))[:, ::-1])
    add("sigma", ("layer", "head", "singular"), np.sort(random.random((L, H, 5)))[..., ::-1])
    cross = random.random((L, H, L, H))
    cross[~np.triu(np.ones((L, L), bool), 1)[:, None, :, None].repeat(H, 1).repeat(H, 3)] = np.nan
    add("cross", ("layer", "head", "layer_b", "head_b"), cross, ((), 0.25), ((), 0.02))
    ds = ds.assign_coords(layer_b=ds.layer.values)
    words = np.array(
        [[[f"w{n}{h}{k}" for k in range(3)] for h in range(H)] for n in range(L)], object
    )
    add("words", ("layer", "head", "rank"), words)
    ds = ds.assign_coords(label=["pos", "place"], label_b=["pos", "place"])
    ds = ds.assign_coords(read_out=["concat", "attn_out", "resid_post"])
    for name, axis in (("told", ()), ("read", ("read_out",)), ("seen", ("head",)),
                       ("costs", ("label_b",))):  # fmt: skip
        dims = ("layer", "label", *axis)
        values = random.random([L, 2, *(ds.sizes[d] for d in axis)])
        add(name, dims, values, ((), 0.5), ((), 0.1))
    add("surprise", ("layer", "head", "head_b", "angle"), random.random((L, H, H, 3)))
    return ds


HOSTILE = [
    "", "\0", "a\0b\0", "\\", "\\u0041", "שלום", "‮evil", "مرحبا",
    "</script><script>window.pwned=1</script>", "<img src=x onerror='window.pwned=1'>",
    "<!--", "]]>", "\u2028\u2029", "{{ 7*7 }}", "{% raw %}", "&lt;b&gt;", "'\"`", "🙂", " ", "\n\t",
    "<a href=\"javascript:window.pwned=1\">x</a>", "%{customdata}", "$\\alpha$",
]  # fmt: skip


def hostile() -> xr.Dataset:
    """Every shape, with text in every place that must be taken as text only."""
    ds = every_shape()
    L, H = ds.sizes["layer"], ds.sizes["head"]
    layers = [f"{n} {text}" for n, text in zip(range(L), HOSTILE[-9:], strict=False)]
    layers[0] = HOSTILE[10] + HOSTILE[11]
    # xarray itself refuses lone surrogates in an array, not in an attribute
    words = np.resize(np.array(HOSTILE, object), (L, H, len(HOSTILE)))
    ds = ds.drop_vars("words").assign_coords(layer=layers, layer_b=layers)
    ds["words"] = (("layer", "head", "rank"), words, describe("Words"))
    nasty = " ".join([*HOSTILE, "\ud800"])
    for variable in (ds.per_head, ds.words, ds.projection_kernel):
        variable.attrs = {k: nasty for k in variable.attrs}
    ds.attrs |= {
        "model": nasty,
        "processing": nasty,
        "notes": json.dumps({layers[0]: HOSTILE}),
        "skipped": json.dumps({nasty: {layers[0]: nasty}}),
        "provenance": json.dumps({nasty: nasty}),
        "versions": json.dumps({nasty: nasty}),
    }
    return ds


def any_layer() -> xr.Dataset:
    """On text, with a metric that compares any two heads of the model, whichever comes first."""
    ds = on_text()
    L, H = ds.sizes["layer"], ds.sizes["head"]
    pairs = np.random.default_rng(2).random((L * H, L * H))
    alike = ((pairs + pairs.T) / 2 + 2 * np.eye(L * H)).reshape(L, H, L, H)
    about = describe("Alike anywhere", needs="layers, joint")
    ds["alike"] = (("layer", "head", "layer_b", "head_b"), alike, about)
    ds["alike_null_mean"], ds["alike_null_sd"] = ((), 0.0), ((), 0.1)
    return ds


def on_text() -> xr.Dataset:
    """Every shape, and made-up metrics of activations: intervals, and one without position."""
    ds = every_shape()
    random = np.random.default_rng(1)
    L, H = ds.sizes["layer"], ds.sizes["head"]

    def add(name: str, dims: tuple[str, ...], values: np.ndarray, **attrs: str) -> None:
        about = {"needs": "heads, moments", "family": "own text"} | attrs
        ds[name] = (dims, values, describe(f"Title of {name}", **about))
        ds[f"{name}_null_mean"] = (dims, np.full(values.shape, 0.5))
        ds[f"{name}_null_sd"] = (dims, np.full(values.shape, 0.01))
        ds[f"{name}_low"] = (dims, values - 0.02)
        ds[f"{name}_high"] = (dims, values + 0.03)

    add("layer_on_text", ("layer",), random.random(L))
    for suffix in ("", "_within_position"):
        add(f"head_on_text{suffix}", ("layer", "head"), random.random((L, H)))
        pairs = random.random((L, H, H))
        add(f"pair_on_text{suffix}", ("layer", "head", "head_b"), (pairs + pairs.mT) / 2)
    ds["n_tokens"], ds["n_documents"] = ("layer", [1200.0] * L), ("layer", [9.0] * L)
    ds.attrs |= {
        "text": "a text made up",
        "text_sha256": "ab" * 32,
        "text_rule": "Every token counts.",
        "folds": "5",
        "plan": "1200 tokens in 3 batches",
    }
    return ds
