"""Packs: images that are decoded once, so that training reads pixels instead of decoding files in every epoch.

A pack is a folder with a tar for each split, train.tar and val.tar. Each member is an image as a binary PPM, whose name
is the path of the original in its set, and .ppm. So a pack is an ordinary data set: other tools read it as well.
"""

import collections
import io
import itertools
import os
import secrets
import shutil
import tarfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from grassy.atomic import TEMPORARY, sync_folder
from grassy.data.class_folders import PACKED, FolderImages, open_files
from grassy.data.decode import Box, plain_file, reason_for
from grassy.data.layout import TRAIN_NAMES, VALIDATION_NAMES, advice, holds_images, split_place
from grassy.data.loader import Failure, processors
from grassy.terminal import bar

#: Images with a longer short side are reduced to this: twice the usual 224 pixels, and some more.
SHORT_SIDE = 512
#: So many images are read to estimate the size of a pack.
LOOKED_AT = 64
#: What a tar needs for each member at most, in addition to its pixels: a header, padding, and a long name.
OVERHEAD = 4 * tarfile.BLOCKSIZE


@dataclass
class Packed:
    """What was written for a split."""

    path: Path
    images: int
    classes: int
    bytes: int
    failures: list[Failure] = field(default_factory=list)


def pack(source: Path, target: Path, short_side: int | None = SHORT_SIDE) -> list[Packed]:
    """Write a pack of the images in class folders or tars.

    The target appears when it is whole. The same source gives the same bytes.

    Args:
        source: A folder with splits, such as train and val; or a folder of class folders, or a tar.
        target: The folder to create.
        short_side: Larger images are reduced so that their short side has so many pixels; None keeps them.

    Returns:
        What was written, for each split.

    Raises:
        ValueError: If the source holds no images, if the target exists, or if the disk is too small.
    """
    if short_side is not None and short_side < 1:
        raise ValueError(f"size must be a positive number of pixels, got {short_side}")
    if os.path.lexists(target):
        raise ValueError(f"{target} exists: name another folder, or remove it")
    splits = _splits(source)
    _check_space(splits, target, short_side)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f"{TEMPORARY}{secrets.token_hex(8)}"
    temporary.mkdir()
    try:
        found = [_write(*split, temporary / f"{name}.tar", short_side) for name, split in splits.items()]
        for packed in found:
            if not packed.images:
                first = packed.failures[0]
                raise ValueError(f"no image of {source} can be read: {first.name}: {first.reason}")
            packed.path = target / packed.path.name
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(target.parent)
    return found


Split = tuple[Path, FolderImages]  # the folder or tar, and its images


def _splits(source: Path) -> dict[str, Split]:
    """The images of each split by its name; of a set without splits as "train", which a recipe can split later."""
    if not source.exists():
        raise ValueError(f"{source} does not exist")
    places = {}
    if source.is_dir():
        names = (*TRAIN_NAMES, *VALIDATION_NAMES)
        places = {name: place for name in names if (place := split_place(source, [name])) is not None}
        if not places and holds_images(source):
            raise ValueError(f"{source} holds no class folders{advice(source)}")
    arrays = next((place for place in [source, *places.values()] if place.suffix == ".npz"), None)
    if arrays is not None:
        raise ValueError(f"{arrays} holds decoded images already")
    if not places:
        places = {"train": source}
    to_split = not any(name in VALIDATION_NAMES for name in places)
    found: dict[str, Split] = {}
    class_names = None
    for name, place in places.items():  # training sets come first
        found[name] = place, open_files(place, class_names, topmost=to_split)
        if name in TRAIN_NAMES:
            class_names = found[name][1].class_names
    return found


# --------------------------------------------------------------------------------------------------- writing


def _write(root: Path, images: FolderImages, path: Path, short_side: int | None) -> Packed:
    packed = Packed(path, 0, len(images.class_names), 0)
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
            member = tarfile.TarInfo(names[index])
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
            packed.images += 1
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


def _in_threads(images: FolderImages, short_side: int | None) -> Iterator[tuple[int, bytes | Failure]]:
    """Index and content of each image, in order. Decoders release the GIL, so that threads use all cores."""
    ahead: collections.deque[tuple[int, Future[bytes | Failure]]] = collections.deque()
    with ThreadPoolExecutor(processors()) as threads:
        try:
            for index in range(len(images)):
                ahead.append((index, threads.submit(_content, images, index, short_side)))
                if len(ahead) > 4 * processors():
                    first, content = ahead.popleft()
                    yield first, content.result()
            for index, content in ahead:
                yield index, content.result()
        finally:
            for _, content in ahead:
                content.cancel()


def _content(images: FolderImages, index: int, short_side: int | None) -> bytes | Failure:
    try:
        return plain_file(_pixels(images, index, short_side))
    except Exception as error:  # decoders may raise anything for broken files
        return Failure(images.name(index), reason_for(error))


def _pixels(images: FolderImages, index: int, short_side: int | None) -> np.ndarray:
    if short_side is None:
        return images.load(index)[0]
    from PIL import Image

    whole = _Whole(short_side)
    pixels, _ = images.load(index, whole)
    height, width = whole.size
    if min(pixels.shape[:2]) <= short_side:
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC))


class _Whole:
    """The whole image, as a crop that is resized to a short side: a large JPEG file is decoded at its scale then."""

    size = (1, 1)

    def __init__(self, short_side: int) -> None:
        self.short_side = short_side

    def box(self, height: int, width: int) -> Box:
        self.size = reduced_size(height, width, self.short_side)
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
            f"the pack will need about {in_gigabytes(needed)}, and {in_gigabytes(free)} are free in {place}: choose "
            "another place, or a smaller --size"
        )


def _expected_bytes(images: FolderImages, short_side: int | None) -> float:
    """The bytes of a split, by the sizes of some of its images."""
    sizes = []
    for index in np.linspace(0, len(images) - 1, min(LOOKED_AT, len(images))).astype(int).tolist():
        try:
            sizes.append(_pixels(images, index, short_side).nbytes)
        except Exception:  # an unreadable image takes no space, and is named later
            continue
    return len(images) * (sum(sizes) / len(sizes) + OVERHEAD) if sizes else 0.0


def in_gigabytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"
