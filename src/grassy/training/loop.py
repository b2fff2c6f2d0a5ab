"""The training loop, for one process or for many."""

import contextlib
import dataclasses
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import grassy
from grassy.optim import AveragedModel
from grassy.optim.joint import GRASSMANN, MANIFOLD
from grassy.training import build, checkpoint, diagnostics, distributed, journal
from grassy.training.checkpoint import BEST, LAST, STATE, Description
from grassy.training.data import open_data
from grassy.training.distributed import Process
from grassy.training.evaluate import Metrics, evaluate
from grassy.training.loader import Failure, Preparation, seed_of
from grassy.training.models import build_model, training_mode
from grassy.training.progress import Progress
from grassy.training.recipe import Recipe
from grassy.training.resident import ResidentLoader
from grassy.training.schedule import Schedule, learning_rate_factor
from grassy.training.update import CapturedUpdate, Update, learning_rates_on_device

#: How often the processes of a run ask each other whether one of them was told to stop, in updates.
STOP_CHECK = 10
#: Names of the images on which the loss was not finite.
NONFINITE = "nonfinite_batch.txt"


class TrainingStopped(RuntimeError):
    """Training cannot go on; the message says where the last good checkpoint is."""


@dataclass
class State:
    """Where a run is: the epoch and the update that come next, the rows of its summary, its best accuracy."""

    epoch: int = 0
    update: int = 0
    best: float = float("-inf")
    rows: list[dict[str, Any]] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)  # name: reason


def train(
    recipe: Recipe, data_dir: Path | None, output: Path, resume: str = "", device: str = "auto", quiet: bool = False
) -> State:
    """Train what the recipe says on the images in `data_dir`; checkpoints and records go to the folder `output`.

    resume: "" begins a run, "auto" goes on with the one in `output` if there is one, a path with that one.

    Ctrl-C and SIGTERM finish the update, save and return; `State.epoch` then is below `recipe.epochs`.
    """
    with distributed.joined(device) as process:
        run = Run(recipe, data_dir, output, resume, process, quiet)
        try:
            return run.train()
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise TrainingStopped(run.out_of_memory(error)) from error
        finally:
            run.close()


