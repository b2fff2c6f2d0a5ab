"""What goes to a person: a bar where there is a terminal, and text that terminals and spreadsheets do not act on."""

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def bar(text: str, total: int, shown: bool = True) -> Iterator[Callable[..., None]]:
    """A function to call with how much more is done and, if it changes, what: `advance(count=1, text=None)`.

    It moves a bar on stderr, which disappears at the end. Without a terminal there, or if not `shown`, nothing appears.
    """
    if not shown or not sys.stderr.isatty():
        yield lambda count=1, text=None: None
        return
    from rich.console import Console
    from rich.progress import Progress

    # Redirecting, rich would send to stderr what is printed to a stdout that leads elsewhere.
    with Progress(console=Console(stderr=True), transient=True, redirect_stdout=False) as shown_bar:
        task = shown_bar.add_task(text, total=total)
        yield lambda count=1, text=None: shown_bar.update(task, advance=count, description=text)


def printable(text: str) -> str:
    """Text on one line, without anything that a terminal would take for a command: names are other people's."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def spreadsheet_safe(text: str) -> str:
    """Text for a cell of a CSV file: with an apostrophe in front if a spreadsheet would take it for a formula."""
    if not text.startswith(("=", "+", "-", "@", "\t", "\r")):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text  # a number
