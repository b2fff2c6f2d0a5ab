"""An order of classes that puts similar ones side by side, for pictures of (C, C) matrices."""

import numpy as np
import torch
from torch import Tensor

from grassy.extras import needs

# Twice as many classes take about ten times as long: 2 s for 1,000 and 16 s for 2,000.
MOST_FOR_BEST_ORDER = 2000


@needs("cluster_order", extra="report")
@torch.no_grad()
def cluster_order(distance: Tensor) -> Tensor:
    """Return a permutation of the classes that puts classes at a small distance next to each other.

    `matrix[order][:, order]` shows families of classes as blocks along its diagonal. Needs scipy.

    Average linkage merges the two clusters with the smallest mean distance until one is left. Among the 2^(C − 1)
    orders that keep clusters together, scipy finds the one with the smallest sum of distances between neighbours
    (Bar-Joseph et al. 2001). For more than 2,000 classes a faster heuristic flips the two clusters of each merge so
    that their closest ends meet (Gruvaeus & Wainer 1972). The order starts with the smaller of the two classes at its
    ends.

    Args:
        distance: Symmetric, non-negative distances (C, C), such as angles. The diagonal is ignored. For a similarity s
            pass `s.max() - s`.

    Returns:
        Class indices (C,), int64, on the CPU.

    Raises:
        TypeError: If the distances are complex or boolean.
        ValueError: If the distances have the wrong shape, are negative, not symmetric or not finite.
        ModuleNotFoundError: If scipy is missing.
    """
    distance = torch.as_tensor(distance)
    if distance.is_complex() or distance.dtype == torch.bool:
        raise TypeError(f"distance must hold real numbers, got {distance.dtype}")
    if distance.ndim != 2 or distance.shape[0] != distance.shape[1] or not len(distance):
        raise ValueError(f"distance must have shape (classes, classes), got {tuple(distance.shape)}")
    distance = distance.double().cpu()
    row, column = torch.triu_indices(len(distance), len(distance), offset=1)
    condensed, mirrored = distance[row, column], distance[column, row]
    if not bool((condensed.isfinite() & mirrored.isfinite()).all()):
        raise ValueError("distance holds NaN or Inf")
    if bool((condensed < 0).any()):
        raise ValueError("distance must not be negative; for a similarity s pass s.max() - s")
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
    """Return the leaves of scipy's linkage table, in which row i merges two clusters into cluster C + i."""
    groups = {label: np.array([label]) for label in range(len(distance))}
    for made, (first, second) in enumerate(joins[:, :2].astype(int), start=len(distance)):
        a, b = groups.pop(first), groups.pop(second)
        turns = [(x, y) for x in (a, a[::-1]) for y in (b, b[::-1])]
        groups[made] = np.concatenate(min(turns, key=lambda turn: distance[turn[0][-1], turn[1][0]]))
    return groups.popitem()[1]
