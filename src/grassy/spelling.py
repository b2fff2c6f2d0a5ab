"""Names: what a user may have meant by one that is not known, and the order in which people expect them."""

import difflib
import re
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], count: int = 1) -> str:
    """A phrase to append, such as: , did you mean 'x'? It is empty if no known name is close."""
    names = {each.lower(): each for each in known}
    close = [names[each] for each in difflib.get_close_matches(str(name).lower(), names, n=count)]
    return f", did you mean {' or '.join(map(repr, close))}?" if close else ""


def natural_key(name: str) -> list[str | int]:
    """A key that sorts class 2 before class 10, and capitals with their small letters.

    The order is that of timm, whose readers number classes by it.
    """
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"(\d+)", name.lower()))]
