"""Image files: decoded to RGB pixels if they are of a format that we mean, and why that failed."""

import functools
import io
import re
from collections.abc import Sequence
from types import ModuleType
from typing import IO, Any, NamedTuple, Protocol

import numpy as np

from grassy.schema import open_regular

SIXTEEN_BITS = 2**16 - 1
#: Pillow knows many more, some of which start other programs: PostScript in a .jpg would run in Ghostscript. MPO is
#: what many cameras call JPEG.
FORMATS = ("JPEG", "MPO", "PNG", "GIF", "BMP", "PPM", "TIFF", "WEBP", "JPEG2000", "AVIF")
JPEG = b"\xff\xd8\xff"
#: The header of plain pixels, as Pillow and `grassy pack` write it: width and height.
PLAIN = re.compile(rb"P6\n([1-9][0-9]{0,5}) ([1-9][0-9]{0,5})\n255\n")
HEADER = 24  # bytes that hold such a header
#: Limit of what is read into memory to be decoded: the pixels of the largest image that Pillow accepts.
MOST_BYTES = 2**29


@functools.cache
def _formats() -> tuple[str, ...]:
    from PIL import Image

    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)  # AVIF is not in every Pillow


def open_image(file: IO[bytes]) -> Any:
    """An image of Pillow, of which the header has been read, from a file of one of the formats above."""
    from PIL import Image

    return Image.open(file, formats=_formats())


