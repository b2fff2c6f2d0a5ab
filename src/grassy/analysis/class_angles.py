"""Angles between all pairs of classes: principal angles of subspaces, angles of vectors (paper, Section 5.3)."""

import math

import torch
from torch import Tensor

from grassy import geometry

PAIRS_AT_ONCE = 32768  # for K <= 8, where their K x K matrices take 16 MB; fewer for larger K


@torch.no_grad()
def pairwise_principal_angles(weight: Tensor) -> Tensor:
    """Return the principal angles between all pairs of C subspaces, in radians, ascending.

    The first angle is the smallest between a vector of one subspace and a vector of the other. Each further angle is
    the smallest among vectors orthogonal to the previous ones. `grassy.geometry.principal_angles` gives the same for
    one pair.

    The error is at most 2e-7, and at most 1e-10 for angles between 1e-4 and π/2 − 1e-4, before rounding to the dtype of
    the result. The cost is half of a float64 matmul of all bases, (CK)² N operations, and C²/2 eigenvalue problems of
    size K.

    Args:
        weight: A basis of each class as rows, (C, K, N). Zero rows are absent directions. Bases need not be
            orthonormal.

    Returns:
        Angles (C, C, K) in the dtype of the weight, at least float32. Two classes of dimensions k_i and k_j have
        min(k_i, k_j) angles, followed by NaN. The angles of a class with itself are exactly 0.

    Raises:
        TypeError: If the weight is not floating point.
        ValueError: If the weight has the wrong shape or holds NaN or Inf, or if the nonzero rows of a class are
            linearly dependent.

    Examples:
        >>> from grassy import analysis, geometry
        >>> analysis.pairwise_principal_angles(geometry.random_subspace(10, 4, 64)).shape
        torch.Size([10, 10, 4])
    """
    bases = orthonormal_bases(weight)
    classes, k, _ = bases.shape
    dims = geometry.present_rows(bases).sum(-1)
    index = torch.arange(k, device=bases.device)
    angles = torch.zeros(classes, classes, k, dtype=_result_dtype(weight), device=bases.device)
    rows_at_once = max(1, PAIRS_AT_ONCE // max(1, k // 8) ** 2 // classes)
    for start in range(0, classes, rows_at_once):
        rows = bases[start : start + rows_at_once]
        products = rows.flatten(0, 1) @ bases[start:].flatten(0, 1).mT
        products = products.unflatten(0, (-1, k)).unflatten(2, (-1, k)).transpose(1, 2)  # (rows, C - start, K, K)
        first, second = torch.ones(products.shape[:2], device=bases.device).triu(1).nonzero(as_tuple=True)
        if not len(first):  # only the last class is left
            break
        products = products[first, second]
        first, second = first + start, second + start
        # The eigenvalues of P Pᵀ are cos². In float32, angles near 0° or 90° would be off by 3e-4 rad. With bases that
        # are orthonormal in float64, the error of the squares is about 1e-15: 3e-8 rad at 0° or 90°, negligible
        # elsewhere.
        squared = torch.linalg.eigvalsh(products @ products.mT).flip(-1).clamp(0, 1)
        pairs = torch.atan2((1 - squared).sqrt(), squared.sqrt())
        count = torch.minimum(dims[first], dims[second]).unsqueeze(-1)
        pairs = pairs.masked_fill(index >= count, math.nan).to(angles.dtype)
        angles[first, second] = pairs
        angles[second, first] = pairs
    own = angles.diagonal().mT  # (C, K), a view
    own.masked_fill_(index >= dims.unsqueeze(-1), math.nan)
    return angles


@torch.no_grad()
def class_vector_angles(weight: Tensor) -> Tensor:
    """Return the angles between all pairs of class vectors, in radians, for heads with one vector per class.

    Unlike principal angles, they exceed π/2 where vectors point away from each other.

    Args:
        weight: Class vectors (C, N).

    Returns:
        Angles (C, C) in [0, π], in the dtype of the weight, at least float32. The angles of a zero vector are NaN.

    Raises:
        TypeError: If the weight is not floating point.
        ValueError: If the weight has the wrong shape or holds NaN or Inf.
    """
    weight = check_weight(weight, "(classes, width)", 2)
    vectors = weight.double()
    length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    vectors = vectors / length  # NaN for a zero vector
    angles = torch.empty(len(vectors), len(vectors), dtype=_result_dtype(weight), device=weight.device)
    rows_at_once = max(1, 256 * PAIRS_AT_ONCE // len(vectors))
    for start in range(0, len(vectors), rows_at_once):
        rows = vectors[start : start + rows_at_once]
        angles[start : start + rows_at_once] = (rows @ vectors.mT).clamp(-1, 1).arccos()
    angles = torch.where(angles.mT < angles, angles.mT, angles)  # exactly symmetric in spite of rounding
    angles.diagonal().masked_fill_(length.squeeze(-1) > 0, 0.0)
    return angles


def orthonormal_bases(weight: Tensor) -> Tensor:
    """Return float64-orthonormal bases of the subspaces of a weight (C, K, N), after checking it."""
    weight = check_weight(weight, "(classes, k, width)", 3)
    if weight.shape[1] > weight.shape[2]:
        raise ValueError(f"weight must have shape (classes, k, width) with k <= width, got {tuple(weight.shape)}")
    return geometry.orthonormalize(weight.double())


def check_weight(weight: Tensor, shape: str, dimensions: int) -> Tensor:
    weight = torch.as_tensor(weight)
    if not weight.is_floating_point():
        raise TypeError(f"weight must be floating point, got {weight.dtype}")
    if weight.ndim != dimensions or 0 in weight.shape:
        raise ValueError(f"weight must have shape {shape}, none of them 0, got {tuple(weight.shape)}")
    finite = weight.isfinite().flatten(1).all(-1)
    if not bool(finite.all()):
        raise ValueError(f"weight holds NaN or Inf, first in class {int((~finite).nonzero()[0])}")
    return weight


def _result_dtype(weight: Tensor) -> torch.dtype:
    return torch.promote_types(torch.as_tensor(weight).dtype, torch.float32)
