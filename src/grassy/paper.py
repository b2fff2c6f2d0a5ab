"""The figures of the paper's tables, as it prints them, to compare runs with: `paper.json`, row by row."""

import copy
import functools
import json
from importlib import resources
from typing import Any

from grassy.spelling import nearest


def rows() -> list[str]:
    """Keys of all rows; a row that a recipe reproduces has the recipe's name."""
    return list(_contents()["rows"])


def figures(key: str) -> dict[str, Any]:
    """What the paper says about one row, in percent, degrees or ms.

    "from" names the tables and what each of them gives. "corrections", where there are any, give the right value of a
    figure that the paper has wrong, and who says so; the figure itself stays as printed.
    """
    row = _contents()["rows"].get(key)
    if row is None:
        raise ValueError(f"the paper has no row {key!r}{nearest(key, rows())}; grassy.paper.rows() lists them")
    row = copy.deepcopy(row)
    row["from"] = {_contents()["sources"][label]: names for label, names in row["from"].items()}
    return row


@functools.cache
def _contents() -> dict[str, Any]:
    return json.loads((resources.files("grassy") / "paper.json").read_text(encoding="utf-8"))
