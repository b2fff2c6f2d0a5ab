"""Transforms of uint8 batches on the device: normalisation, random erasing, mixup and cutmix."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grassy.models import import_timm
from grassy.runs.recipe import Recipe


class Preparation:
    """Normalises a uint8 batch, then applies random erasing and mixing if given."""

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device,
        channels_last: bool = False,
        erase: Callable[[Tensor], Tensor] | None = None,
        mix: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        self.mean = 255 * torch.tensor(mean, device=device).view(1, -1, 1, 1)
        self.std = 255 * torch.tensor(std, device=device).view(1, -1, 1, 1)
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.erase, self.mix = erase, mix

    def __call__(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        images = (images.contiguous(memory_format=self.memory_format) - self.mean) / self.std
        if self.erase is not None:
            images = self.erase(images)
        return (images, labels) if self.mix is None else self.mix(images, labels)


def build_mixing(recipe: Recipe, num_classes: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """Mixup and cutmix of a batch, by timm, which turn labels into soft, smoothed targets."""
    if not recipe.mixes:
        return None
    import_timm()
    from timm.data import Mixup

    return Mixup(
        recipe.mixup,
        recipe.cutmix,
        prob=recipe.mixup_prob,
        switch_prob=recipe.mixup_switch_prob,
        label_smoothing=recipe.smoothing,
        num_classes=num_classes,
    )


def build_erasing(recipe: Recipe, device: torch.device) -> Callable[[Tensor], Tensor] | None:
    """Random erasing of a batch on the device, by timm."""
    if not recipe.reprob:
        return None
    import_timm()
    from timm.data.random_erasing import RandomErasing

    return RandomErasing(recipe.reprob, mode=recipe.remode, max_count=1, device=str(device))
