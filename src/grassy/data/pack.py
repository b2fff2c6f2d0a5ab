"""Packs: images that are decoded once, so that training reads pixels instead of decoding files in every epoch.

A pack is a folder with a tar for each split, train.tar and val.tar. Each member is an image as a binary PPM, whose name
is the path of the original in its set, and .ppm. So a pack is an ordinary data set: other tools read it as well. Beside
the tars, pack.json says how they were made.
"""

import collections
import io
import itertools
import json
import os
import shutil
import tarfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from grassy._version import __version__
from grassy.atomic import folder_when_whole
from grassy.data.batch import Failure
from grassy.data.class_folders import PACKED, FolderImages, open_files
from grassy.data.decode import Box, plain_file, reason_for
from grassy.data.layout import TRAIN_NAMES, VALIDATION_NAMES, folders_in, holds_images, layout_hint, split_place
from grassy.data.worker_processes import processors
from grassy.schema import MOST_RECIPE, parse_json, read_text
from grassy.terminal import bar, readable_bytes

#: Images with a longer short side are reduced to this: twice the usual 224 pixels, and some more.
SHORT_SIDE = 512
#: The file in a pack that says how it was made.
ABOUT = "pack.json"
#: So many images are read to estimate the size of a pack.
LOOKED_AT = 64
#: Bytes of decoded images that may wait to be written.
MOST_WAITING = 2**29
#: What a tar needs for each member at most, in addition to its pixels: a header, padding, and a long name.
OVERHEAD = 4 * tarfile.BLOCKSIZE


@dataclass
class Packed:
    """What was written for a split."""

    path: Path
    images: int = 0
    bytes: int = 0
    #: How many images were reduced to the short side.
    reduced: int = 0
    classes: set[str] = field(default_factory=set)
    failures: list[Failure] = field(default_factory=list)


def pack(
    source: Path, target: Path, short_side: int | None = SHORT_SIDE, splits: Sequence[str] | None = None
) -> list[Packed]:
    """Write a pack of the images in class folders or tars.

    The target appears when it is whole. The same source gives the same bytes.

    Args:
        source: A folder with splits, such as train and val; or a folder of class folders, or a tar.
        target: The folder to create.
        short_side: Larger images are reduced so that their short side has so many pixels; None keeps them.
        splits: Names of the splits, first that of the training set; None to find train, val, test and the like.

    Returns:
        What was written, for each split.

    Raises:
        ValueError: If the source holds no images or a class without readable ones, if the target exists or lies in the
            source, or if the disk is too small.
        OSError: If the target cannot be written.
    """
    if short_side is not None and short_side < 1:
        raise ValueError(f"size must be a positive number of pixels, got {short_side}")
    if os.path.lexists(target):
        raise ValueError(f"{target} exists: name another folder, or remove it")
    if target.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"{target} would lie among the images of {source}: name a folder elsewhere")
    chosen = _splits(source, splits)
    _check_space(chosen, target, short_side)
    with folder_when_whole(target) as temporary:
        found = [_write(*split, temporary / f"{name}.tar", short_side) for name, split in chosen.items()]
        training, images = found[0], next(iter(chosen.values()))[1]
        if not training.images:
            first = training.failures[0]
            raise ValueError(f"no image of {source} can be read: {first.name}: {first.reason}")
        if lost := [name for name in images.class_names if name not in training.classes]:
            raise ValueError(f"no image of class {lost[0]} can be read: repair its images, or remove them all")
        about = {"grassy": __version__, "short_side": short_side, "reduced": sum(packed.reduced for packed in found)}
        (temporary / ABOUT).write_text(json.dumps(about) + "\n")
        for packed in found:
            packed.path = target / packed.path.name
    return found


