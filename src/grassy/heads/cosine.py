"""One direction a class: cosine softmax (Kornblith et al. 2021), the paper's 1-dimensional rival without a margin."""

from typing import Any, Unpack

import torch
from torch import Tensor, nn

from grassy.heads.base import (
    HeadOptions,
    check_booleans,
    drawn_like_linear,
    empty_parameter,
    init_like_linear,
    linear,
    positive,
)
from grassy.heads.per_class import PerClassHead
from grassy.kernels import unit


def cosines(features: Tensor, weight: Tensor) -> Tensor:
    """Cosines of the angles between features (..., N) and the rows of weight (M, N): (..., M), at least float32."""
    return cosines_of_units(unit(features), weight)


def cosines_of_units(features: Tensor, weight: Tensor) -> Tensor:
    """Cosines of the angles between unit vectors (..., N) and the rows of weight (M, N): (..., M), at least float32."""
    cosine = linear(features, unit(weight))
    return cosine.to(torch.promote_types(cosine.dtype, torch.float32))


class CosineHead(PerClassHead):
    """l_c = s cos(w_c, x), the class vector normalised here and not in the parameter.

    scale: s; with learnable_scale, where it starts.
    """

    logits_use_target = False
    logit_options = ("scale",)

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        scale: float = 25.0,
        learnable_scale: bool = False,
        **options: Unpack[HeadOptions],
    ) -> None:
        super().__init__(in_features, num_classes, **options)
        check_booleans(learnable_scale=learnable_scale)
        scale = positive("scale", scale)
        self.scale: float | nn.Parameter = empty_parameter(options) if learnable_scale else scale
        self._initial_scale = scale
        self.weight = empty_parameter(options, num_classes, in_features)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        init_like_linear(self.weight)
        if isinstance(self.scale, nn.Parameter):
            nn.init.constant_(self.scale, self._initial_scale)

    def rows(self, features: Tensor) -> Tensor:
        # A scale that is learned belongs to all classes, so it is applied to what they see.
        return self.scale * unit(features) if isinstance(self.scale, nn.Parameter) else unit(features)

    def class_logits(self, rows: Tensor, target: Tensor | None, *params: Tensor) -> Tensor:
        cosine = cosines_of_units(rows, *params)
        return cosine if isinstance(self.scale, nn.Parameter) else self.scale * cosine

    def draw_classes(self, name: str, first: int, count: int, generator: torch.Generator) -> Tensor:
        return drawn_like_linear(count, self.in_features, generator)

    @property
    def options(self) -> dict[str, Any]:
        learnable = isinstance(self.scale, nn.Parameter)
        scale = self._initial_scale if learnable else self.scale
        return {"scale": scale, "learnable_scale": learnable, **super().options}
