"""The training loop, for one process or for many."""

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from grassy.data.device_loader import ResidentLoader
from grassy.data.loader import Failure, seed_of
from grassy.distributed import processes as distributed
from grassy.distributed.processes import Process
from grassy.inference.evaluate import Metrics, evaluate
from grassy.optim.joint import GRASSMANN, MANIFOLD
from grassy.runs import records
from grassy.runs.atomic import write_atomically
from grassy.runs.recipe import Recipe
from grassy.runs.state import STATE
from grassy.runs.weights import Description
from grassy.train import diagnostics
from grassy.train.model import training_mode
from grassy.train.parts import Parts, State, seed_everything
from grassy.train.progress import Progress
from grassy.train.schedule import learning_rate_factor
from grassy.train.update import CapturedUpdate

#: How often several processes tell each other whether to stop or to save, in updates.
AGREE_EVERY = 10
#: So many updates skipped in a row are too many.
MAX_SKIPPED = 20
#: Seconds after which another signal to stop is meant.
IMPATIENCE = 1.0
STOPPING = b"\ngrassy: stopping after this update, and saving; Ctrl-C again quits without saving\n"
#: Names of the images on which the loss was not finite.
NONFINITE = "nonfinite_batch.txt"


class TrainingStopped(RuntimeError):
    """Training cannot go on; the message says where the last good checkpoint is."""


def train(
    recipe: Recipe, data_dir: Path | None, output: Path, resume: str = "", device: str = "auto", quiet: bool = False
) -> State:
    """Train what the recipe says on the images in `data_dir`; checkpoints and records go to the folder `output`.

    resume: "" begins a run, "auto" goes on with the one in `output` if there is one, a path with that one.

    Ctrl-C and SIGTERM finish the update, save and return; `State.stopped_by` then is the signal's number.
    """
    with distributed.joined(device) as process:
        run = None
        try:
            run = Run(recipe, data_dir, output, resume, process, quiet)
            return run.train()
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            raise TrainingStopped(_out_of_memory(recipe, process, output, error)) from error
        finally:
            if run is not None:
                run.close()


