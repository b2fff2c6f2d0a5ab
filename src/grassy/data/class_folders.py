"""Class folders and tars: find their images and classes.

Names that start with a dot are ignored: editors and systems leave copies of images there.
"""

import itertools
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

import numpy as np

from grassy.data.decode import Crop, read_pixels
from grassy.schema import open_regular
from grassy.spelling import natural_key
from grassy.torchvision_import import import_torchvision

#: Suffixes of further formats that Pillow reads, beside timm's.
MORE_SUFFIXES = {".avif", ".bmp", ".jfif", ".jp2", ".pgm", ".ppm", ".tif", ".tiff", ".webp"}
BLOCK = tarfile.BLOCKSIZE
#: A tar may hold tars, one per class; deeper nesting is refused.
MOST_TARS_WITHIN = 2
#: Limit of repeated visits through links: a few links can make millions of paths.
MOST_REPEATS = 50_000
#: The first bytes of compressed files.
COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
#: What `grassy pack` appends to the path of an image.
PACKED = ".ppm"


def image_suffixes() -> frozenset[str]:
    """The suffixes of image files: timm's, and more that Pillow reads."""
    import_torchvision()
    from timm.data import get_img_extensions

    return frozenset(get_img_extensions()) | MORE_SUFFIXES


def is_hidden(path: str) -> bool:
    return any(part.startswith(".") and part not in (".", "..") for part in path.replace(os.sep, "/").split("/"))


