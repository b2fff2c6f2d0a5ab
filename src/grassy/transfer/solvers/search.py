"""The outcome of a search by cross-validation, and how its accuracies are counted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

Model = TypeVar("Model")

METRICS = ("top1", "mean_per_class")


@dataclass(frozen=True)
class Search(Generic[Model]):
    """What was tried, how it did on the samples held out of each fold, and the winner fitted to all samples."""

    values: tuple[float, ...]
    accuracies: Tensor  # (len(values), folds), float64, on the CPU
    chosen: float
    model: Model


def fold_accuracies(correct: Tensor, index: Tensor, held_out: Tensor, metric: str) -> Tensor:
    """Accuracy (folds,) on the samples of each fold; correct (B,) says which were recognised when held out.

    "top1" is the share of samples, "mean_per_class" the mean over classes of the share within a class.
    """
    folds, classes = int(held_out.max()) + 1, int(index.max()) + 1
    cell = held_out * classes + index if metric == "mean_per_class" else held_out
    cells = folds * classes if metric == "mean_per_class" else folds
    counts = cell.bincount(minlength=cells)
    hits = cell.bincount(weights=correct.double(), minlength=cells)
    return (hits / counts).reshape(folds, -1).mean(-1).cpu()


def check_search(values: Sequence[float], name: str, metric: str) -> tuple[float, ...]:
    """The values to try, at least one, all positive."""
    tried = tuple(values)
    if not tried or not all(value > 0 for value in tried):
        raise ValueError(f"{name} must be one or more positive numbers, got {tried}")
    if metric not in METRICS:
        raise ValueError(f"metric must be one of {', '.join(METRICS)}, got {metric!r}")
    return tried


def best(accuracies: Tensor) -> int:
    """The row of the highest mean over folds; of equal ones the first, as scikit-learn's GridSearchCV has it."""
    return int(torch.argmax((accuracies.mean(-1) >= accuracies.mean(-1).max() - 1e-12).int()))