def side_of_pack(data_dir: Path) -> int | None:
    """The short side that images of a pack were reduced to; None if none were, or if the data is no pack of ours."""
    file = (data_dir if data_dir.is_dir() else data_dir.parent) / ABOUT
    try:
        about = parse_json(read_text(file, MOST_RECIPE))
    except (OSError, ValueError):
        return None
    side = about.get("short_side") if isinstance(about, dict) and about.get("reduced") else None
    return side if isinstance(side, int) else None


Split = tuple[Path, FolderImages]  # the folder or tar, and its images


def _splits(source: Path, names: Sequence[str] | None) -> dict[str, Split]:
    """The images of each split by its name; of a set without splits as "train", which a recipe can split later."""
    if not source.exists():
        raise ValueError(f"{source} does not exist")
    places = {}
    names = None if names is None else [name.rstrip("/") for name in names]  # as a shell completes them
    if wrong := [name for name in names or () if name in ("", ".", "..") or Path(name).name != name]:
        raise ValueError(f"a split is the name of a folder or tar in {source}, got {wrong[0]!r}")
    if source.is_dir():
        wanted = names or (*TRAIN_NAMES, *VALIDATION_NAMES)
        places = {name: place for name in wanted if (place := split_place(source, [name])) is not None}
        if names and (missing := [name for name in names if name not in places]):
            raise ValueError(f"{source} has no split {missing[0]!r}, as a folder or .tar")
        if not places and holds_images(source):
            raise ValueError(f"{source} holds no class folders{layout_hint(source)}")
    if not names and places and not any(name in TRAIN_NAMES for name in places):
        classes = [folder.name for folder in folders_in(source) if folder.name not in places]
        if classes:
            raise ValueError(f"{source} has {next(iter(places))} and {classes[0]}, but no train: name its --splits")
    arrays = next((place for place in [source, *places.values()] if place.suffix == ".npz"), None)
    if arrays is not None:
        raise ValueError(f"{arrays} holds decoded images already")
    if not places:
        places = {"train": source}
    train, *others = places
    to_split = not others and train not in VALIDATION_NAMES
    needed = names or [train, *others[:1]]  # what a recipe reads
    found = {train: (places[train], open_files(places[train], topmost=to_split))}
    for name in others:
        try:
            found[name] = places[name], open_files(places[name], found[train][1].class_names)
        except ValueError as error:
            if name in needed:
                raise
            warnings.warn(f"{places[name]} is not packed, since {error}", stacklevel=3)
    return found


# --------------------------------------------------------------------------------------------------- writing


def _write(root: Path, images: FolderImages, path: Path, short_side: int | None) -> Packed:
    packed = Packed(path)
    names = _names(root, images)
    with (
        bar(f"Packing {path.name}", len(images)) as advance,
        path.open("xb") as file,
        tarfile.open(fileobj=file, mode="w") as tar,
    ):
        for index, content in _in_threads(images, short_side):
            advance()
            if isinstance(content, Failure):
                packed.failures.append(content)
                continue
            pixels, reduced = content
            member = tarfile.TarInfo(names[index])
            member.size = len(pixels)
            tar.addfile(member, io.BytesIO(pixels))
            packed.images += 1
            packed.reduced += reduced
            packed.classes.add(images.class_names[images.targets[index]])
        tar.close()
        file.flush()
        os.fsync(file.fileno())
        packed.bytes = file.tell()
    return packed


def _names(root: Path, images: FolderImages) -> list[str]:
    """A name for each image in the tar: its path in the set. A tar may hold a path twice: number them."""
    taken: set[str] = set()
    names = []
    for index in range(len(images)):
        stem, suffix = os.path.splitext(images.path(index, root))
        for number in itertools.count(1):
            name = f"{stem}{'' if number == 1 else f'-{number}'}{suffix}{PACKED}"
            if name not in taken:
                break
        taken.add(name)
        names.append(name)
    return names


#: The bytes of an image in the pack, and whether it was reduced.
Content = tuple[bytes, bool] | Failure


