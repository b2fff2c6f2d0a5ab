"""The principal directions of each class: the best subspaces that need no training."""

import torch
from torch import Tensor


def principal_subspaces(rows: Tensor, labels: Tensor, sample_weight: Tensor, k: int) -> Tensor:
    """For each class the k-dimensional subspace that holds most of the energy of its rows: (C, K, N).

    rows (B, N), labels (B,) and weights (B,). Of all subspaces W it has the largest Σ w‖W x‖². A class whose rows span
    fewer than k dimensions has that many directions, and zero rows for the others.
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
    """The right singular vectors of rows (B, N) that belong to the k largest singular values that are not 0.

    From the eigenvectors of the smaller of the two Gram matrices.
    """
    wide = rows.shape[0] < rows.shape[1]
    values, vectors = torch.linalg.eigh(rows @ rows.mT if wide else rows.mT @ rows)
    values, vectors = values.flip(0)[:k], vectors.flip(1)[:, :k]
    present = values > max(rows.shape) * torch.finfo(values.dtype).eps * values[0]
    values, vectors = values[present], vectors[:, present]
    if not wide:
        return vectors.mT
    # The products lose orthogonality with the smaller values; QR restores it without a change of the span.
    return torch.linalg.qr((vectors.mT @ rows).mT / values.sqrt()).Q.mT
