"""Output for people: a progress bar, and text that is safe for terminals and spreadsheets."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

SECONDS_PER_LINE = 60.0


@contextlib.contextmanager
def bar(text: str, total: int, shown: bool = True) -> Iterator[Callable[..., None]]:
    """Show a progress bar on stderr and yield `advance(count=1, text=None)`, which moves it and may change its text.

    The bar disappears at the end. If stderr is no terminal, one line per minute replaces it. Nothing appears if `shown`
    is False.
    """
    if not shown:
        yield lambda count=1, text=None: None
        return
    if not sys.stderr.isatty():
        yield _Lines(text, total)
        return
    from rich.console import Console
    from rich.progress import Progress

    # With redirect_stdout, rich would send what is printed to a redirected stdout to stderr.
    with Progress(console=Console(stderr=True), transient=True, redirect_stdout=False) as shown_bar:
        task = shown_bar.add_task(text, total=total)
        yield lambda count=1, text=None: shown_bar.update(task, advance=count, description=text)


class _Lines:
    """Progress as plain lines for logs."""

    def __init__(self, text: str, total: int) -> None:
        self.text, self.total, self.done, self.last = text, total, 0, time.monotonic()

    def __call__(self, count: int = 1, text: str | None = None) -> None:
        self.done += count
        self.text = self.text if text is None else text
        if time.monotonic() - self.last >= SECONDS_PER_LINE:
            self.last = time.monotonic()
            print(f"{self.text}: {self.done:,} of {self.total:,}", file=sys.stderr, flush=True)


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


def readable_bytes(size: float) -> str:
    """A number of bytes for people."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
