"""Class folders and tars: find their images and classes."""

import copy
import itertools
import os
from array import array
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from grassy.data.compact_lists import Place, Places, Strings, elements_at
from grassy.data.decode import Crop, read_pixels
from grassy.data.image_files import image_suffixes, is_hidden, walk
from grassy.data.tars import images_in
from grassy.schema import open_regular
from grassy.spelling import natural_key

#: What `grassy pack` appends to the path of an image.
PACKED = ".ppm"


class FolderImages:
    """Images in class folders or tars.

    Args:
        names: Their names, for messages: paths of files, or paths within tars.
        places: Where their bytes are.
        targets: Their class indices.
        class_names: The names of the classes, in the order of the indices.
    """

    def __init__(
        self, names: Iterable[str], places: Iterable[Place], targets: Iterable[int], class_names: Sequence[str]
    ) -> None:
        self.names, self.places, self.targets = Strings(names), Places(places), array("q", targets)
        self.class_names = class_names

    def __len__(self) -> int:
        return len(self.places)

    def load(self, index: int, crop: Crop | None = None) -> tuple[np.ndarray, int]:
        path, offset, size = self.places[index]
        with open_regular(path) as file:
            file.seek(offset)
            return read_pixels(file, crop, size), self.targets[index]

    def name(self, index: int) -> str:
        return self.names[index]

    def path(self, index: int, root: Path) -> str:
        """The path of an image in the set at `root`, which survives moving the set and packing it."""
        place = self.places[index]
        if place.size is None:
            return Path(os.path.relpath(place.path, root)).as_posix()
        path = _original(self.names[index], image_suffixes())
        return path if root.is_file() else path_in_tars(Path(place.path).stem, PurePosixPath(path))

    def labels(self) -> np.ndarray:
        return np.array(self.targets, dtype=np.int64)

    def some(self, indices: Sequence[int]) -> "FolderImages":
        """The images with these indices."""
        part = copy.copy(self)
        part.names, part.places = self.names.some(indices), self.places.some(indices)
        part.targets = elements_at(self.targets, indices)
        return part


def _original(path: str, suffixes: Collection[str]) -> str:
    """The path of an image without what `grassy pack` appended."""
    original = path.removesuffix(PACKED)
    return original if os.path.splitext(original)[1].lower() in suffixes else path


def path_in_tars(stem: str, path: PurePosixPath) -> str:
    """A path for an image in one of several tars, which may be classes or parts of the set: the class, and the rest."""
    *rest, title, name = (stem, *path.parts)
    return f"{title}/{':'.join([*rest, name])}"


def open_files(root: Path, class_names: Sequence[str] | None = None, topmost: bool = False) -> FolderImages:
    """Open a folder of class folders, a folder of tars, or a tar.

    class_names: of the training set, whose class indices a validation set must share; None for the training set.
    topmost: an image in cat/2021 is a cat; otherwise its own folder is its class. A folder of tars has no such choice:
        its tars may be classes or parts of the set.
    """
    if root.suffix == ".tar" and not root.is_dir():
        return _open_tars(root, [root], class_names, topmost)
    if not root.is_dir():
        raise ValueError(f"{root} is neither a folder nor a .tar")
    tars = [tar for tar in sorted(root.glob("*.tar")) if not is_hidden(tar.name)]
    return _open_tars(root, tars, class_names) if tars else _open_folders(root, class_names, topmost)


def _no_images(root: Path) -> ValueError:
    return ValueError(f"{root} holds no images ({', '.join(sorted(image_suffixes()))})")


def _order(name: str) -> tuple[list[str | int], str]:
    """Natural order. It does not distinguish 01 from 1 or A from a, so the names themselves do."""
    return natural_key(name), name


def _numbers(places: dict[str, str], class_names: Sequence[str] | None) -> dict[str, int]:
    """The index of each class, in natural order or as in the training set; `places` maps a class to its path."""
    if class_names is None:
        return {name: number for number, name in enumerate(sorted(places, key=_order))}
    numbers = {name: number for number, name in enumerate(class_names)}
    for name, place in places.items():
        if name not in numbers:
            raise ValueError(f"{place} is a class that the training set does not have")
    return numbers


