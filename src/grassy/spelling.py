"""What a user may have meant by a name that is not known."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], count: int = 1) -> str:
    """A phrase to append, such as: , did you mean 'x'? It is empty if no known name is close."""
    names = {each.lower(): each for each in known}
    close = [names[each] for each in difflib.get_close_matches(str(name).lower(), names, n=count)]
    return f", did you mean {' or '.join(map(repr, close))}?" if close else ""
