"""Every row of docs/integrations.md names a test, and the test exists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "integrations.md").read_text()


def functions(file):
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_test_that_the_page_names_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 20
    for file, name in named:
        assert name in functions(ROOT / file), f"{file}::{name}"


def test_every_row_names_a_test():
    tables = PAGE.split("## Features and no loop")[0]
    rows = [line for line in tables.splitlines() if line.startswith("|")]
    rows = [row for row in rows if not row.startswith("|---") and not row.endswith("| test |")]
    assert len(rows) > 20
    for row in rows:
        assert re.search(r"\| `tests/[\w/]+\.py::test_\w+` \|$", row), row
