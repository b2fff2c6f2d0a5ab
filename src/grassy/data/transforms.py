"""Transforms of single images, by timm and torchvision.

Images arrive as RGB pixels (H, W, 3) of uint8 and leave as uint8 (3, H, W): a quarter of the bytes to move, to be
normalised on the device.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grassy.data.decode import Box, crop_of
from grassy.data.pixel_policies import for_pixels
from grassy.recipes.recipe import Recipe
from grassy.torchvision_import import import_torchvision

Transform = Callable[[np.ndarray], Tensor]


def train_transform(recipe: Recipe) -> Transform:
    """Random crop, flip, policy and jitter. Erasing and mixing happen on batches: see `batch_transforms`."""
    import_torchvision()
    from timm.data import create_transform
    from timm.data.transforms import MaybePILToTensor
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
    except (AssertionError, KeyError, ValueError, IndexError) as error:  # all other options have been checked
        if not recipe.aa:
            raise
        forms = "rand-m9-n2-mstd0.5 (RandAugment), augmix-m3-w3, 3a, or original"
        raise ValueError(f"timm knows no augmentation aa={recipe.aa}: give a policy such as {forms}") from error
    first, *others = whole.transforms
    rest = transforms.Compose([_of_tensors(step) for step in others])
    if recipe.crop == "resized":
        if recipe.interpolation not in RESAMPLED_BY_TORCH:
            return _in_turn(first, MaybePILToTensor(), rest)
        return CropTransform(first, rest)
    # timm starts with the random resized crop; replace it by another crop.
    crop: list[Any] = _resizing(recipe.img_size, 1.0, recipe.interpolation).transforms[:-1]
    if recipe.crop == "padded":
        crop.append(transforms.RandomCrop(recipe.img_size, padding=recipe.padding))
    return _in_turn(*crop, MaybePILToTensor(), rest)


def eval_transform(
    size: int, crop_pct: float, interpolation: str, crop_mode: str = "center", mean: Sequence[float] = (0, 0, 0)
) -> Transform:
    """Resize the short side to size / crop_pct and crop the centre, with Pillow, for the same accuracies as timm.

    crop_mode: "squash" and "border" show the whole image, as timm does: distorted, or inside a border of `mean`.
    """
    return _in_turn(_resizing(size, crop_pct, interpolation, crop_mode, mean))


def _in_turn(*steps: Callable[[Any], Any]) -> Transform:
    """Steps of which the first takes an image of Pillow, as a transform of pixels."""
    import_torchvision()
    from torchvision import transforms

    return transforms.Compose([_to_pillow, *steps])


def _to_pillow(pixels: np.ndarray) -> Any:
    from PIL import Image

    return Image.fromarray(pixels)


def _resizing(
    size: int, crop_pct: float, interpolation: str, crop_mode: str = "center", mean: Sequence[float] = (0, 0, 0)
) -> Any:
    import_torchvision()
    from timm.data import create_transform

    view: dict[str, Any] = {"crop_pct": crop_pct, "crop_mode": crop_mode, "interpolation": interpolation}
    steps = create_transform(size, use_prefetcher=True, mean=mean, **view)
    # Resized by its short side, a strip of a few kilobytes would fill the memory. Resized by its long side, to fit into
    # a border, it would have no pixel across.
    most = {"center": LONGEST_STRIP, "border": max(1, int(size / crop_pct))}
    if crop_mode in most:
        steps.transforms.insert(0, functools.partial(_without_ends, most[crop_mode]))
    return steps


def _without_ends(most: int, image: Any) -> Any:
    """The middle of a strip, whose long side is at most so many times the short side."""
    width, height = image.size
    longest = most * min(width, height)
    left, top = max(0, (width - longest) // 2), max(0, (height - longest) // 2)
    return image.crop((left, top, width - left, height - top)) if left or top else image


#: Of strips with a larger aspect ratio only the middle is resized: what the central crop shows is a part of it.
LONGEST_STRIP = 20
#: torch resamples uint8 by integer arithmetic as Pillow does, in a third of the time.
RESAMPLED_BY_TORCH = ("bilinear", "bicubic")


class CropTransform:
    """timm's random resized crop: the same draws and, to a level or two of 256, the same pixels, by torch.

    Large JPEG files may be decoded at a smaller scale, see `read_pixels`. rest: what follows, of tensors (3, H, W).
    """

    def __init__(self, crop: Any, rest: Callable[[Tensor], Tensor]) -> None:
        self.crop, self.rest = crop, rest
        self.size: tuple[int, int] = tuple(crop.size)

    def box(self, height: int, width: int) -> Box:
        image = torch.empty(1, dtype=torch.uint8).expand(3, height, width)  # of which only the size counts
        top, left, crop_height, crop_width = self.crop.get_params(image, self.crop.scale, self.crop.ratio)
        # timm may draw no pixel at all from an image of one or two.
        return Box(min(top, height - 1), min(left, width - 1), max(1, crop_height), max(1, crop_width))

    def __call__(self, pixels: np.ndarray) -> Tensor:
        return self.of_crop(crop_of(pixels, self))

    def of_crop(self, pixels: np.ndarray) -> Tensor:
        from torchvision.transforms.v2 import functional

        # torch is faster if pixels follow each other, and leaves the channels of a pixel together then.
        image = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)
        return self.rest(functional.resize(image, list(self.size), self.crop.interpolation, antialias=True))


def _of_tensors(step: Any) -> Callable[[Tensor], Tensor]:
    """A step of timm's transform as one of tensors (3, H, W) of uint8."""
    from timm.data.transforms import MaybePILToTensor
    from torchvision import transforms

    if isinstance(step, transforms.RandomHorizontalFlip | MaybePILToTensor):
        return step
    of_arrays = step if for_pixels(step) else functools.partial(_by_pillow, step)
    return functools.partial(_by_arrays, of_arrays)


# Functions of a module: lambdas cannot be pickled, as worker processes need it where they are not forked.
def _by_pillow(step: Callable[[Any], Any], pixels: np.ndarray) -> np.ndarray:
    return np.array(step(_to_pillow(pixels)))


def _by_arrays(step: Callable[[np.ndarray], np.ndarray], image: Tensor) -> Tensor:
    return torch.from_numpy(step(image.permute(1, 2, 0).numpy())).permute(2, 0, 1)
