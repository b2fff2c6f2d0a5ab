"""Which files are images, and a walk over all folders that may hold some.

Names that start with a dot are ignored: editors and systems leave copies of images there.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from grassy.torchvision_import import import_torchvision

#: Suffixes of further formats that Pillow reads, beside timm's.
MORE_SUFFIXES = {".avif", ".bmp", ".jfif", ".jp2", ".pgm", ".ppm", ".tif", ".tiff", ".webp"}
#: Limit of repeated visits through links: a few links can make millions of paths.
MOST_REPEATS = 50_000


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
