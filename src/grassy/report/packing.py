"""Short numbers for JSON: the angles of all pairs of classes as one string, and other numbers rounded.

An angle takes 16 bits. The angles are compressed and written in base64.
1,000 classes with 8 angles per pair have 4 million angles, which would take 30 MB as decimals in JSON.
"""

import base64
import binascii
import math
import zlib
from typing import Any

import numpy as np

STEPS = 65534
MISSING = 65535
FORMAT = (
    "base64 of zlib of the angles of the pairs (i, j) with i < j, ordered by i, then j: first all smallest angles, "
    "then all second ones, and so on, each a 16-bit number v that stands for v / 65534 * limit degrees (65535: no such "
    "angle); of all numbers first the high bytes, then the low bytes"
)


def pack_angles(degrees: np.ndarray, limit: float) -> dict[str, Any]:
    """Pack angles (C, C, K) in degrees between 0 and `limit`, NaN if absent, rounded to multiples of limit/65534."""
    classes, _, k = degrees.shape
    first, second = np.triu_indices(classes, 1)
    planes = degrees[first, second].T  # (K, pairs)
    missing = np.isnan(planes)
    whole = np.rint(np.clip(np.where(missing, 0, planes), 0, limit) * (STEPS / limit)).astype(np.uint16)
    whole[missing] = MISSING
    # High bytes of neighbouring pairs are similar and compress well side by side; low bytes are noise.
    data = (whole >> 8).astype(np.uint8).tobytes() + (whole & 255).astype(np.uint8).tobytes()
    packed = base64.b64encode(zlib.compress(data, 6)).decode()
    return {"classes": classes, "k": k, "limit": limit, "format": FORMAT, "data": packed}


def unpack_angles(packed: dict[str, Any]) -> np.ndarray:
    """Unpack angles (C, C, K) in degrees: float32, symmetric, with a zero diagonal."""
    classes, k, limit = packed["classes"], packed["k"], packed["limit"]
    bytes_of_all = classes * (classes - 1) * k  # two bytes for each pair and angle
    try:
        decompress = zlib.decompressobj()
        data = np.frombuffer(decompress.decompress(base64.b64decode(packed["data"]), bytes_of_all + 1), np.uint8)
        if len(data) != bytes_of_all:
            raise ValueError(f"they should be {bytes_of_all} bytes")
        first, second = np.triu_indices(classes, 1)
        high, low = data.reshape(2, k, len(first)).astype(np.uint16)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise ValueError(f"the packed angles are damaged: {error}") from None
    whole = (high << 8 | low).T
    values = np.where(whole == MISSING, np.nan, whole * np.float32(limit / STEPS)).astype(np.float32)
    degrees = np.zeros((classes, classes, k), np.float32)
    degrees[first, second] = values
    degrees[second, first] = values
    return degrees


def rounded(value: float, digits: int = 5) -> float | None:
    """Round to significant digits; None for NaN, which JSON lacks."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None
