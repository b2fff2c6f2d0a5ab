"""Checks of features and labels, and stratified folds."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

Array = Tensor | np.ndarray

LARGEST = 1e100
ELEMENTS_AT_ONCE = 2**24  # elements converted to another dtype at once: 64 MB of float32


def as_features(features: Array, width: int | None = None) -> Tensor:
    """Features (B, N) as a tensor that shares their memory; a ValueError if they are invalid."""
    try:
        tensor = torch.as_tensor(features)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"features must be a tensor or an array of numbers: {error}") from None
    if not tensor.is_floating_point():
        raise ValueError(f"features must be floating point, got {tensor.dtype}")
    if tensor.ndim != 2 or 0 in tensor.shape:
        raise ValueError(f"features must have shape (samples, width), none of them 0, got {tuple(tensor.shape)}")
    if width is not None and tensor.shape[1] != width:
        raise ValueError(f"features must have width {width}, as in fit, got {tensor.shape[1]}")
    for start, rows in row_blocks(tensor):
        finite = rows.isfinite()
        if not bool(finite.all()):
            first = start + int((~finite.all(-1)).nonzero()[0])
            raise ValueError(f"features hold NaN or Inf, first in row {first}")
        if rows.dtype == torch.float64 and max(float(rows.max()), -float(rows.min())) > LARGEST:
            raise ValueError(f"features hold values beyond {LARGEST:.0e}, whose squares overflow: scale them")
    return tensor.detach()


def as_labels(labels: Array, samples: int) -> Tensor:
    """Labels (B,) as int64; a ValueError if they are invalid."""
    try:
        tensor = torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"labels must be integers: {error}") from None
    if tensor.is_floating_point() or tensor.is_complex():
        raise ValueError(f"labels must be integers, got {tensor.dtype}")
    if tensor.shape != (samples,):
        raise ValueError(f"labels must have shape ({samples},), one per sample, got {tuple(tensor.shape)}")
    return tensor.long()


def as_training_set(features: Array, labels: Array, least_classes: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Features (B, N), the classes present in ascending order (C,), and the index of each sample's class (B,)."""
    tensor = as_features(features)
    classes, index = as_labels(labels, len(tensor)).to(tensor.device).unique(return_inverse=True)
    if len(classes) < least_classes:
        raise ValueError(f"labels must hold at least {least_classes} classes, got only {int(classes[0])}")
    return tensor, classes, index


def stratified_folds(index: Tensor, folds: int, seed: int) -> Tensor:
    """The fold (B,) that holds out each sample, equal to scikit-learn's StratifiedKFold(shuffle=True).

    index (B,): the class index of each sample. Each class is spread evenly, so it needs at least `folds` samples.
    """
    if folds < 2:
        raise ValueError(f"folds must be at least 2, got {folds}")
    counts = index.bincount()
    if int(counts.min()) < folds:
        raise ValueError(f"every class needs at least folds={folds} samples, the smallest has {int(counts.min())}")
    labels = index.cpu().numpy()
    # scikit-learn numbers the classes by their first appearance, and shuffles them in that order.
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    order = np.argsort(np.argsort(first))[inverse]
    in_order = np.sort(order)
    share = np.stack([np.bincount(in_order[fold::folds], minlength=len(first)) for fold in range(folds)])
    generator = np.random.RandomState(seed)
    held_out = np.empty(len(labels), dtype=np.int64)
    for number in range(len(first)):
        of_class = np.arange(folds).repeat(share[:, number])
        generator.shuffle(of_class)
        held_out[order == number] = of_class
    return torch.from_numpy(held_out).to(index.device)


def row_blocks(rows: Tensor, most: int | None = None) -> Iterator[tuple[int, Tensor]]:
    """Consecutive blocks of rows, each with the index of its first row. Copies of a block stay small.

    most: the largest number of rows per block, however narrow they are.
    """
    size = max(1, ELEMENTS_AT_ONCE // rows.shape[1])
    size = size if most is None else max(1, min(size, most))
    for start in range(0, len(rows), size):
        yield start, rows[start : start + size]


def mean_norm(features: Tensor) -> float:
    """The mean Euclidean norm of features (B, N), the scale of the protocol; 1 if all are zero."""
    total = sum(float(torch.linalg.vector_norm(rows.double(), dim=-1).sum()) for _, rows in row_blocks(features))
    return total / len(features) or 1.0
