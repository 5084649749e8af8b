"""C5: W_O is not just a reduction of dimension. What does it keep of the concatenation?

    python analyses/05_dimension.py [--quick]

Asks whether everything in the concatenation can be read back, linearly, from the attention output;
how many dimensions activations fill before and after W_O; and how far heads overlap in it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import studies
import torch
import xarray as xr
from figures import Dot, Dots, number
from torch import Tensor
from verdicts import Decision, Evidence

import headmix as hm

#: A linear read-out this good has lost nothing worth the name: a thousandth of the variance.
KEPT = 0.999

#: Random turns of each head's write directions that the null is taken from.
TURNS = 16

#: Trained on T4: eight heads of width 4 in a stream of width 8.
WIDE = "lab model with Dc = 4 D"

METRICS = [
    "joint_rank", "mean_overlap", "joint_span", "concat_participation_ratio",
    "output_participation_ratio", "read_back_r2", "condition_number", "dimensions_after",
]  # fmt: skip


@dataclass(frozen=True)
class Keeping:
    """One model: layers, those of full rank, the lowest R² of a read-out of the concatenation."""

    model: str
    wider: bool  # Dc > D
    layers: int
    full_rank: int
    least_r2: float


def decide(found: Sequence[Keeping]) -> Decision:
    """Confirmed if the attention output gives the concatenation back, but for a thousandth of its
    variance, in every layer. Refuted if it does not where the concatenation is no wider than the
    stream (Dc ≤ D). If it fails only where Dc > D, the claim depends on the widths."""
    fits, wider = ([f for f in found if f.wider is side] for side in (False, True))
    lost = [f for f in fits if f.least_r2 < KEPT]
    short = [f"{f.layers - f.full_rank} of {f.layers} layers of {f.model}"
             for f in fits if f.full_rank < f.layers]  # fmt: skip
    gone = number(max((1 - f.least_r2 for f in fits), default=0.0))
    because = (
        f"Where the concatenation is no wider than the stream, all but {gone} of its variance can "
        "be read back from the attention output"
    )
    if short:
        because += (
            f", although W_O falls short of full numerical rank in {' and '.join(short)}: next to "
            "nothing varies in the directions that it loses there"
        )
    if lost:
        return Decision("refuted", because + ": part of it is gone.")
    if not wider:
        return Decision("confirmed", because + ".")
    worst = min(f.least_r2 for f in wider)
    if worst >= KEPT:
        return Decision("confirmed", f"{because}; where it is wider, all but {number(1 - worst)}.")
    return Decision(
        "depends",
        f"{because}. Where it is wider (Dc > D), {number(1 - worst)} of the variance is lost.",
        on="whether the concatenation is wider than the residual stream (Dc > D)",
    )


def side_by_side(heads: Any, moments: Any) -> tuple[Tensor, Tensor]:
    """Covariance of the heads' outputs, each in coordinates of its own write directions Q.

    ``x_h = z_h A_h`` with ``W_O[h] = A_h Q_h``: what head h writes, whatever the gauge of z.
    """
    A, Q = heads.write_factor.double(), heads.write_basis.Q.double()
    H, d, _ = A.shape
    K = moments.covariance.reshape(H, d, H, d)
    K = torch.einsum("hda,hdje,jeb->hajb", A, K, A).reshape(Q.shape[0] * Q.shape[1], -1)
    return K, Q


def participation(K: Tensor, Q: Tensor) -> Tensor:
    """(tr C)² / tr C² of ``C = QᵀKQ``, the covariance of what heads write together."""
    C = K @ Q.flatten(0, 1) @ Q.flatten(0, 1).T  # the same eigenvalues
    return C.trace().square() / (C * C.T).sum()


def turned(heads: Any, moments: Any) -> tuple[Tensor, Tensor]:
    """Dimensions after W_O if each head wrote into random directions: mean and sd over draws."""
    K, Q = side_by_side(heads, moments)
    stream = torch.Generator().manual_seed(torch.initial_seed())
    noise = torch.randn(TURNS, *Q.shape, generator=stream, dtype=Q.dtype)
    drawn = torch.stack([participation(K, torch.linalg.qr(n.mT).Q.mT) for n in noise])
    return drawn.mean(), drawn.std()


def dimensions_after(heads: Any, moments: Any) -> Tensor:
    """How many dimensions the attention output fills, beside heads that are turned at random."""
    return participation(*side_by_side(heads, moments))


def read_back_r2(heads: Any, moments: Any) -> Tensor:
    """R² of the concatenation from the attention output: 1 where W_O loses nothing that varies."""
    K, Q = side_by_side(heads, moments)
    KQ = K @ Q.flatten(0, 1)
    inverse = torch.linalg.pinv(Q.flatten(0, 1).T @ KQ, hermitian=True)
    return ((KQ @ inverse * KQ).sum() / K.trace()).clamp(max=1)


def condition_number(heads: Any) -> Tensor:
    """σ_max / σ_min of W_O as it is stored; another gauge has another."""
    sigma = torch.linalg.svdvals(heads.W_O.flatten(0, 1).double())
    return sigma[0] / sigma[-1]


def register() -> None:
    """Let ``measure`` know this analysis' own metrics; when it runs, not when it is imported."""
    same = {"dims": (), "invariant": ("gauge", "rotation", "scale")}
    hm.metric(
        title="Dimensions after W_O", formula="PR of Cov(Σo)", range=(0, "min(Dc, D)"),
        null=turned, null_text="each head turned at random", **same,
    )(dimensions_after)  # fmt: skip
    hm.metric(
        title="Concatenation read back", formula="tr(KQ (QᵀKQ)⁺ QᵀK) / tr K", range=(0, 1), **same
    )(read_back_r2)
    hm.metric(
        title="Condition number", formula="σ_max / σ_min", dims=(), range=(1, math.inf),
        invariant=("rotation", "scale"),
    )(condition_number)  # fmt: skip


