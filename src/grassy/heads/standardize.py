"""Standardised features: mean 0 and variance 1 in each of the N dimensions, before a head sees them.

A network that ends in a ReLU and global average pooling has non-negative features. They share a large mean, so after
normalisation they lie in a narrow cone, and the logits of all classes are large and similar. Standardised features can
point in any direction.

The module is a batch normalisation without scale and shift: (x − mean)/√(variance + 1e-5). It uses batch statistics in
training and running averages in evaluation. A training batch of one feature uses the running averages too, since the
last batch of an epoch may be that small.
"""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

TOO_FEW = (
    "a training batch of one feature is standardised by the running statistics so far. If all batches are that small, "
    "give the head standardize=False, normalize=True"
)


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
        if not torch.compiler.is_compiling():
            warnings.warn(TOO_FEW, stacklevel=2)
        variance: Any = batch_norm.running_var
        return ((rows - mean) * (variance + batch_norm.eps).rsqrt()).reshape(features.shape)
    standard: Tensor = batch_norm(rows)
    return standard.reshape(features.shape)
