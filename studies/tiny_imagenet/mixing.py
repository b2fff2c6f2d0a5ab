"""Mixup and CutMix drawn on the device, as timm's `Mixup` mixes a batch, so that a CUDA graph can hold the update.

One λ per batch, partners are those of the reversed batch, and each batch gets the one or the other. Shapes: B images,
H x W pixels, C classes.
"""

import numpy as np
import torch
from torch import Tensor

from grassy.recipes.recipe import Recipe

#: λ is drawn from so many that were drawn from its Beta distribution beforehand: a graph cannot call NumPy.
TABLE = 2**16


class DeviceMixing:
    """Callable on normalised images (B, 3, H, W) and labels (B,): mixed images and soft targets (B, C)."""

    def __init__(self, recipe: Recipe, num_classes: int, device: torch.device) -> None:
        if not (recipe.mixup > 0 and recipe.cutmix > 0 and recipe.mixup_prob == 1):
            raise ValueError(
                f"the study mixes every batch by mixup or CutMix, got mixup={recipe.mixup}, cutmix={recipe.cutmix}, "
                f"mixup_prob={recipe.mixup_prob}"
            )
        rng = np.random.default_rng(recipe.seed)

        def table(alpha: float) -> Tensor:
            return torch.from_numpy(rng.beta(alpha, alpha, TABLE).astype(np.float32)).to(device)

        self.mixup, self.cutmix = table(recipe.mixup), table(recipe.cutmix)
        self.switch, self.classes = recipe.mixup_switch_prob, num_classes
        self.off = recipe.smoothing / num_classes
        self.on = 1 - recipe.smoothing + self.off

    def __call__(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        which, place, row, column = torch.rand(4, device=images.device)
        index = (place * TABLE).long().clamp(max=TABLE - 1)
        cut = which < self.switch
        inside, share = box(self.cutmix.take(index), row, column, *images.shape[-2:])
        blend = self.mixup.take(index).to(images.dtype)
        other = images.flip(0)
        mixed = torch.where(cut, torch.where(inside, other, images), blend * images + (1 - blend) * other)
        kept = torch.where(cut, 1 - share, self.mixup.take(index))
        own = torch.full((len(labels), self.classes), self.off, device=images.device)
        own = own.scatter(1, labels[:, None], self.on)
        return mixed.contiguous(memory_format=_format(images)), kept * own + (1 - kept) * own.flip(0)


def box(kept: Tensor, row: Tensor, column: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """The pixels (H, W) of a box of about 1 − kept of the area around a place in [0, 1)², and its share of the area."""
    ratio = (1 - kept).sqrt()
    sides = []
    for place, size in ((row, height), (column, width)):
        half, centre = (ratio * size).floor().div(2, rounding_mode="floor"), (place * size).floor()
        pixels = torch.arange(size, device=kept.device)
        sides.append((pixels >= centre - half) & (pixels < centre + half))
    inside = sides[0][:, None] & sides[1]
    return inside, inside.float().mean()


def _format(images: Tensor) -> torch.memory_format:
    last = images.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format
