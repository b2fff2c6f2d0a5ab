"""Names that people write: suggestions for misspelt ones, and the order in which people sort them."""

import difflib
import re
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], count: int = 1) -> str:
    """Return a phrase to append, such as ", did you mean 'x'?", or the empty string if no known name is close."""
    names = {each.lower(): each for each in known}
    close = [names[each] for each in difflib.get_close_matches(str(name).lower(), names, n=count)]
    return f", did you mean {' or '.join(map(repr, close))}?" if close else ""


def natural_key(name: str) -> list[str | int]:
    """Return a key that sorts "class 2" before "class 10" and ignores case.

    timm numbers the classes of a dataset in this order.
    """
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"(\d+)", name.lower()))]