def _in_threads(images: FolderImages, short_side: int | None) -> Iterator[tuple[int, Content]]:
    """Index and content of each image, in order. Decoders release the GIL, so that threads use all cores."""
    ahead: collections.deque[Future[Content]] = collections.deque()
    cores, waiting = processors(), _Waiting()

    def decoded(index: int) -> Content:
        content = _content(images, index, short_side)
        waiting.change(content, 1)
        return content

    def written() -> Content:
        content = ahead.popleft().result()
        waiting.change(content, -1)
        return content

    with ThreadPoolExecutor(cores) as threads:
        try:
            for index in range(len(images)):
                ahead.append(threads.submit(decoded, index))
                # Further ahead of the writer, the threads might fill the memory.
                while len(ahead) - waiting.images > 2 * cores or len(ahead) > 4 * cores or waiting.bytes > MOST_WAITING:
                    yield index + 1 - len(ahead), written()
            while ahead:
                yield len(images) - len(ahead), written()
        finally:
            for content in ahead:
                content.cancel()


class _Waiting:
    """Counts the decoded images that wait for the writer, and their bytes."""

    def __init__(self) -> None:
        self.images = self.bytes = 0
        self._lock = threading.Lock()

    def change(self, content: Content, sign: int) -> None:
        with self._lock:
            self.images += sign
            self.bytes += 0 if isinstance(content, Failure) else sign * len(content[0])


def _content(images: FolderImages, index: int, short_side: int | None) -> Content:
    try:
        pixels, reduced = _pixels(images, index, short_side)
        return plain_file(pixels), reduced
    except Exception as error:  # decoders may raise anything for broken files
        return Failure(images.name(index), reason_for(error))


def _pixels(images: FolderImages, index: int, short_side: int | None) -> tuple[np.ndarray, bool]:
    """The pixels of an image in the pack, and whether it was reduced."""
    if short_side is None:
        return images.load(index)[0], False
    from PIL import Image

    whole = _Whole(short_side)
    pixels, _ = images.load(index, whole)
    if min(pixels.shape[:2]) > short_side:
        height, width = whole.size
        pixels = np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC))
    return pixels, whole.is_reduced


class _Whole:
    """The whole image, as a crop that is resized to a short side: a large JPEG file is decoded at its scale then."""

    size = (1, 1)
    is_reduced = False

    def __init__(self, short_side: int) -> None:
        self.short_side = short_side

    def box(self, height: int, width: int) -> Box:
        self.size = reduced_size(height, width, self.short_side)
        self.is_reduced = self.size != (height, width)
        return Box(0, 0, height, width)


def reduced_size(height: int, width: int, short_side: int | None) -> tuple[int, int]:
    """The size of an image in a pack."""
    factor = 1.0 if short_side is None else min(1.0, short_side / min(height, width))
    return max(1, round(factor * height)), max(1, round(factor * width))


# --------------------------------------------------------------------------------------------------- space


def _check_space(splits: dict[str, Split], target: Path, short_side: int | None) -> None:
    """Raise a ValueError if the pack will hardly fit, before hours of work."""
    needed = sum(_expected_bytes(images, short_side) for _, images in splits.values())
    place = next(folder for folder in [target.absolute(), *target.absolute().parents] if folder.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ValueError(
            f"the pack will need about {readable_bytes(needed)}, and {readable_bytes(free)} are free in {place}: "
            "choose another place, or a smaller --size"
        )


def _expected_bytes(images: FolderImages, short_side: int | None) -> float:
    """The bytes of a split, by the sizes of some of its images."""
    sizes = []
    for index in np.linspace(0, len(images) - 1, min(LOOKED_AT, len(images))).astype(int).tolist():
        try:
            sizes.append(_pixels(images, index, short_side)[0].nbytes)
        except Exception:  # an unreadable image takes no space, and is named later
            continue
    return len(images) * (sum(sizes) / len(sizes) + OVERHEAD) if sizes else 0.0
