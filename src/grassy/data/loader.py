"""Batches for training and validation, equal in every run with the same seed.

Each image has its own seed, made from the run's seed, the epoch and the image's position in the epoch. So a batch does
not depend on the number of workers, on the number of processes that share an epoch, or on where a run was interrupted
and resumed.

An update of the weights takes `batch_size` images: rank r of R takes every R-th of them, in `grad_accum_steps` parts.
"""

import contextlib
import ctypes
import hashlib
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from grassy.data.decode import reason_for
from grassy.data.images import Images, beyond_the_head
from grassy.data.transforms import CropTransform, Transform

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


@dataclass(frozen=True)
class Share:
    """The part of every batch that this process takes."""

    rank: int = 0
    world_size: int = 1


# --------------------------------------------------------------------------------------------------- order


def seed_of(*parts: int) -> int:
    """Hash integers to 63 bits, uncorrelated for similar integers."""
    digest = hashlib.blake2b(np.array(parts, dtype=np.int64).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def epoch_order(length: int, seed: int, epoch: int, repeats: int = 1) -> np.ndarray:
    """Indices in the order of an epoch; with repeats, each chosen image comes several times in a row."""
    order = np.random.default_rng(seed_of(seed, epoch)).permutation(length)
    return order if repeats == 1 else np.repeat(order, repeats)[:length]


class EpochBatches:
    """Batch sampler: for each part of each update of an epoch from `start` on, a list of (index, seed)."""

    def __init__(self, length: int, batch_size: int, parts: int, share: Share, seed: int, repeats: int = 1) -> None:
        self.length, self.batch_size, self.parts, self.share = length, batch_size, parts, share
        self.seed, self.repeats = seed, repeats
        self.updates = length // batch_size
        self.epoch = self.start = 0

    def __len__(self) -> int:
        return (self.updates - self.start) * self.parts

    def indices_of(self, epoch: int, update: int) -> np.ndarray:
        """Indices of the images of all processes in one update."""
        order = epoch_order(self.length, self.seed, epoch, self.repeats)
        return order[update * self.batch_size : (update + 1) * self.batch_size]

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        order = epoch_order(self.length, self.seed, self.epoch, self.repeats)
        for update in range(self.start, self.updates):
            begin = update * self.batch_size
            places = range(begin + self.share.rank, begin + self.batch_size, self.share.world_size)
            size = len(places) // self.parts
            for part in range(self.parts):
                yield [
                    (int(order[place]), seed_of(self.seed, self.epoch, place))
                    for place in places[part * size : (part + 1) * size]
                ]


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


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread, as in a worker: several threads on one small image take many times as long."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


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
            **worker_options(min(workers, processors()), device),
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
            **worker_options(min(workers, processors()), device),
        )

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        return on_device(checked(self._loader, self.num_classes, self.images.name), self.device)


def processors() -> int:
    """The number of CPU cores that this process may use; more workers would not help."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_options(workers: int, device: torch.device) -> dict[str, Any]:
    """Options of a DataLoader that yields `Batch`es."""
    options: dict[str, Any] = {"collate_fn": collate, "num_workers": workers}
    if workers:  # persistent, because starting them costs seconds
        options |= {"persistent_workers": True, "worker_init_fn": _start_worker}
        if sys.platform == "linux":  # Python 3.14 defaults to forkserver, but _start_worker needs fork
            options["multiprocessing_context"] = "fork"
    if device.type == "cuda":
        options |= {"pin_memory": True}
    return options


def _start_worker(_: int) -> None:
    torch.set_num_threads(1)
    keep_memory()
    # Only the main process handles Ctrl-C and SIGTERM, though Slurm, systemd and Kubernetes send them to all processes.
    # It still needs its workers then, and ends them by its own SIGTERM if necessary. This needs fork:
    # the main process is then the parent, and there are no threads yet that would let a SIGTERM through.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with_parent, daemon=True).start()


def keep_memory() -> None:
    """Let glibc keep freed memory. By default it returns arrays of an image's size to the system.

    Each page of the next array is a page fault then, with which some operations take four times as long.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, the largest that is allowed
            libc.mallopt(-1, 2**27)  # M_TRIM_THRESHOLD


def _end_with_parent() -> None:
    """Exit on a SIGTERM from the parent; ignore those of others."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


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
