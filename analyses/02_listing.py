"""C2: concatenation alone does not let heads influence each other. But are they unrelated?

    python analyses/02_listing.py [--quick]

Influence is tested by experiment: shift the values of one head and see which blocks of the
concatenation move. Relation is measured on text: what the outputs of heads tell of each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import studies
import xarray as xr
from figures import Dot, Dots
from verdicts import Decision, Evidence

import headmix as hm

#: Held out by documents, and with what position explains taken away: the strictest of relations.
R2 = "loo_r2_within_position"


@dataclass(frozen=True)
class Listing:
    """One model: its layers, those in which only a head's own blocks moved; layers measured on
    text, those in which heads are related: the whole interval of total correlation lies beyond two
    sd of its null."""

    model: str
    layers: int
    separate: int
    measured: int
    related: int


def decide(found: Sequence[Listing]) -> Decision:
    """Confirmed if only the shifted head's blocks ever move and, on text, heads are as good as
    unrelated. Refuted if another head's block moves. Where blocks stay apart but total correlation
    exceeds its null, the claim holds for influence and fails for independence: it depends."""
    if moved := [f for f in found if f.separate < f.layers]:
        where = ", ".join(
            f"{f.layers - f.separate} of {f.layers} layers of {f.model}" for f in moved
        )
        return Decision("refuted", f"In {where} the values of one head moved another's block.")
    layers = " and ".join(f"all {f.layers} layers of {f.model}" for f in found)
    apart = (
        f"In {layers}, shifting one head's values moved that head's own blocks of the "
        "concatenation and no other"
    )
    if not any(f.related for f in found):
        return Decision("confirmed", f"{apart}; nor do their outputs tell of each other on text.")
    related = " and ".join(
        f"{f.related} of the {f.measured} layers of {f.model} that were measured" for f in found
    )
    return Decision(
        "depends",
        f"{apart}. On text, though, their outputs tell of each other, beyond what unrelated "
        f"heads would show, in {related}: all heads read the same stream.",
        on="what influence means: no head acts on another before W_O, but they are not independent",
    )


def main() -> None:
    chosen = studies.options(__doc__)
    text, described = studies.text(chosen)
    models, absent = studies.models(chosen)
    twin = studies.before(studies.MINILM)
    models[twin] = studies.untrained(models[studies.MINILM], chosen.seed)
    datasets, found, evidence, dots = {}, [], [], []
    for name, model in models.items():
        check = hm.verify(model)
        datasets[name] = ds = hm.measure(
            model, text, metrics=["total_correlation", "loo_r2"], within_position=True,
            layers=studies.some_layers(model, 10),
            max_tokens=8_000 if chosen.quick else None, seed=chosen.seed,
        )  # fmt: skip
        found.append(listing(name, check, ds))
        evidence += numbers(found[-1], ds)
        dots += studies.by_layer(ds, R2, name)
    studies.publish(
        chosen, __file__, "C2", decide,
        decide([f for f in found if f.model != twin]), evidence, [figure(dots)],
        datasets, text=described, absent=absent,
    )  # fmt: skip


def listing(name: str, check: Any, ds: xr.Dataset) -> Listing:
    bound = ds.total_correlation_null_mean + 2 * ds.total_correlation_null_sd
    related = int((ds.total_correlation_low > bound).sum())
    return Listing(name, len(check.rows), sum(row.independent for row in check.rows),
                   ds.sizes["layer"], related)  # fmt: skip


def numbers(found: Listing, ds: xr.Dataset) -> list[Evidence]:
    name, n = found.model, studies.sample(ds)
    excess = ds.total_correlation_low - ds.total_correlation_null_mean
    least = ds.isel(layer=int(excess.values.argmin()))
    above = (ds[f"{R2}_low"] > ds[f"{R2}_null_mean"]).mean()
    best = ds[R2].stack(place=("layer", "head")).idxmax().item()
    return [
        Evidence(
            "influence", name, "share of layers in which only the shifted head's blocks moved",
            found.separate / found.layers, f"{found.layers} layers, every KV head in turn",
        ),
        studies.reading(
            least, "total_correlation", "independence", name,
            f"total correlation (nats) in {least.layer.item()}, the layer closest to its null", n,
        ),
        studies.reading(
            ds.sel(layer=best[0], head=best[1]), R2, "independence", name,
            f"held-out R² of {best[0]}H{best[1]} from the other heads, the best predicted", n,
        ),
        Evidence(
            "independence", name, "share of heads whose whole interval of R² lies above its null",
            float(above), f"{ds[R2].size} heads",
        ),
    ]  # fmt: skip


def figure(dots: list[Dot]) -> Dots:
    return Dots(
        title="How well the other heads predict a head, layer by layer",
        caption=(
            "One faint dot a head: held-out R² with position taken out. The dashed tick is what "
            "unrelated heads would give: heads to the right of it are related, if their intervals "
            "are too; the numbers below count those."
        ),
        axis="held-out R² from the other heads",
        dots=dots,
    )


if __name__ == "__main__":
    main()