class Run(Parts):
    """One run, from where it is to its end."""

    def __init__(
        self, recipe: Recipe, data_dir: Path | None, output: Path, resume: str, process: Process, quiet: bool = False
    ) -> None:
        super().__init__(recipe, data_dir, output, resume, process)
        self.batches, self.run_update = self._batches_and_update()

        self.best: tuple[dict[str, Tensor], Description] | None = None  # weights that are still to be written
        self.failures: list[Failure] = []  # of this process, in this epoch
        self.counts = (self.optimizer.capped_classes, self.optimizer.skipped_classes)  # of classes, so far
        self.last_save = time.monotonic()
        self.curves = None
        if process.is_main and self.state.epoch < recipe.epochs:
            self.folder.claim()
            if self.resumed_from is not None:
                self.folder.adopt_best(self.resumed_from)
            records.save_settings(output, recipe, data_dir, process.world_size, self.device)
            self.curves = records.Curves(output, self.done)
        quiet = quiet or not process.is_main
        self.progress = Progress(recipe.epochs, self.updates, self.data.batch_size, self.done, quiet)
        self.progress.accuracy = self.state.rows[-1]["eval_top1"] if self.state.rows else None

    # ------------------------------------------------------------------------------------------------ the loop

    def train(self) -> State:
        state, recipe = self.state, self.recipe
        if state.epoch >= recipe.epochs:
            where = self.resumed_from.parent if self.resumed_from else self.output
            asked = f", and {recipe.epochs} were asked for" if state.epoch > recipe.epochs else ""
            self.progress.say(f"the run in {where} is finished: it has {state.epoch} epochs{asked}")
            return state
        with self.progress, _told_to_stop(self.process.is_main) as told:
            self._introduce()
            while state.epoch < recipe.epochs:
                training_mode(self.model, recipe.freeze)
                begin = time.monotonic() - state.seconds
                for batch in self._until_workers_die(self.batches(state.epoch, state.update), told):
                    self.schedule.set(learning_rate_factor(recipe, state.epoch + state.update / self.updates))
                    self.run_update(batch)
                    state.update += 1
                    state.seconds = time.monotonic() - begin
                    if self.average is not None:
                        self.average.update(self.model, self.done)
                    stop, save = self._look(told)
                    if stop:
                        return self._stop(told)
                    if save:
                        with self.progress.pause():
                            self._save()
                        begin = time.monotonic() - state.seconds
                if told() is not None and state.update < self.updates:  # a signal has ended the workers
                    return self._stop(told)
                self._finish_epoch(begin)
        self._save()
        return state

    def _stop(self, told: Callable[[], int | None]) -> State:
        self.state.stopped_by = told()
        self._save()
        self.progress.say(f"stopped after update {self.done} and saved; --resume auto goes on")
        return self.state

    def _until_workers_die(self, batches: Iterator[Any], told: Callable[[], int | None]) -> Iterator[Any]:
        """The batches; they end early if a signal to stop has ended the workers that prepare them."""
        while True:
            try:
                batch = next(batches, None)
            except RuntimeError as error:
                if "DataLoader worker" in str(error) and told() is not None:
                    return
                raise
            if batch is None:
                return
            yield batch

    def _look(self, told: Callable[[], int | None]) -> tuple[bool, bool]:
        """Whether to stop and whether to save now. On the way: is the loss finite, what is there to report?

        A GPU is asked only now and then, since it has to be waited for, and other processes at agreed moments only.
        """
        due = self.progress.is_due()
        alone = self.process.world_size == 1
        agreed = alone or self.done % AGREE_EVERY == 0
        if (alone and (due or self.device.type == "cpu")) or (not alone and agreed):
            self._stop_if_not_finite()
        if due:
            self.progress.report(self.done, self._mean_loss())
        if not agreed:
            return False, False
        interval = self.recipe.checkpoint_interval
        late = interval > 0 and time.monotonic() - self.last_save >= interval
        if alone:
            return told() is not None, late
        return (
            distributed.anywhere(told() is not None, self.device),
            distributed.anywhere(late and self.process.is_main, self.device),
        )

    def _finish_epoch(self, begin: float) -> None:
        """Validate, write the records, and save if it is time."""
        state = self.state
        self._stop_if_not_finite()  # waits for the device, so the time is right
        state.seconds = time.monotonic() - begin
        self.update.losses.copy_(distributed.summed(self.update.losses))
        self.progress.report(self.done, self._mean_loss())
        with self.progress.pause():
            self._close_epoch()

    def _close_epoch(self) -> None:
        state, recipe = self.state, self.recipe
        last = state.epoch + 1 == recipe.epochs
        metrics = self._validate() if last or (state.epoch + 1) % recipe.val_interval == 0 else None
        row = self._row(metrics)
        state.rows.append(row)
        self._report_unreadable(distributed.gathered(self.failures))
        self.failures = []
        self._report_subspaces()
        if self.curves is not None:
            records.save_summary(self.output, state.rows)
            self._draw(row)
        self.progress.end_of_epoch(state.epoch, row["train_loss"], metrics, state.seconds)
        self._keep_if_best(metrics)
        state.epoch, state.update, state.seconds = state.epoch + 1, 0, 0.0
        self.update.losses.zero_()
        late = time.monotonic() - self.last_save >= recipe.checkpoint_interval and self.process.is_main
        if not last and distributed.anywhere(late, self.device):
            self._save()

    def _validate(self) -> Metrics:
        model = self._evaluated_model()
        distributed.average_buffers(model)
        self.progress.validating()
        metrics, failures = evaluate(
            model, self.data.validation, self.prepare_validation, self.device, self.amp_dtype, self.data.sharded
        )
        self._report_unreadable(failures)
        return metrics

    def _evaluated_model(self) -> nn.Module:
        return self.model if self.average is None else self.average.module

    def _keep_if_best(self, metrics: Metrics | None) -> None:
        """Copy the best weights so far to the CPU, to be written with the next checkpoint."""
        if metrics is None:
            return
        if not math.isfinite(metrics.loss):
            message = f"the validation loss is not finite after epoch {self.state.epoch + 1}; {self._last_good()}"
            if self.recipe.nonfinite == "stop":
                raise TrainingStopped(message)
            self.progress.say(message)
        elif (metrics.top1, -metrics.loss) > (self.state.best, -self.state.best_loss):
            self.state.best, self.state.best_loss = metrics.top1, metrics.loss
            if self.process.is_main:
                weights = self._evaluated_model().state_dict()
                self.best = {name: tensor.cpu().clone() for name, tensor in weights.items()}, self.description()

    # ------------------------------------------------------------------------------------------------ saving

    def _save(self) -> None:
        self._stop_if_not_finite()  # a checkpoint is always a good one
        if self.process.is_main:
            last = self._evaluated_model().state_dict(), self.description()
            self.folder.save(self.best, last, self.state_dict())
            self.best = None
        distributed.wait_for_all()
        self.last_save = time.monotonic()

    # ------------------------------------------------------------------------------------------------ records

    def _introduce(self) -> None:
        for note in self.data.notes:
            self.progress.say(note)
        weights = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        count = f"{weights / 1e6:.1f} M" if weights >= 1e5 else f"{weights:,}"
        place = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        many = f", {self.process.world_size} processes" if self.process.world_size > 1 else ""
        head = " ".join(f"{key}={value}" if key != "name" else str(value) for key, value in self.head.items())
        self.progress.say(
            f"{self.recipe.model} with head {head}, {count} weights to train, {self.data.num_classes} "
            f"classes, {self.updates} updates of {self.data.batch_size} images an epoch, on {place}{many}, into "
            f"{self.output}"
        )
        updates = self.updates * self.recipe.epochs
        if self.recipe.model_ema and (kept := self.recipe.model_ema_decay**updates) > 0.05:
            better = f"try {1 - 20 / updates:.3g}" if updates > 20 else "train for longer, or without it"
            self.progress.say(
                f"the average of the weights will still be {kept:.0%} what training begins with: {updates} updates are "
                f"few for model_ema_decay={self.recipe.model_ema_decay:g}; {better}"
            )
        if self.done:
            self.progress.say(f"resumed after update {self.done}, in epoch {self.state.epoch + 1}")

    def _mean_loss(self) -> float:
        total, count = self.update.losses.tolist()
        return total / count if count else math.nan

    def _row(self, metrics: Metrics | None) -> dict[str, Any]:
        rates = {group[MANIFOLD]: float(group["lr"]) for group in self.optimizer.param_groups}
        return {
            "epoch": self.state.epoch,
            "train_loss": self._mean_loss(),
            "eval_loss": None if metrics is None else metrics.loss,
            "eval_top1": None if metrics is None else metrics.top1,
            "eval_top5": None if metrics is None else metrics.top5,
            "lr": rates.get("euclidean"),
            "head_lr": rates.get(GRASSMANN),
            "seconds": self.state.seconds,
            "eval_effective_rank": None if metrics is None else metrics.effective_rank,
        }

    def _draw(self, row: dict[str, Any]) -> None:
        assert self.curves is not None
        scalars = {name: row[name] for name in row if name != "epoch" and row[name] is not None}
        scalars |= diagnostics.after_an_update(self.model, self.optimizer)
        if len(self.state.rows) == min(2, self.recipe.epochs):  # the first epoch may have spent its time compiling
            size = self.data.batch_size // self.process.world_size
            with contextlib.suppress(torch.OutOfMemoryError):  # of a head that fits only once
                seconds = diagnostics.head_seconds(self.model, size, self.amp_dtype)
                scalars["time/head_share"] = seconds / (row["seconds"] / self.updates)
        self.curves.add(scalars, self.done)

    def _report_subspaces(self) -> None:
        before, self.counts = self.counts, (self.optimizer.capped_classes, self.optimizer.skipped_classes)
        for line in diagnostics.trouble_of_an_epoch(before, self.counts, self.recipe.max_angle):
            self.progress.say(line)

    def _report_unreadable(self, failures: list[Failure]) -> None:
        """Name an image that cannot be read once, and count them all."""
        for failure in failures:
            if failure.name not in self.state.unreadable:
                self.state.unreadable[failure.name] = failure.reason
                count = len(self.state.unreadable)
                self.progress.say(f"cannot read {failure.name}: {failure.reason} ({count} skipped so far)")

    def close(self) -> None:
        if self.curves is not None:
            self.curves.close()
        self.folder.release()

    # ------------------------------------------------------------------------------------------------ stopping

    def _stop_if_not_finite(self) -> None:
        number = int(distributed.largest(self.update.first_bad))
        skipped = self.update.skipped_in_a_row
        if number < 0 and skipped < MAX_SKIPPED:
            return
        epoch, update = divmod(number if number >= 0 else self.done - 1, self.updates)
        names = self.data.train.names_of(epoch, update)
        listing = self.output / NONFINITE
        if self.process.is_main:
            text = "".join(f"{name}\n" for name in names)
            write_atomically(listing, lambda file: file.write(text.encode()))
        row = f", the last of {skipped} in a row that were skipped" if number < 0 else ""
        raise TrainingStopped(
            f"the loss is not finite at update {update + 1} of epoch {epoch + 1}{row}, on {names[0]} and "
            f"{len(names) - 1} other images that {listing} names; {self._last_good()}; "
            "nonfinite=skip would leave such updates out, a lower lr or clip_grad may prevent them"
        )

    def _last_good(self) -> str:
        return _last_good(self.output)

    def _batches_and_update(self) -> tuple[Callable[[int, int], Iterator[Any]], Callable[[Any], None]]:
        """What the loop iterates over, and what it does with each of them."""
        if self.captured:
            assert isinstance(self.data.train, ResidentLoader)
            return self.data.train.plans, CapturedUpdate(self.update, self.data.train.assemble)

        def run(parts: Any) -> None:
            # So that a resumed run draws what it would have drawn; other processes draw something else.
            seed_everything(seed_of(self.recipe.seed, self.done, self.process.rank))
            for part in parts:
                self.failures += part.failures
                if self.process.world_size == 1:
                    self._report_unreadable(part.failures)
            before = self.update.skipped_in_a_row
            self.update([(part.images, part.labels) for part in parts])
            if self.update.skipped_in_a_row > before:
                self.progress.say(f"skipped update {self.done + 1}: its loss or gradient is not finite")

        return self.data.train.epoch, run


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def _out_of_memory(recipe: Recipe, process: Process, output: Path, error: BaseException) -> str:
    size = max(1, recipe.batch_size // process.world_size // recipe.grad_accum_steps)
    return (
        f"out of memory with {size} images of {recipe.img_size} pixels at a time on {process.device}: lower "
        f"batch_size, or raise grad_accum_steps, which keeps the batch; {_last_good(output)}"
        f" ({(str(error).splitlines() or [''])[0][:120]})"
    )


def _last_good(output: Path) -> str:
    good = output / STATE
    return f"the last good checkpoint is {good}" if good.exists() else "there is no checkpoint yet"


@contextlib.contextmanager
def _told_to_stop(answer: bool) -> Iterator[Callable[[], int | None]]:
    """The signal that came, of Ctrl-C and SIGTERM, or None; a Ctrl-C that comes a second later ends the process.

    answer: a Ctrl-C on the terminal.
    """
    received: list[int] = []
    previous: dict[int, Any] = {}
    first = math.inf

    def note(number: int, _: Any) -> None:
        nonlocal first
        if not received:
            received.append(number)
            first = time.monotonic()
            if answer and number == signal.SIGINT:
                with contextlib.suppress(OSError):  # not by print, which may be what was interrupted
                    os.write(2, STOPPING)
        elif number == signal.SIGINT and time.monotonic() - first > IMPATIENCE:
            signal.signal(number, previous[number])
            signal.raise_signal(number)

    for number in (int(signal.SIGINT), int(signal.SIGTERM)):
        with contextlib.suppress(ValueError):  # not in the main thread: the caller handles signals
            previous[number] = signal.signal(number, note)
    try:
        yield lambda: received[0] if received else None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
