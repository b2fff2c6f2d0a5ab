"""The contract of a head: features in, logits out, and a loss."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

Criterion = Callable[[Tensor, Tensor], Tensor]


class LossRequest(NamedTuple):
    """What `grassy.classification_loss` hands to a head for the length of one forward pass of the model."""

    target: Tensor
    criterion: Criterion


class Head(nn.Module):
    """Maps features (..., N) to logits (..., C).

    A new head defines `logits`. It may use the target, as margin heads do in training. If its training loss is more
    than a criterion on its logits, it defines `loss` as well.
    """

    #: Names of the parameters that are subspaces, to be trained by Riemannian SGD.
    subspace_names: tuple[str, ...] = ()

    def __init__(self, in_features: int, num_classes: int) -> None:
        super().__init__()
        for name, value in (("in_features", in_features), ("num_classes", num_classes)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        self.in_features = in_features
        self.num_classes = num_classes
        self.loss_request: LossRequest | None = None

    def forward(self, features: Tensor, target: Tensor | None = None) -> Tensor:
        """Logits; or the loss, if `classification_loss` asked a head that has one of its own for it."""
        if not features.is_floating_point():
            raise TypeError(f"features must be floating point, got {features.dtype}")
        if features.shape[-1:] != (self.in_features,):
            raise ValueError(
                f"{type(self).__name__} takes features of width {self.in_features}, got {tuple(features.shape)}"
            )
        if self.loss_request is not None and target is None:
            target = self.loss_request.target
            if self.has_own_loss():
                return self.loss(features, target, self.loss_request.criterion)
        return self.logits(features, target)

    def logits(self, features: Tensor, target: Tensor | None = None) -> Tensor:
        """Logits (..., C) of features (..., N). `target` holds class indices, or is None."""
        raise NotImplementedError(f"{type(self).__name__} must define logits(features, target)")

    def loss(self, features: Tensor, target: Tensor, criterion: Criterion) -> Tensor:
        """The training loss: the criterion on the logits, unless the representation needs more."""
        return criterion(self.logits(features, target), target)

    def has_own_loss(self) -> bool:
        return type(self).loss is not Head.loss

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, num_classes={self.num_classes}"


def normal_like_linear(weight: Tensor) -> None:
    """Initialise a (..., out, in) weight as `nn.Linear` does: uniform within 1/√in."""
    bound = weight.shape[-1] ** -0.5
    with torch.no_grad():
        weight.uniform_(-bound, bound)