class Run:
    """One run: its parts, put together in order, and the loop over its epochs."""

    def __init__(
        self, recipe: Recipe, data_dir: Path | None, output: Path, resume: str, process: Process, quiet: bool = False
    ) -> None:
        self.recipe, self.output, self.process, self.device = recipe, output, process, process.device
        saved = _find_state(output, resume)
        self.data = open_data(recipe, data_dir, process)
        self.captured = self._can_be_captured()

        seed_everything(recipe.seed)  # the same first weights in every process
        memory_format = torch.channels_last if recipe.channels_last else torch.contiguous_format
        self.model = build_model(recipe, self.data.num_classes).to(self.device, memory_format=memory_format)  # type: ignore[call-overload]
        if recipe.sync_bn and process.world_size > 1:
            if self.device.type != "cuda":
                raise ValueError("sync_bn=true needs GPUs: torch's SyncBatchNorm does not run on a CPU")
            self.model = nn.SyncBatchNorm.convert_sync_batchnorm(self.model)
        self.optimizer = build.build_optimizer(recipe, self.model, self.device, self.captured)
        self.schedule = Schedule(self.optimizer)
        self.average = AveragedModel(self.model, recipe.model_ema_decay) if recipe.model_ema else None
        self.amp_dtype = build.amp_dtype(recipe, self.device)
        preparation: dict[str, Any] = {
            "mean": recipe.mean,
            "std": recipe.std,
            "device": self.device,
            "channels_last": recipe.channels_last,
        }
        self.prepare_validation = Preparation(**preparation)
        self.update = Update(
            self._wrapped_model(),
            self.optimizer,
            build.build_criterion(recipe),
            Preparation(
                **preparation,
                erase=build.build_erasing(recipe, self.device),
                mix=build.build_mixing(recipe, self.data.num_classes),
            ),
            self.device,
            amp_dtype=self.amp_dtype,
            clip_grad=recipe.clip_grad,
            skip_nonfinite=recipe.nonfinite == "skip",
        )
        self.state = State()
        if saved is not None:
            self._restore(checkpoint.read_torch(saved), saved)
        if self.captured:
            learning_rates_on_device(self.optimizer, self.device)
        self.batches, self.run_update = self._batches_and_update()

        if process.is_main:
            output.mkdir(parents=True, exist_ok=True)
            checkpoint.remove_torn_files(output)
            journal.save_settings(output, recipe, data_dir, process.world_size, self.device)
        self.curves = journal.Curves(output, self.done) if process.is_main else None
        self.best_weights: nn.Module | None = None  # a copy that is still to be written
        self.last_save = time.monotonic()
        quiet = quiet or not process.is_main
        self.progress = Progress(recipe.epochs, self.updates, self.data.batch_size, self.done, quiet)
        for note in self.data.notes:
            self.progress.say(note)

    @property
    def updates(self) -> int:
        """Updates in an epoch."""
        return self.data.train.updates

    @property
    def done(self) -> int:
        """Updates so far, in all epochs."""
        return self.state.epoch * self.updates + self.state.update

    # ------------------------------------------------------------------------------------------------ the loop

    def train(self) -> State:
        state, recipe = self.state, self.recipe
        with self.progress, _told_to_stop() as told:
            while state.epoch < recipe.epochs:
                training_mode(self.model, recipe.freeze)
                begin, first = time.monotonic(), state.update
                for batch in self.batches(state.epoch, first):
                    self.schedule.set(learning_rate_factor(recipe, state.epoch + state.update / self.updates))
                    self.run_update(batch)
                    state.update += 1
                    if self.average is not None:
                        self.average.update(self.model, self.done)
                    self._look()
                    if self._should_stop(told):
                        self._save()
                        self.progress.say(f"stopped after update {self.done} and saved; --resume auto goes on")
                        return state
                self._finish_epoch(begin, state.update - first)
        self._save()
        return state

    def _look(self) -> None:
        """On a CPU after every update, on a GPU now and then, since it waits for the device: is the loss finite?"""
        due = self.progress.is_due()
        if due or self.device.type == "cpu":
            self._stop_if_not_finite()
        if due:
            self.progress.report(self.done, self._mean_loss())

    def _finish_epoch(self, begin: float, updates: int) -> None:
        """Validate, write the records, and save if it is time."""
        state, recipe = self.state, self.recipe
        self._stop_if_not_finite()  # waits for the device, so the time is right
        seconds = time.monotonic() - begin
        self.progress.report(self.done, self._mean_loss())
        last = state.epoch + 1 == recipe.epochs
        metrics = self._validate() if last or (state.epoch + 1) % recipe.val_interval == 0 else None
        row = self._row(metrics, seconds)
        state.rows.append(row)
        if self.curves is not None:
            self._draw(row, seconds / max(1, updates))
        self.progress.end_of_epoch(state.epoch, row["train_loss"], metrics)
        if metrics is not None and metrics.top1 > state.best:
            state.best = metrics.top1
            self.best_weights = _copy_of(self._evaluated_model())
        state.epoch, state.update = state.epoch + 1, 0
        self.update.loss_sum.zero_()
        if not last and time.monotonic() - self.last_save >= recipe.checkpoint_interval:
            self._save()
        self.progress.skip_pause()

    def _validate(self) -> Metrics:
        metrics, failures = evaluate(
            self._evaluated_model(),
            self.data.validation,
            self.prepare_validation,
            self.device,
            self.amp_dtype,
            self.data.sharded,
        )
        self._report_unreadable(failures)
        return metrics

    def _evaluated_model(self) -> nn.Module:
        return self.model if self.average is None else self.average.module

    # ------------------------------------------------------------------------------------------------ saving

    def _save(self) -> None:
        """Write the best and the last weights, then the state: it must never claim what is not on the disk."""
        self._stop_if_not_finite()
        if self.process.is_main:
            if self.best_weights is not None:
                checkpoint.save_weights(self.best_weights, self._description(), self.output / BEST)
                self.best_weights = None
            checkpoint.save_weights(self._evaluated_model(), self._description(), self.output / LAST)
            journal.save_summary(self.output, self.state.rows)
            checkpoint.save_state(self._state(), self.output / STATE)
        distributed.wait_for_all()
        self.last_save = time.monotonic()

    def _state(self) -> dict[str, Any]:
        return {
            "grassy": grassy.__version__,
            "recipe": self.recipe.to_dict(),
            "progress": dataclasses.asdict(self.state),
            "model": self.model.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.update.scaler.state_dict(),
            "loss_sum": float(self.update.loss_sum),
        }

    def _restore(self, saved: dict[str, Any], path: Path) -> None:
        try:
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            if self.average is not None:
                self.average.load_state_dict(saved["average"])
            self.update.scaler.load_state_dict(saved["scaler"])
            self.state = State(**saved["progress"])
            self.update.loss_sum.fill_(saved["loss_sum"])
        except (KeyError, TypeError, AttributeError, RuntimeError, ValueError) as error:
            raise ValueError(f"{path} does not belong to this recipe: {str(error).splitlines()[0]}") from None
        self.update.number.fill_(self.done)

    def _description(self) -> Description:
        recipe = self.recipe
        metrics = {key: row for key, row in (self.state.rows[-1] if self.state.rows else {}).items() if row is not None}
        return Description(
            model=recipe.model,
            num_classes=self.data.num_classes,
            head=recipe.head,
            model_kwargs=recipe.model_kwargs,
            class_names=self.data.class_names,
            img_size=recipe.test_size or recipe.img_size,
            crop_pct=recipe.crop_pct,
            interpolation=recipe.interpolation,
            mean=recipe.mean,
            std=recipe.std,
            recipe=recipe.to_dict(),
            epoch=len(self.state.rows),
            metrics=metrics,
            version=grassy.__version__,
        )

    # ------------------------------------------------------------------------------------------------ records

    def _mean_loss(self) -> float:
        return float(self.update.loss_sum) / max(1, self.state.update)

    def _row(self, metrics: Metrics | None, seconds: float) -> dict[str, Any]:
        rates = {group[MANIFOLD]: float(group["lr"]) for group in self.optimizer.param_groups}
        return {
            "epoch": self.state.epoch,
            "train_loss": self._mean_loss(),
            "eval_loss": None if metrics is None else metrics.loss,
            "eval_top1": None if metrics is None else metrics.top1,
            "eval_top5": None if metrics is None else metrics.top5,
            "lr": rates.get("euclidean"),
            "head_lr": rates.get(GRASSMANN),
            "seconds": seconds,
        }

    def _draw(self, row: dict[str, Any], seconds_an_update: float) -> None:
        assert self.curves is not None
        scalars = {name: row[name] for name in row if name != "epoch" and row[name] is not None}
        scalars |= diagnostics.after_an_update(self.model, self.optimizer)
        if len(self.state.rows) == min(2, self.recipe.epochs):  # the first epoch may have spent its time compiling
            size = self.data.batch_size // self.process.world_size
            seconds = diagnostics.head_seconds(self.model, size, self.amp_dtype)
            scalars["time/head_share"] = seconds / seconds_an_update
        self.curves.add(scalars, self.done)

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

    # ------------------------------------------------------------------------------------------------ stopping

    def _stop_if_not_finite(self) -> None:
        number = int(self.update.first_bad)
        if number < 0:
            return
        epoch, update = divmod(number, self.updates)
        names = self.data.train.names_of(epoch, update)
        listing = self.output / NONFINITE
        if self.process.is_main:
            text = "".join(f"{name}\n" for name in names)
            checkpoint.write_atomically(listing, lambda file: file.write(text.encode()))
        raise TrainingStopped(
            f"the loss is not finite at update {update + 1} of epoch {epoch + 1}, on {names[0]} and {len(names) - 1} "
            f"other images that {listing} names; {self._last_good()}; "
            "nonfinite=skip would leave such updates out, a lower lr or clip_grad may prevent them"
        )

    def out_of_memory(self, error: BaseException) -> str:
        """A line on what was too much, and what to do."""
        size = self.data.batch_size // self.process.world_size // self.recipe.grad_accum_steps
        return (
            f"out of memory with {size} images of {self.recipe.img_size} pixels at a time on {self.device}: lower "
            f"batch_size, or raise grad_accum_steps, which keeps the batch; {self._last_good()}"
            f" ({(str(error).splitlines() or [''])[0][:120]})"
        )

    def _last_good(self) -> str:
        good = self.output / STATE
        return f"the last good checkpoint is {good}" if good.exists() else "there is no checkpoint yet"

    def _should_stop(self, told: Callable[[], bool]) -> bool:
        if self.process.world_size > 1 and self.done % STOP_CHECK:
            return False
        return distributed.anywhere(told(), self.device)

    # ------------------------------------------------------------------------------------------------ putting together

    def _wrapped_model(self) -> nn.Module:
        model = self.model
        if build.compiles(self.recipe, self.device):
            model = torch.compile(model)  # type: ignore[assignment]
        if self.process.world_size > 1:
            ids = [self.device.index] if self.device.type == "cuda" else None
            model = nn.parallel.DistributedDataParallel(model, device_ids=ids)
        return model

    def _can_be_captured(self) -> bool:
        """Whether a whole update fits into one CUDA graph: nothing in it may ask the host."""
        recipe = self.recipe
        return (
            self.device.type == "cuda"
            and self.process.world_size == 1
            and isinstance(self.data.train, ResidentLoader)
            and recipe.opt in build.FUSED
            and build.amp_dtype(recipe, self.device) is not torch.float16
            and not (recipe.mixes or recipe.reprob or recipe.nonfinite == "skip")
        )

    def _batches_and_update(self) -> tuple[Callable[[int, int], Iterator[Any]], Callable[[Any], None]]:
        """What the loop iterates over, and what it does with each of them."""
        if self.captured:
            assert isinstance(self.data.train, ResidentLoader)
            return self.data.train.plans, CapturedUpdate(self.update, self.data.train.assemble)

        def run(parts: Any) -> None:
            # So that a resumed run draws what it would have drawn; other processes draw something else.
            seed_everything(seed_of(self.recipe.seed, self.done, self.process.rank))
            for part in parts:
                self._report_unreadable(part.failures)
            self.update([(part.images, part.labels) for part in parts])

        return self.data.train.epoch, run


