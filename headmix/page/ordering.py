"""An order of the heads of a layer in which those alike by a metric of pairs stand together."""

import numpy as np
import xarray as xr

from headmix.shapes import UNITS, by_replacing


def by_likeness(variable: xr.DataArray) -> list[list[int]] | None:
    """For each layer every head once, by average linkage with optimal leaf order.

    How far two heads are apart is how far their number lies below the largest of the layer: in
    size, where the metric may be negative; above the smallest, where it is a divergence. Either
    head first counts the same: the mean of both. A pair without a number is as far apart as the
    furthest, a head without any comes last.

    Args:
        variable: values [layer, unit, unit_b] of a metric of pairs in a layer.

    Returns:
        Places along the unit's axis; None where no layer has three heads to order.
    """
    values, apart = _by_layer(variable), diverges(variable)
    orders = [_order(pairs, apart) for pairs in values]
    return orders if values.shape[1] > 2 else None


def diverges(variable: xr.DataArray) -> bool:
    """Whether a metric of pairs in a layer is a divergence: the less, the more two heads are alike.

    It shows in a head with itself having the least. What replacing two heads does is none: one
    head alone does nothing to itself there either.
    """
    values = _by_layer(variable)
    off = ~np.eye(values.shape[1], dtype=bool)
    least = np.where(np.isfinite(values) & off, values, np.inf).min(axis=2, initial=np.inf)
    known = np.isfinite(least)
    if by_replacing(variable) or not known.any():
        return False
    own = np.diagonal(values, axis1=1, axis2=2)[known]
    return bool(np.isfinite(own).all() and own.max() < least[known].min())


def _by_layer(variable: xr.DataArray) -> np.ndarray:
    """Values [layer, unit, unit_b]."""
    (unit,) = (dim for dim in UNITS if dim in variable.dims)
    return variable.transpose("layer", unit, f"{unit}_b").values.astype(float)


def _order(pairs: np.ndarray, apart: bool) -> list[int]:
    """One layer's."""
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    off = ~np.eye(len(pairs), dtype=bool)
    known = (np.isfinite(pairs) & off).any(0) | (np.isfinite(pairs) & off).any(1)
    there = np.flatnonzero(known)
    missing = np.flatnonzero(~known).tolist()
    if len(there) < 3:
        return [*there.tolist(), *missing]
    distance = distances(pairs[np.ix_(there, there)], apart)
    tree = linkage(squareform(distance, checks=False), "average", optimal_ordering=True)
    return [*there[leaves_list(tree)].tolist(), *missing]


def distances(pairs: np.ndarray, apart: bool) -> np.ndarray:
    """How far heads are apart, [head, head], symmetric and 0 for a head and itself.

    Args:
        pairs: values [head, head] of a metric.
        apart: whether it is a divergence.
    """
    pairs = np.where(np.isfinite(pairs), pairs, np.nan)
    off = ~np.eye(len(pairs), dtype=bool)
    size = pairs if apart else -np.abs(pairs)
    both = np.stack([size, size.T])
    counted = np.isfinite(both).sum(0)
    total = np.nansum(both, 0)
    mean = np.divide(total, counted, out=np.full(size.shape, np.nan), where=counted > 0)
    found = mean - np.nanmin(mean[off])
    found[~np.isfinite(found)] = np.nanmax(found[off])
    found[~off] = 0
    return found
