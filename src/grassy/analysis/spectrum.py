"""How features use the subspace of their class: the spectrum of their coordinates and its effective rank."""

import math

import torch
from torch import Tensor

from grassy.analysis.class_angles import orthonormal_bases
from grassy.analysis.labelled import ROWS_AT_ONCE, check_labelled_features, check_labels_of_classes, members_by_class


@torch.no_grad()
def effective_rank(coordinates: Tensor) -> Tensor:
    """Return the effective rank of sets of vectors: how many directions they use.

    It is exp(−Σ p_i log p_i), where p_i = σ_i²/Σσ² is the fraction of energy along the i-th principal direction. The
    σ_i are the singular values of the coordinates. Vectors spread evenly over m orthogonal directions have effective
    rank m. It does not depend on the basis or the scale.

    Coordinates are not centred: a class that sits at one point of its subspace uses one direction. Roy & Vetterli
    (2007), who introduced the name, use p_i = σ_i/Σσ. We use energies, because they add up to the squared logit.

    Args:
        coordinates: Sets of B vectors of dimension K, (..., B, K), floating point.

    Returns:
        Effective ranks (...) in [1, K], float64. It is 0 if all vectors are zero.

    Raises:
        TypeError: If the coordinates are not floating point.
        ValueError: If the shape is wrong or a value is not finite.

    Examples:
        >>> import torch, grassy
        >>> round(float(grassy.analysis.effective_rank(torch.eye(5))), 6)
        5.0
    """
    coordinates = torch.as_tensor(coordinates)
    if not coordinates.is_floating_point():
        raise TypeError(f"coordinates must be floating point, got {coordinates.dtype}")
    if coordinates.ndim < 2 or 0 in coordinates.shape:
        raise ValueError(f"coordinates must have shape (samples, k), none of them 0, got {tuple(coordinates.shape)}")
    if not bool(coordinates.isfinite().all()):
        raise ValueError("coordinates hold NaN or Inf")
    coordinates = coordinates.double()
    coordinates = coordinates / coordinates.abs().amax((-2, -1), keepdim=True).clamp_min(torch.finfo(torch.double).tiny)
    return effective_rank_of_moments(coordinates.mT @ coordinates)


@torch.no_grad()
def class_spectra(features: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    """Return how the energy of each class's features is distributed over K directions of its subspace.

    Let x̂ be a unit feature of class c, W_c an orthonormal basis of its subspace, and t = W_c x̂ its coordinates. Row c
    holds the eigenvalues of the mean of t tᵀ, in descending order. Their sum is the mean of ‖t‖², at most 1. The
    remaining fraction of energy lies outside the subspace.

    Args:
        features: Features (B, N), floating point. Zero features are ignored.
        labels: Integer labels (B,) from 0 to C − 1.
        weight: Subspaces (C, K, N).

    Returns:
        Fractions of energy (C, K), float64. Absent directions have 0, classes without samples NaN.

    Raises:
        TypeError: If the features are not floating point or the labels not integers.
        ValueError: If shapes or labels do not fit the weight, or a value is not finite.
    """
    features, labels = check_labelled_features(features, labels)
    bases = orthonormal_bases(weight)
    if bases.shape[2] != features.shape[1]:
        raise ValueError(f"features have width {features.shape[1]}, but the weight has width {bases.shape[2]}")
    check_labels_of_classes(labels, len(bases))
    bases = bases.to(features.device)
    moments = torch.full((*bases.shape[:2], bases.shape[1]), math.nan, dtype=torch.float64, device=features.device)
    for label, members in members_by_class(labels).items():
        total, samples = torch.zeros_like(moments[0]), torch.zeros_like(moments[0, 0, 0])
        for block in members.split(ROWS_AT_ONCE):
            rows = features[block].double()
            length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
            coordinates = (rows @ bases[label].mT / length).masked_fill(length == 0, 0.0)
            total += coordinates.mT @ coordinates
            samples += (length > 0).sum()
        moments[label] = total / samples  # NaN without nonzero features
    empty = moments[:, 0, 0].isnan().unsqueeze(-1)
    return _energies(moments.nan_to_num(nan=0.0)).masked_fill(empty, math.nan)


@torch.no_grad()
def class_effective_ranks(features: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    """Return how many directions of its subspace each class uses: the `effective_rank` of its coordinates W_c x̂.

    Each sample has the same weight, whatever the length of its feature.

    Args:
        features: Features (B, N), floating point. Zero features are ignored.
        labels: Integer labels (B,) from 0 to C − 1.
        weight: Subspaces (C, K, N).

    Returns:
        Effective ranks (C,), float64. NaN for a class without samples, 0 if all its features are orthogonal to its
        subspace.

    Raises:
        TypeError: As `class_spectra`.
        ValueError: As `class_spectra`.
    """
    return _rank_of_shares(class_spectra(features, labels, weight))


def effective_rank_of_moments(moments: Tensor) -> Tensor:
    """Return the effective rank (...) of vectors t, given the sums of t tᵀ, (..., K, K). It is 0 where the sum is."""
    return _rank_of_shares(_energies(moments))


def _energies(moments: Tensor) -> Tensor:
    """Return the eigenvalues of positive semidefinite matrices (..., K, K), descending. Negative ones are rounding."""
    return torch.linalg.eigvalsh(moments).flip(-1).clamp_min(0)


def _rank_of_shares(energies: Tensor) -> Tensor:
    """Return the exponential of the entropy of the normalised energies (..., K), or 0 where all are 0."""
    total = energies.sum(-1, keepdim=True)
    shares = energies / total
    rank = torch.special.entr(shares).sum(-1).exp()
    return rank.masked_fill(total.squeeze(-1) == 0, 0.0)
