"""Targets that are mixtures of a few labels, as mixup and CutMix make them, without a probability for every class."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class MixedLabels:
    """Of each row, M labels (..., M) and how much of each is in it, weights (..., M).

    The target is t = Σ_m w_m e(y_m). Labels of a row may be the same, and its weights need not sum to one.
    Labels to ignore, -100 by default, drop out with their weight, and so do rows that have no other labels.
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

    @property
    def shape(self) -> torch.Size:
        """The shape (...) of the rows."""
        return self.labels.shape[:-1]

    def counted(self, ignore_index: int = -100) -> Tensor:
        """Whether a row (...) has a label that is not to be ignored."""
        return (self.labels != ignore_index).any(-1)

    def dense(self, num_classes: int, ignore_index: int = -100) -> Tensor:
        """The probabilities (..., C)."""
        ignored = self.labels == ignore_index
        result = self.weights.new_zeros(*self.shape, num_classes)
        return result.scatter_add(-1, self.labels.long().masked_fill(ignored, 0), self.weights.masked_fill(ignored, 0))


def is_soft(target: Tensor | MixedLabels) -> bool:
    """Whether a target is more than one label for each row."""
    return isinstance(target, MixedLabels) or target.is_floating_point()
