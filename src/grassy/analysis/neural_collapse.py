"""Neural collapse: do features converge to their class means, and these to a simplex? (Papyan, Han, Donoho 2020.)"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from grassy.analysis.class_angles import check_weight
from grassy.analysis.labelled import ROWS_AT_ONCE, check_labelled_features, check_labels_of_classes

# Relative to the largest singular value. Smaller ones are float32 rounding, and the pseudo-inverse drops them.
SMALLEST_SINGULAR_VALUE = 1e-6


class NeuralCollapse(NamedTuple):
    """Measures of neural collapse. All of them tend to 0 as a classifier with class vectors collapses."""

    within_over_between: float
    """NC1: tr(Σ_W Σ_B⁺)/C."""
    norm_deviation: float
    """NC2, equal norms: the standard deviation of ‖μ_c − μ‖ divided by its mean."""
    cosine_deviation: float
    """NC2, equal angles: the standard deviation of cos(μ_c − μ, μ_d − μ) over the pairs c ≠ d."""
    simplex_deviation: float
    """NC2, largest possible angles: the mean of |cos(μ_c − μ, μ_d − μ) + 1/(C − 1)| over the pairs c ≠ d."""
    self_duality: float | None
    """NC3: ‖W/‖W‖ − M/‖M‖‖² in Frobenius norms, where M has the rows μ_c − μ. None without class vectors."""


@torch.no_grad()
def neural_collapse(features: Tensor, labels: Tensor, weight: Tensor | None = None) -> NeuralCollapse:
    """Measure how far features have collapsed; `NeuralCollapse` defines the measures.

    Notation: μ_c is the mean of class c, and μ the mean of the C class means. Σ_W is the mean over classes of the
    covariance around μ_c, and Σ_B = (1/C) Σ_c (μ_c − μ)(μ_c − μ)ᵀ. The pseudo-inverse is ⁺. Standard deviations are
    those of a population. Each class that occurs has the same weight, as in Papyan et al., who have classes of equal
    size.

    Args:
        features: Features (B, N), floating point.
        labels: Integer labels (B,).
        weight: Class vectors (C, N), of which labels are row indices. Needed for NC3, which is None without it and for
            a weight of subspaces (C, K, N).

    Returns:
        The measures. NC1 and NC3 are NaN if all class means coincide. NC2 is NaN if one of them coincides with μ.

    Raises:
        TypeError: If the features are not floating point or the labels not integers.
        ValueError: If a shape or a label is wrong, a value is not finite, or there are fewer than 2 classes.
    """
    features, labels = check_labelled_features(features, labels)
    classes, index, counts = labels.unique(return_inverse=True, return_counts=True)
    number = len(classes)
    if number < 2:
        raise ValueError(f"neural collapse needs at least 2 classes, the labels hold only {int(classes[0])}")
    vectors = None if weight is None else _class_vectors(weight, features, labels)

    means = torch.zeros(number, features.shape[1], dtype=torch.float64, device=features.device)
    largest = means.new_zeros(())
    for rows, own in zip(features.split(ROWS_AT_ONCE), index.split(ROWS_AT_ONCE), strict=True):
        means.index_add_(0, own, rows.double())
        largest = torch.maximum(largest, torch.linalg.vector_norm(rows.double(), dim=-1).max())
    means /= counts.unsqueeze(-1)
    centred = means - means.mean(0)
    centred[torch.linalg.vector_norm(centred, dim=-1) <= 1e-12 * largest] = 0.0  # rounding

    duality = None
    if vectors is not None:
        vectors = vectors[classes]
        difference = vectors / torch.linalg.matrix_norm(vectors) - centred / torch.linalg.matrix_norm(centred)
        duality = float(difference.square().sum())
    return NeuralCollapse(_within_over_between(features, index, counts, means, centred), *_simplex(centred), duality)


def _within_over_between(features: Tensor, index: Tensor, counts: Tensor, means: Tensor, centred: Tensor) -> float:
    """Return tr(Σ_W Σ_B⁺)/C without an N x N matrix: for the centred means M = U S Vᵀ, Σ_B⁺ = C V S⁻² Vᵀ."""
    _, singular, vt = torch.linalg.svd(centred, full_matrices=False)
    kept = singular > SMALLEST_SINGULAR_VALUE * singular[0]
    if not bool(kept.any()):
        return math.nan
    whiten = (vt[kept] / singular[kept].unsqueeze(-1)).mT  # (N, rank); C and 1/C cancel
    total = means.new_zeros(())
    for rows, own in zip(features.split(ROWS_AT_ONCE), index.split(ROWS_AT_ONCE), strict=True):
        spread = ((rows.double() - means[own]) @ whiten).square().sum(-1)
        total += (spread / counts[own]).sum()
    return float(total) / len(means)


def _simplex(centred: Tensor) -> tuple[float, float, float]:
    """Return the three measures of NC2 for the centred class means (C, N)."""
    number = len(centred)
    length = torch.linalg.vector_norm(centred, dim=-1)
    if not bool((length > 0).all()):
        return math.nan, math.nan, math.nan
    unit = centred / length.unsqueeze(-1)
    pairs = number * (number - 1)
    average = float(unit.sum(0).square().sum() - number) / pairs
    squares, simplex = centred.new_zeros(()), centred.new_zeros(())
    for rows in torch.arange(number, device=unit.device).split(ROWS_AT_ONCE):
        cosine = unit[rows] @ unit.mT
        different = rows.unsqueeze(-1) != torch.arange(number, device=unit.device)
        squares += (cosine[different] - average).square().sum()
        simplex += (cosine[different] + 1 / (number - 1)).abs().sum()
    return float(length.std(correction=0) / length.mean()), math.sqrt(float(squares) / pairs), float(simplex) / pairs


def _class_vectors(weight: Tensor, features: Tensor, labels: Tensor) -> Tensor | None:
    """Return the weight (C, N) in float64 on the device of the features, or None for a weight of subspaces."""
    weight = torch.as_tensor(weight)
    subspaces = weight.ndim == 3
    weight = check_weight(weight, "(classes, k, width)" if subspaces else "(classes, width)", 3 if subspaces else 2)
    if weight.shape[-1] != features.shape[1]:
        raise ValueError(f"features have width {features.shape[1]}, but the weight has width {weight.shape[-1]}")
    check_labels_of_classes(labels, len(weight))
    return None if subspaces else weight.to(features.device, torch.float64)
