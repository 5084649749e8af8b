"""Do the heads of a layer write into the same directions more than unrelated heads would?

    python analyses/01_overlap_of_heads.py [MODEL]

Writes reports/01_overlap_of_heads.md.
"""

import sys
from pathlib import Path

import numpy as np
import xarray as xr

import headmix as hm

REPORT = Path(__file__).parents[1] / "reports" / "01_overlap_of_heads.md"
METRICS = ["projection_kernel", "mean_overlap", "joint_span", "joint_rank"]


def main(model: str = "demo") -> None:
    loaded = hm.load(model)
    check = hm.verify(loaded)
    if not check.ok:
        sys.exit(f"{model}: a law failed; see headmix verify {model}")
    REPORT.write_text(write_up(hm.measure(loaded, metrics=METRICS)), encoding="utf-8")
    print(REPORT)


def write_up(ds: xr.Dataset) -> str:
    rows = [layer_row(ds.sel(layer=name)) for name in ds.layer.values]
    return "\n".join(
        [
            "# Do heads write into the same directions?",
            "",
            f"Model: {ds.attrs['model']}, {ds.attrs['processing']} weights. "
            f"{ds.sizes['layer']} layers of {ds.sizes['head']} heads, "
            f"d_head {int(ds.d_head[0])}, d_model {int(ds.d_model[0])}.",
            "",
            "The overlap of two heads is the mean squared cosine of the principal angles between "
            "the subspaces that their blocks of W_O span: 0 orthogonal, 1 the same. The null is "
            "random subspaces of the same size; it is not a p-value, because trained heads are "
            "not independent draws.",
            "",
            "| layer | mean overlap | null mean ± sd | z_null | closest pair | its overlap "
            "| effective span | null | rank of W_O |",
            "|---|---|---|---|---|---|---|---|---|",
            *rows,
            "",
            f"{overlap_sentence(ds)} {rank_sentence(ds)}",
            "",
        ]
    )


def layer_row(layer: xr.Dataset) -> str:
    overlap = layer.projection_kernel.values.copy()
    np.fill_diagonal(overlap, -1)
    i, j = sorted(map(int, np.unravel_index(np.argmax(overlap), overlap.shape)))
    mean, null, sd = (
        float(layer[f"mean_overlap{part}"]) for part in ("", "_null_mean", "_null_sd")
    )
    return (
        f"| {layer.layer.item()} | {mean:.3f} | {null:.3f} ± {sd:.4f} | {(mean - null) / sd:+.0f} "
        f"| H{i}, H{j} | {overlap[i, j]:.3f} | {float(layer.joint_span):.0f} "
        f"| {float(layer.joint_span_null_mean):.0f} | {int(layer.joint_rank)} |"
    )


def overlap_sentence(ds: xr.Dataset) -> str:
    z = (ds.mean_overlap - ds.mean_overlap_null_mean) / ds.mean_overlap_null_sd
    above, below = (ds.layer.values[side].tolist() for side in ((z > 2).values, (z < -2).values))
    return (
        "Beyond two null standard deviations, heads overlap more than unrelated ones in "
        f"{', '.join(above) or 'no layer'}, and less in {', '.join(below) or 'no layer'}. "
        f"The mean overlap runs from {float(ds.mean_overlap.min()):.2f} to "
        f"{float(ds.mean_overlap.max()):.2f}."
    )


def rank_sentence(ds: xr.Dataset) -> str:
    """Rank is what is left when everything near zero counts as zero, so it says little alone."""
    short = ds.layer.values[(ds.joint_rank < ds.joint_rank_null_mean).values].tolist()
    return (
        "The rank of W_O is what subspaces in general position would give in every layer."
        if not short
        else f"The rank of W_O falls short of general position in {', '.join(short)}."
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
