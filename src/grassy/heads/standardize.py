"""Standardised features: mean 0 and variance 1 in each of the N dimensions, before a head sees them.

A network that ends in a ReLU and global average pooling has non-negative features. They share a large mean, so after
normalisation they lie in a narrow cone, and the logits of all classes are large and similar. Standardised features can
point in any direction.

The module is a batch normalisation without scale and shift: (x − mean)/√(variance + 1e-5). It uses batch statistics in
training and running averages in evaluation.
"""

from typing import Any

import torch
from torch import Tensor, nn


def standardization(in_features: int, device: torch.device | str | None, dtype: torch.dtype | None) -> nn.BatchNorm1d:
    """Create the batch normalisation, with statistics in at least float32.

    It is not a subclass of torch's module, so that `nn.SyncBatchNorm.convert_sync_batchnorm` can convert it.
    """
    exact = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
    return nn.BatchNorm1d(in_features, affine=False, device=device, dtype=exact)


def standardized(batch_norm: nn.Module, features: Tensor) -> Tensor:
    """Standardise features (..., N) in the dtype of the statistics, under autocast too."""
    mean: Any = batch_norm.running_mean
    rows = features.reshape(-1, features.shape[-1]).to(mean.dtype)
    alone = not isinstance(batch_norm, nn.SyncBatchNorm)  # which counts the features of all processes and checks itself
    if batch_norm.training and alone and len(rows) < 2:  # one feature has no variance, and none would store NaN
        raise ValueError(
            f"standardize=True needs at least two features in training to estimate mean and variance, got features "
            f"of shape {tuple(features.shape)}: use larger batches (drop_last=True), or head.eval()"
        )
    standard: Tensor = batch_norm(rows)
    return standard.reshape(features.shape)
