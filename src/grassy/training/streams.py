"""Sets that are read in order, shard by shard (WebDataset and the like), through timm's iterable readers.

Their order is the reader's: the same seed gives the same order for the same number of processes and workers. A run
that is resumed in the middle of an epoch reads on from there by skipping what it had seen; crops and flips are then
drawn anew.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from grassy.torchvision_import import import_torchvision
from grassy.training.augment import Transform
from grassy.training.loader import Batch, Share, collate, moved_ahead, worker_options
from grassy.training.recipe import Recipe

STREAMS = ("wds/", "hfids/", "tfds/")


class StreamLoader:
    """Training batches of a stream."""

    def __init__(
        self, recipe: Recipe, data_dir: Path | None, share: Share, transform: Transform, device: torch.device
    ) -> None:
        self.parts, self.device = recipe.grad_accum_steps, device
        size = recipe.batch_size // share.world_size // self.parts
        self.stream = _open(recipe, data_dir, recipe.train_split, True, size)
        self.stream.transform = transform
        images = int(self.stream.reader.num_samples)
        self.updates = images // recipe.batch_size
        if not self.updates:
            raise ValueError(f"{recipe.dataset} has {images} images, fewer than batch_size {recipe.batch_size}")
        self._loader = _loader(self.stream, size, recipe.workers, device)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[list[Batch]]:
        """The parts of each update of an epoch, from update `start` on."""
        self.stream.set_epoch(epoch)
        batches = moved_ahead(itertools.islice(self._loader, self.updates * self.parts), self.device)
        for update in range(self.updates):
            parts = list(itertools.islice(batches, self.parts))
            if len(parts) < self.parts:
                return  # the shards held less than they said
            if update >= start:
                yield parts

    def names_of(self, epoch: int, update: int) -> list[str]:
        return [f"(images {update} of a stream in epoch {epoch})"]


class StreamValidation:
    """Every image of a stream; the readers share them among the processes."""

    def __init__(self, recipe: Recipe, data_dir: Path | None, transform: Transform, device: torch.device) -> None:
        size = recipe.val_batch_size or recipe.batch_size
        self.stream = _open(recipe, data_dir, recipe.val_split, False, size)
        self.stream.transform = transform
        self.device = device
        self._loader = _loader(self.stream, size, recipe.workers, device)

    def __iter__(self) -> Iterator[Batch]:
        return moved_ahead(self._loader, self.device)


def _open(recipe: Recipe, data_dir: Path | None, split: str, training: bool, batch_size: int) -> Any:
    import_torchvision()
    from timm.data import create_dataset

    root = None if data_dir is None else str(data_dir)
    try:
        stream = create_dataset(
            recipe.dataset, root=root, split=split, is_training=training, batch_size=batch_size, seed=recipe.seed
        )
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"{recipe.dataset}: {error}") from None
    stream.set_loader_cfg(num_workers=max(1, recipe.workers))
    return stream


def _loader(stream: Any, batch_size: int, workers: int, device: torch.device) -> Any:
    options = {**worker_options(workers, device), "collate_fn": _collate}
    return torch.utils.data.DataLoader(stream, batch_size=batch_size, **options)


def _collate(samples: list[tuple[Any, Any]]) -> Batch:
    return collate([(torch.as_tensor(image), int(label), -1, []) for image, label in samples])
