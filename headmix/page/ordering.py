"""An order of the heads of a layer in which those alike by a metric of pairs stand together."""

import numpy as np
import xarray as xr

from headmix.shapes import UNITS


def by_likeness(variable: xr.DataArray) -> list[list[int]] | None:
    """For each layer every head once, by average linkage with optimal leaf order.

    How far two heads are apart is how far their number lies below the largest of the layer: in
    size, where the metric may be negative; above the smallest, where it is a divergence, which
    shows in a head with itself having the least. Either head first counts the same: the mean of
    both. A pair without a number is as far apart as the furthest, a head without any comes last.

    Args:
        variable: values [layer, unit, unit_b] of a metric of pairs in a layer.

    Returns:
        Places along the unit's axis; None where no layer has three heads to order.
    """
    (unit,) = (dim for dim in UNITS if dim in variable.dims)
    values = variable.transpose("layer", unit, f"{unit}_b").values.astype(float)
    orders = [_order(pairs) for pairs in values]
    return orders if values.shape[1] > 2 else None


def _order(pairs: np.ndarray) -> list[int]:
    """One layer's."""
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    off = ~np.eye(len(pairs), dtype=bool)
    known = (np.isfinite(pairs) & off).any(0) | (np.isfinite(pairs) & off).any(1)
    there = np.flatnonzero(known)
    missing = np.flatnonzero(~known).tolist()
    if len(there) < 3:
        return [*there.tolist(), *missing]
    distance = distances(pairs[np.ix_(there, there)])
    tree = linkage(squareform(distance, checks=False), "average", optimal_ordering=True)
    return [*there[leaves_list(tree)].tolist(), *missing]


def distances(pairs: np.ndarray) -> np.ndarray:
    """How far heads are apart, [head, head], symmetric and 0 for a head and itself."""
    pairs = np.where(np.isfinite(pairs), pairs, np.nan)
    off = ~np.eye(len(pairs), dtype=bool)
    own = np.diag(pairs)
    diverges = np.isfinite(own).all() and own.max() < np.nanmin(pairs[off])
    size = pairs if diverges else -np.abs(pairs)
    both = np.stack([size, size.T])
    counted = np.isfinite(both).sum(0)
    total = np.nansum(both, 0)
    mean = np.divide(total, counted, out=np.full(size.shape, np.nan), where=counted > 0)
    apart = mean - np.nanmin(mean[off])
    apart[~np.isfinite(apart)] = np.nanmax(apart[off])
    apart[~off] = 0
    return apart
