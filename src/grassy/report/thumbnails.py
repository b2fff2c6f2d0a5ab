"""Thumbnails, small enough to be part of a page."""

import base64
import io
from typing import Any

import numpy as np

from grassy.data.images import Images
from grassy.report.examples import OUTLIERS, rank_in_group

BUDGET = 4_000_000  # characters in total
PIXEL_ART = 32  # images up to this side are stored without loss: every pixel counts
#: The longer side in pixels, by the number of images.
SIZES = ((1500, 96), (4000, 64))
SMALLEST = 48


def thumbnails(images: Images, examples: dict[str, Any], budget: int = BUDGET) -> list[str | None]:
    """A data URI for each example; None if the budget is spent or the image cannot be read.

    Each class gets one image of every kind before any class gets a second.
    """
    wanted = _most_needed_first(examples)
    size = next((size for most, size in SIZES if len(wanted) <= most), SMALLEST)
    found: list[str | None] = [None] * len(examples["index"])
    for position in wanted:
        index, name = examples["index"][position], examples["name"][position]
        if index >= len(images) or short_name(images.name(index)) != name:
            continue  # the data have changed since
        uri = _thumbnail(images, index, size)
        if uri is None:
            continue
        budget -= len(uri)
        if budget < 0:
            break
        found[position] = uri
    return found


def short_name(name: str) -> str:
    """The end of an image's path: its file and folder."""
    return "/".join(name.replace("\\", "/").split("/")[-2:])


def _most_needed_first(examples: dict[str, Any]) -> list[int]:
    mistakes = examples["mistakes"]
    labels = np.asarray(examples["label"], dtype=np.int64)
    rounds = [(0, position) for position in (*mistakes[:OUTLIERS], *examples["outliers"])]
    rounds += zip(rank_in_group(labels[mistakes]).tolist(), mistakes, strict=True) if mistakes else ()
    rounds += [
        (rank, position)
        for kind in ("typical", "untypical")
        for own in examples[kind]
        for rank, position in enumerate(own)
    ]
    rounds.sort(key=lambda entry: entry[0])
    return list(dict.fromkeys(position for _, position in rounds))


def _thumbnail(images: Images, index: int, size: int) -> str | None:
    from PIL import Image

    try:
        pixels = images.load(index)[0]
    except Exception:  # decoders may raise anything, and a missing thumbnail is no reason to stop
        return None
    image = Image.fromarray(pixels)
    small = max(image.size) <= PIXEL_ART  # the page enlarges it without smoothing
    image.thumbnail((size, size))
    file = io.BytesIO()
    kind, options = ("PNG", {"optimize": True}) if small else _photo_format()
    image.convert("RGB").save(file, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def _photo_format() -> tuple[str, dict[str, Any]]:
    """WebP if Pillow can write it, which takes half the space of JPEG at this size."""
    from PIL import features

    return ("WEBP", {"quality": 62, "method": 4}) if features.check("webp") else ("JPEG", {"quality": 68})
