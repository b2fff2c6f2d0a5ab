"""Several linear layers on the same features: MultiFC in the paper."""

from typing import Any, Unpack

import torch
from torch import Tensor, nn

from grassy.arguments import check_booleans, positive_integer
from grassy.criteria import Criterion, with_classes_last
from grassy.heads.base import Head, HeadOptions, empty_parameter, init_like_linear, linear


class MultiHead(Head):
    """Ensemble of linear layers on the same features: MultiFC in the paper.

    It averages the losses of the layers in training and their logits in evaluation.

    Args:
        in_features: Feature dimension N.
        num_classes: Number of classes C.
        layers: Number of linear layers.
        bias: Add a bias per layer and class.
        **options: Options of every head: see `Head`.
    """

    logits_use_target = False

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        layers: int = 8,
        bias: bool = True,
        **options: Unpack[HeadOptions],
    ) -> None:
        super().__init__(in_features, num_classes, **options)
        layers = positive_integer("layers", layers)
        check_booleans(bias=bias)
        self.weight = empty_parameter(options, layers, num_classes, in_features)
        self.bias = empty_parameter(options, layers, num_classes) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        init_like_linear(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def logits(self, features: Tensor, target: Tensor | None = None) -> Tensor:
        # Averaging the weights gives the average of the logits, for one matmul of size C.
        return linear(features, self.weight.mean(0), None if self.bias is None else self.bias.mean(0))

    def loss(self, features: Tensor, target: Tensor, criterion: Criterion) -> Tensor:
        features = self.prepare(features, target, criterion)
        if not self.training:
            return with_classes_last(criterion, self.logits(features), target)
        bias = None if self.bias is None else self.bias.flatten()
        each = linear(features, self.weight.flatten(0, 1), bias).unflatten(-1, self.weight.shape[:2])  # from one matmul
        return torch.stack([with_classes_last(criterion, logits, target) for logits in each.unbind(-2)]).mean(0)

    @property
    def options(self) -> dict[str, Any]:
        return {"layers": self.weight.shape[0], "bias": self.bias is not None, **super().options}
