"""The share of its time that a run waits for its input, and advice about it.

On a GPU the host only queues the work on a batch. If the GPU is slower, the host waits for a free slot in that
queue. If the input is slower, the host waits for the next batch. So the host's clock distinguishes the two.
"""

import importlib.util
import itertools
import os
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from grassy.data.class_folders import PACKED, FolderImages
from grassy.data.images import ArrayImages
from grassy.data.resident_loader import ResidentLoader
from grassy.data.run_data import Data
from grassy.data.stream_loader import StreamLoader
from grassy.data.worker_processes import processors
from grassy.recipes.recipe import Recipe

#: The share of waiting from which a run reports it.
MUCH = 0.1
JPEG = {".jpg", ".jpeg", ".jfif"}
Item = TypeVar("Item")


class InputWait:
    """The seconds that the loop waited for batches since the epoch began, and all its seconds."""

    def __init__(self) -> None:
        self.waited = self.seconds = self.first = 0.0
        self._started = False  # whether the workers, if any, have delivered a batch

    def timed(self, batches: Iterable[Item]) -> Iterator[Item]:
        """The same batches, timed. The first batch of a run does not count, since workers start then."""
        self.waited = self.seconds = self.first = 0.0
        iterator = iter(batches)
        for place in itertools.count():
            before = time.monotonic()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            if self._started:
                self.waited += time.monotonic() - before
                self.first = self.first if place else self.waited
            else:
                self._started, before = True, time.monotonic()
            yield batch
            self.seconds += time.monotonic() - before

    @property
    def share(self) -> float:
        return self.waited / self.seconds if self.seconds else 0.0

    @property
    def steady_share(self) -> float:
        """The share without the first batch of the epoch, which takes as long however fast the following ones come."""
        rest = self.seconds - self.first
        return (self.waited - self.first) / rest if rest else 0.0


def advice_on_waiting(share: float, recipe: Recipe, data: Data, rank: int = 0) -> str | None:
    """Advice for an epoch that waited for its input; None if it did not wait for long, or if nothing can be done.

    rank: the process that waited longest, for which the others wait too.
    """
    if share <= MUCH or isinstance(data.train, ResidentLoader):
        return None
    waits = f"{f'rank {rank}' if rank else 'the run'} waits for its input {share:.0%} of the time"
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun says how many processes share the machine
    cores = max(1, processors() // here)
    of_each = " of this process" if here > 1 else ""
    if isinstance(data.train, StreamLoader) and data.train.images.workers < recipe.workers:
        return f"{waits}: its shards allow {data.train.images.workers} workers only; split them into more shards"
    if recipe.workers < cores:
        return f"{waits}: try workers={cores}, one per available CPU core{of_each}"
    suffixes = _suffixes(data.train.images)
    if suffixes & JPEG and importlib.util.find_spec("simplejpeg") is None:
        return f"{waits}: `pip install simplejpeg` speeds up JPEG decoding"
    if suffixes == {PACKED}:
        return f"{waits}: move the pack to a faster disk or into memory, or make a smaller one with --size"
    slow = f"{waits}: {cores} CPU cores{of_each} cannot load images faster"
    if suffixes:
        return f"{slow}; `grassy pack` decodes them once, before training, and a run reads them without decoding"
    if isinstance(data.train.images, ArrayImages):
        return f"{slow}; smaller images or less augmentation would help"
    return f"{slow}; save them in class folders, which `grassy pack` decodes once"


def _suffixes(images: object) -> set[str]:
    """The suffixes of a thousand files, or an empty set if the images are no files."""
    if not isinstance(images, FolderImages):
        return set()
    step = max(1, len(images) // 1000)
    return {os.path.splitext(name)[1].lower() for name in images.names[::step]}