def seed_everything(seed: int) -> None:
    """Python's, NumPy's and torch's generators, on all devices."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (what timm's mixup draws from)
    torch.manual_seed(seed)


def _find_state(output: Path, resume: str) -> Path | None:
    """The file to resume from. A folder that holds a run is not written over."""
    own = output / STATE
    if not resume:
        if own.exists() or (output / LAST).exists():
            raise ValueError(
                f"{output} holds a run already: --resume auto goes on with it, another --output begins one"
            )
        return None
    if resume == "auto":
        return own if own.exists() else None
    path = Path(resume)
    path = path / STATE if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"there is nothing to resume from at {path}")
    return path


def _copy_of(model: nn.Module) -> nn.Module:
    """A copy on the CPU, to be written later."""
    import copy

    with torch.no_grad():
        twin = copy.deepcopy(model)
    return twin.cpu()


@contextlib.contextmanager
def _told_to_stop() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed or SIGTERM came; a second one ends the process at once."""
    received: list[int] = []
    previous: dict[int, Any] = {}

    def note(number: int, _: Any) -> None:
        received.append(number)
        signal.signal(number, previous[number])

    for number in (int(signal.SIGINT), int(signal.SIGTERM)):
        with contextlib.suppress(ValueError):  # not in the main thread: the caller handles signals
            previous[number] = signal.signal(number, note)
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
