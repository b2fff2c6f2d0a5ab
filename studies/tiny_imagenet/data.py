"""The images of the study at 32 pixels, as .npz files that training reads and as tensors on the device.

Shapes: N images, H x W pixels.
"""

import hashlib
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from grassy.transfer.datasets import MissingData, TransferSet, open_transfer_set
from studies.cifar100.measure import Labelled, View, as_arrays, find_set, look
from studies.tiny_imagenet.plan import CIFAR100, HELD_OUT, HELD_OUT_SEED, SUPERCLASSES, TINY, Entry

Arrays = dict[str, tuple[np.ndarray, np.ndarray]]  # by part, "train" and "test": uint8 (N, H, W, 3) and labels (N,)

#: The superclass of each fine class of CIFAR-100, as its authors have it; classes in alphabetical order.
SUPERCLASS = np.array([
    *(4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7),
    *(6, 13, 15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5, 5, 19, 8, 8, 15, 13, 14, 17, 18, 10),
    *(16, 4, 17, 4, 2, 0, 17, 4, 18, 17, 10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16),
    *(12, 9, 13, 15, 13, 16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13),
])  # fmt: skip


def find(name: str, data_dir: Path) -> TransferSet:
    """A data set by its name, Tiny-ImageNet included."""
    return open_transfer_set(f"{name}={data_dir / name}", data_dir) if name == TINY else find_set(name, data_dir)


def split(labels: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the images to train on and of those held out: the tenth `number` of every class."""
    rng = np.random.default_rng(HELD_OUT_SEED)
    held_out = []
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        size = max(1, round(HELD_OUT * len(members)))
        held_out.append(members[number * size : (number + 1) * size])
    chosen = np.sort(np.concatenate(held_out))
    return np.setdiff1d(np.arange(len(labels)), chosen), chosen


@dataclass
class Store:
    """All images, read once: from `data_dir` as it is, or from `scratch`, where they were put the last time."""

    data_dir: Path
    scratch: Path
    device: torch.device
    view: View
    _digests: dict[str, str] = field(default_factory=dict)
    _arrays: dict[str, Arrays] = field(default_factory=dict)
    _tensors: dict[str, dict[str, Labelled]] = field(default_factory=dict)

    def check(self, entry: Entry) -> None:
        """Raise a ValueError that names every data set that an entry needs and that is not there."""
        missing = []
        for name in dict.fromkeys((CIFAR100 if entry.data == SUPERCLASSES else entry.data, *entry.sets)):
            try:
                find(name, self.data_dir)
            except MissingData as error:
                missing.append(str(error))
        if missing:
            raise ValueError("; ".join(missing))

    def arrays(self, name: str) -> Arrays:
        """Training and test images of a set, resized and cropped as test images are."""
        if name not in self._arrays:
            folder = self.scratch / "data" / f"{name}-{self._digest(name)}"
            if not folder.exists():
                source = find(name, self.data_dir)
                _write(folder, {part: as_arrays(getattr(source, part), self.view) for part in ("train", "test")})
            self._arrays[name] = {part: _read(folder / f"{part}.npz") for part in ("train", "test")}
        return self._arrays[name]

    def _digest(self, name: str) -> str:
        """Tells images from other ones, so that nothing stale is read from the scratch folder."""
        if name not in self._digests:
            source = find(name, self.data_dir)
            text = f"{look(source.train)} {look(source.test)} {self.view}"
            self._digests[name] = hashlib.sha256(text.encode()).hexdigest()[:12]
        return self._digests[name]

    def training_arrays(self, entry: Entry) -> Arrays:
        """What an entry trains on, and what judges it in place of test images."""
        name = CIFAR100 if entry.data == SUPERCLASSES else entry.data
        found = self.arrays(name)
        if entry.data == SUPERCLASSES:
            found = {part: (x, SUPERCLASS[y]) for part, (x, y) in found.items()}
        if entry.split is None:
            return found
        x, y = found["train"]
        kept, held_out = split(y, entry.split)
        return {"train": (x[kept], y[kept]), "test": (x[held_out], y[held_out])}

    def training_folder(self, entry: Entry) -> Path:
        """A folder with train.npz and test.npz for `grassy.train`."""
        digest = self._digest(CIFAR100 if entry.data == SUPERCLASSES else entry.data)
        folder = self.scratch / "train" / f"{entry.data}-{'all' if entry.split is None else entry.split}-{digest}"
        if not folder.exists():
            _write(folder, self.training_arrays(entry))
        return folder

    def tensors(self, name: str) -> dict[str, Labelled]:
        """The images of a transfer set on the device: uint8 (N, 3, H, W) and labels."""
        if name not in self._tensors:
            self._tensors[name] = {part: self.on_device(*both) for part, both in self.arrays(name).items()}
        return self._tensors[name]

    def on_device(self, pixels: np.ndarray, labels: np.ndarray) -> Labelled:
        return torch.from_numpy(pixels).to(self.device).permute(0, 3, 1, 2), torch.from_numpy(labels).to(self.device)


def _write(folder: Path, arrays: Arrays) -> None:
    """All or nothing: a folder that is there is whole, and of two processes that write it one succeeds."""
    part = folder.with_name(f"{folder.name}.{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for name, (x, y) in arrays.items():
        np.savez(part / f"{name}.npz", x=x, y=y)
    try:
        part.rename(folder)
    except OSError:
        if not folder.exists():
            raise
        shutil.rmtree(part)  # another process was faster


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    with np.load(path) as file:
        return file["x"], file["y"]
