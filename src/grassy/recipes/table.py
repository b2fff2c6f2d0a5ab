"""The output of `grassy recipes`: a table of recipes with the paper's results, or one recipe in full."""

import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grassy import paper
from grassy.recipes.files import load_recipe, recipe_names
from grassy.recipes.recipe import Recipe
from grassy.spelling import nearest

#: Titles of the columns, and whether they hold numbers.
COLUMNS = {
    "recipe": False,
    "model": False,
    "head": False,
    "epochs": True,
    "batch": True,
    "top-1": True,
    "top-5": True,
    "SVM": True,
    "description": False,
}
#: Columns to drop on a narrow terminal, in this order; columns without values are dropped before them.
DISPENSABLE = ("model", "batch", "epochs", "head", "top-5")
#: Smallest width to which a description is cut.
SHORTEST = 20


class RecipeRow(NamedTuple):
    """One line of the list. The last three numbers are the paper's, or None; `svm` is the mean of six datasets."""

    name: str
    model: str
    head: str
    epochs: int
    batch_size: int
    top1: float | None
    top5: float | None
    svm: float | None
    description: str

    def cells(self) -> tuple[str, ...]:
        # The paper reports one decimal for the transfer of transformers.
        figures = ((self.top1, 2), (self.top5, 2), (self.svm, 1))
        numbers = ("-" if figure is None else f"{figure:.{decimals}f}" for figure, decimals in figures)
        return (self.name, self.model, self.head, str(self.epochs), str(self.batch_size), *numbers, self.description)


def list_recipes(pattern: str = "") -> list[RecipeRow]:
    """The recipes whose names contain the pattern, or match it if it has shell wildcards (* ? [)."""
    names, wanted = recipe_names(), pattern.lower()
    if any(wildcard in wanted for wildcard in "*?["):
        chosen = fnmatch.filter(names, wanted)
    else:
        chosen = [name for name in names if wanted in name]
    if not chosen:
        raise ValueError(f"no recipe matches {pattern!r}{nearest(wanted, names)}")
    return [_row(name, load_recipe(name)) for name in chosen]


def table(pattern: str = "", console: Any = None) -> str:
    """The list as text: a table that fits the terminal, or aligned lines without a terminal.

    console: a rich Console to fit, instead of one on stdout.
    """
    rows = list_recipes(pattern)
    if console is None:
        from rich.console import Console

        console = Console()
    return fitted(rows, console) if console.is_terminal else "\n".join(aligned(rows))


def show(name: str | Path) -> str:
    """All settings of one recipe as YAML, with bases and defaults resolved. The text loads as the same recipe."""
    import yaml

    if not str(name):
        raise ValueError("which recipe? give its name, as `grassy recipes` lists it")
    recipe = load_recipe(name)
    # default_flow_style=None puts lists and mappings without nested ones on one line.
    text = yaml.safe_dump(recipe.to_dict(), sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)
    return "\n".join([*_of_paper(recipe.paper), text.rstrip("\n")])


def _of_paper(row: str) -> list[str]:
    """The paper's results for a row, as comments."""
    if row not in paper.rows():
        return []
    figures = paper.figures(row)
    figures.pop("from")
    corrections = figures.pop("corrections", {})
    words = []
    for key, value in figures.items():
        several = isinstance(value, dict)
        text = ", ".join(f"{name} {each}" for name, each in value.items()) if several else str(value)
        if key in corrections:
            text += f" ({corrections[key]['value']} {corrections[key]['source']})"
        words.append(f"# the paper: {key.replace('_', ' ')} {text}")
    return words


def aligned(rows: Sequence[RecipeRow]) -> list[str]:
    """Aligned lines of text, titles first, with at least two spaces between columns."""
    lines = [tuple(COLUMNS), *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    justify = [str.rjust if is_number else str.ljust for is_number in COLUMNS.values()]
    return [
        "  ".join(just(cell, width) for just, cell, width in zip(justify, line, widths, strict=True)).rstrip()
        for line in lines
    ]


def fitted(rows: Sequence[RecipeRow], console: Any) -> str:
    """A table with as many columns as fit the console; only the description may be cut."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    columns = dict(zip(COLUMNS, zip(*(row.cells() for row in rows), strict=True), strict=True))
    columns, room = _columns_that_fit(columns, console.width)
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in columns:
        justify: Any = "right" if COLUMNS[title] else "left"
        drawn.add_column(title, justify=justify, no_wrap=True, max_width=room if title == "description" else None)
    for cells in zip(*columns.values(), strict=True):
        drawn.add_row(*map(Text, cells))
    with console.capture() as capture:
        console.print(drawn)
    return str(capture.get()).rstrip("\n")


def _columns_that_fit(columns: dict[str, Any], width: int) -> tuple[dict[str, Any], int]:
    """The columns that fit, and the width left for the description."""
    saying_nothing = [title for title, cells in columns.items() if set(cells) == {"-"}]
    for hidden in ("", "description"):  # the description goes last, if dropping all other columns is not enough
        kept = {title: cells for title, cells in columns.items() if title != hidden}
        for dispensable in (*saying_nothing, *DISPENSABLE, ""):
            others = sum(max(map(len, (title, *kept[title]))) for title in kept if title != "description")
            room = width - others - 3 * len(kept) + 1  # minus borders and gaps
            if room >= (SHORTEST if "description" in kept else 0):
                return kept, room
            kept.pop(dispensable, None)
    return kept, 0


def _row(name: str, recipe: Recipe) -> RecipeRow:
    figures = paper.figures(recipe.paper) if recipe.paper else {}
    return RecipeRow(
        name=name,
        model=recipe.model,
        head=_head(recipe),
        epochs=recipe.epochs,
        batch_size=recipe.batch_size,
        top1=figures.get("top1"),
        top5=figures.get("top5"),
        svm=figures.get("svm", {}).get("average"),
        description=recipe.description,
    )


def _head(recipe: Recipe) -> str:
    """The name of the head, with its subspace dimension if it has one."""
    k = recipe.head.get("k")
    return recipe.head["name"] + ("" if k is None else f" k={k}")
