"""The layout of a folder of images: splits, class folders, one class, or one level off."""

import os
from collections.abc import Sequence
from pathlib import Path

from grassy.data.image_files import image_suffixes, is_hidden
from grassy.spelling import nearest

TRAIN_NAMES = ("train", "training")
VALIDATION_NAMES = ("val", "valid", "validation", "eval", "evaluation", "test")


def split_place(folder: Path, names: Sequence[str]) -> Path | None:
    """The folder, tar or .npz file of a split. A folder that holds nothing but images is a class of that name."""
    for name in names:
        for place in (folder / name, folder / f"{name}.tar", folder / f"{name}.npz"):
            if place.is_file() or (place.is_dir() and (folders_in(place) or not holds_images(place))):
                return place
    return None


def split_names(split: str) -> list[str]:
    """The split, and its synonyms after it."""
    for synonyms in (TRAIN_NAMES, VALIDATION_NAMES):
        if split in synonyms:
            return [split, *(name for name in synonyms if name != split)]
    return [split]


def place_of_split(root: Path, split: str) -> Path:
    """The folder, tar or .npz file of a split or of a synonym.

    Without one, timm would use the whole tree, and mix validation with training.
    """
    names = split_names(split)
    if (place := split_place(root, names)) is not None:
        return place
    found = sorted(entry.name for entry in root.iterdir() if not is_hidden(entry.name))[:5]
    wanted = f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]
    listing = f"found {', '.join(found)}{' ...' if len(found) == 5 else ''}" if found else "it is empty"
    raise ValueError(f"{root} has no folder {wanted}{nearest(split, found)}; {listing}{layout_hint(root)}")


def holds_images(folder: Path) -> bool:
    """Whether the folder itself holds images."""
    suffixes = image_suffixes()
    with os.scandir(folder) as entries:
        return any(
            os.path.splitext(entry.name)[1].lower() in suffixes and not is_hidden(entry.name) and entry.is_file()
            for entry in entries
        )


def folders_in(folder: Path) -> list[Path]:
    """The visible folders in a folder, sorted by name."""
    return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not is_hidden(entry.name))


def below_the_split(folder: Path) -> Path | None:
    """The only subfolder with train and val, if the given folder is one level too high."""
    found = [each for each in folders_in(folder)[:100] if split_place(each, TRAIN_NAMES)]
    return found[0] if len(found) == 1 and split_place(found[0], VALIDATION_NAMES) else None


def layout_hint(folder: Path) -> str:
    """A phrase to append to an error about a folder that is no dataset: what the user may have meant, or ""."""
    folder = folder.absolute()
    parts = (*TRAIN_NAMES, *VALIDATION_NAMES)
    if (
        folder.name in parts
        and split_place(folder.parent, TRAIN_NAMES)
        and split_place(folder.parent, VALIDATION_NAMES)
    ):
        return f"; it is a part of a dataset: give --data-dir {folder.parent}"
    if (below := below_the_split(folder)) is not None:
        return f"; did you mean --data-dir {below}?"
    if holds_images(folder):
        return f"; its images lie in no class folder: if it is a class itself, give --data-dir {folder.parent}"
    if any(holds_images(each) for each in folders_in(folder)[:100]):
        return "; to hold out a fifth of each class folder, give --val-fraction 0.2"
    return ""
