"""Targets that mix a few labels per row, as in mixup and CutMix, without a probability for every class."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class MixedLabels:
    """A target that mixes M labels per row, with the probabilities t = Σ_m w_m e(y_m).

    Labels of a row may be equal, and its weights need not sum to 1. Labels equal to `ignore_index`, -100 by default, do
    not count. Rows without other labels do not count either, but only sharded and sampled heads take such
    rows: for other heads the target becomes probabilities, in which every row counts.

    Args:
        labels: Class indices y, (..., M).
        weights: Weights w, (..., M), floating point.

    Raises:
        TypeError: If the labels are not integers, or the weights not floating point.
        ValueError: If the shapes differ.

    Examples:
        >>> import torch, grassy
        >>> target = grassy.MixedLabels(torch.tensor([[0, 2]]), torch.tensor([[0.7, 0.3]]))
        >>> target.dense(3)
        tensor([[0.7000, 0.0000, 0.3000]])
    """

    labels: Tensor
    weights: Tensor

    def __post_init__(self) -> None:
        if self.labels.is_floating_point() or not self.weights.is_floating_point():
            raise TypeError(
                f"MixedLabels takes integer labels and floating point weights, got {self.labels.dtype} and "
                f"{self.weights.dtype}"
            )
        if self.labels.shape != self.weights.shape or not self.labels.ndim:
            raise ValueError(
                f"labels and weights must have the same shape (..., M), got {tuple(self.labels.shape)} and "
                f"{tuple(self.weights.shape)}"
            )

    def __getitem__(self, rows: slice | Tensor) -> "MixedLabels":
        """Return the target of some rows."""
        return MixedLabels(self.labels[rows], self.weights[rows])

    @property
    def shape(self) -> torch.Size:
        """The shape (...) of the rows."""
        return self.labels.shape[:-1]

    def counted(self, ignore_index: int = -100) -> Tensor:
        """Return whether each row (...) has a label other than `ignore_index`."""
        return (self.labels != ignore_index).any(-1)

    def dense(self, num_classes: int, ignore_index: int = -100) -> Tensor:
        """Return the probabilities (..., C)."""
        ignored = self.labels == ignore_index
        result = self.weights.new_zeros(*self.shape, num_classes)
        return result.scatter_add(-1, self.labels.long().masked_fill(ignored, 0), self.weights.masked_fill(ignored, 0))


def is_soft(target: Tensor | MixedLabels) -> bool:
    """Whether a target holds probabilities or mixed labels, not one label per row."""
    return isinstance(target, MixedLabels) or target.is_floating_point()
