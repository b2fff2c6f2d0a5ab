"""Labelled images from class folders, tars, arrays in .npz files, timm readers, or scikit-learn's digits.

All have the same interface: a length, class names, an image and its label by index, and a name for messages.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from grassy.data.class_folders import open_files
from grassy.data.decode import Crop, crop_of, read_pixels
from grassy.data.layout import TRAIN_NAMES, VALIDATION_NAMES, place_of_split
from grassy.data.torchvision_images import TorchvisionImages
from grassy.recipes.values import check_dataset
from grassy.schema import open_regular
from grassy.torchvision_import import import_torchvision


class Images(Protocol):
    """A set of labelled images."""

    @property
    def class_names(self) -> Sequence[str] | None: ...

    def __len__(self) -> int: ...

    def load(self, index: int, crop: Crop | None = None) -> tuple[np.ndarray, int]:
        """The RGB pixels (H, W, 3) of an image or of a crop of it, as uint8, and its label. Raises if it is unreadable.

        A crop may come at a smaller scale, see `read_pixels`.
        """

    def name(self, index: int) -> str: ...

    def labels(self) -> np.ndarray | None:
        """All labels, if they are known without reading the images; else None."""


def open_images(dataset: str, data_dir: Path | None, split: str, class_names: Sequence[str] | None = None) -> Images:
    """Open a split of a dataset.

    Args:
        dataset: "" for files in data_dir (class folders, tars, or .npz), "digits", or the name of a timm reader.
        data_dir: The folder or file of the images; None for the digits.
        split: The name of the split. "val", "validation" and "test" are among the synonyms for validation images.
        class_names: Those of the training set, whose class indices a validation set must share.

    Returns:
        The images.

    Raises:
        ValueError: If the dataset is unknown, or if the split cannot be found or read.
    """
    check_dataset(dataset)
    if dataset == "digits":
        if data_dir is not None:
            raise ValueError(f"dataset is digits, which has no files: for the images in {data_dir} it must be empty")
        return digits(split)
    if data_dir is None:
        raise ValueError("where are the images? give --data-dir")
    if not dataset.startswith("hfds/") and not data_dir.exists():
        where = "" if data_dir.is_absolute() else f" in {Path.cwd()}"
        raise ValueError(f"--data-dir {data_dir} does not exist{where}")
    if dataset == "":
        place = place_of_split(data_dir, split) if data_dir.is_dir() else data_dir
        return arrays_from_file(place, class_names) if place.suffix == ".npz" else open_files(place, class_names)
    return _in_the_order_of(_from_timm(dataset, data_dir, split), class_names, dataset)


# --------------------------------------------------------------------------------------------------- arrays


class ArrayImages:
    """Images in memory.

    Args:
        images: The pixels (N, H, W, 3) or (N, H, W), as uint8.
        labels: N integers.
        class_names: The names of the classes, if they are known.
        where: Where the images come from, for messages.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray, class_names: Sequence[str] | None, where: str) -> None:
        if (
            images.dtype != np.uint8
            or images.ndim not in (3, 4)
            or 0 in images.shape[1:]
            or (images.ndim == 4 and images.shape[3] not in (1, 3))
        ):
            shape = f"{images.dtype} {images.shape}"
            raise ValueError(f"{where}: images must be uint8 of shape (N, H, W) or (N, H, W, 3), got {shape}")
        if labels.shape != images.shape[:1] or not np.issubdtype(labels.dtype, np.integer):
            raise ValueError(f"{where}: labels must be {len(images)} integers, got {labels.dtype} {labels.shape}")
        if len(labels) == 0:
            raise ValueError(f"{where} holds no images")
        if labels.min() < 0:
            raise ValueError(f"{where}: labels must not be negative, got {labels.min()}")
        images = images[..., None] if images.ndim == 3 else images
        self.images = images if images.shape[3] == 3 else np.repeat(images, 3, axis=3)
        self.class_names: Sequence[str] | None = None if class_names is None else [str(name) for name in class_names]
        self._labels, self.where = labels.astype(np.int64), where

    def __len__(self) -> int:
        return len(self.images)

    def load(self, index: int, crop: Crop | None = None) -> tuple[np.ndarray, int]:
        return crop_of(self.images[index], crop), int(self._labels[index])

    def name(self, index: int) -> str:
        return f"{self.where}[{index}]"

    def labels(self) -> np.ndarray:
        return self._labels


def arrays_from_file(file: Path, class_names: Sequence[str] | None = None) -> ArrayImages:
    """The images of an .npz file.

    It has `x` (or `images`), `y` (or `labels`) and optionally `classes`, the names. It is read without pickle.

    Args:
        file: The file.
        class_names: Those of the training set, whose class indices the labels get.
    """
    try:
        with open_regular(file) as stream, np.load(stream, allow_pickle=False) as arrays:
            images, labels = (
                next((arrays[name] for name in names if name in arrays), None)
                for names in (("x", "images"), ("y", "labels"))
            )
            classes = arrays.get("classes")
            found = ", ".join(arrays.files)
    except Exception as error:  # zipfile, zlib and NumPy may raise anything for damaged archives, even MemoryError
        raise ValueError(f"{file} cannot be read as .npz: {error}") from None
    if images is None or labels is None:
        raise ValueError(f"{file} must hold x (or images) and y (or labels), found {found or 'nothing'}")
    arrays_in_file = ArrayImages(images, labels, None if classes is None else classes.tolist(), file.name)
    return arrays_in_file if class_names is None or classes is None else _renumbered(arrays_in_file, class_names)


