"""One direction per class, with an angular margin in training: ArcFace (Deng et al. 2019)."""

import math
import warnings
from typing import Any, Unpack

import torch
from torch import Tensor

from grassy.arguments import number, positive
from grassy.heads.base import HeadOptions, check_labels_of_a_margin, empty_parameter, init_like_linear
from grassy.heads.cosine import cosines_of_units
from grassy.heads.per_class import PerClassHead
from grassy.kernels import unit


class ArcFaceHead(PerClassHead):
    """ArcFace: l_c = s cos θ_c, and in training l_y = s cos(θ_y + m) for the target class y.

    Training needs the target: use `grassy.classification_loss`, or call `head(features, target)`. It accepts class
    indices only, so mixup and cutmix do not work with it.

    Args:
        in_features: Feature dimension N.
        num_classes: Number of classes C.
        scale: Scale s of the logits.
        margin: Angular margin m in radians, in [0, π/2).
        **options: Options of every head: see `Head`.

    Raises:
        ValueError: If `scale` or `margin` is out of range.
    """

    takes_soft_targets = False
    logit_options = ("scale",)  # the margin applies in training only

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        scale: float = 64.0,
        margin: float = 0.5,
        **options: Unpack[HeadOptions],
    ) -> None:
        super().__init__(in_features, num_classes, **options)
        if not 0 <= number(margin) < math.pi / 2:
            raise ValueError(f"margin must lie in [0, π/2), in radians, got {margin!r}")
        self.scale, self.margin = positive("scale", scale), float(margin)
        self.weight = empty_parameter(options, num_classes, in_features)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        init_like_linear(self.weight)

    def rows(self, features: Tensor) -> Tensor:
        return unit(features)

    def cosines(self, rows: Tensor, *params: Tensor) -> Tensor:
        """Return the cosines (..., c) between unit features (..., N) and the c classes of `params`."""
        return cosines_of_units(rows, *params)

    def class_logits(self, rows: Tensor, target: Tensor | None, *params: Tensor) -> Tensor:
        cosine = self.cosines(rows, *params)
        if self.training and target is not None:
            cosine = with_margin(cosine, target, self.margin)
        return self.scale * cosine

    def logits(self, features: Tensor, target: Tensor | None = None) -> Tensor:
        if self.training and target is None and not torch.compiler.is_compiling():
            warnings.warn(
                f"{type(self).__name__} got no target in training, so it applies no margin: use "
                "grassy.classification_loss(model, inputs, target)",
                stacklevel=2,
            )
        return super().logits(features, target)

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": self.scale, "margin": self.margin, **super().options}


def with_margin(cosine: Tensor, target: Tensor, margin: float) -> Tensor:
    """Replace cos θ by cos(θ + m) for the target class (...) in cosines (..., C). Ignored labels get no margin.

    For θ > π − m, where cos(θ + m) would increase again, it uses cos θ − m sin m, which keeps decreasing.
    """
    check_labels_of_a_margin(target, cosine)
    target = target.unsqueeze(-1)
    if cosine.shape[-1] == 0:  # a process without classes
        return cosine
    valid = (target >= 0) & (target < cosine.shape[-1])
    index = target.where(valid, 0)
    own = cosine.gather(-1, index)
    # The derivative of the square root is infinite at θ = 0: hence the clamp.
    sine = (1 - own.square()).clamp_min(torch.finfo(own.dtype).eps).sqrt()
    turned = own * math.cos(margin) - sine * math.sin(margin)
    own_with_margin = torch.where(own >= math.cos(math.pi - margin), turned, own - margin * math.sin(margin))
    return cosine.scatter(-1, index, torch.where(valid, own_with_margin, own))