def shared_levels(folders: Iterable[PurePosixPath]) -> int:
    """The number of folders above the topmost class folders: those that all paths share, without the class itself."""
    levels = zip(*(path.parts[:-1] for path in folders), strict=False)  # the last part is a class name
    return len(list(itertools.takewhile(lambda level: len(set(level)) == 1, levels)))


def _topmost(folders: Iterable[PurePosixPath]) -> dict[PurePosixPath, str]:
    """The class of each folder: the first part of its path that not all paths share."""
    paths = list(folders)
    shared = shared_levels(paths)
    return {path: path.parts[shared] for path in paths}


def _check_distinct(folders: Iterable[PurePosixPath], where: Path) -> None:
    """Raise a ValueError if folders of equal name have different parents: it is unclear whether they are one class."""
    found: dict[str, PurePosixPath] = {}
    for folder in folders:
        if (other := found.setdefault(folder.name, folder)) != folder:
            raise ValueError(
                f"{other} and {folder} in {where} would be one class {folder.name!r}: put the images of each class "
                "into one folder"
            )


# --------------------------------------------------------------------------------------------------- folders


def _open_folders(root: Path, class_names: Sequence[str] | None, topmost: bool) -> FolderImages:
    suffixes = image_suffixes()
    files: list[str] = []
    found: list[str] = []  # leaf folders, and folders with images
    for folder, below, names in walk(root):
        start = os.path.join(folder, "")
        images = [start + name for name in names if os.path.splitext(name)[1].lower() in suffixes]
        if images and folder == str(root):
            raise ValueError(f"{images[0]} lies in no class folder: move it into that of its class, or away")
        if images or (not below and folder != str(root)):
            found.append(folder)
        files += images
    if not files:
        raise _no_images(root)
    files.sort(key=_order)
    paths = {folder: PurePosixPath(Path(folder).relative_to(root).as_posix()) for folder in found}
    if class_names is None and not topmost:
        _check_distinct(paths.values(), root)
    top = _topmost(paths.values()) if topmost else {}
    classes = {folder: top.get(path, path.name) for folder, path in paths.items()}
    places = {name: folder for folder, name in classes.items()}
    names = [classes[file.rpartition(os.sep)[0]] for file in files]
    empty = sorted(set(places) - set(names))
    if class_names is None and empty:
        raise ValueError(f"class folder {places[empty[0]]} holds no images: fill or remove it")
    numbers = _numbers(places, class_names)
    return FolderImages(files, map(Place, files), [numbers[name] for name in names], list(numbers))


# --------------------------------------------------------------------------------------------------- tars


def _open_tars(
    root: Path, tars: Iterable[Path], class_names: Sequence[str] | None, topmost: bool = False
) -> FolderImages:
    """Images are read by offset, so that processes do not share the position of an open file."""
    found: list[tuple[str, str, PurePosixPath, Place]] = []  # paths in the set and the tar, folder, place
    for tar in tars:
        folders: set[PurePosixPath] = set()
        with open_regular(tar) as file:
            outer = [] if tar == root else [tar.stem]
            for path, offset, size in images_in(file, os.path.getsize(tar), tar):
                # Paths in a tar may start with "./", which is no class.
                whole = PurePosixPath(*outer, *path)
                if is_hidden(str(whole)):
                    continue
                if len(whole.parts) == 1:
                    raise ValueError(f"{whole} of {root} lies in no class folder: move it into that of its class")
                folders.add(whole.parent)
                within = PurePosixPath(*path)
                in_set = str(within) if tar == root else path_in_tars(tar.stem, within)
                found.append((in_set, str(within), whole.parent, Place(str(tar), offset, size)))
        if class_names is None and not topmost:  # per tar, since several tars may be parts of one set
            _check_distinct(sorted(folders), tar)
    if not found:
        raise _no_images(root)
    suffixes = image_suffixes()
    found.sort(key=lambda image: _order(_original(image[0], suffixes)))  # a pack has the order of its files
    top = _topmost({folder for *_, folder, _ in found}) if topmost else {}
    names = [top.get(folder, folder.name) for *_, folder, _ in found]
    numbers = _numbers({name: f"{name} of {root}" for name in names}, class_names)
    labels = (numbers[name] for name in names)
    return FolderImages((path for _, path, *_ in found), (place for *_, place in found), labels, list(numbers))
