"""The result of a search by cross-validation, and the accuracies of folds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, get_args

import torch
from torch import Tensor

Model = TypeVar("Model")

Metric = Literal["top1", "mean_per_class"]
METRICS = get_args(Metric)


@dataclass(frozen=True)
class Search(Generic[Model]):
    """The values tried, their accuracies on the held-out samples of each fold, and the best model, fitted to all."""

    values: tuple[float, ...]
    accuracies: Tensor  # (len(values), folds), float64, on the CPU
    chosen: float
    model: Model


def fold_accuracies(correct: Tensor, index: Tensor, held_out: Tensor, metric: str) -> Tensor:
    """Accuracy (folds,) on the samples of each fold. correct (B,): whether each sample was classified correctly.

    "top1" is the share of correct samples, "mean_per_class" the mean of that share over classes.
    """
    folds, classes = int(held_out.max()) + 1, int(index.max()) + 1
    cell = held_out * classes + index if metric == "mean_per_class" else held_out
    cells = folds * classes if metric == "mean_per_class" else folds
    counts = cell.bincount(minlength=cells)
    hits = cell.bincount(weights=correct.double(), minlength=cells)
    return (hits / counts).reshape(folds, -1).mean(-1).cpu()


def check_search(values: Sequence[float], name: str, metric: str) -> tuple[float, ...]:
    """The values to try; a ValueError unless there is at least one and all are positive."""
    tried = tuple(values)
    if not tried or not all(value > 0 for value in tried):
        raise ValueError(f"{name} must be one or more positive numbers, got {tried}")
    if metric not in METRICS:
        raise ValueError(f"metric must be one of {', '.join(METRICS)}, got {metric!r}")
    return tried


def best(accuracies: Tensor) -> int:
    """The row with the highest mean over folds; on a tie the first, as in scikit-learn's GridSearchCV."""
    return int(torch.argmax((accuracies.mean(-1) >= accuracies.mean(-1).max() - 1e-12).int()))
