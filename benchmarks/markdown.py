"""Tables in Markdown, and putting them between the marks of a page whose sentences are written by hand.

A page marks the place of a table by `<!-- table: NAME -->` and `<!-- end -->`, each on a line of its own.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Result = dict[str, Any]


def fill(page: Path, blocks: Mapping[str, str]) -> None:
    """Put each block between its marks; a block without marks is left out, and marks without a block stay as they are.

    A mark that is never closed raises a ValueError: the text after it would be lost.
    """
    text = page.read_text(encoding="utf-8")
    for name, block in blocks.items():
        begin = f"<!-- table: {name} -->\n"
        before, found, rest = text.partition(begin)
        if not found:
            continue
        old, end, after = rest.partition("<!-- end -->")
        if not end or "<!-- table:" in old:
            raise ValueError(f"{page} has no <!-- end --> for <!-- table: {name} -->")
        text = f"{before}{begin}{block}\n{end}{after}"
    page.write_text(text, encoding="utf-8")


def marks(page: Path) -> list[str]:
    """The names of the tables that a page has places for."""
    return re.findall(r"^<!-- table: (.+) -->$", page.read_text(encoding="utf-8"), re.MULTILINE)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = True) -> str:
    """A table. numbers: all columns but the first are aligned to the right."""
    lines = [heads, ["---", *["---:" if numbers else "---"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def shape(row: Result) -> str:
    return f"{row['classes']:,} x {row['k']} x {row['n']:,}"


def elements(row: Result) -> int:
    """In the weight."""
    return int(row["classes"] * row["k"] * row["n"])


def number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def microseconds(ms: float | None) -> str:
    return "–" if ms is None else f"{1e3 * ms:,.0f}" if ms >= 0.1 else f"{1e3 * ms:.1f}"
