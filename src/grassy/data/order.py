"""The order of an epoch: which images a batch holds, and the seed of each image.

The seed is made from the run's seed, the epoch and the image's position in the epoch. So a batch does not depend on the
number of workers, on the number of processes that share an epoch, or on where a run was interrupted and resumed.

An update of the weights takes `batch_size` images: rank r of R takes every R-th of them, in `grad_accum_steps` parts.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Share:
    """The part of every batch that this process takes."""

    rank: int = 0
    world_size: int = 1


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
