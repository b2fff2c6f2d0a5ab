"""Comments as docstrings, for mkdocstrings.

A comment after a field, or one that starts with #: above any variable, describes it.
"""

import re
from typing import Any

from griffe import Attribute, Class, Docstring, Extension

COMMENT_AFTER = re.compile(r"\s{2}# (.*)$")
COMMENT_ABOVE = re.compile(r"^\s*#: ?(.*)$")


class Docstrings(Extension):
    """Turns comments into docstrings."""

    def on_attribute(self, *, attr: Attribute, **_: Any) -> None:
        if attr.docstring is None and attr.lineno is not None and (comment := _comment(attr)):
            attr.docstring = Docstring(comment, parent=attr)


def _comment(attr: Attribute) -> str:
    lines = attr.lines_collection[attr.filepath]
    above, number = [], attr.lineno - 2
    while number >= 0 and (match := COMMENT_ABOVE.match(lines[number])):
        above.insert(0, match[1])
        number -= 1
    after = COMMENT_AFTER.search(lines[attr.endlineno - 1]) if isinstance(attr.parent, Class) else None
    return "\n".join(above) or (after[1] if after else "")
