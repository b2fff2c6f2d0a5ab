"""A run in memory: its model, its data and its position."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from grassy.data.run_data import Data
from grassy.distributed.processes import Process
from grassy.optim import AveragedModel
from grassy.optim.joint import JointOptimizer
from grassy.recipes.recipe import Recipe
from grassy.train.schedule import Schedule
from grassy.train.training_step import TrainingStep


@dataclass(frozen=True)
class Trained:
    """A model with its optimizer, schedule and average."""

    model: nn.Module
    optimizer: JointOptimizer
    schedule: Schedule
    average: AveragedModel | None
    head: dict[str, Any]  # name and options, with the value of gamma="auto"

    @property
    def evaluated(self) -> nn.Module:
        """The model to validate and save."""
        return self.model if self.average is None else self.average.module

    @property
    def copies(self) -> list[nn.Module]:
        """The model, and its average if there is one: both have batch statistics."""
        return [self.model] if self.average is None else [self.model, self.average]


@dataclass
class Position:
    """The next epoch and update, both counted from 0, the rows of the summary, and the best accuracy."""

    updates_per_epoch: int
    epoch: int = 0
    update: int = 0  # within the epoch
    seconds: float = 0.0  # time of this epoch's updates so far
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
        """Epochs so far, with a fraction, for the schedule."""
        return self.epoch + self.update / self.updates_per_epoch

    def next_epoch(self) -> None:
        self.epoch, self.update, self.seconds = self.epoch + 1, 0, 0.0

    def to_dict(self) -> dict[str, Any]:
        """The fields to save; the number of updates per epoch follows from the data."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "updates_per_epoch"}

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore a saved position; a TypeError if it is invalid."""
        vars(self).update(vars(Position(self.updates_per_epoch, **{**saved, "stopped_by": None})))


@dataclass(frozen=True)
class Run:
    """Everything that checkpoints and reports need."""

    recipe: Recipe
    output: Path
    process: Process
    data: Data
    trained: Trained
    step: TrainingStep
    position: Position
