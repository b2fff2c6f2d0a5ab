"""One direction a class: cosine softmax (Kornblith et al. 2021), the paper's 1-dimensional rival without a margin."""

import torch
from torch import Tensor, nn

from grassy.heads.base import Head, check_booleans, init_like_linear, linear, positive
from grassy.kernels import unit


def cosines(features: Tensor, weight: Tensor) -> Tensor:
    """Cosines of the angles between features (..., N) and the rows of weight (M, N): (..., M), at least float32."""
    cosine = linear(unit(features), unit(weight))
    return cosine.to(torch.promote_types(cosine.dtype, torch.float32))


class CosineHead(Head):
    """l_c = s cos(w_c, x), the class vector normalised here and not in the parameter.

    scale: s; with learnable_scale, where it starts.
    """

    logits_use_target = False

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        scale: float = 25.0,
        learnable_scale: bool = False,
        dropout: float = 0.0,
        standardize: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, num_classes, dropout, standardize, device, dtype)
        check_booleans(learnable_scale=learnable_scale)
        scale = positive("scale", scale)
        start = torch.full((), float(scale), device=device, dtype=dtype)
        self.scale: float | nn.Parameter = nn.Parameter(start) if learnable_scale else scale
        self._initial_scale = scale
        self.weight = nn.Parameter(torch.empty(num_classes, in_features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        init_like_linear(self.weight)
        if isinstance(self.scale, nn.Parameter):
            nn.init.constant_(self.scale, self._initial_scale)

    def logits(self, features: Tensor, target: Tensor | None = None) -> Tensor:
        return self.scale * cosines(features, self.weight)

    def extra_repr(self) -> str:
        scale = "learnable" if isinstance(self.scale, nn.Parameter) else self.scale
        return f"{super().extra_repr()}, scale={scale}"
