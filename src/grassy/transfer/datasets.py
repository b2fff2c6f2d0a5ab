"""The datasets of the paper's transfer tables, with their splits and metrics, and your own datasets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grassy.data.class_folders import open_files
from grassy.data.held_out import split as split_set
from grassy.data.image_files import is_hidden
from grassy.data.images import Images, Joined, arrays_from_file, of_torchvision, open_images
from grassy.data.layout import TRAIN_NAMES, VALIDATION_NAMES, folders_in, holds_images, split_place
from grassy.data.run_images import data_dir_of, run_images, run_recipe
from grassy.recipes.changes import with_changes
from grassy.recipes.recipe import Recipe
from grassy.runs.records import ENVIRONMENT
from grassy.runs.weights import read_description, run_folder, weights_file
from grassy.spelling import nearest
from grassy.torchvision_import import import_torchvision


@dataclass(frozen=True)
class TransferSet:
    """A dataset: its name, the metric to report, and its training and test images."""

    name: str
    metric: str  # "top1" or "mean_per_class"
    train: Images
    test: Images


#: The share of a folder of class folders that becomes the test set, if the folder has no splits.
HELD_OUT = 0.2


class MissingData(ValueError):
    """A dataset was not found; the message says what to do."""


#: torchvision's class, its arguments for training and for test, and the metric, as in the paper's appendix.
#: Flowers trains on its official train and val splits together.
KNOWN: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any], str]] = {
    "cifar10": ("CIFAR10", [{"train": True}], {"train": False}, "top1"),
    "cifar100": ("CIFAR100", [{"train": True}], {"train": False}, "top1"),
    "food101": ("Food101", [{"split": "train"}], {"split": "test"}, "top1"),
    "pets": ("OxfordIIITPet", [{"split": "trainval"}], {"split": "test"}, "mean_per_class"),
    "cars": ("StanfordCars", [{"split": "train"}], {"split": "test"}, "top1"),
    "flowers": ("Flowers102", [{"split": "train"}, {"split": "val"}], {"split": "test"}, "mean_per_class"),
}


def open_transfer_set(name: str, data_dir: Path | None) -> TransferSet:
    """Open a dataset of the paper by name, or your own as NAME=PATH or PATH.

    The folder of a run stands for the images that it was trained and validated on.

    For a known name, this looks for `data_dir/NAME` (class folders, tars or .npz files), then for torchvision's layout
    in `data_dir`. It downloads nothing. "digits", torch/NAME and hfds/NAME use the same readers as training.
    """
    if name not in KNOWN:
        title, equals, place = name.partition("=")
        place = place if equals else name
        if place == "digits" or place.startswith(("torch/", "hfds/")):
            return TransferSet(title, "top1", *_from_readers(place, data_dir))
        path = Path(place)
        if not path.exists():
            known = f"the known datasets are {', '.join((*KNOWN, 'digits'))}{nearest(name, (*KNOWN, 'digits'))}"
            raise MissingData(f"{path} does not exist, and {known}")
        if (path / ENVIRONMENT).is_file():
            name, *parts = _of_run(path)
            return TransferSet(title if equals else name, "top1", *parts)
        return TransferSet(title if equals else path.resolve().name, "top1", *_own(path))
    _, _, _, metric = KNOWN[name]
    if data_dir is None:
        raise MissingData(f"{name}: give --data-dir, the folder that holds {name} or torchvision's copy of it")
    if (data_dir / name).exists():
        return TransferSet(name, metric, *_own(data_dir / name))
    return TransferSet(name, metric, *_torchvision(name, data_dir))


def of_runs(runs: Sequence[str]) -> list[str]:
    """The folders of runs as names for `open_transfer_set`, one for each dataset that they were trained on."""
    found: dict[tuple[str, str], str] = {}
    for run in runs:
        weights = weights_file(Path(run)) if Path(run).exists() else None  # None for a model of timm's
        folder = None if weights is None else run_folder(weights)
        if weights is None or folder is None or not (folder / ENVIRONMENT).is_file():
            raise ValueError(f"which datasets? {run} does not say what it was trained on: give --datasets")
        recipe = run_recipe(read_description(weights))
        found.setdefault((recipe.dataset, str(data_dir_of(weights, recipe, None))), str(folder))
    return list(found.values())


def _own(path: Path) -> tuple[Images, Images]:
    """Training and test images of a folder. If it has val and test, val belongs to the training images."""
    if not path.is_dir():
        raise MissingData(f"{path} is a file: give a folder with a training and a test set")
    validation_names = [name for name in VALIDATION_NAMES if name != "test"]
    train, validation, test = (split_place(path, names) for names in (TRAIN_NAMES, validation_names, ["test"]))
    if train is None and validation is None and test is None and any(map(holds_images, folders_in(path))):
        try:
            images, held_out, _ = split_set(Recipe(val_fraction=HELD_OUT), path)
        except (ValueError, OSError) as error:
            raise MissingData(str(error)) from None
        return images, held_out
    if train is None or (validation is None and test is None):
        absent = "train" if train is None else "test or val"
        found = ", ".join(sorted(entry.name for entry in path.iterdir() if not is_hidden(entry.name))[:5])
        raise MissingData(f"{path} has no {absent}, as a folder, .tar or .npz; it holds {found or 'nothing'}")
    try:
        images = _open(train)
        if validation is None or test is None:
            return images, _open(validation or test, images.class_names)  # type: ignore[arg-type]
        both = Joined([images, _open(validation, images.class_names)])
        return both, _open(test, images.class_names)
    except (ValueError, OSError) as error:
        raise MissingData(str(error)) from None


def _of_run(folder: Path) -> tuple[str, Images, Images]:
    """The name of a run's dataset, and the images that the run was trained and validated on."""
    try:
        file = weights_file(folder)
        about = read_description(file)
        recipe = run_recipe(about)
        data_dir = data_dir_of(file, recipe, None)
        train, test = (
            run_images(file, about, with_changes(recipe, {"val_split": part}), data_dir)[0]
            for part in (recipe.train_split, recipe.val_split)
        )
    except (ValueError, OSError) as error:
        raise MissingData(f"the data of {folder}: {error}") from None
    return recipe.dataset if data_dir is None else data_dir.name, train, test


def _open(place: Path, class_names: Sequence[str] | None = None) -> Images:
    if place.suffix == ".npz":
        return arrays_from_file(place, class_names)
    return open_files(place, class_names)


def _from_readers(name: str, data_dir: Path | None) -> tuple[Images, Images]:
    try:
        train, test = (open_images(name, data_dir, split) for split in ("train", "validation"))
    except (ValueError, OSError, ImportError) as error:
        raise MissingData(f"{name}: {' '.join(str(error).split())}") from None
    return train, test


def _torchvision(name: str, data_dir: Path) -> tuple[Images, Images]:
    import_torchvision()
    from torchvision import datasets

    kind, train, test, _ = KNOWN[name]
    build: Callable[..., Any] = getattr(datasets, kind)
    try:
        *parts, held_out = (
            of_torchvision(build(str(data_dir), download=False, **split), name) for split in (*train, test)
        )
    except (RuntimeError, OSError, ModuleNotFoundError) as error:
        reason = " ".join(str(error).split())
        raise MissingData(
            f"{name} is not in {data_dir}: put class folders or .npz files into {data_dir / name}, or download it with "
            f"torchvision.datasets.{kind}({str(data_dir)!r}, download=True) ({reason})"
        ) from None
    return parts[0] if len(parts) == 1 else Joined(parts), held_out
