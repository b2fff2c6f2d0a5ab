"""A few images of each class, small enough to stand inside a page."""

import base64
import io
from collections import defaultdict
from typing import Any

from grassy.data.images import Images

EACH = 4
SIZE = 56
BUDGET = 2_500_000  # characters in all


def sample_images(images: Images, classes: int, each: int = EACH, budget: int = BUDGET) -> list[list[str]] | None:
    """Data URIs of up to `each` images of every class, fewer where all of them would exceed the budget.

    None if labels are not known without reading the images. Images that cannot be read are left out.
    """
    labels = images.labels()
    if labels is None:
        return None
    members: dict[int, list[int]] = defaultdict(list)
    for index, label in enumerate(labels.tolist()):
        members[label].append(index)
    shown: list[list[str]] = [[] for _ in range(classes)]
    left = budget
    for turn in range(each):  # one of each class before a second of any
        for label in range(classes):
            own = members[label]
            if turn >= len(own):
                continue
            uri = _thumbnail(images, own[turn * len(own) // each if len(own) >= each else turn])
            if uri is None:
                continue
            left -= len(uri)
            if left < 0:
                return shown
            shown[label].append(uri)
    return shown


def _thumbnail(images: Images, index: int) -> str | None:
    try:
        image: Any = images.load(index)[0]
        small = max(image.size) <= 32  # of so few pixels each counts; the page enlarges them without smoothing
        image.thumbnail((SIZE, SIZE))
        file = io.BytesIO()
        image.convert("RGB").save(file, *(("PNG",) if small else ("JPEG",)), quality=72, optimize=True)
    except Exception:  # whatever a broken file makes Pillow raise, a missing sample is no reason to stop
        return None
    kind = "png" if small else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
