"""Docstrings in the form that this package has, for mkdocstrings.

A line `name: what it is` describes a parameter. A comment after a field, or one that starts with #: above any variable,
describes that.
"""

import re
from typing import Any

from griffe import Attribute, Class, Docstring, Extension, Function

PARAMETER = re.compile(r"^(\w+(?:, \w+)*): ")
NEXT_SENTENCE = re.compile(r"(?<=\.) (?=\w+(?:, \w+)*: )")
COMMENT_AFTER = re.compile(r"\s{2}# (.*)$")
COMMENT_ABOVE = re.compile(r"^\s*#: ?(.*)$")


class Docstrings(Extension):
    """Turns lines about parameters into the section Args of griffe's Google style, and comments into docstrings."""

    def on_function(self, *, func: Function, **_: Any) -> None:
        _describe_parameters(func)

    def on_class(self, *, cls: Class, **_: Any) -> None:
        _describe_parameters(cls)

    def on_attribute(self, *, attr: Attribute, **_: Any) -> None:
        if attr.docstring is None and attr.lineno is not None and (comment := _comment(attr)):
            attr.docstring = Docstring(comment, parent=attr)


def _describe_parameters(found: Class | Function) -> None:
    if found.docstring is None:
        return
    known = {parameter.name for parameter in found.parameters}
    text: list[str] = []
    arguments: list[str] = []
    inside = False
    lines = [part for line in found.docstring.value.split("\n") for part in NEXT_SENTENCE.split(line)]
    for line in lines:
        match = PARAMETER.match(line)
        names = match[1].split(", ") if match else []
        if match and known.issuperset(names):
            inside = True
            arguments += [f"    {name}: {line[match.end() :]}" for name in names]
        elif inside and line.startswith("    "):
            arguments.append(f"    {line}")
        else:
            inside = False
            text.append(line)
    section = ["", "Args:", *arguments] if arguments else []
    found.docstring.value = "\n".join([*text, *section]).strip()


def _comment(attr: Attribute) -> str:
    lines = attr.lines_collection[attr.filepath]
    above, number = [], attr.lineno - 2
    while number >= 0 and (match := COMMENT_ABOVE.match(lines[number])):
        above.insert(0, match[1])
        number -= 1
    after = COMMENT_AFTER.search(lines[attr.endlineno - 1]) if isinstance(attr.parent, Class) else None
    return "\n".join(above) or (after[1] if after else "")