def _renumbered(images: ArrayImages, class_names: Sequence[str]) -> ArrayImages:
    """The same images, with the class indices of the training set."""
    own = list(images.class_names or ())
    if own == list(class_names):
        return images
    numbers = {name: number for number, name in enumerate(class_names)}
    for name in own:
        if name not in numbers:
            raise ValueError(f"{images.where} has the class {name!r}, which the training set does not have")
    labels = images.labels()
    if labels.max() >= len(own):
        raise ValueError(f"{images.where} has the label {labels.max()}, but names only {len(own)} classes")
    return ArrayImages(images.images, np.array([numbers[name] for name in own])[labels], class_names, images.where)


def _in_the_order_of(images: Images, class_names: Sequence[str] | None, dataset: str) -> Images:
    """The same images, with the class indices of the training set, if both have names."""
    if class_names is None or images.class_names is None or list(images.class_names) == list(class_names):
        return images
    if isinstance(images, ArrayImages):
        return _renumbered(images, class_names)
    raise ValueError(f"{dataset} has other classes than the training set, or the same in another order")


def digits(split: str) -> ArrayImages:
    """scikit-learn's 1,797 digits of 8x8 pixels; every fifth is for validation."""
    from sklearn.datasets import load_digits

    if split not in (*TRAIN_NAMES, *VALIDATION_NAMES):
        raise ValueError(f"the digits have no split {split!r}: it is one of train and val")
    bunch = load_digits()
    fifth = np.arange(len(bunch.target)) % 5 == 0
    chosen = ~fifth if split in TRAIN_NAMES else fifth
    images = np.minimum(bunch.images[chosen] * 16, 255).astype(np.uint8)
    return ArrayImages(images, bunch.target[chosen].astype(np.int64), [str(name) for name in range(10)], "digits")


# --------------------------------------------------------------------------------------------------- files


class ReaderImages:
    """Images of a random-access timm reader.

    Args:
        reader: The reader.
    """

    def __init__(self, reader: Any) -> None:
        self.reader = reader
        names = getattr(reader, "class_to_idx", None) or getattr(reader, "class_name_to_idx", None)
        self.class_names: Sequence[str] | None = sorted(names, key=lambda name: names[name]) if names else None

    def __len__(self) -> int:
        return len(self.reader)

    def load(self, index: int, crop: Crop | None = None) -> tuple[np.ndarray, int]:
        # The reader itself, not timm's ImageDataset, which would silently replace a broken image by another.
        file, label, *_ = self.reader[index]
        with file:
            return read_pixels(file, crop), int(label)

    def name(self, index: int) -> str:
        return str(self.reader.filename(index, absolute=True))

    def labels(self) -> np.ndarray | None:
        targets, samples = getattr(self.reader, "targets", None), getattr(self.reader, "samples", None)
        if targets is None and samples is not None:
            targets = [label for _, label in samples]
        return None if targets is None else np.asarray(targets, dtype=np.int64)


def _from_timm(name: str, data_dir: Path, split: str) -> Images:
    import_torchvision()
    from timm.data import create_dataset

    try:
        dataset = create_dataset(name, root=str(data_dir), split=split)
    except AssertionError as error:
        raise ValueError(str(error) or f"timm cannot open {name!r} in {data_dir}") from None
    except RuntimeError as error:  # torchvision: not found or corrupted; its advice does not apply here
        why = str(error).replace("You can use download=True to download it", "grassy downloads nothing")
        raise ValueError(f"{name} in {data_dir}: {why}") from None
    reader = getattr(dataset, "reader", None)
    return of_torchvision(dataset, name) if reader is None else ReaderImages(reader)


def of_torchvision(dataset: Any, name: str) -> Images:
    """The images of a torchvision dataset; those of CIFAR as an array."""
    pixels, targets = getattr(dataset, "data", None), getattr(dataset, "targets", None)
    if isinstance(pixels, np.ndarray) and targets is not None:
        return ArrayImages(pixels, np.asarray(targets), getattr(dataset, "classes", None), name)
    return TorchvisionImages(dataset, name)


class Joined:
    """Several sets, concatenated.

    Args:
        parts: The sets. All number classes alike.
    """

    def __init__(self, parts: list[Images]) -> None:
        self.parts = parts
        self.class_names = parts[0].class_names
        self.ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def _find(self, index: int) -> tuple[Images, int]:
        part = int(np.searchsorted(self.ends, index, side="right"))
        return self.parts[part], index - int(self.ends[part] - len(self.parts[part]))

    def load(self, index: int, crop: Crop | None = None) -> tuple[np.ndarray, int]:
        images, place = self._find(index)
        return images.load(place, crop)

    def name(self, index: int) -> str:
        images, place = self._find(index)
        return images.name(place)

    def labels(self) -> np.ndarray | None:
        labels = [part.labels() for part in self.parts]
        return None if any(part is None for part in labels) else np.concatenate(labels)  # type: ignore[arg-type]


def check_labels(images: Images, num_classes: int, what: str, hint: str = "") -> None:
    """Raise a ValueError, which ends with the hint, for labels beyond the classes of the head."""
    labels = images.labels()
    if labels is not None and len(labels) and labels.max() >= num_classes:
        index = int(labels.argmax())
        wrong = beyond_the_head(images.name(index), int(labels[index]), num_classes)
        raise ValueError(f"{what}: {wrong}{hint}")


def beyond_the_head(image: str, label: int, num_classes: int) -> str:
    """The message for a label that the head does not have."""
    return f"{image} has label {label}, but the head has {num_classes} classes (0 to {num_classes - 1})"


def number_of_classes(images: Images) -> int:
    if images.class_names is not None:
        return len(images.class_names)
    labels = images.labels()
    if labels is None:
        raise ValueError("cannot tell the number of classes from the data: give num_classes=N")
    return int(labels.max()) + 1
