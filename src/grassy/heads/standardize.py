"""Standardised features: each of the N features with mean 0 and variance 1, before a head looks at them.

A network that ends in a ReLU and a mean over places has features that are never negative, and they all point roughly
the same way: their common mean is most of their length. Scaled to one length they lie in a narrow cone, and the logits
of all classes are large and alike. Without its mean, and with every coordinate on one scale, a feature can point
anywhere. It is a batch normalisation without scale and shift: (x − mean)/√(variance + 1e-5), with the statistics of
the batch in training and their running average in evaluation.
"""

from typing import Any

import torch
from torch import Tensor, nn


def standardization(in_features: int, device: torch.device | str | None, dtype: torch.dtype | None) -> nn.BatchNorm1d:
    """The module that keeps the statistics, in at least float32.

    torch's own and not a subclass of it, so that `nn.SyncBatchNorm.convert_sync_batchnorm` knows what to do with it.
    """
    exact = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
    return nn.BatchNorm1d(in_features, affine=False, device=device, dtype=exact)


def standardized(batch_norm: nn.Module, features: Tensor) -> Tensor:
    """Features (..., N) of any leading shape, standardised in the precision of the statistics, under autocast too."""
    mean: Any = batch_norm.running_mean
    rows = features.reshape(-1, features.shape[-1]).to(mean.dtype)
    alone = not isinstance(batch_norm, nn.SyncBatchNorm)  # which counts those of all processes, and checks that itself
    if batch_norm.training and alone and len(rows) < 2:  # one has no variance, and none would leave NaN behind
        raise ValueError(
            f"standardize=True needs at least two features in training to tell their mean and variance, got features "
            f"of shape {tuple(features.shape)}: use larger batches (drop_last=True), or head.eval()"
        )
    standard: Tensor = batch_norm(rows)
    return standard.reshape(features.shape)
