"""One vector a class: the softmax baseline, `nn.Linear` under the contract of a head."""

import torch
from torch import Tensor, nn

from grassy.heads.base import Head, check_booleans, init_like_linear, linear


class LinearHead(Head):
    """l_c = w_cᵀ x + b_c."""

    logits_use_target = False

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = True,
        dropout: float = 0.0,
        standardize: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, num_classes, dropout, standardize, device, dtype)
        check_booleans(bias=bias)
        self.weight = nn.Parameter(torch.empty(num_classes, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_classes, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        init_like_linear(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def logits(self, features: Tensor, target: Tensor | None = None) -> Tensor:
        return linear(features, self.weight, self.bias)
