"""The data sets of the paper's transfer tables by name, with their splits and metrics, and sets of one's own."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grassy.torchvision_import import import_torchvision
from grassy.training.datasets import ArrayImages, Images, Joined, ReaderImages, arrays_from_file, open_images


@dataclass(frozen=True)
class TransferSet:
    """A data set: its name, what is reported of it, and its training and test images."""

    name: str
    metric: str  # "top1" or "mean_per_class"
    train: Images
    test: Images


class MissingData(ValueError):
    """A data set is not where it was looked for; the message says what to do."""


#: torchvision's class, its arguments for training and for test, and the metric, as the paper's appendix has them.
#: Flowers is trained on its official train and val splits together.
KNOWN: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any], str]] = {
    "cifar10": ("CIFAR10", [{"train": True}], {"train": False}, "top1"),
    "cifar100": ("CIFAR100", [{"train": True}], {"train": False}, "top1"),
    "food101": ("Food101", [{"split": "train"}], {"split": "test"}, "top1"),
    "pets": ("OxfordIIITPet", [{"split": "trainval"}], {"split": "test"}, "mean_per_class"),
    "cars": ("StanfordCars", [{"split": "train"}], {"split": "test"}, "top1"),
    "flowers": ("Flowers102", [{"split": "train"}, {"split": "val"}], {"split": "test"}, "mean_per_class"),
}


def open_set(name: str, data_dir: Path | None) -> TransferSet:
    """A data set of the paper by its name, or one of your own as NAME=PATH or PATH.

    Of a known name, `data_dir/NAME` is looked for first, as class folders or .npz files, then torchvision's own layout
    in `data_dir`. Nothing is downloaded.
    """
    if name not in KNOWN:
        title, equals, place = name.partition("=")
        path = Path(place if equals else name)
        if not path.exists():
            raise MissingData(f"{path} does not exist, and the known data sets are {', '.join(KNOWN)}")
        return TransferSet(title if equals else path.name, "top1", *_own(path))
    _, _, _, metric = KNOWN[name]
    if data_dir is None:
        raise MissingData(f"{name}: give --data-dir, the folder that holds {name} or torchvision's copy of it")
    if (data_dir / name).exists():
        return TransferSet(name, metric, *_own(data_dir / name))
    return TransferSet(name, metric, *_torchvision(name, data_dir))


def _own(path: Path) -> tuple[Images, Images]:
    """Training and test images of a folder; a validation split beside a test split counts as training."""
    try:
        if (path / "train.npz").is_file():
            train = arrays_from_file(path / "train.npz", "train")
            if not (path / "test.npz").is_file():
                return train, arrays_from_file(path, "validation", train.class_names)
            test = arrays_from_file(path / "test.npz", "test", train.class_names)
            if not (path / "val.npz").is_file():
                return train, test
            return Joined([train, arrays_from_file(path / "val.npz", "val", train.class_names)]), test
        train_images = open_images("", path, "train")
        test_split = "test" if (path / "test").exists() else "validation"
        return train_images, open_images("", path, test_split, train_images.class_names)
    except (ValueError, OSError) as error:
        raise MissingData(str(error)) from None


def _torchvision(name: str, data_dir: Path) -> tuple[Images, Images]:
    import_torchvision()
    from torchvision import datasets

    kind, train, test, _ = KNOWN[name]
    build: Callable[..., Any] = getattr(datasets, kind)
    try:
        parts = [_images(build(str(data_dir), download=False, **split), name) for split in train]
        return parts[0] if len(parts) == 1 else Joined(parts), _images(
            build(str(data_dir), download=False, **test), name
        )
    except (RuntimeError, OSError, ModuleNotFoundError) as error:
        reason = " ".join(str(error).split())
        raise MissingData(
            f"{name} is not in {data_dir}: put class folders or .npz files into {data_dir / name}, or get it by "
            f"torchvision.datasets.{kind}({str(data_dir)!r}, download=True) ({reason})"
        ) from None


def _images(dataset: Any, name: str) -> Images:
    pixels, targets = getattr(dataset, "data", None), getattr(dataset, "targets", None)
    if isinstance(pixels, np.ndarray) and targets is not None:
        return ArrayImages(pixels, np.asarray(targets), getattr(dataset, "classes", None), name)
    return FileImages(dataset, name)


class FileImages(ReaderImages):
    """A data set of torchvision that reads files: their names are known, and so are the labels."""

    def name(self, index: int) -> str:
        files = next((v for k, v in vars(self.dataset).items() if k in ("_image_files", "_images")), None)
        if files is None and hasattr(self.dataset, "_samples"):
            return str(self.dataset._samples[index][0])
        return str(files[index]) if files is not None else super().name(index)

    def labels(self) -> np.ndarray | None:
        labels = getattr(self.dataset, "_labels", None)
        if labels is None and hasattr(self.dataset, "_samples"):
            labels = [label for _, label in self.dataset._samples]
        return super().labels() if labels is None else np.asarray(labels, dtype=np.int64)
