"""The principal directions of each class: subspaces that need no training."""

import torch
from torch import Tensor


def principal_subspaces(rows: Tensor, labels: Tensor, sample_weight: Tensor, k: int) -> Tensor:
    """Return for each class the k-dimensional subspace W with the largest Σ w‖W x‖² over its rows x: (C, K, N).

    The arguments are rows (B, N), labels (B,) and weights (B,). A class whose rows span fewer than k dimensions has
    zero rows for the absent directions.
    """
    classes = int(labels.max()) + 1
    out = rows.new_zeros(classes, k, rows.shape[1])
    for label in range(classes):
        members = labels == label
        own = rows[members].double() * sample_weight[members].double().sqrt().unsqueeze(-1)
        found = _principal_directions(own, k)
        out[label, : len(found)] = found.to(rows.dtype)
    return out


def _principal_directions(rows: Tensor, k: int) -> Tensor:
    """Return the right singular vectors of rows (B, N) for the k largest nonzero singular values.

    It computes them from the eigenvectors of the smaller of the two Gram matrices.
    """
    wide = rows.shape[0] < rows.shape[1]
    values, vectors = torch.linalg.eigh(rows @ rows.mT if wide else rows.mT @ rows)
    values, vectors = values.flip(0)[:k], vectors.flip(1)[:, :k]
    present = values > max(rows.shape) * torch.finfo(values.dtype).eps * values[0]
    values, vectors = values[present], vectors[:, present]
    if not wide:
        return vectors.mT
    # These vectors are less orthogonal for smaller singular values. QR restores it and keeps the span.
    return torch.linalg.qr((vectors.mT @ rows).mT / values.sqrt()).Q.mT
