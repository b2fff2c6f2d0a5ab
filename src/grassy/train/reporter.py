"""Reports of a run: lines or a bar on the terminal, one row per epoch in summary.csv, curves for TensorBoard."""

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch

from grassy.data.batch import Failure
from grassy.distributed import is_sharded, processes
from grassy.heads import GrassmannHead, heads_of
from grassy.inference.evaluate import Metrics
from grassy.optim.joint import GRASSMANN, MANIFOLD
from grassy.runs import records
from grassy.train import diagnostics
from grassy.train.advice import what_is_off
from grassy.train.input_wait import InputWait, advice_on_waiting
from grassy.train.progress import Progress
from grassy.train.run import Run
from grassy.train.sharding import has_sharded_weights


@dataclass
class Reporter:
    """Every process of a run has one; only the main process prints and writes."""

    run: Run
    progress: Progress
    curves: records.Curves | None
    failures: list[Failure] = field(default_factory=list)  # of this process, not reported yet
    counts: tuple[int, int] = (0, 0)  # capped and skipped class updates so far
    input_wait: InputWait = field(default_factory=InputWait)
    told_of_waiting: bool = False

    def __post_init__(self) -> None:
        self.counts = self._counts()

    def say(self, text: str) -> None:
        self.progress.say(text)

    def introduce(self) -> None:
        """Print what is trained, on what, and what is unusual about it."""
        recipe, data, position = self.run.recipe, self.run.data, self.run.position
        for note in data.notes:
            self.say(note)
        weights = sum(p.numel() for p in self.run.trained.model.parameters() if p.requires_grad)
        count = f"{weights / 1e6:.1f} M" if weights >= 1e5 else f"{weights:,}"
        device = self.run.process.device
        place = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        many = f", {self.run.process.world_size} processes" if self.run.process.world_size > 1 else ""
        head = " ".join(
            f"{key}={value}" if key != "name" else str(value) for key, value in self.run.trained.head.items()
        )
        self.say(
            f"{recipe.model} with head {head}, {count} weights to train, {data.num_classes} classes, "
            f"{position.updates_per_epoch} updates of {data.batch_size} images per epoch, on {place}{many}, into "
            f"{self.run.output}"
        )
        updates = position.updates_per_epoch * recipe.epochs
        average = self.run.trained.average
        if average is not None and not average.use_warmup and (kept := recipe.model_ema_decay**updates) > 0.05:
            better = "model_ema_warmup=true forgets them"
            self.say(
                f"the average of the weights will still hold {kept:.0%} of the initial weights: {updates} updates are "
                f"few for model_ema_decay={recipe.model_ema_decay:g}; {better}"
            )
        if position.done:
            self.say(f"resumed after update {position.done}, in epoch {position.epoch + 1}")

    def after_update(self, failures: list[Failure]) -> None:
        """Report images that could not be read, at once if there is one process only, and a skipped update."""
        self.failures += failures
        if self.run.process.world_size == 1:
            self.tell_of_unreadable()
        if self.run.step.skipped_in_a_row:
            self.say(f"skipped update {self.run.position.done}: its loss or gradient is not finite")

    def report(self) -> None:
        """Report the progress of the run."""
        self.progress.report(self.run.position.done, self.run.step.mean_loss())

    def end_of_epoch(self, metrics: Metrics | None) -> None:
        """Write the row of an epoch and print its results. All processes must call it."""
        position = self.run.position
        row = self._row(metrics)
        position.rows.append(row)
        self.tell_of_unreadable()
        before, self.counts = self.counts, self._counts()
        for line in diagnostics.trouble_of_an_epoch(before, self.counts, self.run.recipe.max_angle):
            self.say(line)
        steady = processes.gathered([self.input_wait.steady_share])
        rank = max(range(len(steady)), key=lambda rank: steady[rank])
        if not self.told_of_waiting and (
            waits := advice_on_waiting(steady[rank], self.run.recipe, self.run.data, rank)
        ):
            self.told_of_waiting = True
            self.say(waits)
        if self.curves is not None:
            records.save_summary(self.run.output, position.rows)
            self.curves.add(self._scalars(row), position.done)
        self.progress.end_of_epoch(position.epoch, row["train_loss"], metrics, position.seconds)
        if metrics is not None and position.epoch + 1 == self.run.recipe.epochs:
            heads = [head for head in heads_of(self.run.trained.model) if isinstance(head, GrassmannHead)]
            head = heads[0] if heads else None
            for line in what_is_off(metrics, self.run.data.num_classes, head, position.done):
                self.say(line)

    def tell_of_unreadable(self) -> None:
        """Name each unreadable image once, and count them all. All processes must call it."""
        unreadable = self.run.position.unreadable
        for failure in processes.gathered(self.failures):
            if failure.name not in unreadable:
                unreadable[failure.name] = failure.reason
                self.say(f"cannot read {failure.name}: {failure.reason} ({len(unreadable)} skipped so far)")
        self.failures = []

    def _counts(self) -> tuple[int, int]:
        """Capped and skipped class updates so far. All processes must call it: each may have its own classes."""
        counts = self.run.trained.optimizer.capped_classes, self.run.trained.optimizer.skipped_classes
        if not is_sharded(self.run.trained.model):
            return counts
        capped, skipped = zip(*processes.gathered([counts]), strict=True)
        return sum(capped), sum(skipped)

    def _row(self, metrics: Metrics | None) -> dict[str, Any]:
        rates = {group[MANIFOLD]: float(group["lr"]) for group in self.run.trained.optimizer.param_groups}
        return {
            "epoch": self.run.position.epoch,
            "train_loss": self.run.step.mean_loss(),
            "eval_loss": None if metrics is None else metrics.loss,
            "eval_top1": None if metrics is None else metrics.top1,
            "eval_top5": None if metrics is None else metrics.top5,
            "lr": rates.get("euclidean"),
            "head_lr": rates.get(GRASSMANN),
            "seconds": self.run.position.seconds,
            "eval_effective_rank": None if metrics is None else metrics.effective_rank,
            "outlier_threshold": None if metrics is None else metrics.outlier_threshold,
            "input_share": max(processes.gathered([self.input_wait.share])),  # the others wait for the slowest
        }

    def _scalars(self, row: dict[str, Any]) -> dict[str, float]:
        model, optimizer, recipe = self.run.trained.model, self.run.trained.optimizer, self.run.recipe
        scalars = {name: row[name] for name in row if name != "epoch" and row[name] is not None}
        scalars |= diagnostics.after_an_update(model, optimizer)
        if len(self.run.position.rows) == min(2, recipe.epochs) and not has_sharded_weights(
            model
        ):  # the first epoch may include compilation
            size = self.run.data.batch_size // self.run.process.world_size
            with contextlib.suppress(torch.OutOfMemoryError):  # the copy of a large head may not fit
                seconds = diagnostics.head_seconds(model, size, self.run.step.amp_dtype)
                scalars["time/head_share"] = seconds / (row["seconds"] / self.run.position.updates_per_epoch)
        return scalars
