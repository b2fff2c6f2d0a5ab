"""One vector a class: the softmax baseline, `nn.Linear` under the contract of a head."""

import torch
from torch import Tensor, nn

from grassy.heads.base import Head, normal_like_linear


class LinearHead(Head):
    """l_c = w_cᵀ x + b_c."""

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, num_classes)
        self.weight = nn.Parameter(torch.empty(num_classes, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_classes, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        normal_like_linear(self.weight)
        if self.bias is not None:
            bound = self.in_features**-0.5
            nn.init.uniform_(self.bias, -bound, bound)

    def logits(self, features: Tensor, target: Tensor | None = None) -> Tensor:
        if not torch.is_autocast_enabled(features.device.type):
            features = features.to(self.weight.dtype)
        return nn.functional.linear(features, self.weight, self.bias)
