"""C3: W_O amplifies the heads that matter and attenuates those that overlap. Does it?

    python analyses/03_emphasis.py [--quick]

(a) Do heads with a large share of the attention output matter when they are replaced?
(b) Do heads that find the same tokens alike cancel each other in the residual stream?
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import studies
import torch
import xarray as xr
from figures import Dot, Dots
from torch import Tensor
from verdicts import Decision, Evidence

import headmix as hm

#: The pairs called redundant: this share of a layer's pairs, those of largest CKA.
REDUNDANT = 0.25

#: (b) as a metric of this analysis.
CANCELS = "redundant_interference"


@dataclass(frozen=True)
class Attenuation:
    """One model: its layers, those where redundant heads cancel and those where they add up, each
    with the whole interval beyond two sd of the null."""

    model: str
    layers: int
    cancel: int
    add: int


@dataclass(frozen=True)
class Emphasis:
    """One model: its layers, those where heads with a larger share of the output matter more when
    replaced (whole interval of the rank correlation above 0), and those where they matter less."""

    model: str
    layers: int
    more: int
    less: int


def decide(emphasis: Sequence[Emphasis], attenuation: Sequence[Attenuation]) -> Decision:
    """(a) Heads with a larger share of the output should matter more: so in most layers, and less
    in none. (b) Redundant heads should cancel: so in most layers, and add up in none. Confirmed if
    both hold. Refuted if redundant heads add up somewhere and cancel nowhere. Otherwise it depends
    on the half of the claim, on the layer, or on more text where no interval is clear of its
    null."""
    layers, more, less = (sum(getattr(f, n) for f in emphasis) for n in ("layers", "more", "less"))
    of, cancel, add = (sum(getattr(f, n) for f in attenuation) for n in ("layers", "cancel", "add"))
    because = (
        f"(a) Heads with a larger share of the output matter more in {more} of {layers} layers and "
        f"less in {less}, by an interval clear of 0; that W_O made their shares large is not "
        f"tested. (b) The heads that are most alike cancel each other in {cancel} of {of} layers "
        f"and add up in {add}, by an interval clear of two sd of the null. In the others "
        "intervals are not clear."
    )
    amplifies, attenuates = 2 * more > layers and not less, 2 * cancel > of and not add
    if amplifies and attenuates:
        return Decision("confirmed", because)
    if add and not cancel:
        return Decision("refuted", because)
    if not cancel and not add:
        return Decision("depends", because, on="more text than was read")
    if amplifies != attenuates and not (cancel and add):
        return Decision("depends", because, on="the half of the claim")
    return Decision("depends", because, on="the layer")


def pairs(heads: Any, moments: Any) -> tuple[Tensor, Tensor]:
    """Of each pair of heads: CKA, and interference in sd of its null (heads turned at random)."""
    upper = torch.triu_indices(heads.n_heads, heads.n_heads, 1)
    _, sd = hm.metrics.pair_interference.null(heads, moments)
    z = hm.metrics.pair_interference(heads, moments) / sd
    return hm.metrics.cka(heads, moments)[tuple(upper)], z[tuple(upper)]


def redundant_interference(heads: Any, moments: Any) -> Tensor:
    """Mean interference of the most redundant pairs, in sd of its null: below 0 they cancel."""
    cka, z = pairs(heads, moments)
    return z[cka.topk(_count(heads)).indices].mean()


def null(heads: Any, moments: Any) -> tuple[Tensor, Tensor]:
    """A mean of so many numbers with mean 0 and sd 1, uncorrelated where heads are turned."""
    return torch.tensor(0.0), torch.tensor(_count(heads) ** -0.5)


def _count(heads: Any) -> int:
    return max(1, round(REDUNDANT * heads.n_heads * (heads.n_heads - 1) / 2))


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """The rank correlation of two lists without ties."""
    ranks = torch.stack([x.argsort().argsort().double() for x in (a, b)])
    return torch.corrcoef(ranks)[0, 1]


def measure_emphasis(
    model: hm.AttentionModel, text: Any, shares: xr.DataArray, *, tokens: int, seed: int
) -> xr.Dataset:
    """(a) of some layers, as a metric of this analysis: the shares are those of all of the text,
    what is replaced is jackknifed."""

    def emphasis(heads: Any, effects: Any) -> Tensor:
        """Spearman correlation over heads of the variance share and of what replacing costs."""
        try:
            cost = hm.metrics.head_ablation_loss(effects)
        except hm.NotApplicable:  # it predicts no tokens: how far the output moves
            cost = hm.metrics.head_ablation(effects)
        return spearman(torch.as_tensor(shares.sel(layer=heads.layer).values), cost)

    hm.metric(
        title="Share and importance", formula="Spearman(share, cost)", dims=(), range=(-1, 1),
        null=lambda heads, effects: (torch.tensor(0.0), torch.tensor((heads.n_heads - 1) ** -0.5)),
        null_text="shares dealt to heads at random", invariant=("gauge", "rotation"),
    )(emphasis)  # fmt: skip
    how = hm.Interventions(tokens=tokens, replacements=["resample"], interactions=0)
    return hm.measure(
        model, text, metrics=["emphasis", "head_ablation", "head_ablation_loss"], causal=how,
        layers=studies.some_layers(model, 6), seed=seed,
    )  # fmt: skip


def register() -> None:
    """Let ``measure`` know this analysis' own metric; when it runs, not when it is imported."""
    hm.metric(
        title="Interference of redundant heads", formula="mean z over the quarter of largest CKA",
        dims=(), range=(-math.inf, math.inf), null=null, null_text="heads turned at random",
        invariant=("gauge", "rotation", "scale", "head_scale"),
    )(redundant_interference)  # fmt: skip


