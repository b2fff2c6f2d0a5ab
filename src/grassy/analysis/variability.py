"""Intra-class variability: how far the features of one class point away from each other (paper, Section 5.2)."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

ROWS_AT_ONCE = 2048


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
    classes = labels.argsort().split(labels.unique(return_counts=True)[1].tolist())  # the indices of each class
    total = sum(_mean_angle(features, members, mean, noise) for members in classes)
    return math.degrees(total / len(classes))


def check_labelled_features(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Features (B, N) and labels (B,) as tensors on one device, or an error that says what is wrong with them."""
    features, labels = torch.as_tensor(features), torch.as_tensor(labels)
    if not features.is_floating_point():
        raise TypeError(f"features must be floating point, got {features.dtype}")
    if labels.is_floating_point() or labels.is_complex():
        raise TypeError(f"labels must be integers, got {labels.dtype}")
    if features.ndim != 2 or 0 in features.shape:
        raise ValueError(f"features must have shape (samples, width), none of them 0, got {tuple(features.shape)}")
    if labels.shape != features.shape[:1]:
        raise ValueError(f"labels must have shape ({len(features)},), one for each feature, got {tuple(labels.shape)}")
    for start, rows in row_blocks(features):
        finite = rows.isfinite().all(-1)
        if not bool(finite.all()):
            raise ValueError(f"features hold NaN or Inf, first in row {start + int((~finite).nonzero()[0])}")
    return features, labels.to(features.device)


def row_blocks(rows: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Consecutive blocks of rows, each with the index of its first row, so that float64 copies stay small."""
    for start in range(0, len(rows), ROWS_AT_ONCE):
        yield start, rows[start : start + ROWS_AT_ONCE]


def directions(vectors: Tensor, noise: Tensor | float = 0.0) -> Tensor:
    """Unit vectors (B, N + 1) of float64 vectors (B, N).

    Those no longer than `noise` point along an axis of their own, the last one: at a right angle to all others.
    """
    length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    absent = length <= noise
    return torch.cat([(vectors / length).masked_fill(absent, 0.0), absent.double()], dim=-1)


def _mean_and_largest_norm(features: Tensor) -> tuple[Tensor, Tensor]:
    total = torch.zeros(features.shape[1], dtype=torch.float64, device=features.device)
    largest = total.new_zeros(())
    for _, rows in row_blocks(features):
        total += rows.double().sum(0)
        largest = torch.maximum(largest, torch.linalg.vector_norm(rows.double(), dim=-1).max())
    return total / len(features), largest


def _mean_angle(features: Tensor, members: Tensor, mean: Tensor, noise: Tensor) -> float:
    """The mean angle in radians over all ordered pairs of the samples whose indices are `members`."""

    def unit(indices: Tensor) -> Tensor:
        return directions(features[indices].double() - mean, noise)

    center = torch.stack([unit(block).sum(0) for _, block in row_blocks(members)]).sum(0) / len(members)
    total = mean.new_zeros(())
    for start, block in row_blocks(members):
        first = unit(block) - center
        for other_start, other_block in row_blocks(members[: start + len(block)]):
            if other_start == start:
                total += _angles(first, first).fill_diagonal_(0.0).sum()
            else:
                total += 2 * _angles(first, unit(other_block) - center).sum()
    return float(total) / len(members) ** 2


def _angles(a: Tensor, b: Tensor) -> Tensor:
    """Angles between unit vectors of which a common vector was subtracted, all pairs: 2 arcsin(‖u − v‖/2).

    arccos(uᵀv) would lose half of the digits where u is near v. The chord, taken from products for their speed, has
    the same trouble only relative to the size of a and b, which subtracting the centre of a class makes small exactly
    when its features are close together.
    """
    squared = a.square().sum(-1, keepdim=True) + b.square().sum(-1) - 2 * (a @ b.mT)
    return 2 * (squared.clamp(0, 4).sqrt() / 2).arcsin()
