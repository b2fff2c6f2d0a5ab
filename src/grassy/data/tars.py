"""Tars: find the images in them without reading these."""

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from grassy.data.image_files import image_suffixes

BLOCK = tarfile.BLOCKSIZE
#: Bytes after the end of a tar in which further members are looked for: more than the largest photo.
MOST_AFTER_THE_END = 2**26
#: A tar may hold tars, one per class; deeper nesting is refused.
MOST_TARS_WITHIN = 2
#: The first bytes of compressed files.
COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


def images_in(file: IO[bytes], size: int, tar: Path, within: int = 0) -> Iterator[tuple[tuple[str, ...], int, int]]:
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
                archive.members.clear()  # type: ignore[attr-defined]  # they take a kilobyte each
                suffix = os.path.splitext(member.path)[1].lower()
                if suffix == ".cls":
                    raise ValueError(
                        f"{tar} is a shard of a WebDataset, which has labels in files ({member.path}): give "
                        "dataset=wds/NAME num_classes=N, see the recipes page"
                    )
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
                for path, offset, length in images_in(inner, member.size, tar, within + 1):
                    yield (PurePosixPath(member.path).stem, *path), member.offset_data + offset, length
            end = archive.offset
    except (tarfile.TarError, OverflowError) as error:
        raise ValueError(f"{tar} is not a tar, or a damaged one: {error}") from None
    file.seek(min(end, size))
    if file.read(BLOCK) != bytes(BLOCK):
        raise ValueError(f"{tar} is not a tar, or a damaged one: nothing marks its end at byte {end}")
    after = file.read(min(MOST_AFTER_THE_END, max(0, size - end - BLOCK)))
    headers = (after[start : start + BLOCK] for start in range(0, len(after) - BLOCK + 1, BLOCK))
    if any(_is_header(block) for block in headers):  # zeros instead of a header look like the end
        raise ValueError(
            f"{tar} is a damaged tar, or several in one: members follow its end at byte {end}. Extract it with "
            "tar --ignore-zeros and pack it again"
        )


def _first_block(file: IO[bytes]) -> bytes:
    block = file.read(BLOCK)
    file.seek(0)
    return block


def _is_header(block: bytes) -> bool:
    try:
        tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def _begins_a_tar(block: bytes) -> bool:
    """Whether the block is a tar header, perhaps a damaged one, or the end of an empty tar."""
    if block == bytes(BLOCK) or block[257:262] == b"ustar":
        return True
    return _is_header(block)


def _check_uncompressed(block: bytes, name: str) -> None:
    """Raise a ValueError if a file starting with this block is compressed: images are read by offset."""
    kind = next((kind for magic, kind in COMPRESSED.items() if block.startswith(magic)), None)
    if kind and not _begins_a_tar(block):  # a tar starts with the name of a member, which may be anything
        raise ValueError(f"{name} is compressed with {kind}: decompress it first")
