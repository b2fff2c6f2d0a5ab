"""Stop a run by a signal: it finishes the update, saves and returns."""

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

#: Seconds after which another Ctrl-C counts as a second one.
IMPATIENCE = 1.0
STOPPING = b"\ngrassy: stopping after this update, and saving; Ctrl-C again quits without saving\n"


@contextlib.contextmanager
def told_to_stop(answer: bool) -> Iterator[Callable[[], int]]:
    """Yield a function that returns the signal received (SIGINT or SIGTERM), or 0. A second Ctrl-C ends the process.

    answer: print a line on Ctrl-C.
    """
    received: list[int] = []
    previous: dict[int, Any] = {}
    first = math.inf

    def note(number: int, _: Any) -> None:
        nonlocal first
        if not received:
            received.append(number)
            first = time.monotonic()
            if (
                answer and number == signal.SIGINT and sys.stderr is not None
            ):  # otherwise file descriptor 2 may be any other file
                with contextlib.suppress(OSError):  # not print, which may be what was interrupted
                    os.write(2, STOPPING)
        elif number == signal.SIGINT and time.monotonic() - first > IMPATIENCE:
            signal.signal(number, previous[number])
            signal.raise_signal(number)

    for number in (int(signal.SIGINT), int(signal.SIGTERM)):
        with contextlib.suppress(ValueError):  # outside the main thread, the caller handles signals
            previous[number] = signal.signal(number, note)
    try:
        yield lambda: received[0] if received else 0
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
