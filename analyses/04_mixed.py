"""C4: behind W_O there are mixed features of syntax, meaning and position. Are there?

    python analyses/04_mixed.py [--quick] [--conllu FILE]

Reads labels at every step from one head to the stream, and asks how many heads feed what is read.
Labels of syntax need CoNLL-U.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import studies
import xarray as xr
from figures import Dot, Dots, Heat
from verdicts import Decision, Evidence

import headmix as hm

METRICS = [
    "probe_r2", "head_probe_r2", "multi_head_gain", "probe_participation", "leace_damage",
]  # fmt: skip

#: The way from one head to the stream.
WAY = {
    "concat": "concatenation",
    "attn_out": "attention output",
    "resid_mid": "stream with it",
    "mlp_out": "FFN output",
    "resid_post": "stream after",
}

#: A direction is mixed if so many heads feed it, at least.
HEADS = 2.0


@dataclass(frozen=True)
class Mixing:
    """One model, over all pairs of label and layer in which the label can be read: how many there
    are, in how many at least two heads feed its direction, in how many all heads know more than
    the best, and in how many more is read behind W_O than before (intervals do not meet)."""

    model: str
    read: int
    mixed: int
    gained: int
    new: int


def decide(found: Sequence[Mixing], untrained: Sequence[Mixing] = ()) -> Decision:
    """Mixed means that at least two heads feed a label's direction behind W_O (N_eff), and that all
    heads together know more of it than the best one; each with the whole interval. Confirmed if
    both hold for most labels and layers of each model, refuted if for few (under a tenth of them)
    in each; else it depends on the label and layer."""
    counts = "; ".join(
        f"{f.model}: several heads feed the direction of a label in {f.mixed} of {f.read} cases, "
        f"all heads know more than the best one in {f.gained}"
        for f in found
    )
    new, read = sum(f.new for f in found), sum(f.read for f in found)
    because = (
        f"{counts}. That more can be read behind W_O than from the concatenation is clear in {new} "
        f"of {read} cases: it mixes what is there"
    )
    for f in untrained:
        because += f". In {f.model}, several heads feed a label in {f.mixed} of {f.read} cases"
        because += ": it takes no training" if 2 * f.mixed > f.read else ""
    both = [min(f.mixed, f.gained) / max(1, f.read) for f in found]
    if all(share > 0.5 for share in both):
        return Decision("confirmed", because + ".")
    if all(share < 0.1 for share in both):
        return Decision("refuted", because + ".")
    return Decision("depends", because + ".", on="the label and the layer")


def main() -> None:
    chosen = studies.options(__doc__)
    text, described = studies.text(chosen, labelled=True)
    models, absent = studies.models(chosen)
    if not chosen.conllu:
        absent.append("syntax: it needs --conllu")
    twin = studies.before(studies.MINILM)
    models[twin] = studies.untrained(models[studies.MINILM], chosen.seed)
    datasets = {
        name: hm.measure(
            model, text, labels=studies.labels(chosen), metrics=METRICS,
            layers=studies.some_layers(model, 4 if name == studies.SMOLLM2 else 6),
            max_tokens=8_000 if chosen.quick else 30_000, seed=chosen.seed,
        )
        for name, model in models.items()
    }  # fmt: skip
    trained = {name: ds for name, ds in datasets.items() if name != twin}
    studies.publish(
        chosen, __file__, "C4", decide,
        decide([mixing(name, ds) for name, ds in trained.items()], [mixing(twin, datasets[twin])]),
        [e for name, ds in datasets.items() for e in numbers(name, ds)],
        [participation(datasets), *(f for name, ds in trained.items() for f in tables(name, ds))],
        datasets, text=described, absent=absent, labels=chosen.conllu,
    )  # fmt: skip


def can_be_read(ds: xr.Dataset) -> xr.DataArray:
    """Labels and layers of which the concatenation says something: R² beyond its null."""
    at = ds.sel(read_out="concat")
    return at.probe_r2_low > (at.probe_r2_null_mean + 2 * at.probe_r2_null_sd).clip(min=0)


def mixing(name: str, ds: xr.Dataset) -> Mixing:
    read = can_be_read(ds)
    more = ds.probe_r2_low.sel(read_out="attn_out") > ds.probe_r2_high.sel(read_out="concat")
    return Mixing(
        name,
        int(read.sum()),
        int((read & (ds.probe_participation_low >= HEADS)).sum()),
        int((read & (ds.multi_head_gain_low > 0)).sum()),
        int((read & more).sum()),
    )


def numbers(name: str, ds: xr.Dataset) -> list[Evidence]:
    read, n = can_be_read(ds), studies.sample(ds)
    made = []
    for label in ds.label.values.tolist():
        here = read.sel(label=label).values
        layers = ds.isel(layer=np.flatnonzero(here)).sel(label=label)
        if not here.any():
            continue
        fed = layers.isel(layer=int(layers.probe_participation.values.argmin()))
        gain = layers.isel(layer=int(layers.multi_head_gain.values.argmin()))
        made += [
            studies.reading(fed, "probe_participation", label, name, "N_eff, heads that feed its "
                            f"direction, fewest ({fed.layer.item()})", n),
            studies.reading(gain, "multi_head_gain", label, name, "R² of all heads less that of "
                            f"the best, least ({gain.layer.item()})", n),
        ]  # fmt: skip
    damage = (ds.leace_damage - ds.leace_damage_null_mean).values
    others = damage[:, ~np.eye(damage.shape[-1], dtype=bool)]
    made.append(
        Evidence("erasing a label", name, "share of another label that goes with it, beyond a "
                 "random erasure of as many directions; median over pairs and layers",
                 float(np.nanmedian(others)), n, 0.0)
    )  # fmt: skip
    return made


def participation(datasets: dict[str, xr.Dataset]) -> Dots:
    dots = []
    for name, ds in datasets.items():
        null = float(ds.probe_participation_null_mean.max())
        for label in ds.label.values.tolist():
            values = ds.probe_participation.where(can_be_read(ds)).sel(label=label).values
            if np.isfinite(values).any():
                dots.append(Dot(label, values.tolist(), null=null, group=name))
    return Dots(
        title="How many heads feed what is read behind W_O?",
        caption=(
            "N_eff of each label's direction: 1 if one head feeds it. One faint dot a layer in "
            "which the label can be read. Dashed: a random direction of heads that write alike."
        ),
        axis="effective number of heads",
        dots=dots,
        zero=True,
    )


def tables(name: str, ds: xr.Dataset) -> list[Heat]:
    labels = ds.label.values.tolist()
    short = [label.partition(" (")[0] for label in labels]
    best = ds.head_probe_r2.max("head").mean("layer").values
    steps = {"the best head": best} | {
        said: ds.probe_r2.sel(read_out=place).mean("layer").values for place, said in WAY.items()
    }
    damage = ds.leace_damage.mean("layer").values
    return [
        Heat(
            title=f"What can be read on the way through a layer of {name}",
            caption="Held-out R² of each label, mean over layers.",
            rows=list(steps),
            columns=short,
            cells=[[float(v) for v in row] for row in steps.values()],
            row_axis="read from",
        ),
        Heat(
            title=f"What erasing one label costs another in {name}",
            caption=(
                "Share of a label (column) that no linear probe finds any more in the attention "
                "output once another (row) is erased, mean over layers."
            ),
            rows=[f"erased: {label}" for label in short],
            columns=short,
            cells=[[float(v) for v in row] for row in damage],
            row_axis="erased",
        ),
    ]


if __name__ == "__main__":
    main()