def walk(root: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Each folder at or below the root, with the sorted names of its folders and files, without hidden ones.

    Links are followed, except to a folder that contains them. A folder with several links to it is visited for each.
    A folder without permission raises; os.walk would skip it silently.
    """

    def stop(error: OSError) -> None:
        raise error

    lines: dict[str, tuple[str, ...]] = {}  # real paths of a folder and its ancestors, from the root
    seen: set[str] = set()
    repeats = 0
    for folder, below, names in os.walk(root, followlinks=True, onerror=stop):
        above = lines.get(os.path.dirname(folder), ())
        place = os.path.realpath(os.path.join(above[-1], os.path.basename(folder)) if above else folder)
        if place in above:
            below.clear()
            continue
        repeats += place in seen
        if repeats > MOST_REPEATS:
            raise ValueError(f"links below {root} lead to the same folders more than {MOST_REPEATS:,} times")
        seen.add(place)
        lines[folder] = (*above, place)
        below[:] = sorted(name for name in below if not is_hidden(name))
        yield folder, list(below), sorted(name for name in names if not is_hidden(name))


class Place(NamedTuple):
    """The location of an image's bytes: a file, or a part of one."""

    path: str
    offset: int = 0
    size: int | None = None  # None: all of the file


class FolderImages:
    """Images in class folders or tars.

    Args:
        names: Their names, for messages: paths of files, or paths within tars.
        places: Where their bytes are.
        targets: Their class indices.
        class_names: The names of the classes, in the order of the indices.
    """

    def __init__(
        self, names: Sequence[str], places: Sequence[Place], targets: Sequence[int], class_names: Sequence[str]
    ) -> None:
        self.names, self.places, self.targets, self.class_names = names, places, targets, class_names

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
        path = PurePosixPath(self.names[index])
        if path.suffix == PACKED and path.with_suffix("").suffix.lower() in image_suffixes():
            path = path.with_suffix("")
        return str(path) if root.is_file() else path_in_tars(Path(place.path).stem, path)

    def labels(self) -> np.ndarray:
        return np.asarray(self.targets, dtype=np.int64)

    def some(self, indices: Sequence[int]) -> "FolderImages":
        """The images with these indices."""
        names, places = [self.names[index] for index in indices], [self.places[index] for index in indices]
        return FolderImages(names, places, [self.targets[index] for index in indices], self.class_names)


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


def _numbers(places: dict[str, str], class_names: Sequence[str] | None) -> dict[str, int]:
    """The index of each class, in natural order or as in the training set; `places` maps a class to its path."""
    if class_names is None:
        return {name: number for number, name in enumerate(sorted(places, key=natural_key))}
    numbers = {name: number for number, name in enumerate(class_names)}
    for name, place in places.items():
        if name not in numbers:
            raise ValueError(f"{place} is a class that the training set does not have")
    return numbers


def _topmost(folders: Iterable[PurePosixPath]) -> dict[PurePosixPath, str]:
    """The class of each folder: the first part of its path that not all paths share."""
    paths = list(folders)
    levels = zip(*(path.parts[:-1] for path in paths), strict=False)  # the last part is a class name
    shared = len(list(itertools.takewhile(lambda level: len(set(level)) == 1, levels)))
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
        images = [os.path.join(folder, name) for name in names if os.path.splitext(name)[1].lower() in suffixes]
        if images and folder == str(root):
            raise ValueError(f"{images[0]} lies in no class folder: move it into that of its class, or away")
        if images or (not below and folder != str(root)):
            found.append(folder)
        files += images
    if not files:
        raise _no_images(root)
    files.sort(key=lambda file: (natural_key(file), file))
    paths = {folder: PurePosixPath(Path(folder).relative_to(root).as_posix()) for folder in found}
    if class_names is None and not topmost:
        _check_distinct(paths.values(), root)
    top = _topmost(paths.values()) if topmost else {}
    classes = {folder: top.get(path, path.name) for folder, path in paths.items()}
    places = {name: folder for folder, name in classes.items()}
    names = [classes[os.path.dirname(file)] for file in files]
    empty = sorted(set(places) - set(names))
    if class_names is None and empty:
        raise ValueError(f"class folder {places[empty[0]]} holds no images: fill or remove it")
    numbers = _numbers(places, class_names)
    return FolderImages(files, [Place(file) for file in files], [numbers[name] for name in names], list(numbers))


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
            for path, offset, size in _images_in(file, os.path.getsize(tar), tar):
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
    found.sort(key=lambda image: natural_key(image[0]))
    top = _topmost({folder for *_, folder, _ in found}) if topmost else {}
    names = [top.get(folder, folder.name) for *_, folder, _ in found]
    numbers = _numbers({name: f"{name} of {root}" for name in names}, class_names)
    labels = [numbers[name] for name in names]
    return FolderImages([path for _, path, *_ in found], [place for *_, place in found], labels, list(numbers))


def _images_in(file: IO[bytes], size: int, tar: Path, within: int = 0) -> Iterator[tuple[tuple[str, ...], int, int]]:
    """Path (with those of enclosing tars), offset and size of each image in a tar of `size` bytes.

    A truncated or compressed tar, or a member larger than the tar, raises a ValueError. A member named .tar that is no
    tar is skipped.
    """
    suffixes = image_suffixes()
    if within > MOST_TARS_WITHIN:
        raise ValueError(f"{tar} holds tars in tars in tars")
    if not within:
        _check_uncompressed(_first_block(file), str(tar))
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                suffix = os.path.splitext(member.path)[1].lower()
                if not member.isfile() or suffix not in suffixes | {".tar"}:
                    continue
                if member.sparse is not None:
                    raise ValueError(f"{member.path} of {tar} is a sparse file: pack it again without tar's --sparse")
                if member.offset_data + member.size > size:
                    raise tarfile.ReadError(f"{member.path} is not all there")
                if suffix != ".tar":
                    yield (member.path,), member.offset_data, member.size
                    continue
                inner = archive.extractfile(member)
                assert inner is not None
                first = _first_block(inner)
                _check_uncompressed(first, f"{member.path} of {tar}")
                if not _begins_a_tar(first):
                    continue
                for path, offset, length in _images_in(inner, member.size, tar, within + 1):
                    yield (PurePosixPath(member.path).stem, *path), member.offset_data + offset, length
            end = archive.offset
    except (tarfile.TarError, OverflowError) as error:
        raise ValueError(f"{tar} is not a tar, or a damaged one: {error}") from None
    file.seek(min(end, size))
    if file.read(BLOCK) != bytes(BLOCK):
        raise ValueError(f"{tar} is not a tar, or a damaged one: nothing marks its end at byte {end}")
    while file.tell() < size and (rest := file.read(min(2**20, size - file.tell()))):  # zeros may be a damaged header
        if rest.count(0) < len(rest):
            raise ValueError(f"{tar} is a damaged tar, or several in one: it goes on after its end at byte {end}")


def _first_block(file: IO[bytes]) -> bytes:
    block = file.read(BLOCK)
    file.seek(0)
    return block


def _begins_a_tar(block: bytes) -> bool:
    """Whether the block is a tar header, perhaps a damaged one, or the end of an empty tar."""
    if block == bytes(BLOCK) or block[257:262] == b"ustar":
        return True
    try:
        tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def _check_uncompressed(block: bytes, name: str) -> None:
    """Raise a ValueError if a file starting with this block is compressed: images are read by offset."""
    kind = next((kind for magic, kind in COMPRESSED.items() if block.startswith(magic)), None)
    if kind and not _begins_a_tar(block):  # a tar starts with the name of a member, which may be anything
        raise ValueError(f"{name} is compressed with {kind}: decompress it first")
