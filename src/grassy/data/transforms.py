"""What happens to an image before the model sees it, by timm's and torchvision's transforms.

Images leave these functions as uint8 (3, H, W): a quarter of the bytes to move, to be normalised on the device.
"""

from collections.abc import Callable
from typing import Any

from grassy.runs.recipe import Recipe
from grassy.torchvision_import import import_torchvision

Transform = Callable[[Any], Any]


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
    if recipe.crop == "resized":
        return whole
    # timm begins with the random resized crop; another crop takes its place.
    crop: list[Any] = [_resize_and_crop(recipe.img_size, 1.0, recipe.interpolation)]
    if recipe.crop == "padded":
        crop.append(transforms.RandomCrop(recipe.img_size, padding=recipe.padding))
    return transforms.Compose(crop + whole.transforms[1:])


def eval_transform(size: int, crop_pct: float, interpolation: str) -> Transform:
    """Resize the short side to size / crop_pct and crop the centre."""
    import_torchvision()
    from timm.data import create_transform

    return create_transform(size, crop_pct=crop_pct, interpolation=interpolation, use_prefetcher=True)


def _resize_and_crop(size: int, crop_pct: float, interpolation: str) -> Transform:
    from torchvision import transforms

    return transforms.Compose(eval_transform(size, crop_pct, interpolation).transforms[:-1])  # type: ignore[attr-defined]
