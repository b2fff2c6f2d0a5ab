"""Intra-class variability: how far the features of one class point away from each other (paper, Section 5.2)."""

import math

import torch
from torch import Tensor

from grassy.analysis.labelled import ROWS_AT_ONCE, check_labelled_features, directions, members_by_class

SAMPLES_AT_ONCE = 2048  # of a class, against blocks of all its others: enough to make up for reading those again


@torch.no_grad()
def variability(features: Tensor, labels: Tensor) -> float:
    """The mean angle in degrees between two features of a class, averaged over the classes, each weighing the same.

    features (B, N), any floating dtype; labels (B,), integers. Features are centred by their mean over all classes.
    The pairs are all ordered ones, a sample with itself included at 0°, so a class of m samples that are pairwise at
    angle θ counts θ(m − 1)/m.

    A feature that equals the mean has no direction: it is at 90° to those that have one and at 0° to those that have
    none, so a network that maps everything to one point has variability 0.
    """
    features, labels = check_labelled_features(features, labels)
    mean, largest = _mean_and_largest_norm(features)
    noise = 1e-12 * largest  # a difference from the mean below this is rounding
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
    """The mean angle in radians over all ordered pairs of the samples whose indices are `members`."""

    def unit(indices: Tensor) -> Tensor:
        return directions(features[indices].double().sub_(mean), noise)

    total = mean.new_zeros(())
    for start in range(0, len(members), SAMPLES_AT_ONCE):
        several = members[start : start + SAMPLES_AT_ONCE]
        first = unit(several)
        if start == 0:
            center = first.mean(0)  # any vector will do that is close to all of them if they are close together
        first.sub_(center)
        for block in members[:start].split(ROWS_AT_ONCE):
            total += 2 * _angles(first, unit(block).sub_(center)).sum()  # the pair in either order
        for offset, block in zip(range(0, len(first), ROWS_AT_ONCE), first.split(ROWS_AT_ONCE), strict=True):
            angles = _angles(first, block)
            angles[offset : offset + len(block)].fill_diagonal_(0.0)  # a sample and itself
            total += angles.sum()
    return float(total) / len(members) ** 2


def _angles(a: Tensor, b: Tensor) -> Tensor:
    """Angles between unit vectors of which a common vector was subtracted, all pairs: 2 arcsin(‖u − v‖/2).

    arccos(uᵀv) would lose half of the digits where u is near v. The chord, taken from products for their speed, has
    the same trouble only relative to the size of a and b, which subtracting the centre of a class makes small exactly
    when its features are close together.
    """
    squared = (a @ b.mT).mul_(-2).add_(a.square().sum(-1, keepdim=True)).add_(b.square().sum(-1))
    return squared.clamp_(0, 4).sqrt_().div_(2).arcsin_().mul_(2)
