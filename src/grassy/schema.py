"""Checks of everything that is read from files: regular files of bounded size, values of known types and bounds.

Files are untrusted. Their contents leave this module as plain, bounded values, or as one ValueError.
"""

import json
import math
import os
import stat
import sys
from collections.abc import Callable, Mapping
from typing import IO, Any

#: Largest sizes in bytes: a recipe; a description or summary; an analysis, which holds the angles of all pairs.
MOST_RECIPE, MOST_DESCRIPTION, MOST_ANALYSIS = 2**20, 2**26, 2**30
MOST_CLASSES = 10**8
MOST_PIXELS = 4096  # side of a model's input image
LEAST_CROP = 0.1  # bounds the size to which an image is resized: the crop's size divided by crop_pct
MOST_CROP = 2  # beyond 1 the image gets a margin, as in some timm models (1.15)
CROP_MODES = ("center", "squash", "border")  # timm's: crop the centre, distort, or show the whole image in a border
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")

#: timm options about the source of weights rather than the architecture.
OTHER_SOURCES = ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")

DEPTH = 4  # nesting of lists and mappings in the options of a head, model or optimizer

Check = Callable[[str, Any], Any]


# ------------------------------------------------------------------------------------------------ files


def open_regular(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a file for reading. Anything but a regular file raises a ValueError: a FIFO, for example, would block."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{os.fspath(path)} is not a regular file")
    return os.fdopen(descriptor, "rb")


def read_text(path: str | os.PathLike[str], most: int) -> str:
    """The UTF-8 text of a regular file of at most `most` bytes."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{os.fspath(path)} has more than {most:,} bytes")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{os.fspath(path)} is not UTF-8: {error.reason} at byte {error.start}") from None


def parse_json(text: str) -> Any:
    """Parse JSON text; any error is a ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


# ------------------------------------------------------------------------------------------------ values


def fail(name: str, allowed: str, value: Any) -> ValueError:
    shown = repr(value)
    return ValueError(f"{name} must be {allowed}, got {shown if len(shown) <= 80 else f'{shown[:77]}...'}")


def integer(least: int, most: int) -> Check:
    def check(name: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise fail(name, f"an integer from {least} to {most}", value)
        return value

    return check


def number(least: float, most: float) -> Check:
    def check(name: str, value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            raise fail(name, f"a number from {least:g} to {most:g}", value)
        return float(value)

    return check


def text(most: int) -> Check:
    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or len(value) > most:
            raise fail(name, f"a string of at most {most} characters", value)
        return value

    return check


def one_of(*allowed: str) -> Check:
    def check(name: str, value: Any) -> str:
        if value not in allowed:
            raise fail(name, f"one of {', '.join(allowed)}", value)
        return str(value)

    return check


def list_of(each: Check, least: int, most: int) -> Check:
    def check(name: str, value: Any) -> list[Any]:
        if not isinstance(value, list | tuple) or not least <= len(value) <= most:
            size = str(least) if least == most else f"{least} to {most}"
            raise fail(name, f"a list of length {size}", value)
        return [each(f"{name}[{place}]", item) for place, item in enumerate(value)]

    return check


def or_none(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def options(largest: float, most: int, depth: int = DEPTH, longest: int = 10_000) -> Check:
    """A mapping of plain values: numbers up to `largest`, strings up to `longest`, at most `most` entries."""
    check_integer, check_number = integer(-int(largest), int(largest)), number(-largest, largest)
    check_text, check_key = text(longest), text(200)

    def plain(name: str, value: Any, depth: int) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return check_integer(name, value)
        if isinstance(value, float):
            return check_number(name, value)
        if isinstance(value, str):
            return check_text(name, value)
        if depth == 0 or not isinstance(value, list | tuple | dict) or len(value) > most:
            raise fail(name, f"plain values, at most {most} of them and not nested deeply", value)
        if not isinstance(value, dict):
            return [plain(name, item, depth - 1) for item in value]
        return {
            check_key(f"a key of {name}", key): plain(f"{name}.{key}", item, depth - 1) for key, item in value.items()
        }

    def check(name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise fail(name, "a mapping", value)
        found: dict[str, Any] = plain(name, value, depth)
        return found

    return check


def check_model_kwargs(name: str, value: Any) -> dict[str, Any]:
    """Options of an architecture: sizes and rates, never a source of weights."""
    found = options(2**16, most=1000)("model_kwargs", value)
    if wrong := next((key for key in found if key in OTHER_SOURCES), None):
        raise ValueError(
            f"model_kwargs.{wrong} is not accepted: it names a source of weights, for which there is "
            "--initial-checkpoint"
        )
    if not isinstance(found.get("pretrained", False), bool):
        raise fail("model_kwargs.pretrained", "true or false", found["pretrained"])
    return found


def check_head(name: str, value: Any) -> dict[str, Any]:
    """The name and options of a head, as plain values; the head itself checks them further."""
    found = options(1e6, most=MOST_CLASSES)(name, value)
    text(100)("head.name", found.get("name"))
    return found


#: All settings of a recipe, as plain values. `Recipe` checks them further; all that it accepts can be saved.
check_recipe = options(sys.float_info.max, most=MOST_CLASSES, depth=1 + DEPTH, longest=MOST_RECIPE)


def _colours(least: float, most: float) -> Check:
    check = list_of(number(least, most), 3, 3)
    return lambda name, value: tuple(check(name, value))


def _metrics(name: str, value: Any) -> dict[str, float]:
    if not isinstance(value, dict) or len(value) > 1000:
        raise fail(name, "a mapping", value)
    try:
        return {str(key): float(item) for key, item in value.items() if isinstance(item, int | float)}
    except OverflowError:
        raise fail(name, "a mapping to numbers that a float can hold", value) from None


#: The fields of a `Description` in a file of weights.
DESCRIPTION: dict[str, Check] = {
    "model": text(200),
    "num_classes": integer(1, MOST_CLASSES),
    "head": check_head,
    "model_kwargs": check_model_kwargs,
    "class_names": or_none(list_of(text(10_000), 0, MOST_CLASSES)),
    "img_size": integer(1, MOST_PIXELS),
    "crop_pct": number(LEAST_CROP, MOST_CROP),
    "crop_mode": one_of(*CROP_MODES),
    "interpolation": one_of(*INTERPOLATIONS),
    "mean": _colours(-1e6, 1e6),
    "std": _colours(1e-6, 1e6),
    "recipe": check_recipe,
    "epoch": or_none(integer(0, 2**63)),
    "metrics": _metrics,
    "version": text(200),
    "outlier_threshold": or_none(number(0, 1)),
    "outlier_rate": or_none(number(0, 1)),
}


def check_description(values: Any) -> dict[str, Any]:
    """The known fields of a description, checked for type and bounds; a ValueError names an invalid field."""
    if not isinstance(values, dict):
        raise fail("the description", "a mapping", values)
    for name in ("model", "num_classes", "head"):
        if name not in values:
            raise ValueError(f"it has no {name}")
    return {name: check(name, values[name]) for name, check in DESCRIPTION.items() if name in values}


def finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value
