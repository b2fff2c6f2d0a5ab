"""Checks of arguments: numbers of Python, NumPy and torch, and booleans."""

import math
import operator
from typing import Any


def positive_integer(name: str, value: int) -> int:
    """Return the value as an int, also for NumPy integers; raise a ValueError that names the argument otherwise."""
    try:
        found = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = 0
    if found < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return found


def number(value: Any) -> float:
    """Return a Python, NumPy or tensor scalar as a float, and NaN for anything else, such as True, None and text."""
    if isinstance(value, bool | str | bytes) or "bool" in str(getattr(value, "dtype", "")):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor with several elements
        return math.nan


def positive(name: str, value: float) -> float:
    """Return the value as a float; raise a ValueError that names the argument unless it is positive and finite."""
    if not 0 < number(value) < math.inf:
        raise ValueError(f"{name} must be positive, got {value!r}")
    return float(value)


def nonnegative(name: str, value: float) -> float:
    """Return the value as a float; raise a ValueError that names the argument unless it is >= 0 and finite."""
    if not 0 <= number(value) < math.inf:
        raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")
    return float(value)


def check_booleans(**options: Any) -> None:
    """Raise TypeError for an option that is not a boolean: the string "no" would count as True."""
    for name, value in options.items():
        if type(value).__name__ not in ("bool", "bool_"):  # NumPy 1 calls its boolean type bool_, NumPy 2 bool
            raise TypeError(f"{name} must be True or False, got {value!r}")
