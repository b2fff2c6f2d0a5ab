"""Angles between all pairs of classes: principal angles of subspaces, plain angles of vectors (paper, Section 5.3)."""

import math

import torch
from torch import Tensor

from grassy import geometry

PAIRS_AT_ONCE = 32768  # of up to 8 dimensions: their products take 16 MB; of more dimensions fewer, for the same memory


@torch.no_grad()
def pairwise_principal_angles(weight: Tensor) -> Tensor:
    """The principal angles between every two of C subspaces in radians, ascending, (C, C, K).

    weight (C, K, N) holds a basis of each class in its rows; zero rows are absent directions. The first angle is the
    least that a vector of one subspace makes with one of the other; each next one is the least among those at right
    angles to the vectors before. They are what `grassy.geometry.principal_angles` gives for each pair: two classes of
    dimensions k_i and k_j have min(k_i, k_j) angles and NaN after them; a class is at exactly 0 from itself.

    A basis that is orthonormal only up to rounding, or not at all, is made so first. The result has the dtype of the
    weight, at least float32. Before it is rounded to that, it is within 2e-7 of the angles between the given subspaces,
    and within 1e-10 of those between 1e-4 and π/2 − 1e-4. Raises ValueError if the nonzero rows of a class are
    linearly dependent.

    Work: half of one product of all bases in float64, (CK)² N operations, and C²/2 eigenvalue problems of size K.
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
        if not len(first):  # the last class alone
            break
        products = products[first, second]
        first, second = first + start, second + start
        # cos² are the eigenvalues of P Pᵀ, sin² those of I − P Pᵀ. In float32 either would lose half of the digits at
        # its end, 3e-4 rad; with bases that are orthonormal in float64 the squares are off by some 1e-15, which is
        # 3e-8 in an angle at 0° or 90° and nothing to speak of elsewhere.
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
    """The angle between every two class vectors in radians, 0 to π, (C, C): for heads with one vector a class.

    weight (C, N). Unlike principal angles these exceed π/2 where vectors point away from each other. A zero vector has
    no direction: its angles are NaN. The result has the dtype of the weight, at least float32, and errors as there.
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
    angles = torch.where(angles.mT < angles, angles.mT, angles)  # rounding must not depend on the order of a pair
    angles.diagonal().masked_fill_(length.squeeze(-1) > 0, 0.0)
    return angles


def orthonormal_bases(weight: Tensor) -> Tensor:
    """The subspaces of a weight (C, K, N), each by a basis that is orthonormal in float64, or a clear error."""
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
