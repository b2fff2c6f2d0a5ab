"""How features use the subspace of their class: the spectrum of their coordinates in it, and its effective rank."""

import math

import torch
from torch import Tensor

from grassy.analysis.class_angles import orthonormal_bases
from grassy.analysis.labelled import ROWS_AT_ONCE, check_labelled_features, check_labels_of_classes, members_by_class


@torch.no_grad()
def effective_rank(coordinates: Tensor) -> Tensor:
    """The number of directions that vectors use, between 1 and K, not necessarily whole: (..., B, K) -> (...), float64.

    exp(−Σ p_i log p_i), where p_i = σ_i²/Σσ² are the shares of energy along the principal directions and σ_i the
    singular values of the coordinates, which are not centred: a class that sits at one point of its subspace uses one
    direction of it. (Roy & Vetterli 2007, who introduced the name, have p_i = σ_i/Σσ; shares of energy add up to what
    the logit sees.) Vectors that are spread evenly over m orthogonal directions have effective rank m; it does not
    depend on the basis nor on the scale. Vectors that are all zero have effective rank 0.
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
    """Where the energy of the features of a class goes: shares along K directions of its subspace, (C, K), float64.

    features (B, N); labels (B,), integers from 0 to C − 1; weight (C, K, N). With x̂ the feature divided by its length,
    W_c an orthonormal basis of the subspace of class c and t = W_c x̂ the coordinates of its samples, the row of class c
    is the eigenvalues of the mean of t tᵀ, descending: the mean of ‖t‖² split along its principal directions. They add
    up to at most 1, and 1 minus their sum is the share of energy outside of the subspace.

    Absent directions have share 0. Zero features have no direction and are left out. A class without samples is NaN.
    """
    features, labels = check_labelled_features(features, labels)
    bases = orthonormal_bases(weight)
    if bases.shape[2] != features.shape[1]:
        raise ValueError(f"features are {features.shape[1]} wide, the subspaces of the weight {bases.shape[2]}")
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
        moments[label] = total / samples  # NaN if there are none with a direction
    empty = moments[:, 0, 0].isnan().unsqueeze(-1)
    return _energies(moments.nan_to_num(nan=0.0)).masked_fill(empty, math.nan)


@torch.no_grad()
def class_effective_ranks(features: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    """How many directions of its subspace each class uses, (C,), float64: `effective_rank` of its coordinates W_c x̂.

    Arguments as for `class_spectra`. Every sample counts the same, whatever the length of its feature. NaN for a class
    without samples, 0 for one whose features are all orthogonal to its subspace.
    """
    return _rank_of_shares(class_spectra(features, labels, weight))


def effective_rank_of_moments(moments: Tensor) -> Tensor:
    """`effective_rank` of vectors of which only the sum of t tᵀ is known, (..., K, K) -> (...); 0 where it is zero."""
    return _rank_of_shares(_energies(moments))


def _energies(moments: Tensor) -> Tensor:
    """Eigenvalues of positive semidefinite matrices (..., K, K), descending; what is negative is rounding."""
    return torch.linalg.eigvalsh(moments).flip(-1).clamp_min(0)


def _rank_of_shares(energies: Tensor) -> Tensor:
    """The exponential of the entropy of energies (..., K) divided by their sum; 0 where all are 0."""
    total = energies.sum(-1, keepdim=True)
    shares = energies / total
    rank = torch.special.entr(shares).sum(-1).exp()
    return rank.masked_fill(total.squeeze(-1) == 0, 0.0)
