"""Neural collapse: do features fall onto their class means, and those onto a simplex? (Papyan, Han, Donoho 2020.)"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from grassy.analysis.class_angles import check_weight
from grassy.analysis.labelled import ROWS_AT_ONCE, check_labelled_features, check_labels_of_classes

# A direction in which the class means vary by less than this, relative to where they vary most, is rounding of float32:
# the pseudo-inverse leaves it out.
SMALLEST_SINGULAR_VALUE = 1e-6


class NeuralCollapse(NamedTuple):
    """All five tend to 0 as a classifier with class vectors collapses."""

    within_over_between: float
    """NC1: tr(Σ_W Σ_B⁺)/C."""
    norm_deviation: float
    """NC2, equal norms: the standard deviation of ‖μ_c − μ‖ over its mean."""
    cosine_deviation: float
    """NC2, equal angles: the standard deviation of cos(μ_c − μ, μ_d − μ) over the pairs c ≠ d."""
    simplex_deviation: float
    """NC2, angles as large as can be: the mean of |cos(μ_c − μ, μ_d − μ) + 1/(C − 1)| over the pairs c ≠ d."""
    self_duality: float | None
    """NC3: ‖W/‖W‖ − M/‖M‖‖² in Frobenius norms, M with rows μ_c − μ; None without class vectors."""


@torch.no_grad()
def neural_collapse(features: Tensor, labels: Tensor, weight: Tensor | None = None) -> NeuralCollapse:
    """How far features (B, N) with labels (B,), integers, have collapsed; see `NeuralCollapse` for the measures.

    μ_c is the mean of class c, μ the mean of the C class means, Σ_W the mean over classes of the covariance of a class
    around μ_c, Σ_B = (1/C) Σ_c (μ_c − μ)(μ_c − μ)ᵀ, ⁺ the pseudo-inverse, standard deviations those of a population.
    Every class that occurs weighs the same; for classes of equal size this is the definition of Papyan et al., who have
    no other.

    NC3 compares the class means with a weight (C, N) of class vectors, of which labels are the row numbers. For a
    weight (C, K, N) of subspaces it is not defined, and None.
    NC1 and NC3 are NaN if all class means coincide, NC2 is NaN if one of them coincides with μ.
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
    """tr(Σ_W Σ_B⁺)/C, without a matrix N x N: with M = U S Vᵀ the centred means, Σ_B⁺ = C V S⁻² Vᵀ."""
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
    """The three measures of NC2 from the centred class means (C, N)."""
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
    """The weight (C, N) in float64 beside the features, or None if it is one of subspaces."""
    weight = torch.as_tensor(weight)
    subspaces = weight.ndim == 3
    weight = check_weight(weight, "(classes, k, width)" if subspaces else "(classes, width)", 3 if subspaces else 2)
    if weight.shape[-1] != features.shape[1]:
        raise ValueError(f"features are {features.shape[1]} wide, the weight {weight.shape[-1]}")
    check_labels_of_classes(labels, len(weight))
    return None if subspaces else weight.to(features.device, torch.float64)
