"""Numbers and tables as docs/performance.md writes them."""

import textwrap
from collections.abc import Iterable
from typing import Any

Result = dict[str, Any]


def machine(result: Result) -> str:
    where = result.get("gpu") or f"a CPU with {result.get('threads')} threads"
    commit = f" at {result['commit'][:7]}" if result.get("commit") else ""
    return f"{where}, torch {result['torch']}, grassy {result['grassy']}{commit}, {result['date']}"


def numbers(row: Result) -> int:
    """In the weight."""
    return int(row["classes"] * row["k"] * row["n"])


def between(values: Iterable[float], form: str) -> str:
    """The smallest and the largest, or the one number if they look the same."""
    values = list(values)
    return " to ".join(dict.fromkeys(format(value, form) for value in (min(values), max(values))))


def wrapped(paragraph: str) -> str:
    return textwrap.fill(paragraph, 120, break_long_words=False, break_on_hyphens=False)


def number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def microseconds(ms: float | None) -> str:
    return "–" if ms is None else f"{1e3 * ms:,.0f}" if ms >= 0.1 else f"{1e3 * ms:.1f}"


def table(heads: list[str], rows: Iterable[list[str]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
