"""The results in the paper's tables, as printed, for comparison with runs (`paper.json`)."""

import copy
import functools
import json
from importlib import resources
from typing import Any

from grassy.spelling import nearest


def rows() -> list[str]:
    """Return the keys of all rows. A row that a recipe reproduces has the name of the recipe."""
    return list(_contents()["rows"])


def figures(key: str) -> dict[str, Any]:
    """Return the paper's figures for one row, in percent, degrees or ms.

    The key "from" names the source tables and what each gives. The key "corrections", if present, gives the right value
    of a misprinted figure and its source. The figure itself stays as printed.

    Args:
        key: A key of `rows()`.

    Returns:
        A dict of figures by name.

    Raises:
        ValueError: If the paper has no such row.
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
