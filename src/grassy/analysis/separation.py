"""Class separation R²: how much of the spread of features lies between classes (Kornblith et al. 2021, Eq. 11)."""

import math

import torch
from torch import Tensor

from grassy.analysis.labelled import ROWS_AT_ONCE, check_labelled_features, directions


@torch.no_grad()
def class_separation(features: Tensor, labels: Tensor) -> float:
    """Return R² = 1 − (mean cosine distance within classes) / (mean cosine distance over all pairs of classes).

    For C classes with B_c samples x_cm each, the first mean is Σ_c Σ_mn (1 − cos(x_cm, x_cn)) / (C B_c²). The second is
    Σ_cd Σ_mn (1 − cos(x_cm, x_dn)) / (C² B_c B_d). So each class, and each pair of classes, has the same weight. Pairs
    of a class or a sample with itself count. Features are not centred.

    Args:
        features: Features (B, N), floating point.
        labels: Integer labels (B,).

    Returns:
        R² in [0, 1], or NaN if all features have the same direction. A zero feature has no direction: its cosine is 0
        with nonzero features and 1 with other zero features.

    Raises:
        TypeError: If the features are not floating point or the labels not integers.
        ValueError: If a shape is wrong, a feature is not finite, or there are fewer than 2 classes.
    """
    features, labels = check_labelled_features(features, labels)
    classes, index, counts = labels.unique(return_inverse=True, return_counts=True)
    if len(classes) < 2:
        raise ValueError(f"class separation needs at least 2 classes, the labels hold only {int(classes[0])}")

    # The mean cosine over two sets of unit vectors is the inner product of their means, so no pairs are formed.
    means = torch.zeros(len(classes), features.shape[1] + 1, dtype=torch.float64, device=features.device)
    for rows, own in zip(features.split(ROWS_AT_ONCE), index.split(ROWS_AT_ONCE), strict=True):
        means.index_add_(0, own, directions(rows.double()))
    means /= counts.unsqueeze(-1)

    # 1 − ‖mean‖² is the variance around the mean. Summing squared deviations avoids cancellation in collapsed classes.
    squares = torch.zeros(len(classes), dtype=torch.float64, device=features.device)
    for rows, own in zip(features.split(ROWS_AT_ONCE), index.split(ROWS_AT_ONCE), strict=True):
        squares.index_add_(0, own, (directions(rows.double()) - means[own]).square().sum(-1))
    within = float((squares / counts).mean())
    between = float((means - means.mean(0)).square().sum(-1).mean())
    total = within + between
    return between / total if total > 1e-24 else math.nan  # below it, directions differ by rounding only
