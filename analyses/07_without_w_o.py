"""C7: without W_O the benefit of several heads disappears. Does it?

    python analyses/07_without_w_o.py [--quick]

Trains small transformers with a full W_O, and with something else in its place.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import studies
import xarray as xr
from figures import Dot, Dots, number
from verdicts import Decision, Evidence

from headmix import lab

#: In place of W_O: nothing, mixing that is fixed, and mixing that treats all heads alike.
NOTHING, FIXED, ALIKE, ONE_HEAD = "identity", "random_orthogonal", "shared", "one_head"

SERIES = {
    NOTHING: "nothing (identity)",
    FIXED: "a fixed random rotation",
    ALIKE: "one matrix for all heads",
}

TASKS = {
    "xor": "T1 XOR, one head a bit",
    "xor_free": "T1 XOR, heads look freely",
    "threshold": "T2 threshold of a sum",
    "induction": "T3 induction on two features",
    "crowd": "T4 crowded stream (Dc > D)",
    "characters": "T5 next character",
}


@dataclass(frozen=True)
class Comparison:
    """One setting (a task and an architecture): whether the full W_O learns it, and how much
    better (> 0) it goes with nothing and with a fixed rotation in its place (over seeds)."""

    setting: str
    learned: bool
    nothing: tuple[float, float]
    fixed: tuple[float, float]


def decide(found: Sequence[Comparison]) -> Decision:
    """Confirmed if, in every setting that the full W_O learns, models without W_O are clearly worse
    (the whole interval over seeds) and a fixed rotation does not make up for it. Refuted if they
    are clearly worse nowhere, or a fixed rotation makes up for it everywhere. Otherwise it depends
    on the task and the rest of the model."""
    learned = [f for f in found if f.learned]
    worse = [f for f in learned if f.nothing[1] < 0]
    still = [f for f in worse if f.fixed[1] < 0]
    because = (
        f"Of {len(learned)} settings that the full W_O learns, models without it are clearly worse "
        f"in {len(worse) or 'none'}"
    )
    if worse:
        those = "; ".join(f"{f.setting}, by {number(-f.nothing[1], 2)} or more" for f in worse)
        because += f" ({those}), and with a fixed random rotation "
        because += f"in its place still in {len(still)}"
    if not still:
        return Decision("refuted", because + ".")
    if len(still) == len(learned):
        return Decision("confirmed", because + ".")
    return Decision("depends", because + ".", on="the task and on what else is in the model")


def main() -> None:
    chosen = studies.options(__doc__)
    seeds = range(chosen.seed, chosen.seed + (2 if chosen.quick else 5))
    ds = lab.experiment(lab.QUICK if chosen.quick else lab.CELLS, seeds=seeds, n_jobs=2)
    settings = [
        ds.sel(task=task, architecture=architecture)
        for task in ds.task.values
        for architecture in ds.architecture.values
        if ds.value.sel(task=task, architecture=architecture, variant="full").notnull().all()
    ]
    studies.publish(
        chosen, __file__, "C7", decide, decide([comparison(s) for s in settings]),
        [e for s in settings for e in numbers(s)], figures(settings), {"lab": ds},
        text="every task draws its own, from the seed; T5 reads the help topics of Python",
    )  # fmt: skip


def better(setting: xr.Dataset, variant: str, than: str = "full") -> tuple[float, float, float]:
    """How much better a variant does: mean over seeds, and the 95 % t interval."""
    apart = lab.against(setting.expand_dims(["task", "architecture"]), than).squeeze()
    sign, most = (1, 1.0) if setting.unit == "accuracy" else (-1, math.inf)  # less loss is better
    at = apart.sel(variant=variant)
    ends = sorted(min(max(sign * float(end), -most), most) for end in (at.low, at.high))
    return sign * float(at.difference), ends[0], ends[1]


def name(setting: xr.Dataset) -> str:
    return f"{TASKS[setting.task.item()]}, {setting.architecture.item()}"


def comparison(setting: xr.Dataset) -> Comparison:
    full = setting.value.sel(variant="full")
    guess = float(setting.chance if setting.shortcut.isnull() else setting.shortcut)
    low, high = studies.over_seeds(full.values)[1:]
    learned = low > guess if setting.unit == "accuracy" else high < guess
    return Comparison(name(setting), bool(learned), better(setting, NOTHING)[1:],
                      better(setting, FIXED)[1:])  # fmt: skip


def numbers(setting: xr.Dataset) -> list[Evidence]:
    n, unit = f"{setting.sizes['seed']} seeds", setting.unit.item()
    most = 1.0 if unit == "accuracy" else math.inf
    value, low, high = studies.over_seeds(setting.value.sel(variant="full").values, most)
    learns = Evidence("learned at all", name(setting), f"full W_O: {unit}", value, n,
                      float(setting.chance), None, low, high, "seeds")  # fmt: skip
    gained = "accuracy gained" if unit == "accuracy" else "nats per character saved"
    rows = [(v, "full", f"{gained} with {SERIES[v]} in place of W_O") for v in (NOTHING, FIXED)]
    if setting.value.sel(variant=ONE_HEAD).notnull().all():
        rows += [
            ("full", ONE_HEAD, f"{gained} by several heads over one as wide, with W_O"),
            (NOTHING, ONE_HEAD, f"{gained} by several heads over one as wide, without W_O"),
        ]
    made = [learns]
    for variant, than, statistic in rows:
        value, low, high = better(setting, variant, than)
        made.append(Evidence("without W_O", name(setting), statistic, value, n,
                             0.0, None, low, high, "seeds"))  # fmt: skip
    return made


def figures(settings: Sequence[xr.Dataset]) -> list[Dots]:
    accuracy = [s for s in settings if s.unit == "accuracy"]
    text = [s for s in settings if s.unit != "accuracy"]
    caption = (
        "Difference to the same model with a full W_O, with 95 % intervals over seeds. Left of 0 "
        "it does worse without, right of 0 better."
    )
    shown = {"series": list(SERIES.values()), "zero": True}
    return [
        Dots(
            "Tasks on which answers are right or wrong", caption, "accuracy gained",
            [d for s in accuracy for d in rows(s)], **shown,
        ),
        Dots(
            "Text, character by character", caption, "nats per character saved",
            [d for s in text for d in rows(s)], **shown,
        ),
    ]  # fmt: skip


def rows(setting: xr.Dataset) -> list[Dot]:
    made = []
    for series, variant in enumerate(SERIES):
        if setting.value.sel(variant=variant).notnull().all():
            value, low, high = better(setting, variant)
            group = TASKS[setting.task.item()]
            label = setting.architecture.item()
            made.append(Dot(label, value, low, high, 0.0, None, series, group))
    return made


if __name__ == "__main__":
    main()
