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


def decide(found: Sequence[Attenuation]) -> Decision:
    """(b) Redundant heads should interfere negatively. Confirmed if they cancel in most layers and
    add up in none; refuted if they add up somewhere and cancel nowhere; else it depends on the
    layer, or on more text where no layer's interval is clear of the null."""
    layers, cancel, add = (sum(getattr(f, n) for f in found) for n in ("layers", "cancel", "add"))
    because = (
        f"The heads that are most alike cancel each other in {cancel} of {layers} layers and add "
        f"up in {add}; in the rest, text does not tell"
    )
    if not cancel and not add:
        return Decision("depends", because + ".", on="more text than was read")
    if not cancel:
        return Decision("refuted", because + ".")
    if not add and 2 * cancel > layers:
        return Decision("confirmed", because + ".")
    return Decision("depends", because + ".", on="the layer")


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
    datasets, found, evidence, dots = {}, [], [], []
    for name, model in models.items():
        datasets[name] = ds = hm.measure(
            model, text, metrics=[CANCELS, "interference_ratio", "variance_share"],
            max_tokens=8_000 if chosen.quick else None, seed=chosen.seed,
        )  # fmt: skip
        found.append(attenuation(name, ds))
        evidence += numbers(found[-1], ds)
        dots += studies.by_layer(ds, CANCELS, name)
    studies.publish(
        chosen, __file__, "C3", decide,
        decide([f for f in found if f.model != twin]), evidence,
        [figure(dots)], datasets, text=described, absent=absent,
    )  # fmt: skip


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
