"""The one normalisation of the protocol: features are divided by the mean norm of the training features."""

import torch
from torch import Tensor

from grassy.transfer.solvers.folds import row_blocks


def mean_norm(features: Tensor) -> float:
    """The mean Euclidean norm of features (B, N); 1 if all are zero, which no scale can change."""
    total = sum(float(torch.linalg.vector_norm(rows.double(), dim=-1).sum()) for _, rows in row_blocks(features))
    return total / len(features) or 1.0