def main() -> None:
    chosen = studies.options(__doc__)
    register()
    text, described = studies.text(chosen)
    models, absent = studies.models(chosen)
    models[WIDE], sequences = studies.lab_model("crowd", "skip", chosen.seed)
    datasets, found, evidence, dims, overlap = {}, [], [], [], []
    for name, model in models.items():
        datasets[name] = ds = hm.measure(
            model, sequences if name == WIDE else text, metrics=METRICS,
            layers=studies.some_layers(model, 10),
            max_tokens=8_000 if chosen.quick else None, seed=chosen.seed,
        )  # fmt: skip
        found.append(keeping(name, ds))
        evidence += numbers(found[-1], ds)
        dims += studies.by_layer(
            ds.drop_vars([v for v in ds if v.startswith("concat") and "_null" in v]),
            "concat_participation_ratio",
            name,
        )
        dims += studies.by_layer(ds, "dimensions_after", name, series=1)
        overlap += studies.by_layer(ds, "mean_overlap", name)
    studies.publish(
        chosen, __file__, "C5", decide, decide(found), evidence, figures(dims, overlap), datasets,
        text=f"{described}; sequences of its task for the lab model", absent=absent,
    )  # fmt: skip


def keeping(name: str, ds: xr.Dataset) -> Keeping:
    concat = ds.sizes["head"] * int(ds.d_head[0])
    full = int((ds.joint_rank >= min(concat, int(ds.d_model[0]))).sum())
    return Keeping(
        name, concat > int(ds.d_model[0]), ds.sizes["layer"], full, float(ds.read_back_r2.min())
    )


def numbers(found: Keeping, ds: xr.Dataset) -> list[Evidence]:
    name, n = found.model, studies.sample(ds)
    least = ds.isel(layer=int(ds.read_back_r2.values.argmin()))
    worst = ds.isel(layer=int(ds.condition_number.values.argmax()))
    fewer = (ds.dimensions_after_high < ds.dimensions_after_null_mean).mean()
    beyond = (ds.mean_overlap > ds.mean_overlap_null_mean + 2 * ds.mean_overlap_null_sd).mean()
    most = ds.isel(layer=int(ds.mean_overlap.values.argmax()))
    layers = f"{found.layers} layers"
    return [
        Evidence(
            "nothing is lost", name, "share of the concatenation's variance that cannot be read "
            f"back, largest ({least.layer.item()})", float(1 - least.read_back_r2), n,
            low=float(1 - least.read_back_r2_high), high=float(1 - least.read_back_r2_low),
            over="documents",
        ),
        Evidence(
            "nothing is lost", name, "share of layers whose W_O has full numerical rank",
            found.full_rank / found.layers, layers,
        ),
        Evidence(
            "nothing is lost", name, f"condition number of W_O, largest ({worst.layer.item()})",
            float(worst.condition_number), layers,
        ),
        Evidence(
            "dimensions", name, "share of layers whose output fills fewer dimensions than with "
            "heads turned at random", float(fewer), layers, over="documents",
        ),
        studies.reading(
            most, "mean_overlap", "overlap", name,
            f"mean overlap of heads, highest ({most.layer.item()})", "pairs of heads of one layer",
        ),
        Evidence(
            "overlap", name, "share of layers whose mean overlap lies two sd or more above random "
            "subspaces", float(beyond), layers,
        ),
    ]  # fmt: skip


def figures(dims: list[Dot], overlap: list[Dot]) -> list[Dots]:
    return [
        Dots(
            title="Dimensions that activations fill before and after W_O",
            caption=(
                "Participation ratio of the variances of all heads side by side (before) and of "
                "their sum (after), with intervals over documents. Dashed: after W_O, if each head "
                "wrote into random directions."
            ),
            axis="effective dimensions (log scale)",
            dots=dims,
            series=("before W_O: heads side by side", "after W_O: heads added up"),
            log=True,
        ),
        Dots(
            title="How far heads write into the same directions",
            caption=(
                "Mean overlap of two heads' write subspaces: 0 orthogonal, 1 the same. Dashed, "
                "with a band of two sd: random subspaces of the same size."
            ),
            axis="mean write-subspace overlap",
            dots=overlap,
        ),
    ]


if __name__ == "__main__":
    main()
