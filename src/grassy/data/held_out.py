"""Split one set of labelled images: a share of each class is held out for validation, the same in every run.

The choice depends on the seed, the class, and the path of each image below its class folder. It does not depend on the
machine, on the order of files on disk, or on other classes.
"""

import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from grassy.data.class_folders import FolderImages, open_files, path_in_tars, shared_levels
from grassy.data.images import ArrayImages, Images, arrays_from_file
from grassy.data.layout import TRAIN_NAMES, VALIDATION_NAMES, below_the_split, holds_images, layout_hint, split_place
from grassy.recipes.recipe import Recipe

Files = ArrayImages | FolderImages


def set_to_split(recipe: Recipe, data_dir: Path | None) -> Path | None:
    """The path of the images that a recipe splits: one folder of class folders, one tar or one .npz file.

    None if nothing is to be split: `val_fraction` is 0, the dataset is not in files, or the folder has both parts.
    """
    if not recipe.val_fraction or recipe.dataset or data_dir is None or not data_dir.exists():
        return None
    if data_dir.is_file():
        return data_dir
    train, validation = (split_place(data_dir, names) for names in (TRAIN_NAMES, VALIDATION_NAMES))
    if validation is not None:
        return None  # without a training set beside it, the caller reports an error
    if train is None and below_the_split(data_dir) is not None:
        raise ValueError(f"{data_dir} holds neither class folders nor train and val{layout_hint(data_dir)}")
    if train is None and holds_images(data_dir):
        raise ValueError(f"{data_dir} holds no class folders{layout_hint(data_dir)}")
    return train or data_dir


def open_with_keys(place: Path, class_names: Sequence[str] | None = None) -> tuple[Files, list[str]]:
    """All images of a set, and a key for each: its path in the set, which survives moving the set and packing it."""
    if place.suffix == ".npz":
        arrays = arrays_from_file(place, class_names)
        return arrays, [str(index) for index in range(len(arrays))]
    images = open_files(place, class_names, topmost=True)
    return images, [images.path(index, place) for index in range(len(images))]


def recorded_keys(recorded: Sequence[str], place: Path) -> set[str]:
    """The keys that a run recorded, as in `open_with_keys`. Earlier versions put the name of a tar before them."""
    keys = (key.removeprefix(f"{place.name}:").partition(".tar:") for key in recorded)
    return {path_in_tars(start, PurePosixPath(rest)) if rest else start for start, _, rest in keys}


def held_out(images: Files, keys: Sequence[str], fraction: float, seed: int) -> set[str]:
    """Keys of the images to validate on: the given share of each class, rounded, at least one if it has two, never all.

    A class with one image is only trained on.
    """
    labels = images.labels()
    names = images.class_names
    above = shared_levels(PurePosixPath(folder) for folder in {key.rpartition("/")[0] for key in keys})
    chosen: set[str] = set()
    order = np.argsort(labels, kind="stable")
    present, starts = np.unique(labels[order], return_index=True)
    for label, indices in zip(present.tolist(), np.split(order, starts[1:]), strict=True):
        own = [keys[index] for index in indices.tolist()]
        count = min(len(own) - 1, max(1, round(fraction * len(own))))
        title = str(label) if names is None else names[label]
        chosen.update(sorted(own, key=lambda key: _draw(seed, title, key.split("/", above + 1)[-1]))[:count])
    return chosen


def _draw(seed: int, title: str, path: str) -> bytes:
    """A random key for an image, from its path below its class folder, so that a set may be moved or nested.

    The name alone would not do: if each folder below a class has a front.png, all of them would be held out or none.
    """
    return hashlib.sha256(f"{seed}\n{title}\n{path}".encode("utf-8", "surrogateescape")).digest()


def part_of(images: Files, keys: Sequence[str], wanted: Collection[str], inside: bool) -> Files:
    """The images whose keys are wanted or, if not `inside`, the others; class indices stay."""
    indices = [index for index, key in enumerate(keys) if (key in wanted) == inside]
    if isinstance(images, ArrayImages):
        return ArrayImages(images.images[indices], images.labels()[indices], images.class_names, images.where)
    return images.some(indices)


def split(recipe: Recipe, place: Path, recorded: Sequence[str] | None = None) -> tuple[Images, Images, list[str]]:
    """The training images, the validation images, and the sorted keys of the latter.

    recorded: the keys that a run held out before; missing ones are dropped.
    """
    images, keys = open_with_keys(place)
    if recorded is not None:
        chosen = recorded_keys(recorded, place).intersection(keys)
        if not chosen:
            raise ValueError(f"none of the {len(recorded)} images that the run held out is in {place}")
    else:
        chosen = held_out(images, keys, recipe.val_fraction, recipe.val_seed)
    if not chosen:
        raise ValueError(f"no class in {place} has two images, so none can be held out for validation")
    return part_of(images, keys, chosen, False), part_of(images, keys, chosen, True), sorted(chosen)