def main() -> None:
    chosen = studies.options(__doc__)
    register()
    text, described = studies.text(chosen)
    models, absent = studies.models(chosen)
    twin = studies.before(studies.MINILM)
    models[twin] = studies.untrained(models[studies.MINILM], chosen.seed)
    datasets, found, halves, evidence, dots = {}, [], [], [], []
    for name, model in models.items():
        datasets[name] = ds = hm.measure(
            model, text, metrics=[CANCELS, "interference_ratio", "variance_share"],
            max_tokens=8_000 if chosen.quick else None, seed=chosen.seed,
        )  # fmt: skip
        found.append(attenuation(name, ds))
        dots += studies.by_layer(ds, CANCELS, name)
        if name != twin:
            datasets[f"{name} replaced"] = replaced = measure_emphasis(
                model, text, ds.variance_share, seed=chosen.seed,
                tokens=300 if chosen.quick else 800,
            )  # fmt: skip
            halves.append(emphasis(name, replaced))
            evidence += emphasis_numbers(halves[-1], replaced)
        evidence += numbers(found[-1], ds)
    studies.publish(
        chosen, __file__, "C3", decide,
        decide(halves, [f for f in found if f.model != twin]), evidence,
        [matters({name: datasets[f"{name} replaced"] for name in models if name != twin}),
         figure(dots)], datasets, text=described, absent=absent,
    )  # fmt: skip


def emphasis(name: str, ds: xr.Dataset) -> Emphasis:
    more, less = ds.emphasis_low > 0, ds.emphasis_high < 0
    return Emphasis(name, ds.sizes["layer"], int(more.sum()), int(less.sum()))


def emphasis_numbers(found: Emphasis, ds: xr.Dataset) -> list[Evidence]:
    n, what = studies.sample(ds), "rank correlation of a head's share and the cost of replacing it"
    ends = (("lowest", ds.emphasis.values.argmin()), ("highest", ds.emphasis.values.argmax()))
    return [
        Evidence(
            "(a) amplifies", found.model, f"{what}, mean over layers", float(ds.emphasis.mean()),
            f"{found.layers} layers, {n}", 0.0,
            float(ds.emphasis_null_sd.mean()) / found.layers**0.5,
        ),
        *(
            studies.reading(
                ds.isel(layer=int(at)), "emphasis", "(a) amplifies", found.model,
                f"{what}, {which} ({ds.layer.values[at]})", n,
            )
            for which, at in ends
        ),
    ]  # fmt: skip


def matters(datasets: dict[str, xr.Dataset]) -> Dots:
    return Dots(
        title="Do heads with a larger share of the output matter more?",
        caption=(
            "Rank correlation over the heads of a layer between the share of the output's variance "
            "and the cost of resampling the head (loss, or change of the output where there is no "
            "loss), with intervals over documents. The band is two sd of shares dealt at random."
        ),
        axis="rank correlation of share and cost",
        dots=[d for name, ds in datasets.items() for d in studies.by_layer(ds, "emphasis", name)],
        zero=True,
    )


def attenuation(name: str, ds: xr.Dataset) -> Attenuation:
    edge = 2 * ds[f"{CANCELS}_null_sd"]
    cancel, add = (ds[f"{CANCELS}_high"] < -edge), (ds[f"{CANCELS}_low"] > edge)
    return Attenuation(name, ds.sizes["layer"], int(cancel.sum()), int(add.sum()))


def numbers(found: Attenuation, ds: xr.Dataset) -> list[Evidence]:
    name, n, layers = found.model, studies.sample(ds), f"{found.layers} layers"
    ends = (
        ("most negative", ds[CANCELS].values.argmin()),
        ("largest", ds[CANCELS].values.argmax()),
    )
    counts = (("cancel", found.cancel), ("add up", found.add))
    return [
        *(
            Evidence(
                "(b) redundant heads", name, f"share of layers in which they {what}",
                count / found.layers, layers, over="documents",
            )
            for what, count in counts
        ),
        *(
            studies.reading(
                ds.isel(layer=int(at)), CANCELS, "(b) redundant heads", name,
                f"their mean interference in null sd, {which} ({ds.layer.values[at]})", n,
            )
            for which, at in ends
        ),
    ]  # fmt: skip


def figure(dots: list[Dot]) -> Dots:
    return Dots(
        title="Do the heads that are most alike cancel each other?",
        caption=(
            "Mean interference of the quarter of pairs with the largest CKA, in standard "
            "deviations of the null, with intervals over documents. Left of the band they cancel, "
            "right of it they add up; the band is what heads turned at random would give."
        ),
        axis="interference of redundant pairs (null sd)",
        dots=dots,
        zero=True,
    )


if __name__ == "__main__":
    main()
