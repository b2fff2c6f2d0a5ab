"""Output for people: a progress bar, and text that is safe for terminals and spreadsheets."""

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def bar(text: str, total: int, shown: bool = True) -> Iterator[Callable[..., None]]:
    """Show a progress bar on stderr and yield `advance(count=1, text=None)`, which moves it and may change its text.

    The bar disappears at the end. Nothing appears if stderr is not a terminal, or if `shown` is False.
    """
    if not shown or not sys.stderr.isatty():
        yield lambda count=1, text=None: None
        return
    from rich.console import Console
    from rich.progress import Progress

    # With redirect_stdout, rich would send what is printed to a redirected stdout to stderr.
    with Progress(console=Console(stderr=True), transient=True, redirect_stdout=False) as shown_bar:
        task = shown_bar.add_task(text, total=total)
        yield lambda count=1, text=None: shown_bar.update(task, advance=count, description=text)


def printable(text: str) -> str:
    """Escape control characters in text from files or users, so that a terminal cannot interpret them."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def spreadsheet_safe(text: str) -> str:
    """Prefix the text of a CSV cell with an apostrophe if a spreadsheet would interpret it as a formula."""
    if not text.startswith(("=", "+", "-", "@", "\t", "\r")):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text  # a number
