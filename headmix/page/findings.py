"""A few sentences about metrics that the page knows by name, each with number, null and count."""

from collections.abc import Callable

import numpy as np
import xarray as xr

from headmix.page import changes, findings_text
from headmix.page.sentences import Finding, relation
from headmix.page.summary import Row, link, place, rows
from headmix.shapes import Measured


def find(ds: xr.Dataset) -> list[Finding]:
    """What stands out, where the metrics it rests on were measured."""
    if "compared" in ds.attrs:
        return [Finding(*told) for told in changes.find(ds)]
    by_name = {row.name: row for row in rows(ds)}
    sentences: dict[str, Callable[[xr.Dataset, Row], Finding | None]] = {
        "projection_kernel": _overlap,
        "joint_span": _span,
        "ov_stable_rank": _rank,
        "composition_v": _composition,
        "ov_copying": _copying,
        "loo_r2": findings_text.predicted,
        "interference_ratio": findings_text.cancelling,
        "cka": findings_text.alike,
        "head_ablation": findings_text.replaced,
    }
    told = (say(ds, by_name[n]) for n, say in sentences.items() if n in by_name)
    return [finding for finding in told if finding is not None] + findings_text.labels(ds)


def _overlap(ds: xr.Dataset, row: Row) -> Finding | None:
    if row.null_mean is None or row.null_sd is None or row.beyond is None:
        return None
    than = relation(row.mean, row.null_mean)
    return Finding(
        f"The write subspaces of two heads of a layer overlap by {row.mean:.1%} on average "
        f"({row.n} pairs), {than} the {row.null_mean:.1%} of random subspaces of the same "
        f"size (null sd {row.null_sd:.1%}). {row.beyond:.0%} of the pairs lie more than two null "
        f"sd away from that; the furthest overlap by {row.value:.1%}.",
        row.link,
        row.place,
    )


def _span(ds: xr.Dataset, row: Row) -> Finding | None:
    if row.null_mean is None:
        return None
    return Finding(
        f"Together the heads of a layer span {row.mean:.0f} directions effectively, "
        f"{relation(row.mean, row.null_mean)} the {row.null_mean:.0f} that random heads would "
        f"(mean of {row.n} layers); furthest from that is one layer with {row.value:.0f}.",
        row.link,
        row.place,
    )


def _rank(ds: xr.Dataset, row: Row) -> Finding | None:
    if row.null_mean is None:
        return None
    return Finding(
        f"A head's OV matrix has a stable rank of {row.mean:.1f} on average ({row.n} heads), "
        f"{relation(row.mean, row.null_mean)} the {row.null_mean:.1f} of a Gaussian matrix of "
        f"its shape; the furthest has {row.value:.1f}.",
        row.link,
        row.place,
    )


def _composition(ds: xr.Dataset, row: Row) -> Finding | None:
    if row.null_mean is None:
        return None
    measured = Measured.of(ds, row.name).value
    at = {str(d): int(i) for d, i in measured.argmax(...).items()}
    strongest = float(measured.isel(at))
    return Finding(
        f"The strongest composition through values is {strongest:.3f}, "
        f"{strongest / row.null_mean:.1f} times the {row.null_mean:.3f} of unrelated heads "
        f"(the largest of {row.n} pairs; the mean is {row.mean:.3f}).",
        link(ds, at, row.name),
        place(ds, at),
    )


def _copying(ds: xr.Dataset, row: Row) -> Finding | None:
    value = ds[row.name].values
    finite = value[np.isfinite(value)]
    return Finding(
        f"{int((finite > 0.5).sum())} of {row.n} heads tend to raise the logit of the tokens they "
        f"attend to (copying score above 0.5) and {int((finite < -0.5).sum())} to lower it (below "
        f"−0.5); unrelated weights give about 0. Read directly from the embeddings, past every "
        f"other layer and norm. The largest in size is {row.value:+.2f}.".replace("-", "−"),
        row.link,
        row.place,
    )
