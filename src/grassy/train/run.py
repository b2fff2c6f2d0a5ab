"""A run in memory: what is trained, on what, and how far it has come."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from grassy.data.run_data import Data
from grassy.distributed.processes import Process
from grassy.optim import AveragedModel
from grassy.optim.joint import JointOptimizer
from grassy.runs.recipe import Recipe
from grassy.train.schedule import Schedule
from grassy.train.training_step import TrainingStep


@dataclass(frozen=True)
class Trained:
    """A model, and what changes its weights."""

    model: nn.Module
    optimizer: JointOptimizer
    schedule: Schedule
    average: AveragedModel | None
    head: dict[str, Any]  # name and options, with the number that gamma="auto" came to

    @property
    def evaluated(self) -> nn.Module:
        """The model that is validated and saved."""
        return self.model if self.average is None else self.average.module

    @property
    def copies(self) -> list[nn.Module]:
        """The model, and the average of its weights if there is one: what has batch statistics."""
        return [self.model] if self.average is None else [self.model, self.average]


@dataclass
class Position:
    """The epoch and the update that come next, the rows of the summary, and the best accuracy."""

    updates_per_epoch: int
    epoch: int = 0
    update: int = 0  # within the epoch
    seconds: float = 0.0  # that the updates of this epoch have taken
    best: float = float("-inf")
    best_loss: float = float("inf")
    rows: list[dict[str, Any]] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)  # name: reason
    stopped_by: int | None = None  # a signal

    @property
    def done(self) -> int:
        """Updates so far, in all epochs."""
        return self.epoch * self.updates_per_epoch + self.update

    @property
    def time(self) -> float:
        """Epochs so far, with a fraction: what a schedule goes by."""
        return self.epoch + self.update / self.updates_per_epoch

    def next_epoch(self) -> None:
        self.epoch, self.update, self.seconds = self.epoch + 1, 0, 0.0

    def to_dict(self) -> dict[str, Any]:
        """What is saved; the number of updates per epoch follows from the data."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "updates_per_epoch"}

    def restore(self, saved: dict[str, Any]) -> None:
        """Go to a position that was saved; a TypeError if it is none."""
        vars(self).update(vars(Position(self.updates_per_epoch, **{**saved, "stopped_by": None})))


@dataclass(frozen=True)
class Run:
    """All that a checkpoint or a report may be about."""

    recipe: Recipe
    output: Path
    process: Process
    data: Data
    trained: Trained
    step: TrainingStep
    position: Position
