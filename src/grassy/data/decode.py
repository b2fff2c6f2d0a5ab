"""Image files: decoded to RGB pixels if they are of a format that we mean, and why that failed."""

import functools
import io
from types import ModuleType
from typing import IO, Any

import numpy as np

from grassy.runs.schema import open_regular

SIXTEEN_BITS = 2**16 - 1
#: Pillow knows many more, some of which start other programs: PostScript in a .jpg would run in Ghostscript. MPO is
#: what many cameras call JPEG.
FORMATS = ("JPEG", "MPO", "PNG", "GIF", "BMP", "PPM", "TIFF", "WEBP", "JPEG2000", "AVIF")


@functools.cache
def _formats() -> tuple[str, ...]:
    from PIL import Image

    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)  # AVIF is not in every Pillow


def open_image(file: IO[bytes]) -> Any:
    """An image of Pillow, of which the header has been read, from a file of one of the formats above."""
    from PIL import Image

    return Image.open(file, formats=_formats())


def read_rgb(path: Any) -> np.ndarray:
    """The RGB pixels (H, W, 3) of the image in a regular file, as uint8."""
    with open_regular(path) as file:
        return read_pixels(file)


def read_pixels(file: IO[bytes]) -> np.ndarray:
    """The RGB pixels (H, W, 3) of an open image file, as uint8."""
    content = file.read()
    pixels = _decode_jpeg(content) if content.startswith(b"\xff\xd8\xff") else None
    return np.array(to_rgb(open_image(io.BytesIO(content)))) if pixels is None else pixels


def _decode_jpeg(content: bytes) -> np.ndarray | None:
    """The pixels of an ordinary JPEG file, the same as Pillow's; None if Pillow has to look at it.

    Both use libjpeg-turbo. simplejpeg decodes into the array directly, which saves two copies of the pixels. Pillow
    gets damaged, enormous and CMYK images: it has the better messages, a limit on the size, and color profiles.
    """
    from PIL import Image

    decoder = _simplejpeg()
    if decoder is None:
        return None
    try:
        height, width, colors, _ = decoder.decode_jpeg_header(content)
        limit = Image.MAX_IMAGE_PIXELS
        if colors not in ("YCbCr", "Gray") or (limit is not None and height * width > limit):
            return None
        pixels: np.ndarray = decoder.decode_jpeg(content)
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
