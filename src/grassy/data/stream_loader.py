"""Datasets that are read in order, shard by shard (WebDataset and similar), through timm's iterable readers.

The reader determines the order: equal seeds give equal orders for equal numbers of processes and workers. A run that
is resumed within an epoch skips what it has seen; crops and flips are then drawn anew. So the number of workers is
always the recipe's, however few CPU cores there are.

Unreadable images of a WebDataset are skipped and reported with the next batch of their worker. timm's other readers
stop at them.
"""

import io
import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grassy.data.decode import open_image, reason_for, to_rgb
from grassy.data.loader import Batch, Failure, Share, checked, collate, on_device, worker_options
from grassy.data.transforms import Transform
from grassy.recipes.recipe import Recipe
from grassy.torchvision_import import import_torchvision

STREAMS = ("wds/", "hfids/", "tfds/")


class StreamLoader:
    """Training batches of a stream."""

    def __init__(
        self, recipe: Recipe, data_dir: Path | None, share: Share, transform: Transform, device: torch.device
    ) -> None:
        self.parts, self.device, self.num_classes = recipe.grad_accum_steps, device, recipe.num_classes
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
        read = itertools.islice(self._loader, self.updates * self.parts)
        batches = on_device(checked(read, self.num_classes), self.device)
        for update in range(self.updates):
            parts = list(itertools.islice(batches, self.parts))
            if len(parts) < self.parts:
                if update == 0:
                    raise ValueError("not one batch of images could be read from the stream: is this the right data?")
                return  # the shards held fewer images than declared
            if update >= start:
                yield parts

    def names_of(self, epoch: int, update: int) -> list[str]:
        return [f"(images {update} of a stream in epoch {epoch})"]


class StreamValidation:
    """Each image of a stream once; the readers share them among the processes."""

    def __init__(
        self,
        recipe: Recipe,
        data_dir: Path | None,
        transform: Transform,
        batch_size: int,
        device: torch.device,
        num_classes: int,
    ) -> None:
        self.stream = _open(recipe, data_dir, recipe.val_split, False, batch_size)
        self.stream.transform = transform
        self.device, self.num_classes = device, num_classes
        self._loader = _loader(self.stream, batch_size, recipe.workers, device)

    def __iter__(self) -> Iterator[Batch]:
        return on_device(checked(self._loader, self.num_classes), self.device)


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
    if recipe.dataset.startswith("wds/"):
        stream.reader._lazy_init = partial(_start_webdataset, stream.reader)  # timm calls it in each worker
    return stream


def _loader(stream: Any, batch_size: int, workers: int, device: torch.device) -> Any:
    options = {**worker_options(workers, device), "collate_fn": _collate}
    return torch.utils.data.DataLoader(stream, batch_size=batch_size, **options)


def _collate(samples: list[tuple[Any, Any]]) -> Batch:
    """Collate a batch in the worker that read its images, with the images that this worker could not read."""
    batch = collate([(torch.as_tensor(image), int(label), -1, []) for image, label in samples])
    batch.failures, _unreadable[:] = list(_unreadable), []
    return batch


# --------------------------------------------------------------------------------------------------- unreadable images

_unreadable: list[Failure] = []  # of this process, since its last batch


def _start_webdataset(reader: Any) -> None:
    """Start the reader as timm does, but wrap its image decoder, which would only log failures."""
    reader.input_img_mode = ""  # the conversion to RGB is ours
    type(reader)._lazy_init(reader)
    for stage in reader.ds.pipeline:
        if isinstance(decode := (getattr(stage, "args", None) or (None,))[0], partial):
            stage.args = (partial(_decode, decode), *stage.args[1:])


def _decode(decode: partial[Any], sample: dict[str, Any]) -> dict[str, Any] | None:
    try:
        for key in decode.keywords["image_key"].split(";"):
            if key in sample:
                open_image(
                    io.BytesIO(sample[key])
                )  # reads the header only: timm would accept any format that Pillow knows
        decoded = decode(sample)
        return decoded and {**decoded, "jpg": np.array(to_rgb(decoded["jpg"]))}
    except Exception as error:  # decoders may raise anything, as for files
        _unreadable.append(Failure(f"{sample.get('__key__')} of {sample.get('__url__')}", reason_for(error)))
        return None
