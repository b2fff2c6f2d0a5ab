"""An order of classes in which similar ones stand side by side, for pictures of (C, C) matrices."""

import torch
from torch import Tensor


@torch.no_grad()
def cluster_order(distance: Tensor) -> Tensor:
    """A permutation (C,) of classes that puts those at a small distance (C, C) beside each other.

    ``matrix[order][:, order]`` shows families of classes as blocks along its diagonal. Average linkage joins the two
    groups with the least mean distance until one is left; of the 2^(C − 1) orders that never tear a group apart it is
    the one with the least sum of distances between neighbours (Bar-Joseph et al. 2001), by scipy. Of such an order and
    its reverse, the one that begins with the smaller number is taken.

    distance is symmetric and not negative; its diagonal is not read. Angles are distances; of a similarity s take
    ``s.max() - s``. Needs scipy, which comes with scikit-learn.
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

    order = torch.from_numpy(leaves_list(linkage(condensed.numpy(), "average", optimal_ordering=True))).long()
    return order if order[0] < order[-1] else order.flip(0)
