"""Errors that stop a run, as one sentence that names the last good checkpoint."""

import contextlib
import signal
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from grassy.atomic import write_atomically
from grassy.distributed import processes
from grassy.distributed.processes import Process
from grassy.recipes.recipe import Recipe
from grassy.runs.state import state_in
from grassy.train.run import Run

#: Stop after this many skipped updates in a row.
MAX_SKIPPED = 20
#: File for the names of the images with a non-finite loss.
NONFINITE = "nonfinite_batch.txt"


class TrainingStopped(RuntimeError):
    """Training cannot continue; the message names the last good checkpoint."""


@contextlib.contextmanager
def trouble_explained(recipe: Recipe, process: Process, output: Path) -> Iterator[None]:
    """Raise TrainingStopped, with advice, if memory runs out or if a worker or another process dies."""
    try:
        yield
    except (RuntimeError, MemoryError, ConnectionError, EOFError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        # torch raises the first anywhere in the main process; the second comes from the worker's pipe.
        if "DataLoader worker" in str(error) or (not isinstance(error, RuntimeError) and _came_from_a_pipe(error)):
            _tell_of_dead_workers_once()
            raise TrainingStopped(
                f"a process that loads images has died ({reason.strip(' .')}): if memory ran out, fewer workers "
                f"need less; {last_good(output)}"
            ) from error
        if is_of_another_process(error):
            raise TrainingStopped(f"{processes.missing_processes()}; {last_good(output)} ({reason})") from error
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "can't allocate memory" not in str(error):
            raise
        size = max(1, recipe.batch_size // process.world_size // recipe.grad_accum_steps)
        raise TrainingStopped(
            f"out of memory with {size} images of {recipe.img_size} pixels per batch on {process.device}: lower "
            f"batch_size, or raise grad_accum_steps, which keeps the batch; {last_good(output)} ({reason})"
        ) from error


def is_of_another_process(error: BaseException) -> bool:
    """Whether an error means that another process is unreachable. gloo raises a RuntimeError."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error).partition("\n")[0]


def _tell_of_dead_workers_once() -> None:
    """Take torch's handler of SIGCHLD away: it would raise again for the same worker when the others are ended, and
    print a traceback after our sentence. Later loaders look at their workers every five seconds.
    """
    if threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _came_from_a_pipe(error: BaseException) -> bool:
    """Whether an error was raised while receiving from another process of this machine."""
    frames = traceback.extract_tb(error.__traceback__)
    return any("multiprocessing" in Path(frame.filename).parts for frame in frames)


def stop_if_not_finite(run: Run) -> None:
    """Raise TrainingStopped and name the images if the loss was not finite in some process. Waits for the device."""
    number, skipped = int(processes.largest(run.step.first_bad)), run.step.skipped_in_a_row
    if number < 0 and skipped < MAX_SKIPPED:
        return
    epoch, update = divmod(number if number >= 0 else run.position.done - 1, run.position.updates_per_epoch)
    names = run.data.train.names_of(epoch, update)
    listing = run.output / NONFINITE
    if run.process.is_main:
        text = "".join(f"{name}\n" for name in names)
        write_atomically(listing, lambda file: file.write(text.encode("utf-8", "surrogateescape")))
    row = f", the last of {skipped} in a row that were skipped" if number < 0 else ""
    raise TrainingStopped(
        f"the loss is not finite at update {update + 1} of epoch {epoch + 1}{row}, on {names[0]} and "
        f"{len(names) - 1} other images listed in {listing}; {last_good(run.output)}; "
        "nonfinite=skip skips such updates; a lower lr or clip_grad may prevent them"
    )


def last_good(output: Path) -> str:
    good = state_in(output)
    return "there is no checkpoint yet" if good is None else f"the last good checkpoint is {good}"
