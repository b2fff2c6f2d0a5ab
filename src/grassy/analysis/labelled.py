"""Labelled features: checked once, then processed in blocks (`split`), so that float64 copies stay small."""

import math

import torch
from torch import Tensor

ROWS_AT_ONCE = 512  # 8 MB in float64 for N = 2048; larger blocks are slower, by cache misses and page faults


def check_labelled_features(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return features (B, N) and labels (B,) as tensors on one device; raise TypeError or ValueError if invalid."""
    features, labels = torch.as_tensor(features), torch.as_tensor(labels)
    if not features.is_floating_point():
        raise TypeError(f"features must be floating point, got {features.dtype}")
    if labels.is_floating_point() or labels.is_complex():
        raise TypeError(f"labels must be integers, got {labels.dtype}")
    if features.ndim != 2 or 0 in features.shape:
        raise ValueError(f"features must have shape (samples, width), none of them 0, got {tuple(features.shape)}")
    if labels.shape != features.shape[:1]:
        raise ValueError(f"labels must have shape ({len(features)},), one for each feature, got {tuple(labels.shape)}")
    finite = torch.cat([rows.isfinite().all(-1) for rows in features.split(ROWS_AT_ONCE)])
    if not bool(finite.all()):
        raise ValueError(f"features hold NaN or Inf, first in row {int((~finite).nonzero()[0])}")
    return features, labels.to(features.device).long()


def check_labels_of_classes(labels: Tensor, classes: int) -> None:
    """Raise ValueError unless all labels (B,) lie in [0, classes)."""
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        wrong = low if low < 0 else high
        raise ValueError(f"labels must lie between 0 and {classes - 1}, the classes of the weight, got {wrong}")


def members_by_class(labels: Tensor) -> dict[int, Tensor]:
    """Return the indices of the samples of each class that occurs, by label in ascending order."""
    classes, counts = labels.unique(return_counts=True)
    members = labels.argsort(stable=True).split(counts.tolist())
    return dict(zip(classes.tolist(), members, strict=True))


def directions(vectors: Tensor, noise: Tensor | float = 0.0) -> Tensor:
    """Normalise float64 vectors (B, N) to unit vectors (B, N + 1).

    Vectors with a norm of at most `noise` have no direction. They point along the extra last axis, orthogonal to all
    others.
    """
    length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    absent = length <= noise
    return torch.cat([vectors / length.masked_fill(absent, math.inf), absent.double()], dim=-1)
