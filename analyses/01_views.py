"""C1: heads see different things: syntax, meaning, position. Do they?

    python analyses/01_views.py [--quick] [--conllu FILE]

Asks of each label whether some head holds more of it than a random slice of the concatenation
would, and than it did before training. Labels of syntax need CoNLL-U.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import studies
import xarray as xr
from figures import Dot, Dots, Heat, number
from scipy import stats
from verdicts import Decision, Evidence

import headmix as hm

#: A head's share of what the concatenation knows of a label.
KAPPA = "head_concentration"


@dataclass(frozen=True)
class View:
    """One label in one model: the least that its best head holds (lower end of the interval of κ),
    the 99 % quantile of a random slice, the most that an untrained head holds, and the least
    selectivity of the probe in that layer (infinite where there is no control task)."""

    model: str
    label: str
    kappa: float
    slice: float
    untrained: float
    selectivity: float

    @property
    def held(self) -> bool:
        return self.kappa > max(self.slice, self.untrained) and self.selectivity > 0


def decide(found: Sequence[View], dedicated: float) -> Decision:
    """For each label some head should hold more of it than a random slice of the concatenation
    (its 99 % quantile) and than any head before training, by a selective probe; each with the whole
    interval. Confirmed if that is so for every label, refuted if for none; else it depends on the
    view."""
    held = [f for f in found if f.held]
    least = min((f.kappa for f in held), default=0.0)
    names = [f"{f.label} in {f.model}" for f in found if not f.held]
    because = (
        f"In {len(held)} of {len(found)} cases (label × model) some head holds more of the label "
        "than a random slice and than any head before training"
    )
    if held:
        because += (
            f": at least {number(least, 2)} of what the whole concatenation knows, where 99 % of "
            f"random slices have at most {number(max(f.slice for f in found), 2)}. Of the heads "
            f"that hold more of a label than that, {dedicated:.0%} do so for one view alone; the "
            "others hold several"
        )
    if not held:
        return Decision("refuted", because + ".")
    if len(held) == len(found):
        return Decision("confirmed", because + ".")
    return Decision("depends", f"{because}. Not so: {'; '.join(names)}.", on="the view")


def main() -> None:
    chosen = studies.options(__doc__)
    text, described = studies.text(chosen, labelled=True)
    models, absent = studies.models(chosen)
    if not chosen.conllu:
        absent.append("syntax: it needs --conllu")
    datasets, found, evidence, dots = {}, [], [], []
    for name, model in models.items():
        twin = studies.untrained(model, chosen.seed)
        for called, one in ((name, model), (studies.before(name), twin)):
            datasets[called] = hm.measure(
                one, text, labels=studies.labels(chosen),
                metrics=[KAPPA, "probe_selectivity", "view_share_unique"],
                layers=studies.some_layers(model, 4 if name == studies.SMOLLM2 else 6),
                max_tokens=8_000 if chosen.quick else 30_000, seed=chosen.seed,
            )  # fmt: skip
        ds, before = datasets[name], datasets[studies.before(name)]
        for label in ds.label.values.tolist():
            found.append(view(name, ds, before, label))
            evidence += numbers(found[-1], ds)
            dots += rows(name, ds, before, label)
        evidence.append(
            Evidence("one head, one view", name, "share of the heads that stand out which do so "
                     "for one view only", dedicated([ds]), f"{ds[KAPPA][:, 0].size} heads")
        )  # fmt: skip
    trained = [datasets[name] for name in models]
    studies.publish(
        chosen, __file__, "C1", decide, decide(found, dedicated(trained)), evidence,
        [best_heads(dots), *(where(name, datasets[name]) for name in models)], datasets,
        text=described, absent=absent, labels=chosen.conllu,
    )  # fmt: skip


def slice_quantile(ds: xr.Dataset) -> float:
    """The 99 % quantile of the Beta law whose mean and sd are the null of κ."""
    mean, sd = float(ds[f"{KAPPA}_null_mean"].max()), float(ds[f"{KAPPA}_null_sd"].max())
    total = mean * (1 - mean) / sd**2 - 1
    return float(stats.beta.ppf(0.99, mean * total, (1 - mean) * total))


def best(ds: xr.Dataset, label: str) -> xr.Dataset:
    """The head that holds most of a label for sure, by the lower end of its interval."""
    low = ds[f"{KAPPA}_low"].sel(label=label).values
    if np.isnan(low).all():
        low = np.zeros_like(low)  # nothing can be read of it anywhere
    layer, head = np.unravel_index(np.nanargmax(low), low.shape)
    return ds.isel(layer=layer, head=head).sel(label=label)


def view(name: str, ds: xr.Dataset, before: xr.Dataset, label: str) -> View:
    at = best(ds, label)
    at_W_O = at.sel(read_out="concat")
    selectivity = float(at_W_O.probe_selectivity_low)
    untrained = before[KAPPA].sel(label=label).values
    return View(
        name, label, float(np.nan_to_num(at[f"{KAPPA}_low"])), slice_quantile(ds),
        0.0 if np.isnan(untrained).all() else float(np.nanmax(untrained)),
        np.inf if np.isnan(float(at_W_O.probe_selectivity)) else selectivity,
    )  # fmt: skip


def dedicated(found: Sequence[xr.Dataset]) -> float:
    """Of the heads that hold more than a random slice of any label, the share with one view only.

    Labels of syntax are one view together.
    """
    counts = []
    for ds in found:
        stands_out = ds[f"{KAPPA}_low"] > slice_quantile(ds)
        views = [str(label).rpartition("(")[2] for label in ds.label.values]
        by_view = [stands_out[:, [v == view for v in views]].any("label") for view in set(views)]
        counts.append(sum(one.astype(int) for one in by_view).values.ravel())
    every = np.concatenate(counts)
    return float((every == 1).sum() / max(1, (every > 0).sum()))


def numbers(found: View, ds: xr.Dataset) -> list[Evidence]:
    at, n = best(ds, found.label), studies.sample(ds)
    head = f"{at.layer.item()}H{at['head'].item()}"
    before = "before training nothing of it could be read"
    if found.untrained:
        before = f"before training at most {number(found.untrained, 2)}, upper end"
    made = [
        studies.reading(
            at, KAPPA, found.label, found.model,
            f"κ of the head that holds most of it ({head}); {before}", n,
        )
    ]  # fmt: skip
    if np.isfinite(found.selectivity):
        made.append(
            studies.reading(
                at.sel(read_out="concat"), "probe_selectivity", found.label, found.model,
                f"selectivity of the probe on the concatenation of {at.layer.item()}", n,
            )
        )  # fmt: skip
    unique = ds.view_share_unique.sel(label=found.label)
    layer, place = np.unravel_index(np.nanargmax(unique.values), unique.shape)
    top = ds.isel(layer=layer, head=place).sel(label=found.label)
    made.append(
        studies.reading(
            top, "view_share_unique", found.label, found.model, "share of a head's variance that "
            f"this label alone explains, largest ({top.layer.item()}H{place})", n,
        )
    )  # fmt: skip
    return made


def rows(name: str, ds: xr.Dataset, before: xr.Dataset, label: str) -> list[Dot]:
    made = []
    for series, one in enumerate((ds, before)):
        at = best(one, label)
        value = float(at[KAPPA])
        if np.isfinite(value):
            low, high = (float(at[f"{KAPPA}_{end}"]) for end in ("low", "high"))
            null, sd = (float(at[f"{KAPPA}_null_{part}"]) for part in ("mean", "sd"))
            made.append(Dot(label, value, low, high, null, sd, series, name))
    return made


def best_heads(dots: Sequence[Dot]) -> Dots:
    return Dots(
        title="How much of a label the best head holds",
        caption=(
            "κ: what a probe reads from one head over what it reads from all heads of the layer, "
            "with intervals over documents. Dashed, with a band of two sd: a random slice of the "
            "concatenation as wide as a head. No mark: nothing of the label can be read."
        ),
        axis="κ of the best head",
        dots=dots,
        series=("trained", "untrained"),
        zero=True,
    )


def where(name: str, ds: xr.Dataset) -> Heat:
    low = ds[f"{KAPPA}_low"].max("head").transpose("label", "layer").values
    return Heat(
        title=f"Where {name} holds its views",
        caption=(
            "The lower end of the interval of κ, of the best head of each layer. Blank: nothing of "
            "the label can be read there."
        ),
        rows=ds.label.values.tolist(),
        columns=ds.layer.values.tolist(),
        cells=[[None if np.isnan(x) else max(0.0, float(x)) for x in row] for row in low],
        row_axis="label",
    )


if __name__ == "__main__":
    main()
