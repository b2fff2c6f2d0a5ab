"""Batches for training and validation from images that can be read in any order."""

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from grassy.data.decode import reason_for
from grassy.data.images import Images, beyond_the_head
from grassy.data.order import EpochBatches, Share
from grassy.data.transforms import CropTransform, Transform
from grassy.data.worker_processes import keep_memory, one_thread, processors, worker_options

MAX_TRIES = 20


class Failure(NamedTuple):
    """An image that could not be read, and why."""

    name: str
    reason: str


@dataclass
class Batch:
    """Images (B, 3, H, W) as uint8, labels (B,), and the images that could not be read.

    `blank` entries have no image and the label −1. `indices` (B of them) are the images' indices, if they are drawn
    one by one.
    """

    images: Tensor
    labels: Tensor
    indices: list[int] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    blank: int = 0

    def pin_memory(self) -> "Batch":
        """Called by torch's DataLoader: copies from pinned memory to a GPU are asynchronous."""
        self.images, self.labels = self.images.pin_memory(), self.labels.pin_memory()
        return self


# --------------------------------------------------------------------------------------------------- samples


class Samples(torch.utils.data.Dataset[Any]):
    """Transformed images. In training, the next readable image replaces one that cannot be read."""

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
            i = (index + attempt) % len(self.images)
            with seeded(seed), one_thread():
                try:
                    # The crop is drawn first, since it determines the scale at which a file is decoded.
                    image, label = self.images.load(i) if self.crop is None else self.images.load(i, self.crop)
                    if label < 0:  # some datasets mark missing labels so
                        raise ValueError(f"its label is {label}")
                except Exception as error:  # decoders may raise anything for broken files
                    failures.append(Failure(self.images.name(i), reason_for(error)))
                    continue
                return self.rest(image), label, i, failures
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


def collate(samples: Sequence[tuple[Tensor | None, int, int, list[Failure]]]) -> Batch:
    """Collate a batch. Images that could not be read are blank, with the label −1."""
    known = next((image for image, *_ in samples if image is not None), None)
    if known is None:
        known = torch.zeros(3, 1, 1, dtype=torch.uint8)
    # The channels of a pixel lie together in images that come from files, and stay so: to move them would take as long
    # as a resize.
    pixels = [(torch.zeros_like(known) if image is None else image).permute(1, 2, 0) for image, *_ in samples]
    return Batch(
        torch.stack(pixels).permute(0, 3, 1, 2),
        torch.tensor([label for _, label, *_ in samples]),
        [index for _, _, index, _ in samples],
        [failure for *_, failures in samples for failure in failures],
        blank=sum(image is None for image, *_ in samples),
    )


# --------------------------------------------------------------------------------------------------- loaders


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


def checked(
    batches: Iterable[Batch], num_classes: int | None, name: Callable[[int], str] | None = None
) -> Iterator[Batch]:
    """The same batches; a ValueError for a label beyond the head's classes, for which CUDA would only report an assert.

    name: maps the index of an image to its name, for the message.
    """
    for batch in batches:
        if num_classes is not None:
            wrong = (batch.labels >= num_classes) | ((batch.labels < 0) & (batch.blank == 0))
            if wrong.any():
                place = int(wrong.int().argmax())
                who = "an image" if name is None else name(batch.indices[place])
                raise ValueError(beyond_the_head(who, int(batch.labels[place]), num_classes))
        yield batch


def on_device(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """Batches on the device. On a GPU the host only queues the work on a batch, so a copy in a stream of its own runs
    beside the work on the batch before.
    """
    if device.type != "cuda":
        yield from batches
        return
    stream = torch.cuda.Stream(device)
    for batch in batches:
        with torch.cuda.stream(stream):
            batch.images = batch.images.to(device, non_blocking=True)
            batch.labels = batch.labels.to(device, non_blocking=True)
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream)
        for tensor in (batch.images, batch.labels):
            tensor.record_stream(current)
        yield batch
