"""One direction per class: cosine softmax (Kornblith et al. 2021), the paper's 1-dimensional baseline."""

from typing import Any, Unpack

import torch
from torch import Tensor, nn

from grassy.arguments import check_booleans, positive
from grassy.heads.base import HeadOptions, empty_parameter, init_like_linear, linear
from grassy.heads.per_class import PerClassHead
from grassy.kernels import unit


def cosines(features: Tensor, weight: Tensor) -> Tensor:
    """Return the cosines (..., M) between features (..., N) and the rows of weight (M, N), in at least float32."""
    return cosines_of_units(unit(features), weight)


def cosines_of_units(features: Tensor, weight: Tensor) -> Tensor:
    """Return the cosines (..., M) between unit vectors (..., N) and the rows of weight (M, N)."""
    cosine = linear(features, unit(weight))
    return cosine.to(torch.promote_types(cosine.dtype, torch.float32))


class CosineHead(PerClassHead):
    """Cosine softmax with one direction per class: l_c = s cos(w_c, x).

    The forward normalises the class vectors. The parameter `weight` (C, N) keeps its length.

    Args:
        in_features: Feature dimension N.
        num_classes: Number of classes C.
        scale: Scale s of the logits, or its initial value with `learnable_scale`.
        learnable_scale: Make the scale a parameter.
        **options: Options of every head: see `Head`.
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
        # All classes share a learnable scale, so it multiplies the features and not the parameters of a class.
        return self.scale * unit(features) if isinstance(self.scale, nn.Parameter) else unit(features)

    def class_logits(self, rows: Tensor, target: Tensor | None, *params: Tensor) -> Tensor:
        cosine = cosines_of_units(rows, *params)
        return cosine if isinstance(self.scale, nn.Parameter) else self.scale * cosine

    @property
    def options(self) -> dict[str, Any]:
        learnable = isinstance(self.scale, nn.Parameter)
        scale = self._initial_scale if learnable else self.scale
        return {"scale": scale, "learnable_scale": learnable, **super().options}
