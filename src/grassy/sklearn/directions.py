"""Map features to directions, which subspaces through the origin can distinguish.

A subspace cannot distinguish x from −x, or from 2x. A constant extra coordinate changes that: a subspace of the
extended space corresponds to an affine subspace of the original one.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from grassy.kernels.reference import unit


class Directions(NamedTuple):
    """Maps x to ((x − mean)/scale, constant), normalised. mean (N,) and scale (N,) are NumPy arrays."""

    mean: Any
    scale: Any
    constant: float

    def __call__(self, features: Any) -> Tensor:
        """Map a NumPy array (B, N) to unit vectors (B, N), or (B, N + 1) with a constant."""
        rows = torch.from_numpy(np.ascontiguousarray((features - self.mean) / self.scale, dtype=features.dtype))
        if self.constant:
            rows = torch.cat([rows, rows.new_full((len(rows), 1), self.constant)], dim=1)
        return unit(rows)


def fit_directions(features: Any, sample_weight: Any, standardize: bool, constant: float) -> Directions:
    """Fit the map to features (B, N) with weights (B,). It is invariant to the common scale of the features.

    With `standardize`, every dimension gets mean 0 and variance 1. Otherwise all share one scale. The constant is in
    units of the root mean square of the centred features, and 0 means none. Features are centred if there is a constant
    or if they are standardised.
    """
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler(with_std=standardize).fit(features, sample_weight=sample_weight)
    mean = scaler.mean_ if constant or standardize else np.zeros(features.shape[1])
    scale = np.ones(features.shape[1]) if scaler.scale_ is None else scaler.scale_
    size = _root_mean_square((features - mean) / scale, sample_weight)
    return Directions(mean.astype(features.dtype), (scale * size).astype(features.dtype), constant)


def _root_mean_square(rows: Any, sample_weight: Any) -> float:
    """Return the root mean square of all elements of rows (B, N), with weights (B,); 1 if all are zero."""
    largest = float(np.abs(rows).max()) or 1.0  # so that squares cannot overflow
    squares = np.square(rows / largest, dtype=np.float64).mean(axis=1)
    return largest * float(np.sqrt(np.average(squares, weights=sample_weight))) or 1.0
