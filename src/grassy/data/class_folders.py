"""Class folders and tars through timm's readers: which of their files are images, and of which class.

What is hidden, its name beginning with a dot, is not looked at: editors and systems leave copies of images there.
"""

import os
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from grassy.spelling import natural_key
from grassy.torchvision_import import import_torchvision

#: Of images that Pillow reads, beside those that timm looks for.
MORE_SUFFIXES = {".avif", ".bmp", ".jfif", ".jp2", ".pgm", ".ppm", ".tif", ".tiff", ".webp"}


def open_files(root: Path, class_names: Sequence[str] | None = None) -> Any:
    """A reader of timm for a folder of class folders, a folder of tars, or a tar.

    class_names: of the training set, whose numbering a validation set has to share; None for the set that defines it.
    """
    image_suffixes()
    tars = [root] if root.suffix == ".tar" and root.is_file() else sorted(root.glob("*.tar"))
    tars = [tar for tar in tars if tar == root or not is_hidden(tar.name)]
    return _open_tars(root, tars, class_names) if tars else _open_folders(root, class_names)


def image_suffixes() -> frozenset[str]:
    """The suffixes of files that are taken for images: timm's own, and more that Pillow reads. timm is told of them."""
    import_torchvision()
    from timm.data import add_img_extensions, get_img_extensions

    add_img_extensions(sorted(MORE_SUFFIXES - set(get_img_extensions())))
    return frozenset(get_img_extensions())


def _no_images(root: Path) -> ValueError:
    return ValueError(f"{root} holds no images ({', '.join(sorted(image_suffixes()))})")


def is_hidden(path: str) -> bool:
    return any(part.startswith(".") and part not in (".", "..") for part in path.replace(os.sep, "/").split("/"))


def _open_folders(root: Path, class_names: Sequence[str] | None) -> Any:
    from timm.data.readers.reader_image_folder import ReaderImageFolder

    try:
        reader = ReaderImageFolder(str(root))
    except RuntimeError:
        raise _no_images(root) from None
    begin = len(os.path.join(root, ""))
    files = [file for file, _ in reader.samples if not is_hidden(file[begin:])]
    stray = next((file for file in files if os.sep not in file[begin:]), None)
    if stray is not None:
        raise ValueError(f"{stray} lies in no class folder: move it into that of its class, or away")
    folders = [os.path.dirname(file) for file in files]
    names = [os.path.basename(folder) for folder in folders]
    places = {os.path.basename(folder): folder for folder in (*class_folders(root), *folders)}
    empty = sorted(set(places) - set(names))
    if class_names is None and empty:
        raise ValueError(f"class folder {places[empty[0]]} holds no images: fill or remove it")
    reader.class_to_idx = _numbers(places, class_names)
    reader.samples = [(file, reader.class_to_idx[name]) for file, name in zip(files, names, strict=True)]
    if not files:
        raise _no_images(root)
    return reader


def class_folders(root: Path) -> list[str]:
    """The folders with nothing but files in them: the leaves, which timm takes for the classes."""
    leaves = []
    for folder, below, _ in os.walk(root, followlinks=True):
        below[:] = [name for name in below if not is_hidden(name)]
        if not below and folder != str(root):
            leaves.append(folder)
    return leaves


def _open_tars(root: Path, tars: Iterable[Path], class_names: Sequence[str] | None) -> Any:
    from timm.data.readers.reader_image_in_tar import ReaderImageInTar

    for tar in tars:
        if not tarfile.is_tarfile(tar):
            raise ValueError(f"{tar} is not a tar, or a damaged one")
    try:
        reader = ReaderImageInTar(str(root))
    except tarfile.TarError as error:
        raise ValueError(f"{root} cannot be read as tar: {error}") from None
    except ValueError as error:
        if "to unpack" not in str(error):
            raise
        raise _no_images(root) from None  # timm unpacks an empty list
    kept, names = [], []
    for number, (member, tar, inner_tar) in enumerate(reader.samples):
        # timm would call a class "." if the paths in its tar begin with "./".
        outer = [Path(file).stem for file in (tar, inner_tar and inner_tar.name) if file]
        path = PurePosixPath(*outer, member.path)
        if is_hidden(str(path)):
            continue
        if len(path.parts) == 1:
            raise ValueError(f"{member.path} of {root} lies in no class folder: move it into that of its class")
        kept.append(number)
        names.append(path.parent.name)
    if not kept:
        raise _no_images(root)
    numbers = _numbers({name: f"{name} of {root}" for name in names}, class_names)
    reader.class_name_to_idx = numbers
    reader.class_idx_to_name = {number: name for name, number in numbers.items()}
    reader.samples, reader.targets = reader.samples[kept], [numbers[name] for name in names]
    return reader


def _numbers(places: dict[str, str], class_names: Sequence[str] | None) -> dict[str, int]:
    """A number for each class, in natural order, or that of the training set; `places` says where a class was found."""
    if class_names is None:
        return {name: number for number, name in enumerate(sorted(places, key=natural_key))}
    numbers = {name: number for number, name in enumerate(class_names)}
    for name, place in places.items():
        if name not in numbers:
            raise ValueError(f"{place} is a class that the training set does not have")
    return numbers
