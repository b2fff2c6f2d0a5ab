"""Several directions a class, the nearest one active, with an angular margin in training (Deng et al. 2020)."""

import torch
from torch import Tensor, nn

from grassy.heads.arcface import ArcFaceHead
from grassy.heads.base import positive_integer
from grassy.heads.cosine import cosines


class SubcenterArcFaceHead(ArcFaceHead):
    """ArcFace with cos θ_c the largest cosine over the K centres of class c. No centre or sample is dropped.

    centers: K.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        centers: int = 8,
        scale: float = 64.0,
        margin: float = 0.5,
        dropout: float = 0.0,
        standardize: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        centers = positive_integer("centers", centers)
        super().__init__(in_features, num_classes, scale, margin, dropout, standardize, device, dtype)
        self.weight = nn.Parameter(torch.empty(num_classes, centers, in_features, device=device, dtype=dtype))
        self.reset_parameters()

    def cosines(self, features: Tensor) -> Tensor:
        return cosines(features, self.weight.flatten(0, 1)).unflatten(-1, self.weight.shape[:2]).amax(-1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, centers={self.weight.shape[1]}"
