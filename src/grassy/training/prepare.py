"""From images in uint8, on the device, to what a model takes: normalised, erased, mixed."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Preparation:
    """From a uint8 batch on the device to what the model takes: normalised, erased, mixed."""

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
        images = ((images - self.mean) / self.std).contiguous(memory_format=self.memory_format)
        if self.erase is not None:
            images = self.erase(images)
        return (images, labels) if self.mix is None else self.mix(images, labels)
