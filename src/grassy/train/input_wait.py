"""How much of its time a run waits for its input, and what its user can do about it.

On a GPU the host only queues the work on a batch. If the GPU is the slower one, the host waits for a place in that
queue; if the input is, the host waits for the next batch. So the host's clock tells the two apart.
"""

import importlib.util
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from grassy.data.loader import WorkerLoader, processors
from grassy.data.run_data import Data
from grassy.runs.recipe import Recipe

#: The share of the time from which on a run says that it waits.
MUCH = 0.1
Item = TypeVar("Item")


class InputWait:
    """Seconds that the loop waited for batches since the epoch began, beside all its seconds."""

    def __init__(self) -> None:
        self.waited = self.seconds = 0.0
        self._started = False  # whether worker processes, if there are any, have delivered

    def timed(self, batches: Iterable[Item]) -> Iterator[Item]:
        """The same batches. The first one of a run is not waited for in the sense of this file: workers start."""
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
    """What to say of an epoch that waited for its input, or None if it did not wait for long."""
    if share <= MUCH or not isinstance(data.train, WorkerLoader):
        return None
    waits = f"the run waits for its input {share:.0%} of the time"
    cores = processors()
    if recipe.workers < cores:
        return f"{waits}: try workers={cores}, one for each processor that it may use"
    if importlib.util.find_spec("simplejpeg") is None:
        return f"{waits}: `pip install simplejpeg` makes JPEG files faster to decode"
    size = recipe.img_size
    return (
        f"{waits}: {cores} processors cannot prepare images faster; files reduced once to about {2 * size} pixels are "
        "faster to decode"
    )
