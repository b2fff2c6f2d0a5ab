"""Datasets that are read in order, shard by shard (WebDataset and similar), through timm's iterable readers.

Order, crops and flips of an epoch depend on seed, epoch, and the numbers of processes and workers. So the number of
workers is always the recipe's, or that of the shards, however few CPU cores there are. A run that is resumed within an
epoch reads what it has seen again, and skips it. That holds for WebDataset and, with `datasets` before version 4, for
timm's reader of Hugging Face streams. TFDS seeds its own order, which is not tested.

Unreadable images of a WebDataset are skipped and reported with the next batch of their worker. In validation, the last
ones come with a blank image; in training, a pass does not end with them. timm's other readers stop at them.
"""

import io
import itertools
import multiprocessing
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grassy.data.batch import Batch, Failure, checked, collate, on_device
from grassy.data.decode import open_image, reason_for, to_rgb
from grassy.data.order import Share, seed_of
from grassy.data.transforms import Transform
from grassy.data.worker_loader import seeded
from grassy.data.worker_processes import one_thread, worker_options
from grassy.recipes.recipe import Recipe
from grassy.torchvision_import import import_torchvision


class StreamLoader:
    """Training batches of a stream."""

    def __init__(
        self, recipe: Recipe, data_dir: Path | None, share: Share, transform: Transform, device: torch.device
    ) -> None:
        self.parts, self.device, self.num_classes = recipe.grad_accum_steps, device, recipe.num_classes
        size = recipe.batch_size // share.world_size // self.parts
        self.images = _StreamImages(recipe, data_dir, recipe.train_split, True, size, transform, share)
        images = int(self.images.reader.num_samples)
        self.updates = images // recipe.batch_size
        if not self.updates:
            raise ValueError(f"{recipe.dataset} has {images} images, fewer than batch_size {recipe.batch_size}")
        self._loader = _loader(self.images, size, device)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[list[Batch]]:
        """The parts of each update of an epoch, from update `start` on."""
        self.images.begin(epoch)
        read = itertools.islice(self._loader, self.updates * self.parts)
        batches = on_device(checked(read, self.num_classes), self.device)
        for update in range(self.updates):
            parts = list(itertools.islice(batches, self.parts))
            if len(parts) < self.parts:
                raise ValueError(f"the stream ended after {update} of {self.updates} updates: is this the right data?")
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
        share: Share,
        device: torch.device,
        num_classes: int,
    ) -> None:
        images = _StreamImages(recipe, data_dir, recipe.val_split, False, batch_size, transform, share)
        self.device, self.num_classes = device, num_classes
        self._loader = _loader(images, batch_size, device)

    def __iter__(self) -> Iterator[Batch]:
        return on_device(checked(self._loader, self.num_classes), self.device)


class _StreamImages(torch.utils.data.IterableDataset[tuple[Tensor | None, int]]):
    """The transformed images of a stream in this process and worker."""

    def __init__(
        self,
        recipe: Recipe,
        data_dir: Path | None,
        split: str,
        training: bool,
        batch_size: int,
        transform: Transform,
        share: Share,
    ) -> None:
        import_torchvision()
        from timm.data import create_dataset

        root = None if data_dir is None else str(data_dir)
        try:
            stream = create_dataset(
                recipe.dataset, root=root, split=split, is_training=training, batch_size=batch_size, seed=recipe.seed
            )
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"{recipe.dataset}: {error}") from None
        except (KeyError, TypeError, AttributeError) as error:  # timm reads it as it is
            raise ValueError(f"{recipe.dataset}: its _info.json is not as timm writes it, at {error}") from None
        self.kind = recipe.dataset.partition("/")[0]
        self.stream, self.reader, self.transform, self.training = stream, stream.reader, transform, training
        self.seed, self.rank, self.workers = recipe.seed, share.rank, recipe.workers
        self._epoch = multiprocessing.Value("q", 0)  # workers live for several epochs
        if (shards := self._shards()) is not None:
            if training and self.kind == "wds" and shards < share.world_size:
                raise ValueError(f"{recipe.dataset} has too few shards for {share.world_size} processes: {shards}")
            self.workers = min(self.workers, max(1, shards // share.world_size))  # more would wait for some forever
        stream.set_loader_cfg(num_workers=max(1, self.workers))

    def _shards(self) -> int | None:
        """The number of shards, which workers divide among them; None for TFDS, which divides shards too."""
        if self.kind == "wds":
            return len(self.reader.split_info.filenames)
        if self.kind == "hfids":
            self.reader._lazy_init()
            shards: int = self.reader.ds.n_shards
            self.reader.ds = None
            return shards
        return None

    def begin(self, epoch: int) -> None:
        self._epoch.value = epoch
        self.stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[tuple[Tensor | None, int]]:
        worker = torch.utils.data.get_worker_info()
        own = (self.seed, self._epoch.value, self.rank, 0 if worker is None else worker.id)
        images = _webdataset(self.reader, seed_of(*own), self.training) if self.kind == "wds" else iter(self.reader)
        for place, (image, label) in enumerate(images):
            pixels = image if isinstance(image, np.ndarray) else np.array(to_rgb(image))  # other readers give Pillow's
            with seeded(seed_of(*own, place)), one_thread():
                transformed = self.transform(pixels)
            yield transformed, label
        if _unreadable and not self.training:
            yield None, -1


def _loader(images: _StreamImages, batch_size: int, device: torch.device) -> Any:
    options = worker_options(images.workers, device, _collate)
    # The readers of timm take seeds from the worker, and the worker takes its seed from this generator.
    generator = torch.Generator().manual_seed(seed_of(images.seed, images.rank))
    return torch.utils.data.DataLoader(images, batch_size=batch_size, generator=generator, **options)


def _collate(samples: list[tuple[Tensor | None, Any]]) -> Batch:
    """Collate a batch in the worker that read its images, with the images that this worker could not read."""
    batch = collate([(image, int(label), -1, []) for image, label in samples])
    batch.failures, _unreadable[:] = list(_unreadable), []
    return batch


# --------------------------------------------------------------------------------------------------------- WebDataset

_unreadable: list[Failure] = []  # of this process, since its last batch


def _webdataset(reader: Any, seed: int, training: bool) -> Iterator[tuple[Any, Any]]:
    """The images and labels of an epoch, from timm's reader with another shuffle and with our image decoder.

    timm seeds the shuffle of a worker once, so that an epoch would depend on those before it, and its decoder would
    only log failures. In validation with several processes it repeats images, so that all have equally many.
    """
    reader.input_img_mode = ""  # the conversion to RGB is ours
    reader._lazy_init()  # the first time it takes over the worker's seed
    reader.worker_seed = seed
    reader._lazy_init()
    for stage in reader.ds.pipeline:
        if isinstance(decode := (getattr(stage, "args", None) or (None,))[0], partial):
            stage.args = (partial(_decode, decode), *stage.args[1:])
    return iter(reader) if training else ((each["image"], each["target"]) for each in reader.ds)


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
