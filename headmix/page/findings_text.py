"""Sentences about what was measured on text: read-outs, replaced heads, what heads share."""

import numpy as np
import xarray as xr

from headmix.page.sentences import Finding, also, largest, null, read, said
from headmix.page.summary import Row, in_order, link, place
from headmix.shapes import Measured

#: How many labels get a sentence.
LABELS = 3


def predicted(ds: xr.Dataset, row: Row) -> Finding | None:
    if row.null_mean is None:
        return None
    measured = Measured.of(ds, row.name)
    best = largest(measured.value, 3)
    median = float(measured.value.median())  # a head that the others mislead can be far below 0
    value, more = said(measured, best[0]), also(ds, measured, best[1:])
    return Finding(
        f"The other heads of its layer predict what this head writes better than any other: "
        f"held-out R² {value}, where predictors of pure noise give {row.null_mean:.2f}. Next come "
        f"{more}; the median of {row.n} heads is {median:.2f}.{read(ds)}".replace(" -", " −"),
        link(ds, best[0], row.name),
        place(ds, best[0]),
    )


def cancelling(ds: xr.Dataset, row: Row) -> Finding | None:
    measured = Measured.of(ds, row.name)
    (at,) = largest(-measured.value, 1)
    lowest = float(measured.value.isel(at))
    if measured.mean is None or measured.sd is None:
        return None
    mean, sd = float(measured.mean.isel(at)), float(measured.sd.isel(at))
    below = int((measured.value < measured.mean).sum())
    if lowest >= mean:
        what = "In no layer do the heads cancel; they add up least here"
    elif measured.high is not None and float(measured.high.isel(at)) >= mean:
        what = "In no layer are the heads seen to cancel on this text; they add up least here"
    else:
        what = "The heads of this layer cancel most"
    return Finding(
        f"{what} (interference): their sum varies {said(measured, at)} times as much as they do "
        f"one by one, against {mean:.2f} (sd {sd:.2f}) were each turned at random. {below} of "
        f"{row.n} layers lie below that null; the mean is {row.mean:.2f}.{read(ds)}",
        link(ds, at, row.name),
        place(ds, at),
    )


def alike(ds: xr.Dataset, row: Row) -> Finding | None:
    measured = Measured.of(ds, row.name).without_self()
    first, *rest = map(in_order, largest(measured.value, 6)[::2])  # each pair is there twice
    if row.null_mean is None or row.null_sd is None:
        return None
    weights = ""
    if "projection_kernel" in ds:
        overlap = Measured.of(ds, "projection_kernel")
        weights = f" Their write subspaces overlap by {float(overlap.value.isel(first)):.1%}"
        if overlap.mean is not None:
            weights += f" (null {float(overlap.mean.isel(first)):.1%})"
        weights += "."
    return Finding(
        f"These two heads find the same tokens alike more than any other pair of a layer: debiased "
        f"CKA {said(measured, first)}, {row.null_mean:.2f} (sd {row.null_sd:.4f}) for independent "
        f"heads on independent tokens.{weights} Next come {also(ds, measured, rest)}; the mean "
        f"over {row.n} pairs is {row.mean:.2f}.{read(ds)}",
        link(ds, first, row.name),
        place(ds, first),
    )


def replaced(ds: xr.Dataset, row: Row) -> Finding | None:
    measured = Measured.of(ds, row.name)
    first, *rest = largest(measured.value, 3)
    median = float(measured.value.median())
    return Finding(
        f"The model's output changes most when this head says what it says of another document: by "
        f"{said(measured, first)} of its length{null(measured, first)}. Next come "
        f"{also(ds, measured, rest)}; the median of {row.n} heads is {median:.2f}.",
        link(ds, first, row.name),
        place(ds, first),
    )


def labels(ds: xr.Dataset) -> list[Finding]:
    """Where each label is read best, and by which single head."""
    if "probe_r2" not in ds:
        return []
    names = [str(name) for name in ds.label.values]
    told = [_label(ds, name) for name in names[:LABELS]]
    return [finding for finding in told if finding is not None]


def _label(ds: xr.Dataset, label: str) -> Finding | None:
    measured = Measured.of(ds, "probe_r2").sel("label", label)
    best = largest(measured.value, 1)
    if not best:
        return None
    where = f"{ds.read_out.values[best[0]['read_out']]} of {ds.layer.values[best[0]['layer']]}"
    text = (
        f"“{label}” is read best at {where}: held-out R² {said(measured, best[0])}"
        f"{null(measured, best[0])}, the largest of {int(np.isfinite(measured.value).sum())}."
    )
    at, metric = best[0], "probe_r2"
    if "head_probe_r2" in ds:
        heads = Measured.of(ds, "head_probe_r2").sel("label", label)
        if one := largest(heads.value, 1):
            at, metric = one[0], "head_probe_r2"
            text += (
                f" Of {int(np.isfinite(heads.value).sum())} single heads {place(ds, at)} says most "
                f"of it: {said(heads, at)}{null(heads, at)}."
            )
    number = [str(name) for name in ds.label.values].index(label)
    chosen = {k: v for k, v in at.items() if k != "read_out"} | {"label": number}
    return Finding(text, link(ds, chosen, metric), place(ds, at).split(" · ")[0])


def beaten(ds: xr.Dataset) -> str:
    """Where a probe of the attention output does better than one of what it is computed from."""
    there = {"concat", "attn_out"} <= {*ds.read_out.values.tolist()} if "read_out" in ds else False
    if "probe_r2" not in ds or not there:
        return ""
    r2 = ds.probe_r2
    higher = r2.sel(read_out="attn_out", drop=True) > r2.sel(read_out="concat", drop=True)
    if not (n := int(higher.sum())):
        return ""
    at = [place(ds, dict(zip(map(str, higher.dims), i, strict=True)))
          for i in np.argwhere(higher.values).tolist()]  # fmt: skip
    more = f", and {n - 4} more" if n > 4 else ""
    return (
        f"In {n} of {higher.size} cases ({', '.join(at[:4])}{more}) a probe of the attention "
        "output does better than one of the heads side by side, from which it is computed. That "
        "is no gain of the projection: on so little text a probe of fewer directions is fitted "
        "better, and more text would raise the other."
    )
