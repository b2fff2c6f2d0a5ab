"""Progress of a run: on a terminal a bar with loss, accuracy, speed and remaining time; elsewhere plain lines."""

import contextlib
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from grassy.inference.evaluate import Metrics
from grassy.terminal import printable

#: Seconds between two readings of the loss, which wait for the device: on a terminal, and elsewhere.
BAR_INTERVAL, LINE_INTERVAL = 0.5, 30.0


class Progress:
    """Reports the updates of a run. It should be `quiet` in all processes but the main one."""

    def __init__(
        self, epochs: int, updates_per_epoch: int, batch_size: int, done: int = 0, quiet: bool = False
    ) -> None:
        self.epochs, self.updates_per_epoch, self.batch_size, self.quiet = epochs, updates_per_epoch, batch_size, quiet
        self.total, self.begin_at = epochs * updates_per_epoch, done
        self.started = self.looked = time.monotonic()
        self.looked_at = done
        self.accuracy: float | None = None
        self.speed = 0.0
        self._bar: Any = None
        self._task: Any = None
        self._speaking = contextlib.suppress(OSError, ValueError)  # a closed terminal must not stop a run
        if sys.stderr is None:
            self.quiet = True
        elif not quiet and sys.stderr.isatty():
            self._open_bar(done)
        self.interval = BAR_INTERVAL if self._bar is not None else LINE_INTERVAL

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            with self._speaking:
                self._bar.stop()

    def is_due(self) -> bool:
        """Whether it is time to report again."""
        return time.monotonic() - self.looked >= self.interval

    def report(self, done: int, loss: float) -> None:
        """Report `done` updates in total, and the mean loss of the epoch so far."""
        now = time.monotonic()
        if done > self.looked_at and now > self.looked:
            self.speed = (done - self.looked_at) * self.batch_size / (now - self.looked)
        self.looked, self.looked_at = now, done
        if self._bar is not None:
            self._bar.update(self._task, completed=done, **self._fields(done, loss))
        else:
            epoch, update = divmod(done, self.updates_per_epoch)
            if update:
                where = f"epoch {epoch + 1}/{self.epochs}, update {update}/{self.updates_per_epoch}"
                self.say(f"{where}: loss {loss:.4f}, {self.speed:,.0f} images/s, {self._left(done)} left")

    def end_of_epoch(self, epoch: int, loss: float, metrics: Metrics | None, seconds: float) -> None:
        """Print the results of an epoch. epoch counts from 0; the line counts from 1. seconds: time of its updates."""
        self.speed = self.updates_per_epoch * self.batch_size / max(seconds, 1e-9)
        done = (epoch + 1) * self.updates_per_epoch
        scores = ""
        if metrics is not None:
            self.accuracy = metrics.top1
            scores = f", val loss {metrics.loss:.4f}, top-1 {metrics.top1:.2f}, top-5 {metrics.top5:.2f}"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, **self._fields(done, loss))
        self.say(f"epoch {epoch + 1}/{self.epochs}: loss {loss:.4f}{scores}, {self.speed:,.0f} images/s")

    def validating(self) -> None:
        """Show on a terminal that validation runs, since the bar does not move."""
        if self._bar is not None:
            self._bar.update(self._task, speed="validating,")

    def say(self, text: str) -> None:
        """Print a line. It may hold names of files, which may be anything."""
        if self.quiet:
            return
        text = printable(text)
        with self._speaking:
            if self._bar is not None:
                self._bar.console.print(text, highlight=False, markup=False)
            else:
                print(text, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the time of this block, which validates or saves, from the speed of updates."""
        begin = time.monotonic()
        yield
        self.looked += time.monotonic() - begin

    def _fields(self, done: int, loss: float) -> dict[str, str]:
        accuracy = "-" if self.accuracy is None else f"{self.accuracy:.2f}"
        return {
            "epoch": f"{max(1, -(-done // self.updates_per_epoch))}/{self.epochs}",
            "loss": f"{loss:.4f}",
            "accuracy": accuracy,
            "speed": f"{self.speed:,.0f}",
        }

    def _left(self, done: int) -> str:
        elapsed = time.monotonic() - self.started
        seconds = elapsed / max(1, done - self.begin_at) * (self.total - done)
        return str(timedelta(seconds=round(seconds)))

    def _open_bar(self, done: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("top-1 {task.fields[accuracy]}"),
            TextColumn("{task.fields[speed]} images/s"),
            TimeRemainingColumn(compact=True),
            console=Console(stderr=True),
            expand=True,
            transient=True,  # only the lines of epochs stay
        )
        empty = {"epoch": f"1/{self.epochs}", "loss": "-", "accuracy": "-", "speed": "-"}
        self._task = self._bar.add_task("", total=self.total, completed=done, **empty)
        with self._speaking:
            self._bar.start()
