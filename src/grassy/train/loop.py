"""The training loop, for one process or several."""

import math
import time
from collections.abc import Callable
from pathlib import Path

from grassy.data.batch import Failure
from grassy.data.batch_transforms import Preparation
from grassy.distributed import processes
from grassy.inference.evaluate import Metrics, evaluate
from grassy.recipes.recipe import Recipe
from grassy.train.checkpoints import Checkpoints
from grassy.train.model import training_mode
from grassy.train.opening import opened_run
from grassy.train.reporter import Reporter
from grassy.train.run import Position, Run
from grassy.train.schedule import learning_rate_factor
from grassy.train.stopping import told_to_stop
from grassy.train.training_step import Steps
from grassy.train.trouble import TrainingStopped, last_good, stop_if_not_finite, trouble_explained

__all__ = ["Position", "TrainingStopped", "train"]

#: Updates between two exchanges in which processes agree whether to stop or save.
AGREE_EVERY = 10
#: The last run of several processes, kept alive. If it were freed while threads of gloo still release tensors, DDP's
#: reducer would wait for them while holding the GIL that they need, and the process would hang after a good run.
_LAST_RUN: list[Run] = []


def train(
    recipe: Recipe,
    data_dir: Path | None,
    output: Path,
    resume: str = "",
    device: str = "auto",
    quiet: bool = False,
    timeout: float = processes.TIMEOUT,
) -> Position:
    """Train a recipe on the images in `data_dir`, and write checkpoints and records to the folder `output`.

    resume: "" starts a run; "auto" resumes the run in `output` if there is one; a path resumes that run.
    timeout: seconds that a process waits for the others before it stops and names those that do not answer.

    On Ctrl-C or SIGTERM it finishes the update, saves and returns; `stopped_by` is then the signal's number.
    """
    with (
        processes.joined(device, timeout) as process,
        trouble_explained(recipe, process, output),
        opened_run(recipe, data_dir, output, resume, process, quiet) as (run, steps, checkpoints, reporter),
    ):
        if process.world_size > 1:
            _LAST_RUN[:] = [run]
        if run.position.epoch < recipe.epochs:
            train_epochs(run, steps, checkpoints, reporter)
        else:
            more = f", and {recipe.epochs} were asked for" if run.position.epoch > recipe.epochs else ""
            where = checkpoints.restored_from or output
            reporter.say(f"the run in {where} is finished: it has {run.position.epoch} epochs{more}")
        return run.position


def train_epochs(run: Run, steps: Steps, checkpoints: Checkpoints, reporter: Reporter) -> None:
    """Train from the current position to the last epoch, or until a signal arrives."""
    recipe, trained, position = run.recipe, run.trained, run.position
    with reporter.progress, told_to_stop(run.process.is_main) as told:
        reporter.introduce()
        while position.epoch < recipe.epochs:
            training_mode(trained.model, recipe.freeze)
            begin = time.monotonic() - position.seconds
            for batch in reporter.input_wait.timed(steps.batches(position.epoch, position.update)):
                trained.schedule.set(learning_rate_factor(recipe, position.time))
                failures = steps.take(batch, position.done)
                position.update += 1
                position.seconds = time.monotonic() - begin
                if trained.average is not None:
                    trained.average.update(trained.model, position.done)
                reporter.after_update(failures)
                stop, save = stop_or_save(run, checkpoints, reporter, told)
                if stop or save:
                    position.stopped_by = stop or None
                    reporter.tell_of_unreadable()
                    with reporter.progress.pause():
                        checkpoints.save()
                    begin = time.monotonic() - position.seconds
                if stop:
                    again = f"`grassy train --resume {run.output}` resumes the run"
                    reporter.say(f"stopped after update {position.done} and saved; {again}")
                    return
            finish_epoch(run, checkpoints, reporter, begin)
        checkpoints.save()


def stop_or_save(run: Run, checkpoints: Checkpoints, reporter: Reporter, told: Callable[[], int]) -> tuple[int, int]:
    """The signal to stop, or 0, and whether to save now. It also checks that the loss is finite, and reports progress.

    It reads from a GPU only now and then, since that waits for the GPU, and from other processes at agreed updates.
    """
    device = run.process.device
    due = reporter.progress.is_due()
    alone = run.process.world_size == 1
    agreed = alone or run.position.done % AGREE_EVERY == 0
    if (alone and (due or device.type == "cpu")) or (not alone and agreed):
        stop_if_not_finite(run)
    if due:
        reporter.report()
    if not agreed:
        return 0, 0
    late = run.recipe.checkpoint_interval > 0 and checkpoints.is_due()
    return processes.anywhere(told(), device), processes.anywhere(late, device)


def finish_epoch(run: Run, checkpoints: Checkpoints, reporter: Reporter, begin: float) -> None:
    """Validate, write the records, and save if it is time. begin: when the updates of the epoch started."""
    recipe, step, position = run.recipe, run.step, run.position
    stop_if_not_finite(run)  # waits for the device, so the measured time is correct
    position.seconds = time.monotonic() - begin
    step.losses.copy_(processes.summed(step.losses))
    reporter.report()
    with reporter.progress.pause(), processes.averaged_buffers(run.trained.evaluated):
        last = position.epoch + 1 == recipe.epochs
        metrics = None
        if last or (position.epoch + 1) % recipe.val_interval == 0:
            reporter.progress.validating()
            metrics, failures = validate(run)
            reporter.failures += failures
        reporter.end_of_epoch(metrics)
        if metrics is not None and math.isfinite(metrics.loss):
            checkpoints.keep_if_best(metrics)
        elif metrics is not None:
            message = f"the validation loss is not finite after epoch {position.epoch + 1}; {last_good(run.output)}"
            if recipe.nonfinite == "stop":
                raise TrainingStopped(message)
            reporter.say(message)
    position.next_epoch()
    step.losses.zero_()
    if not last and processes.anywhere(checkpoints.is_due(), run.process.device):
        with reporter.progress.pause():
            checkpoints.save()


def validate(run: Run) -> tuple[Metrics, list[Failure]]:
    """Metrics of the weights to save, on the images of all processes, and the images that could not be read.

    All processes get the metrics of the main process. If each validates all images, rounding may differ between them,
    but they must agree on whether to save the weights.
    """
    recipe, data, device, model = run.recipe, run.data, run.process.device, run.trained.evaluated
    prepare = Preparation(recipe.mean, recipe.std, device, recipe.channels_last)
    metrics, failures = evaluate(model, data.validation, prepare, device, run.step.amp_dtype, data.own_batches)
    return processes.gathered([metrics])[0], failures
