"""Features as directions: what a subspace through the origin can tell apart.

A subspace does not know x from −x, nor a feature from one twice as long. A constant coordinate beside the features
changes that: in the space of one more dimension, a subspace through the origin is any flat of the original space.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from grassy.kernels.reference import unit


class Directions(NamedTuple):
    """x ↦ ((x − mean)/scale, constant), scaled to length 1. mean (N,) and scale (N,) are NumPy arrays."""

    mean: Any
    scale: Any
    constant: float

    def __call__(self, features: Any) -> Tensor:
        """Features (B, N) of NumPy to unit vectors (B, N), or (B, N + 1) if there is a constant."""
        rows = torch.from_numpy(np.ascontiguousarray((features - self.mean) / self.scale, dtype=features.dtype))
        if self.constant:
            rows = torch.cat([rows, rows.new_full((len(rows), 1), self.constant)], dim=1)
        return unit(rows)


def fit_directions(features: Any, sample_weight: Any, standardize: bool, constant: float) -> Directions:
    """The map for features (B, N) with weights (B,). Features of another scale give the same directions.

    standardize: every feature gets mean 0 and variance 1. Otherwise all are divided by one number.
    constant: the constant coordinate, in units of the root mean square of the centred features; 0 for none. Features
        are centred if there is one, or if they are standardised; else the origin is where it was.
    """
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler(with_std=standardize).fit(features, sample_weight=sample_weight)
    mean = scaler.mean_ if constant or standardize else np.zeros(features.shape[1])
    scale = np.ones(features.shape[1]) if scaler.scale_ is None else scaler.scale_
    size = _root_mean_square((features - mean) / scale, sample_weight)
    return Directions(mean.astype(features.dtype), (scale * size).astype(features.dtype), constant)


def _root_mean_square(rows: Any, sample_weight: Any) -> float:
    """Of all elements of rows (B, N), by the weights of the rows; 1 if all are zero."""
    largest = float(np.abs(rows).max()) or 1.0  # squares of what is divided by it cannot overflow
    squares = np.square(rows / largest, dtype=np.float64).mean(axis=1)
    return largest * float(np.sqrt(np.average(squares, weights=sample_weight))) or 1.0
