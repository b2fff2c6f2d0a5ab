"""timm's policies of augmentation (RandAugment, AutoAugment) on arrays of uint8: the same draws, the same pixels.

A policy of timm draws its operations and their strengths itself. Only the functions that change pixels are replaced.
Those that take most of the time in Pillow, shears and translations, move whole lines of pixels. Along a line all
weights of the cubic interpolation are the same, so a few passes over the array do it.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

Pixels = np.ndarray  # (H, W, 3) of uint8
Operation = Callable[..., Any]


def for_pixels(policy: Any) -> bool:
    """Let a policy of timm take arrays (H, W, 3) instead of Pillow's images. False if it is of another kind."""
    from timm.data.auto_augment import AugMixAugment

    operations = _operations(policy)
    for operation in operations:
        _mend(operation)
    if isinstance(policy, AugMixAugment):  # which blends Pillow's images itself
        return False
    for operation in operations:
        operation.aug_fn = _of_pixels(operation.aug_fn)
    return bool(operations)


def _operations(policy: Any) -> list[Any]:
    from timm.data.auto_augment import AugMixAugment, AutoAugment, RandAugment

    if isinstance(policy, RandAugment | AugMixAugment):
        return list(policy.ops)
    return [each for pair in policy.policy for each in pair] if isinstance(policy, AutoAugment) else []


def _mend(operation: Any) -> None:
    """Replace what Pillow refuses: to posterize to no bits, and to shear or rotate by a filter for resizing."""
    from PIL import Image

    if operation.name.startswith("Posterize"):
        operation.aug_fn = _posterize
    resample = operation.kwargs["resample"]
    affine = (Image.Resampling.NEAREST, Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)
    if not isinstance(resample, tuple) and resample not in affine:
        operation.kwargs["resample"] = Image.Resampling.BICUBIC


def _posterize(image: Any, bits: int, **options: Any) -> Any:
    """timm's, which is black where the strongest draw keeps no bits."""
    from PIL import Image
    from timm.data import auto_augment

    return Image.new(image.mode, image.size) if bits < 1 else auto_augment.posterize(image, bits, **options)


def _of_pixels(function: Operation) -> Operation:
    # Not closures, which cannot be pickled, as worker processes need it where they are not forked.
    return functools.partial(_by_lines if function.__name__ in MOVES else _by_pillow, function)


def _by_pillow(function: Operation, pixels: Pixels, *args: Any, **options: Any) -> Pixels:
    from PIL import Image

    return np.array(function(Image.fromarray(pixels), *args, **options))


def _by_lines(function: Operation, pixels: Pixels, amount: float, resample: Any, fillcolor: Any) -> Pixels:
    from PIL import Image

    if resample != Image.Resampling.BICUBIC:  # a choice of two, from which timm's function draws, or a cheap one
        return _by_pillow(function, pixels, amount, resample=resample, fillcolor=fillcolor)
    moved: Pixels = MOVES[function.__name__](pixels, amount, fillcolor)
    return moved


def shear_x(pixels: Pixels, factor: float, fill: Iterable[int]) -> Pixels:
    return _moved(pixels, factor * (np.arange(len(pixels)) + 0.5), fill)


def shear_y(pixels: Pixels, factor: float, fill: Iterable[int]) -> Pixels:
    return _transposed(shear_x(_transposed(pixels), factor, fill))


def translate_x(pixels: Pixels, distance: float, fill: Iterable[int]) -> Pixels:
    return _moved(pixels, np.full(len(pixels), float(distance)), fill)


def translate_y(pixels: Pixels, distance: float, fill: Iterable[int]) -> Pixels:
    return _transposed(translate_x(_transposed(pixels), distance, fill))


def _transposed(pixels: Pixels) -> Pixels:
    return torch.from_numpy(pixels).transpose(0, 1).contiguous().numpy()  # torch copies in half of NumPy's time


def _moved(pixels: Pixels, distances: np.ndarray, fill: Iterable[int]) -> Pixels:
    """Row y at x + distances[y], by Pillow's cubic interpolation, and `fill` where that lies outside of the image."""
    height, width, _ = pixels.shape
    whole = np.floor(distances).astype(int)
    # Two pixels at each side are repeated, as Pillow does. What lies further out is not looked at.
    margin = int(np.abs(whole).max()) + 3
    wide = np.zeros((height, width + 2 * margin, 3), np.uint8)
    wide[:, margin : margin + width] = pixels
    wide[:, margin - 2 : margin] = pixels[:, :1]
    wide[:, margin + width : margin + width + 2] = pixels[:, -1:]
    windows = np.lib.stride_tricks.sliding_window_view(wide.reshape(height, -1), 3 * (width + 3), axis=1)
    near = torch.from_numpy(windows[np.arange(height), 3 * (margin + whole - 1)]).short()
    a, b, c, d = (near[:, 3 * i : 3 * (i + width)] for i in range(4))
    t = torch.from_numpy(distances - whole)[:, None]
    bend = b - a - c + d
    value = bend.double().mul_(t).add_(a - b - bend).mul_(t).add_(c - a).mul_(t).add_(b).clamp_(0, 255)
    moved = value.numpy().astype(np.uint8)  # Pillow does not round, either
    x = np.repeat(np.arange(width, dtype=np.int16), 3)
    first, end = (np.ceil(bound - 0.5 - distances).astype(np.int16)[:, None] for bound in (0, width))
    inside = ((x >= first) & (x < end)).view(np.uint8)
    return (moved * inside + np.tile(np.array(tuple(fill), np.uint8), width) * (1 - inside)).reshape(pixels.shape)


#: By the names of timm's functions.
MOVES: dict[str, Operation] = {
    "shear_x": shear_x,
    "shear_y": shear_y,
    "translate_x_abs": translate_x,
    "translate_y_abs": translate_y,
    "translate_x_rel": lambda pixels, share, fill: translate_x(pixels, share * pixels.shape[1], fill),
    "translate_y_rel": lambda pixels, share, fill: translate_y(pixels, share * pixels.shape[0], fill),
}
