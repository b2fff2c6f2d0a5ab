"""The share of its time that a run waits for its input, and advice about it.

On a GPU the host only queues the work on a batch. If the GPU is slower, the host waits for a free slot in that
queue. If the input is slower, the host waits for the next batch. So the host's clock distinguishes the two.
"""

import importlib.util
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from grassy.data.loader import WorkerLoader, processors
from grassy.data.run_data import Data
from grassy.recipes.recipe import Recipe

#: The share of waiting from which a run reports it.
MUCH = 0.1
Item = TypeVar("Item")


class InputWait:
    """The seconds that the loop waited for batches since the epoch began, and all its seconds."""

    def __init__(self) -> None:
        self.waited = self.seconds = 0.0
        self._started = False  # whether the workers, if any, have delivered a batch

    def timed(self, batches: Iterable[Item]) -> Iterator[Item]:
        """The same batches, timed. The first batch of a run does not count, since workers start then."""
        self.waited = self.seconds = 0.0
        iterator = iter(batches)
        while True:
            before = time.monotonic()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            if self._started:
                self.waited += time.monotonic() - before
            else:
                self._started, before = True, time.monotonic()
            yield batch
            self.seconds += time.monotonic() - before

    @property
    def share(self) -> float:
        return self.waited / self.seconds if self.seconds else 0.0


def advice(share: float, recipe: Recipe, data: Data) -> str | None:
    """Advice for an epoch that waited for its input; None if it did not wait for long."""
    if share <= MUCH or not isinstance(data.train, WorkerLoader):
        return None
    waits = f"the run waits for its input {share:.0%} of the time"
    cores = processors()
    if recipe.workers < cores:
        return f"{waits}: try workers={cores}, one per available CPU core"
    if importlib.util.find_spec("simplejpeg") is None:
        return f"{waits}: `pip install simplejpeg` speeds up JPEG decoding"
    return (
        f"{waits}: {cores} CPU cores cannot load images faster; `grassy pack` decodes them once, before training, and "
        "a run reads them without decoding"
    )
