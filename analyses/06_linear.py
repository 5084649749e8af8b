"""C6: W_O mixes linearly, so the FFN takes care of non-linear combination. Does it alone?

    python analyses/06_linear.py [--quick]

Reads how far the effects of two heads fail to add up, place by place on the way from W_O to the
next layer; and trains models on XOR, with and without a feed-forward.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import studies
import xarray as xr
from figures import Dot, Dots, number
from verdicts import Decision, Evidence

import headmix as hm
from headmix import lab

#: Where interaction is read, in the order of the way.
PLACES = {
    "attn_out": "behind W_O",
    "mlp_in": "behind the next norm",
    "mlp_out": "behind the feed-forward",
    "next_logits": "in the next layer's logits",
}

METRIC = "cross_head_interaction_"

#: Interaction up to this is rounding: single precision has seven digits, and sums lose some.
ROUNDING = 1e-4

#: Two layers of nothing but attention, trained on T3: whatever combines heads there is no FFN.
ATTENTION_ONLY = "lab model of attention alone"

#: A model solves XOR if every seed is right so often.
SOLVED = 0.95

#: Where XOR is tried: does a feed-forward make the difference?
XOR = {
    ("xor", "skip"): "each head sees one bit; no norm, no FFN",
    ("xor", "skip+norm"): "each head sees one bit; a norm, no FFN",
    ("xor", "skip+mlp, matched"): "each head sees one bit; an FFN",
    ("xor_free", "skip"): "heads look where they like; no norm, no FFN",
}


@dataclass(frozen=True)
class Interaction:
    """One model: the largest interaction at W_O, and the typical one (median over pairs and
    layers) at each later place that it has, as the lower end of its interval over documents."""

    model: str
    at_W_O: float
    later: Mapping[str, float]

    def before_ffn(self, place: str) -> bool:
        """Whether heads interact at a place that no feed-forward comes before."""
        between = place == "next_logits" and "mlp_out" in self.later
        return not between and self.later.get(place, 0.0) > ROUNDING


def decide(found: Sequence[Interaction], without_ffn: Sequence[str]) -> Decision:
    """Refuted if heads interact right behind W_O. Confirmed if they do so only behind a
    feed-forward, and no model without one solves XOR. If W_O is linear but heads interact without
    a feed-forward as well (behind a norm, in attention logits), the halves of the claim part."""
    largest = max(f.at_W_O for f in found)
    if largest > ROUNDING:
        return Decision("refuted", f"Heads interact right behind W_O already: {number(largest)}.")
    at_ffn = [
        f"{number(f.later['mlp_out'], 2)} in {f.model}" for f in found if "mlp_out" in f.later
    ]
    because = (
        f"Behind W_O the effects of two heads add up (what is missing is {number(largest, 2)} of "
        "them at most: rounding), behind the feed-forward they do not (lower ends of the "
        f"intervals, as shares of the effects: {', '.join(at_ffn)})"
    )
    without = [
        f"{PLACES[place]} of {f.model.replace('lab', 'the lab')} ({number(f.later[place], 2)})"
        for place in ("mlp_in", "next_logits")
        for f in found
        if f.before_ffn(place)
    ]
    if not without and not without_ffn:
        return Decision("confirmed", because + "; nowhere else do they fail to.")
    if without:
        because += f". Nor do they where no feed-forward has been: {', '.join(without)}"
    if without_ffn:
        because += f". XOR is learnt without a feed-forward too ({'; '.join(without_ffn)})"
    return Decision(
        "depends",
        because + ".",
        on="the half of the claim: W_O is linear, but the FFN is not alone in combining heads",
    )


def main() -> None:
    chosen = studies.options(__doc__)
    text, described = studies.text(chosen)
    models, absent = studies.models(chosen)
    how = hm.Interventions(
        tokens=100 if chosen.quick else 400, interactions=100 if chosen.quick else 400,
        most_pairs=10 if chosen.quick else 30,
    )  # fmt: skip
    models[ATTENTION_ONLY], sequences = studies.lab_model("induction", "skip", chosen.seed)
    datasets = {}
    for name, model in models.items():
        read = sequences if name == ATTENTION_ONLY else text
        datasets[name] = hm.measure(
            model, read, metrics=[METRIC + place for place in PLACES], causal=how,
            layers=studies.some_layers(model, 5), max_tokens=8_000, seed=chosen.seed,
        )  # fmt: skip
    seeds = range(chosen.seed, chosen.seed + (2 if chosen.quick else 5))
    cells = [c for c in lab.CELLS if (c.task, c.architecture) in XOR]
    xor = lab.experiment(cells, variants=["full"], seeds=seeds)
    accuracy = {
        XOR[where]: xor.value.sel(task=where[0], architecture=where[1], variant="full").values
        for where in XOR
    }
    without_ffn = [
        said for said, values in accuracy.items() if "no FFN" in said and values.min() >= SOLVED
    ]
    found = [interaction(name, ds) for name, ds in datasets.items()]
    studies.publish(
        chosen, __file__, "C6", decide, decide(found, without_ffn),
        [*(e for name, ds in datasets.items() for e in numbers(name, ds)),
         *(learnt(said, values) for said, values in accuracy.items())],
        [interactions(datasets), solutions(accuracy)], {**datasets, "xor": xor},
        text=f"{described}; random bits for XOR", absent=absent,
    )  # fmt: skip


def typical(ds: xr.Dataset, place: str, end: str = "") -> float:
    """The median over pairs of different heads and layers."""
    values = ds[f"{METRIC}{place}{end}"].values
    others = ~np.eye(values.shape[-1], dtype=bool)
    return float(np.nanmedian(values[:, others]))


def interaction(name: str, ds: xr.Dataset) -> Interaction:
    read = [place for place in PLACES if f"{METRIC}{place}_low" in ds]
    return Interaction(
        name,
        float(ds[f"{METRIC}attn_out"].max()),
        {place: typical(ds, place, "_low") for place in read if place != "attn_out"},
    )


def numbers(name: str, ds: xr.Dataset) -> list[Evidence]:
    n = f"pairs of heads in {ds.sizes['layer']} layers, {studies.sample(ds)}"
    return [
        Evidence(
            "interaction of two heads", name, f"{PLACES[place]}, median", typical(ds, place), n,
            0.0, None, typical(ds, place, "_low"), typical(ds, place, "_high"), "documents",
        )
        for place in PLACES
        if METRIC + place in ds
    ]  # fmt: skip


def learnt(said: str, values: np.ndarray) -> Evidence:
    mean, low, high = studies.over_seeds(values, most=1.0)
    return Evidence(
        "XOR of two heads' bits", f"lab model: {said}", "accuracy", mean, f"{len(values)} seeds",
        0.5, None, low, high, "seeds",
    )  # fmt: skip


def interactions(datasets: Mapping[str, xr.Dataset]) -> Dots:
    dots = [
        Dot(said, typical(ds, place), typical(ds, place, "_low"), typical(ds, place, "_high"),
            group=name)
        for name, ds in datasets.items()
        for place, said in PLACES.items()
        if METRIC + place in ds
    ]  # fmt: skip
    return Dots(
        title="How far the effects of two heads fail to add up",
        caption=(
            "Median over pairs and layers, with medians of the interval over documents. 1 would be "
            "as large as the two effects together; at 10⁻⁷ there is only rounding."
        ),
        axis="interaction, relative to the effects (log scale)",
        dots=dots,
        log=True,
    )


def solutions(accuracy: Mapping[str, np.ndarray]) -> Dots:
    return Dots(
        title="Who learns XOR?",
        caption="One faint dot a seed: accuracy on test data. Dashed: guessing.",
        axis="accuracy",
        dots=[Dot(said.split("; ")[1], values.tolist(), null=0.5, group=said.split("; ")[0])
              for said, values in accuracy.items()],
    )  # fmt: skip


if __name__ == "__main__":
    main()