class Box(NamedTuple):
    """A part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int

    def of(self, pixels: np.ndarray) -> np.ndarray:
        return pixels[self.top : self.top + self.height, self.left : self.left + self.width]


class Crop(Protocol):
    """What part of an image is wanted, and the size (height, width) that it will be resized to."""

    size: tuple[int, int]

    def box(self, height: int, width: int) -> Box:
        """The part of an image of such a size. It may be random, so it is asked for once."""


def crop_of(pixels: np.ndarray, crop: Crop | None) -> np.ndarray:
    """The part of an image (H, W, 3) that is wanted: all of it without a crop."""
    return pixels if crop is None else crop.box(*pixels.shape[:2]).of(pixels)


def read_rgb(path: Any, crop: Crop | None = None) -> np.ndarray:
    """The RGB pixels (H, W, 3) of the image in a regular file, as uint8."""
    with open_regular(path) as file:
        return read_pixels(file, crop)


def read_pixels(file: IO[bytes], crop: Crop | None = None, size: int | None = None) -> np.ndarray:
    """The RGB pixels (H, W, 3) of an image in an open file, or of a crop of it, as uint8.

    A crop of a large JPEG file comes at 1/2, 1/4 or 1/8 of its size, if that is still at least twice `crop.size`. The
    decoder computes fewer pixels then, from the lower frequencies. Of plain pixels, only the rows of a crop are read.

    size: The bytes of the image from the position of the file on; None if the image takes all of the file.
    """
    start = file.tell()
    head = file.read(HEADER if size is None else min(HEADER, size))
    end = file.seek(0, io.SEEK_END) if size is None else start + size
    if (plain := PLAIN.match(head)) is not None:
        pixels = _plain_pixels(file, crop, plain, start, end)
        if pixels is not None:
            return pixels
    file.seek(start)
    if size is None and not head.startswith(JPEG):  # Pillow reads what it needs of a file, which may be of any size
        return _decoded(file, b"", crop)
    if end - start > MOST_BYTES:
        raise ValueError(f"it has {end - start:,} bytes: more than {MOST_BYTES:,} are not read into memory")
    content = file.read(end - start)
    return _decoded(io.BytesIO(content), content, crop)


def plain_file(pixels: np.ndarray) -> bytes:
    """Pixels (H, W, 3) of uint8 as the content of a file that `read_pixels` need not decode: a binary PPM."""
    height, width, _ = pixels.shape
    return b"P6\n%d %d\n255\n" % (width, height) + pixels.tobytes()


def _plain_pixels(
    file: IO[bytes], crop: Crop | None, header: re.Match[bytes], start: int, end: int
) -> np.ndarray | None:
    """The pixels that follow a header, in the bytes of a file from `start` to `end`.

    None if they are not all there, or more than Pillow allows, so that Pillow reports it.
    """
    from PIL import Image

    width, height = map(int, header.groups())
    first = start + header.end()
    limit = Image.MAX_IMAGE_PIXELS
    if end - first < 3 * width * height or (limit is not None and width * height > limit):
        return None
    box = Box(0, 0, height, width) if crop is None else crop.box(height, width)
    rows = np.empty((box.height, width, 3), np.uint8)
    file.seek(first + 3 * width * box.top)
    if file.readinto(rows.reshape(-1).data) != rows.size:  # type: ignore[attr-defined]
        raise ValueError("the file ended while it was read")
    return rows[:, box.left : box.left + box.width]


def _decoded(file: IO[bytes], content: bytes, crop: Crop | None) -> np.ndarray:
    """The pixels of an image file, or of a crop of it. `content` is that of the file if it may be a JPEG."""
    size = _size_of_jpeg(content)
    image = open_image(file) if size is None else None
    height, width = size or (image.height, image.width)  # type: ignore[union-attr]
    box = None if crop is None else crop.box(height, width)
    factor = 1 if crop is None or box is None else _reduction(box, crop.size)
    pixels = _decode_jpeg(content, height, width, factor) if size else None
    if pixels is None:
        image = image or open_image(file)
        if factor > 1:
            image.draft(None, (width // factor, height // factor))  # only JPEG files listen to it
        pixels = np.array(to_rgb(image))
    return pixels if box is None else _reduced(box, (height, width), pixels.shape).of(pixels)


def _reduction(box: Box, size: tuple[int, int]) -> int:
    """The largest reduction that leaves twice the size, or 1: a box is rounded to a quarter of a resized pixel then."""
    most = min(box.height // (2 * size[0]), box.width // (2 * size[1]))
    return next(factor for factor in (8, 4, 2, 1) if factor <= max(most, 1))


def _reduced(box: Box, whole: tuple[int, int], decoded: Sequence[int]) -> Box:
    """The box in an image that was decoded at a smaller size, to the nearest pixel."""
    vertical, horizontal = decoded[0] / whole[0], decoded[1] / whole[1]
    height, width = round(box.height * vertical), round(box.width * horizontal)
    top, left = round(box.top * vertical), round(box.left * horizontal)
    return Box(min(top, decoded[0] - height), min(left, decoded[1] - width), height, width)


def _size_of_jpeg(content: bytes) -> tuple[int, int] | None:
    """Height and width of an ordinary JPEG file; None if Pillow has to look at it.

    Pillow gets damaged, enormous and CMYK images: it has the better messages, a limit on the size, and color profiles.
    """
    from PIL import Image

    decoder = _simplejpeg()
    if decoder is None or not content.startswith(JPEG):
        return None
    try:
        height, width, colors, _ = decoder.decode_jpeg_header(content)
    except ValueError:
        return None
    limit = Image.MAX_IMAGE_PIXELS
    too_large = limit is not None and height * width > limit
    return None if too_large or colors not in ("YCbCr", "Gray") else (height, width)


def _decode_jpeg(content: bytes, height: int, width: int, factor: int) -> np.ndarray | None:
    """The pixels of such a file, at 1/factor of its size, the same as Pillow's; None if it is damaged.

    Both use libjpeg-turbo. simplejpeg decodes into the array directly, which saves two copies of the pixels.
    """
    decoder = _simplejpeg()
    assert decoder is not None
    least = {"min_height": -(-height // factor), "min_width": -(-width // factor), "min_factor": factor}
    try:
        pixels: np.ndarray = decoder.decode_jpeg(content, **(least if factor > 1 else {}))
    except ValueError:
        return None
    return pixels


@functools.cache
def _simplejpeg() -> ModuleType | None:
    try:
        import simplejpeg
    except ImportError:  # optional: Pillow decodes the same pixels, more slowly
        return None
    return simplejpeg


def to_rgb(image: Any) -> Any:
    """An image of Pillow as RGB. Sixteen bits become eight by scaling: Pillow's own `convert` clips them to white."""
    if image.mode == "I" or image.mode.startswith("I;16"):
        from PIL import Image

        pixels = np.asarray(image)
        if pixels.min() < 0 or pixels.max() > SIXTEEN_BITS:
            raise ValueError("its pixels are 32-bit integers of unknown range: save it with 8 or 16 bits")
        # The upper byte, which is what Pillow itself takes of RGB with sixteen bits a channel.
        return Image.fromarray((pixels >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("its pixels are floats of unknown range: save it with 8 or 16 bits")
    return image.convert("RGB")


def reason_for(error: Exception) -> str:
    """Why an image could not be read, on one line and without its name, which is told beside it."""
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return "not an image that Pillow knows"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__
