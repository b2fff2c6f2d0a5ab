"""Small datasets kept on the device: crops and flips are index operations there, without worker processes.

The random plan of an epoch is drawn at its start: for each image its index, the corner of its crop and whether it is
flipped. A batch is then a pure function of its rows of the plan, which a CUDA graph can hold.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from grassy.data.batch import Batch
from grassy.data.images import ArrayImages, Images
from grassy.data.order import EpochBatches, epoch_order, seed_of
from grassy.recipes.recipe import Recipe

#: Datasets up to this size in bytes are kept on the device by default.
SMALL_ENOUGH = 4 * 2**30


def unfit(recipe: Recipe, images: Images) -> str | None:
    """Why the resident loader does not support a recipe on these images; None if it does."""
    if recipe.crop == "resized":
        return "crop is resized; the resident loader supports padded and none"
    if recipe.aa or recipe.color_jitter:
        return "aa and color_jitter need the loader with workers"
    if not isinstance(images, ArrayImages):
        return "images are not in one array, as .npz files give"
    if images.images.shape[1:3] != (recipe.img_size, recipe.img_size):
        height, width = images.images.shape[1:3]
        return f"images have {height}x{width} pixels, img_size is {recipe.img_size}"
    return None


class ResidentLoader:
    """Training batches from images on the device."""

    def __init__(self, images: ArrayImages, recipe: Recipe, batches: EpochBatches, device: torch.device) -> None:
        self.images, self.batches, self.device = images, batches, device
        self.size, self.hflip = recipe.img_size, recipe.hflip
        self.padding = recipe.padding if recipe.crop == "padded" else 0
        pad = (self.padding, self.padding)
        pixels = np.pad(images.images, ((0, 0), pad, pad, (0, 0)))
        self.pixels = torch.from_numpy(pixels).to(device)  # (N, H + 2P, W + 2P, 3)
        self.labels = torch.from_numpy(images.labels()).to(device)
        self.range = torch.arange(self.size, device=device)

    @property
    def updates(self) -> int:
        """Updates per epoch."""
        return self.batches.updates

    def plan(self, epoch: int) -> np.ndarray:
        """Rows (index, top, left, flipped) of all images of an epoch, in order, equal in all processes."""
        order = epoch_order(len(self.images), self.batches.seed, epoch, self.batches.repeats)
        rng = np.random.default_rng(seed_of(self.batches.seed, epoch, 1))
        corners = rng.integers(0, 2 * self.padding + 1, (len(order), 2))
        flipped = rng.random(len(order)) < self.hflip
        return np.column_stack([order, corners, flipped])

    def plans(self, epoch: int, start: int = 0) -> Iterator[Tensor]:
        """For each update from `start` on, the rows of its parts on the device: (parts, B, 4)."""
        share, parts = self.batches.share, self.batches.parts
        whole = self.plan(epoch)[: self.updates * self.batches.batch_size]
        own = whole.reshape(self.updates, -1, 4)[:, share.rank :: share.world_size]
        yield from torch.from_numpy(own.reshape(self.updates, parts, -1, 4)[start:].copy()).to(self.device)

    def assemble(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Images (B, 3, H, W) as channels-last uint8, and labels (B,), for rows (B, 4) of the plan."""
        index, top, left, flipped = rows.unbind(-1)
        y = top[:, None] + self.range
        x = left[:, None] + torch.where(flipped[:, None] > 0, self.size - 1 - self.range, self.range)
        pixels = self.pixels[index[:, None, None], y[:, :, None], x[:, None, :]]
        return pixels.permute(0, 3, 1, 2), self.labels[index]

    def epoch(self, epoch: int, start: int = 0) -> Iterator[list[Batch]]:
        """The parts of each update of an epoch, from update `start` on."""
        for parts in self.plans(epoch, start):
            yield [Batch(*self.assemble(rows)) for rows in parts]

    def names_of(self, epoch: int, update: int) -> list[str]:
        """Names of the images of an update, for messages."""
        return [self.images.name(int(index)) for index in self.batches.indices_of(epoch, update)]


class ResidentValidation:
    """Each image of a small dataset once, from device memory."""

    def __init__(self, images: ArrayImages, batch_size: int, device: torch.device) -> None:
        self.images = images
        self.pixels = torch.from_numpy(images.images).to(device)
        self.labels = torch.from_numpy(images.labels()).to(device)
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[Batch]:
        for begin in range(0, len(self.labels), self.batch_size):
            chosen = slice(begin, begin + self.batch_size)
            yield Batch(self.pixels[chosen].permute(0, 3, 1, 2), self.labels[chosen])
