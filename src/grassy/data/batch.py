"""A batch of images and labels: how it is made of samples, checked and moved to the device."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from grassy.data.images import beyond_the_head


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
    stream = _copies(device)
    for batch in batches:
        with torch.cuda.stream(stream):
            batch.images = batch.images.to(device, non_blocking=True)
            batch.labels = batch.labels.to(device, non_blocking=True)
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream)
        for tensor in (batch.images, batch.labels):
            tensor.record_stream(current)
        yield batch


@functools.cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    """The stream for copies to a device. torch's allocator keeps freed memory for the stream that it was used in, so
    a new stream in each epoch would start without any.
    """
    return torch.cuda.Stream(device)
