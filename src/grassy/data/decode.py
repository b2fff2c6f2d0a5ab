"""From what Pillow opens to RGB of eight bits, and in a few words why that failed."""

from typing import Any

import numpy as np

SIXTEEN_BITS = 2**16 - 1


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
