"""What the demo says of its runs: means over seeds, differences, a table, and sentences."""

import statistics
from typing import Any

from rich.table import Table

from grassy.demo.measures import Difference, difference

#: What is measured: the key in demo.json, what it is called, and how many decimals are worth showing.
MEASURES = (
    ("accuracy", "accuracy, trained", 1),
    ("angle", "angle in a class (°)", 1),
    ("strongest", "in one direction (%)", 1),
    ("inside", "in its subspace (%)", 1),
    ("one_shot", "unseen, 1 example", 1),
    ("five_shot", "unseen, 5 examples", 1),
    ("slant", "slant (R²)", 2),
    ("width", "width (R²)", 2),
    ("ink", "ink (R²)", 2),
)
#: What is compared, as it is called in demo.json and in the table.
HEADS = SOFTMAX, STANDARDIZED, SMALL, OURS = "softmax", "softmax, standardised", "subspaces, k = 2", "subspaces, k = 8"
PIXELS = "pixels"
COLUMNS = (*HEADS, PIXELS)


def _values_of(runs: list[dict[str, Any]], head: str, key: str) -> list[float]:
    """One value per seed; none where the head has no such measure."""
    return [run[key] for run in runs if run["head"] == head and key in run]


def compare(runs: list[dict[str, Any]], key: str, against: str) -> Difference:
    """The large subspaces minus another head."""
    return difference(_values_of(runs, OURS, key), _values_of(runs, against, key))


def summarize(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each measure the mean of each head over seeds, and the differences of the large subspaces from softmax."""
    return {
        key: {
            **{head: statistics.fmean(found) for head in COLUMNS if (found := _values_of(runs, head, key))},
            **{
                f"{OURS} - {head}": compare(runs, key, head)._asdict()
                for head in (SOFTMAX, STANDARDIZED)
                if _values_of(runs, head, key)
            },
        }
        for key, _, _ in MEASURES
    }


def sentences(runs: list[dict[str, Any]]) -> list[str]:
    """Three sentences on what was seen and what was not, whatever the numbers are."""

    def mean(head: str, key: str) -> float:
        return statistics.fmean(_values_of(runs, head, key))

    def lead(key: str, decimals: int) -> str:
        found = compare(runs, key, SOFTMAX)
        interval = "" if found.low is None else f", 95 % CI {found.low:+.{decimals}f} to {found.high:+.{decimals}f}"
        standardised = compare(runs, key, STANDARDIZED).mean
        return f"({found.mean:+.{decimals}f}{interval}; {standardised:+.{decimals}f} over standardised softmax)"

    not_seen = [
        f"a clear gain in {what} {lead(key, 1)}"
        for key, what in (("accuracy", "accuracy on trained digits"), ("one_shot", "accuracy on unseen digits"))
        if not (compare(runs, key, SOFTMAX).is_clear and compare(runs, key, SOFTMAX).mean > 0)
    ]
    if mean(PIXELS, "one_shot") > max(mean(head, "one_shot") for head in HEADS):
        not_seen.append(f"features better than plain pixels on unseen digits ({mean(PIXELS, 'one_shot'):.1f} %)")
    not_seen.append(
        f"features that lie entirely in their subspaces ({mean(OURS, 'inside'):.0f} % of their energy does)"
    )
    pairs = [", or ".join(not_seen[first : first + 2]) for first in range(0, len(not_seen), 2)]
    return [
        f"Spread: two features of a digit are {mean(OURS, 'angle'):.1f}° apart with subspaces (k = 8) and "
        f"{mean(SOFTMAX, 'angle'):.1f}° with softmax {lead('angle', 1)}.",
        f"Kept: one example of each unseen digit gives {mean(OURS, 'one_shot'):.1f} % with subspaces and "
        f"{mean(SOFTMAX, 'one_shot'):.1f} % with softmax {lead('one_shot', 1)}; neighbours predict the slant with R² "
        f"{mean(OURS, 'slant'):.2f} and {mean(SOFTMAX, 'slant'):.2f}.",
        f"Not seen: {'. Nor did we see '.join(pairs)}.",
    ]


def rows(result: dict[str, Any], against: tuple[str, ...]) -> list[list[str]]:
    """One row of text per measure: the mean of each head, and the differences of the large subspaces from others."""
    shown = []
    for key, title, decimals in MEASURES:
        found = result["summary"][key]
        means = [f"{found[head]:.{decimals}f}" if head in found else "–" for head in COLUMNS]
        pairs = [found.get(f"{OURS} - {head}") for head in against]
        each = ["–" if pair is None else Difference(**pair).shown(decimals) for pair in pairs]
        shown.append([title, *means, *each])
    return shown


def full_table(result: dict[str, Any]) -> list[list[str]]:
    """For the page: the titles of the columns, then the rows."""
    against = (SOFTMAX, STANDARDIZED)
    return [["", *COLUMNS, *(f"k = 8 minus {head} (95 % CI)" for head in against)], *rows(result, against)]


def table(result: dict[str, Any]) -> Table:
    """For a terminal of 80 columns."""
    shown = Table("", "softmax", "+ std", "k=2", "k=8", "pixels", "k=8 - softmax", box=None, padding=(0, 1, 0, 0))
    for column in shown.columns[1:]:
        column.justify = "right"
    for row in rows(result, (SOFTMAX,)):
        shown.add_row(*row)
    return shown


def caption(result: dict[str, Any], standardised: str) -> str:
    """How to read the table, which calls softmax on standardised features so."""
    seeds = result["settings"]["seeds"]
    return (
        f"Means over {seeds} {'seed' if seeds == 1 else 'seeds'}, and paired differences with 95 % confidence "
        f"intervals. Other digits are held out with each seed. '{standardised}' is softmax on standardised features, "
        "which the subspaces (k = 2, k = 8) also have. The first four rows are of test images of trained digits: the "
        "angle between two features of a class, and the share of their energy along their best direction and in the "
        "subspace of the class. An unseen digit takes the class of the nearest of 1 or 5 examples (%). "
        "R² is that of a property of a test image, predicted from its five nearest training images of the same class."
    )
