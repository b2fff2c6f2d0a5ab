"""Several directions per class, of which the nearest counts: sub-centre ArcFace (Deng et al. 2020)."""

from typing import Any, Unpack

from torch import Tensor

from grassy.arguments import positive_integer
from grassy.heads.arcface import ArcFaceHead
from grassy.heads.base import HeadOptions, empty_parameter
from grassy.heads.cosine import cosines_of_units


class SubcenterArcFaceHead(ArcFaceHead):
    """Sub-centre ArcFace: cos θ_c is the largest cosine over the K centres of class c.

    Unlike the original, it drops neither centres nor samples during training.

    Args:
        in_features: Feature dimension N.
        num_classes: Number of classes C.
        centers: Number of centres K per class.
        scale: Scale s of the logits.
        margin: Angular margin m in radians, in [0, π/2).
        **options: Options of every head: see `Head`.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        centers: int = 8,
        scale: float = 64.0,
        margin: float = 0.5,
        **options: Unpack[HeadOptions],
    ) -> None:
        centers = positive_integer("centers", centers)
        super().__init__(in_features, num_classes, scale=scale, margin=margin, **options)
        self.weight = empty_parameter(options, num_classes, centers, in_features)
        self.reset_parameters()

    def cosines(self, rows: Tensor, *params: Tensor) -> Tensor:
        (weight,) = params
        return cosines_of_units(rows, weight.flatten(0, 1)).unflatten(-1, weight.shape[:2]).amax(-1)

    @property
    def options(self) -> dict[str, Any]:
        return {"centers": self.weight.shape[1], **super().options}
