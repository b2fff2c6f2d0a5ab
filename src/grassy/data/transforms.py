"""What happens to an image before the model sees it, by timm's and torchvision's transforms.

Images arrive as RGB pixels (H, W, 3) of uint8 and leave as uint8 (3, H, W): a quarter of the bytes to move, to be
normalised on the device.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grassy.runs.recipe import Recipe
from grassy.torchvision_import import import_torchvision

Transform = Callable[[np.ndarray], Tensor]


def train_transform(recipe: Recipe) -> Transform:
    """Random crop, flip, policy and jitter. Erasing and mixing are for batches on the device: see `loader`."""
    import_torchvision()
    from timm.data import create_transform
    from torchvision import transforms

    options: dict[str, Any] = {
        "hflip": recipe.hflip,
        "color_jitter": recipe.color_jitter or None,
        "auto_augment": recipe.aa or None,
        "interpolation": recipe.interpolation,
        "mean": recipe.mean,
        "std": recipe.std,
    }
    if recipe.crop == "resized":
        options |= {"scale": recipe.scale, "ratio": recipe.ratio}
    try:
        whole = create_transform(recipe.img_size, is_training=True, use_prefetcher=True, **options)
    except (AssertionError, KeyError, ValueError, IndexError) as error:  # all else in the options has been checked
        if not recipe.aa:
            raise
        raise ValueError(f"timm knows no augmentation aa={recipe.aa}: {error}") from None
    first, *others = whole.transforms
    if recipe.crop == "resized":
        if recipe.interpolation not in RESAMPLED_BY_TORCH:
            return of_pixels(whole)
        flips = [step for step in others if isinstance(step, transforms.RandomHorizontalFlip)]
        colors = [step for step in others if step not in flips]  # of Pillow's images, at last made a tensor
        if len(colors) > 1:
            colors.insert(0, lambda image: _to_pillow(image.permute(1, 2, 0).numpy()))
        return transforms.Compose([ResizedCrop(first), *flips, *colors])  # type: ignore[no-any-return]
    # timm begins with the random resized crop; another crop takes its place.
    crop: list[Any] = _resizing(recipe.img_size, 1.0, recipe.interpolation).transforms[:-1]
    if recipe.crop == "padded":
        crop.append(transforms.RandomCrop(recipe.img_size, padding=recipe.padding))
    return of_pixels(transforms.Compose(crop + others))


def eval_transform(size: int, crop_pct: float, interpolation: str) -> Transform:
    """Resize the short side to size / crop_pct and crop the centre: by Pillow, so that accuracies are those of timm."""
    return of_pixels(_resizing(size, crop_pct, interpolation))


def of_pixels(transform: Callable[[Any], Any]) -> Transform:
    """The transform of Pillow's images as one of pixels."""
    import_torchvision()
    from torchvision import transforms

    return transforms.Compose([_to_pillow, transform])  # type: ignore[no-any-return]


def _to_pillow(pixels: np.ndarray) -> Any:
    from PIL import Image

    return Image.fromarray(pixels)


def _resizing(size: int, crop_pct: float, interpolation: str) -> Any:
    import_torchvision()
    from timm.data import create_transform

    return create_transform(size, crop_pct=crop_pct, interpolation=interpolation, use_prefetcher=True)


#: torch resamples uint8 by integer arithmetic as Pillow does, in a third of the time.
RESAMPLED_BY_TORCH = ("bilinear", "bicubic")


class ResizedCrop:
    """timm's random resized crop: the same draws and, to a level or two of 256, the same pixels, by torch."""

    def __init__(self, crop: Any) -> None:
        self.crop = crop

    def __call__(self, pixels: np.ndarray) -> Tensor:
        from torchvision.transforms.v2 import functional

        image = torch.from_numpy(pixels).permute(2, 0, 1)
        top, left, height, width = self.crop.get_params(image, self.crop.scale, self.crop.ratio)
        size, mode = list(self.crop.size), self.crop.interpolation
        cropped: Tensor = functional.resized_crop(image, top, left, height, width, size, mode, antialias=True)
        return cropped
