"""An order of classes in which similar ones stand side by side, for pictures of (C, C) matrices."""

import numpy as np
import torch
from torch import Tensor

from grassy.extras import needs

# The search for the best order takes ten times as long for twice the classes: 2 s for 1,000, 16 s for 2,000 of them.
MOST_FOR_BEST_ORDER = 2000


@needs("cluster_order", extra="report")
@torch.no_grad()
def cluster_order(distance: Tensor) -> Tensor:
    """A permutation (C,) of classes that puts those at a small distance (C, C) beside each other.

    ``matrix[order][:, order]`` shows families of classes as blocks along its diagonal. Average linkage joins the two
    groups with the least mean distance until one is left; of the 2^(C − 1) orders that never tear a group apart it is
    the one with the least sum of distances between neighbours (Bar-Joseph et al. 2001), by scipy. Of more than 2,000
    classes it is one of those orders, but not the best: each join turns its two groups so that the ends which meet are
    the closest (Gruvaeus & Wainer 1972). Of an order and its reverse, the one that begins with the smaller number is
    taken.

    distance is symmetric and not negative; its diagonal is not read. Angles are distances; of a similarity s take
    ``s.max() - s``. Needs scipy.
    """
    distance = torch.as_tensor(distance)
    if distance.is_complex() or distance.dtype == torch.bool:
        raise TypeError(f"distance must be real numbers, got {distance.dtype}")
    if distance.ndim != 2 or distance.shape[0] != distance.shape[1] or not len(distance):
        raise ValueError(f"distance must have shape (classes, classes), got {tuple(distance.shape)}")
    distance = distance.double().cpu()
    row, column = torch.triu_indices(len(distance), len(distance), offset=1)
    condensed, mirrored = distance[row, column], distance[column, row]
    if not bool((condensed.isfinite() & mirrored.isfinite()).all()):
        raise ValueError("distance holds NaN or Inf")
    if bool((condensed < 0).any()):
        raise ValueError("distance must not be negative; of a similarity s take s.max() - s")
    if not torch.allclose(condensed, mirrored, rtol=1e-5, atol=1e-8):
        raise ValueError("distance must be symmetric")
    if len(distance) < 3:
        return torch.arange(len(distance))

    from scipy.cluster.hierarchy import leaves_list, linkage  # type: ignore[import-untyped]

    best = len(distance) <= MOST_FOR_BEST_ORDER
    joins = linkage(condensed.numpy(), "average", optimal_ordering=best)
    leaves = leaves_list(joins) if best else _join_closest_ends(joins, distance.numpy())
    order = torch.from_numpy(leaves).long()
    return order if order[0] < order[-1] else order.flip(0)


def _join_closest_ends(joins: np.ndarray, distance: np.ndarray) -> np.ndarray:
    """The leaves of scipy's table of joins: row i makes group C + i of the groups it begins with, a class being one."""
    groups = {label: np.array([label]) for label in range(len(distance))}
    for made, (first, second) in enumerate(joins[:, :2].astype(int), start=len(distance)):
        a, b = groups.pop(first), groups.pop(second)
        turns = [(x, y) for x in (a, a[::-1]) for y in (b, b[::-1])]
        groups[made] = np.concatenate(min(turns, key=lambda turn: distance[turn[0][-1], turn[1][0]]))
    return groups.popitem()[1]
