"""Intra-class variability: the mean angle between features of one class (paper, Section 5.2)."""

import math

import torch
from torch import Tensor

from grassy.analysis.labelled import ROWS_AT_ONCE, check_labelled_features, directions, members_by_class

SAMPLES_AT_ONCE = 2048  # compared with blocks of the whole class: enough to amortise reading these repeatedly


@torch.no_grad()
def variability(features: Tensor, labels: Tensor) -> float:
    """Return the mean angle in degrees between features of the same class, averaged over the classes.

    Features are centred by their overall mean. Each class has the same weight. All ordered pairs count, including a
    sample with itself at 0°. So a class of m samples at pairwise angle θ has θ(m − 1)/m.

    A feature that equals the mean has no direction. Its angle is 90° to other features and 0° to those without a
    direction, so a network that maps everything to one point has variability 0.

    Args:
        features: Features (B, N), floating point.
        labels: Integer labels (B,).

    Returns:
        The angle in degrees.

    Raises:
        TypeError: If the features are not floating point or the labels not integers.
        ValueError: If a shape is wrong or a feature is not finite.

    Examples:
        >>> import torch, grassy
        >>> features, labels = torch.randn(1000, 64), torch.arange(1000) % 10
        >>> 85 < grassy.analysis.variability(features, labels) < 95
        True
    """
    features, labels = check_labelled_features(features, labels)
    mean, largest = _mean_and_largest_norm(features)
    noise = 1e-12 * largest  # smaller differences from the mean are rounding
    classes = members_by_class(labels).values()
    total = sum(_mean_angle(features, members, mean, noise) for members in classes)
    return math.degrees(total / len(classes))


def _mean_and_largest_norm(features: Tensor) -> tuple[Tensor, Tensor]:
    total = torch.zeros(features.shape[1], dtype=torch.float64, device=features.device)
    largest = total.new_zeros(())
    for rows in features.split(ROWS_AT_ONCE):
        total += rows.double().sum(0)
        largest = torch.maximum(largest, torch.linalg.vector_norm(rows.double(), dim=-1).max())
    return total / len(features), largest


def _mean_angle(features: Tensor, members: Tensor, mean: Tensor, noise: Tensor) -> float:
    """Return the mean angle in radians over all ordered pairs of the samples with the indices `members`."""

    def unit(indices: Tensor) -> Tensor:
        return directions(features[indices].double().sub_(mean), noise)

    total = mean.new_zeros(())
    for start in range(0, len(members), SAMPLES_AT_ONCE):
        several = members[start : start + SAMPLES_AT_ONCE]
        first = unit(several)
        if start == 0:
            center = first.mean(0)  # need not be exact: see _angles
        first.sub_(center)
        for block in members[:start].split(ROWS_AT_ONCE):
            total += 2 * _angles(first, unit(block).sub_(center)).sum()  # both orders of a pair
        for offset, block in zip(range(0, len(first), ROWS_AT_ONCE), first.split(ROWS_AT_ONCE), strict=True):
            angles = _angles(first, block)
            angles[offset : offset + len(block)].fill_diagonal_(0.0)  # a sample and itself
            total += angles.sum()
    return float(total) / len(members) ** 2


def _angles(a: Tensor, b: Tensor) -> Tensor:
    """Return the angles 2 arcsin(‖u − v‖/2) between all pairs of unit vectors, given relative to a common centre.

    arccos(uᵀv) would lose half of the digits where u is near v. Computing ‖u − v‖² by a matmul cancels too, but only
    relative to the size of a and b. Subtracting the centre makes these small when the features are close together.
    """
    squared = (a @ b.mT).mul_(-2).add_(a.square().sum(-1, keepdim=True)).add_(b.square().sum(-1))
    return squared.clamp_(0, 4).sqrt_().div_(2).arcsin_().mul_(2)
