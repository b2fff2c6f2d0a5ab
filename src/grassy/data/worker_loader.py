"""Batches for training and validation from images that can be read in any order."""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grassy.data.batch import Batch, Failure, checked, collate, on_device
from grassy.data.decode import reason_for
from grassy.data.images import Images
from grassy.data.order import EpochBatches, Share, seed_of
from grassy.data.transforms import CropTransform, Transform
from grassy.data.worker_processes import keep_memory, one_thread, processors, worker_options

MAX_TRIES = 20


class Samples(torch.utils.data.Dataset[Any]):
    """Transformed images. In training, another image, drawn at random, replaces one that cannot be read."""

    def __init__(self, images: Images, transform: Transform, training: bool) -> None:
        self.images, self.training = images, training
        self.crop = transform if isinstance(transform, CropTransform) else None
        self.rest = transform if self.crop is None else self.crop.of_crop

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor | None, int, int, list[Failure]]:
        index, seed = key
        failures = []
        for attempt in range(MAX_TRIES if self.training else 1):
            # Not the neighbour: unreadable files often lie side by side, and what follows them would be seen too often.
            i = seed_of(seed, attempt) % len(self.images) if attempt else index
            with seeded(seed), one_thread():
                try:
                    # The crop is drawn first, since it determines the scale at which a file is decoded.
                    image, label = self.images.load(i) if self.crop is None else self.images.load(i, self.crop)
                    if label < 0:  # some datasets mark missing labels so
                        raise ValueError(f"its label is {label}")
                except Exception as error:  # decoders may raise anything for broken files
                    failures.append(Failure(self.images.name(i), reason_for(error)))
                    continue
                try:
                    return self.rest(image), label, i, failures
                except Exception as error:  # the image was read: another one would hide an error of the transform
                    why = reason_for(error)
                    raise ValueError(f"{self.images.name(i)} cannot be transformed: {why}") from error
        return None, -1, index, failures


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed Python's, NumPy's and torch's CPU generators, and restore their states afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 (what transforms use)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])


class WorkerLoader:
    """Training batches, decoded and transformed by worker processes."""

    def __init__(
        self,
        images: Images,
        transform: Transform,
        batches: EpochBatches,
        workers: int,
        device: torch.device,
        num_classes: int | None = None,
    ) -> None:
        self.images, self.batches, self.device, self.num_classes = images, batches, device, num_classes
        if workers == 0:
            keep_memory()
        self._loader = torch.utils.data.DataLoader(
            Samples(images, transform, training=True),
            batch_sampler=batches,
            **worker_options(min(workers, processors()), device, collate),
        )

    @property
    def updates(self) -> int:
        """Updates in an epoch."""
        return self.batches.updates

    def epoch(self, epoch: int, start: int = 0) -> Iterator[list[Batch]]:
        """The parts of each update of an epoch, from update `start` on."""
        self.batches.epoch, self.batches.start = epoch, start
        parts = []
        for batch in on_device(checked(self._loader, self.num_classes, self.images.name), self.device):
            if batch.blank:
                name = batch.failures[-1].name
                raise ValueError(f"{MAX_TRIES} images in a row cannot be read, {name} last: is this the right data?")
            parts.append(batch)
            if len(parts) == self.batches.parts:
                yield parts
                parts = []

    def names_of(self, epoch: int, update: int) -> list[str]:
        """Names of the images of an update, for messages."""
        return [self.images.name(int(index)) for index in self.batches.indices_of(epoch, update)]


class ValidationLoader:
    """Each image of a set once, in order, by worker processes; rank r of R takes every R-th."""

    def __init__(
        self,
        images: Images,
        transform: Transform,
        batch_size: int,
        share: Share,
        workers: int,
        device: torch.device,
        num_classes: int | None = None,
    ) -> None:
        own = [(index, 0) for index in range(share.rank, len(images), share.world_size)]
        self.images, self.device, self.num_classes = images, device, num_classes
        self._loader = torch.utils.data.DataLoader(
            Samples(images, transform, training=False),
            batch_sampler=[own[i : i + batch_size] for i in range(0, len(own), batch_size)],
            **worker_options(min(workers, processors()), device, collate),
        )

    def __iter__(self) -> Iterator[Batch]:
        return on_device(checked(self._loader, self.num_classes, self.images.name), self.device)
