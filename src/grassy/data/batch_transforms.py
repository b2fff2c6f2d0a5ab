"""Transforms of uint8 batches on the device: normalisation, random erasing, mixup and cutmix."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from grassy.mixed_labels import MixedLabels
from grassy.models import import_timm
from grassy.recipes.recipe import Recipe

Mix = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | MixedLabels]]


class Preparation:
    """Normalises a uint8 batch, then applies random erasing and mixing if given."""

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device,
        channels_last: bool = False,
        erase: Callable[[Tensor], Tensor] | None = None,
        mix: Mix | None = None,
    ) -> None:
        self.mean = 255 * torch.tensor(mean, device=device).view(1, -1, 1, 1)
        self.std = 255 * torch.tensor(std, device=device).view(1, -1, 1, 1)
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.erase, self.mix = erase, mix

    def __call__(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Any]:
        """Return the images and the target: labels, or the probabilities or `MixedLabels` that mixing makes of them."""
        images = (images.contiguous(memory_format=self.memory_format) - self.mean) / self.std
        if self.erase is not None:
            images = self.erase(images)
        return (images, labels) if self.mix is None else self.mix(images, labels)


def build_mixing(recipe: Recipe, num_classes: int, as_labels: bool = False) -> Mix | None:
    """Mixup and cutmix of a batch, by timm, which turn labels into soft, smoothed targets.

    With `as_labels`, they turn them into pairs of labels instead, which the criterion has to smooth.
    """
    if not recipe.mixes:
        return None
    import_timm()
    from timm.data import Mixup

    mix: Mix = Mixup(
        recipe.mixup,
        recipe.cutmix,
        prob=recipe.mixup_prob,
        switch_prob=recipe.mixup_switch_prob,
        label_smoothing=0.0 if as_labels else recipe.smoothing,
        num_classes=2 if as_labels else num_classes,
    )
    return functools.partial(_mixed_in_pairs, mix) if as_labels else mix


def _mixed_in_pairs(mix: Mix, images: Tensor, labels: Tensor) -> tuple[Tensor, MixedLabels]:
    """Images that are mixed with those at the other end of the batch, and the labels of both.

    timm tells how much there is of each by the target that it makes of two classes, those of the halves of the batch.
    """
    half = (torch.arange(len(labels), device=labels.device) >= len(labels) // 2).long()
    images, target = mix(images, half)
    assert isinstance(target, Tensor)
    own = target.gather(-1, half.unsqueeze(-1))
    return images, MixedLabels(torch.stack([labels, labels.flip(0)], -1), torch.cat([own, 1 - own], -1))


def build_erasing(recipe: Recipe, device: torch.device) -> Callable[[Tensor], Tensor] | None:
    """Random erasing of a batch on the device, by timm."""
    if not recipe.reprob:
        return None
    import_timm()
    from timm.data.random_erasing import RandomErasing

    return RandomErasing(recipe.reprob, mode=recipe.remode, max_count=1, device=str(device))
