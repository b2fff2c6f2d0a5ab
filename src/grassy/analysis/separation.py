"""Class separation R²: how much of the spread of features lies between classes (Kornblith et al. 2021, Eq. 11)."""

import math

import torch
from torch import Tensor

from grassy.analysis.labelled import ROWS_AT_ONCE, check_labelled_features, directions


@torch.no_grad()
def class_separation(features: Tensor, labels: Tensor) -> float:
    """R² = 1 − (mean cosine distance within classes) / (mean cosine distance over all pairs of classes).

    features (B, N), any floating dtype, are not centred; labels (B,), integers. With K classes of N_k samples the
    first mean is Σ_k Σ_mn (1 − cos(x_km, x_kn)) / (K N_k²), the second Σ_jk Σ_mn (1 − cos(x_jm, x_kn)) / (K² N_j N_k):
    each class, or pair of classes, weighs the same; pairs of a class, or of a sample, with itself count.

    A zero feature has no direction: its cosine is 0 with those that have one and 1 with those that have none.
    NaN if all features point the same way.
    """
    features, labels = check_labelled_features(features, labels)
    classes, index, counts = labels.unique(return_inverse=True, return_counts=True)
    if len(classes) < 2:
        raise ValueError(f"class separation needs at least 2 classes, the labels hold only {int(classes[0])}")

    # The mean cosine over two sets of unit vectors is the product of the means of the sets: no pair is ever formed.
    means = torch.zeros(len(classes), features.shape[1] + 1, dtype=torch.float64, device=features.device)
    for rows, own in zip(features.split(ROWS_AT_ONCE), index.split(ROWS_AT_ONCE), strict=True):
        means.index_add_(0, own, directions(rows.double()))
    means /= counts.unsqueeze(-1)

    # 1 − ‖mean‖² is the variance around the mean, which is summed as such: no digits cancel when classes collapse.
    squares = torch.zeros(len(classes), dtype=torch.float64, device=features.device)
    for rows, own in zip(features.split(ROWS_AT_ONCE), index.split(ROWS_AT_ONCE), strict=True):
        squares.index_add_(0, own, (directions(rows.double()) - means[own]).square().sum(-1))
    within = float((squares / counts).mean())
    between = float((means - means.mean(0)).square().sum(-1).mean())
    total = within + between
    return between / total if total > 1e-24 else math.nan  # below, the directions differ by rounding alone
