"""What a run consists of, put together from its recipe, or as it was saved."""

import dataclasses
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from grassy._version import __version__
from grassy.data.batch_transforms import Preparation, build_erasing, build_mixing
from grassy.data.device_loader import ResidentLoader
from grassy.data.run_data import open_data
from grassy.data.stream_loader import StreamLoader
from grassy.distributed import processes as distributed
from grassy.distributed.processes import Process
from grassy.heads import GrassmannHead, heads_of
from grassy.optim import AveragedModel
from grassy.precision import amp_dtype
from grassy.runs.folder import RunFolder, check_same_run
from grassy.runs.recipe import Recipe
from grassy.runs.state import read_torch
from grassy.runs.weights import Description
from grassy.train.model import build_model
from grassy.train.objective import FUSED, build_criterion, build_optimizer, compiles
from grassy.train.schedule import Schedule
from grassy.train.update import Update, learning_rates_on_device


@dataclass
class State:
    """Where a run is: the epoch and the update that come next, the rows of its summary, its best accuracy."""

    epoch: int = 0
    update: int = 0
    seconds: float = 0.0  # that the updates of this epoch have taken
    best: float = float("-inf")
    best_loss: float = float("inf")
    rows: list[dict[str, Any]] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)  # name: reason
    stopped_by: int | None = None  # a signal


class Parts:
    """Data, model, optimizer, schedule, average and update of a run."""

    def __init__(self, recipe: Recipe, data_dir: Path | None, output: Path, resume: str, process: Process) -> None:
        self.recipe, self.output, self.process, self.device = recipe, output, process, process.device
        self.folder = RunFolder(output)
        given = recipe.initial_checkpoint or recipe.model_kwargs.get("pretrained")
        for setting in ("freeze", "finetune"):
            if getattr(recipe, setting) and not given:
                raise ValueError(
                    f"{setting}=true begins with weights that are there already: give --initial-checkpoint, or "
                    "model_kwargs.pretrained=true"
                )
        self.resumed_from = saved = self.folder.find_state(resume)
        self.data = open_data(recipe, data_dir, process)
        self.captured = self._can_be_captured()

        # The fastest convolutions, found by trying all once; which they are may differ from run to run.
        torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()
        seed_everything(recipe.seed)  # the same first weights in every process
        memory_format = torch.channels_last if recipe.channels_last else torch.contiguous_format
        model = build_model(recipe, self.data.num_classes, self.data.notes.append)
        self.model = model.to(self.device, memory_format=memory_format)  # type: ignore[call-overload]
        if recipe.sync_bn and process.world_size > 1:
            if self.device.type != "cuda":
                raise ValueError("sync_bn=true needs GPUs: torch's SyncBatchNorm does not run on a CPU")
            self.model = nn.SyncBatchNorm.convert_sync_batchnorm(self.model)
        self.optimizer = build_optimizer(recipe, self.model, self.device, self.captured)
        self.schedule = Schedule(self.optimizer)
        self.average = AveragedModel(self.model, recipe.model_ema_decay) if recipe.model_ema else None
        self.amp_dtype = amp_dtype(recipe.amp, self.device)
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
            build_criterion(recipe),
            Preparation(
                **preparation,
                erase=build_erasing(recipe, self.device),
                mix=build_mixing(recipe, self.data.num_classes),
            ),
            self.device,
            amp_dtype=self.amp_dtype,
            clip_grad=recipe.clip_grad,
            skip_nonfinite=recipe.nonfinite == "skip",
        )
        self.state = State()
        if saved is not None:
            self._restore(read_torch(saved), saved)
        self._check_that_all_begin_alike()
        if self.captured:
            learning_rates_on_device(self.optimizer, self.device)

    @property
    def updates(self) -> int:
        """Updates in an epoch."""
        return self.data.train.updates

    @property
    def images(self) -> int | None:
        """Images to train on; of a stream it is not known."""
        return None if isinstance(self.data.train, StreamLoader) else self.data.train.batches.length

    @property
    def done(self) -> int:
        """Updates so far, in all epochs."""
        return self.state.epoch * self.updates + self.state.update

    @property
    def head(self) -> dict[str, Any]:
        """Name and options of the head, with the number that gamma="auto" came to."""
        options = self.recipe.head
        found = [head.initial_gamma for head in heads_of(self.model) if isinstance(head, GrassmannHead)]
        return {**options, "gamma": found[0]} if options.get("gamma") == "auto" else options

    def state_dict(self) -> dict[str, Any]:
        return {
            "grassy": __version__,
            "recipe": self.recipe.to_dict(),
            "head": self.head,  # with a number where the recipe has "auto", which another version may take for another
            "updates": self.updates,
            "images": self.images,
            "class_names": None if self.data.class_names is None else list(self.data.class_names),
            "progress": dataclasses.asdict(self.state),
            "model": self.model.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.update.scaler.state_dict(),
            "losses": self.update.losses.cpu(),
        }

    def _restore(self, saved: dict[str, Any], path: Path) -> None:
        check_same_run(saved, self.recipe, self.updates, self.images, self.data.class_names, path)
        if (before := saved.get("head", self.head)) != self.head:
            raise ValueError(
                f"{path} belongs to a run with head {before}, and this version of grassy makes {self.head} of it: go "
                f"on with version {saved.get('grassy')}, or begin another --output with --initial-checkpoint"
            )
        try:
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            if self.average is not None:
                self.average.load_state_dict(saved["average"])
            self.update.scaler.load_state_dict(saved["scaler"])
            self.state = State(**{**saved["progress"], "stopped_by": None})
            self.update.losses.copy_(saved["losses"])
        except (KeyError, TypeError, AttributeError, RuntimeError, ValueError) as error:
            raise ValueError(f"{path} does not belong to this recipe: {' '.join(str(error).split())[:200]}") from None
        self.update.number.fill_(self.done)

    def _check_that_all_begin_alike(self) -> None:
        """Processes on machines without a common disk might find different states to resume from."""
        if len(set(distributed.gathered([self.done]))) > 1:
            raise ValueError("the processes found different checkpoints: --output must be one folder for all machines")

    def description(self) -> Description:
        recipe = self.recipe
        row = self.state.rows[-1] if self.state.rows else {}
        return Description(
            model=recipe.model,
            num_classes=self.data.num_classes,
            head=self.head,
            model_kwargs=recipe.model_kwargs,
            class_names=self.data.class_names,
            img_size=recipe.test_size or recipe.img_size,
            crop_pct=recipe.crop_pct,
            interpolation=recipe.interpolation,
            mean=recipe.mean,
            std=recipe.std,
            recipe=recipe.to_dict(),
            epoch=row.get("epoch"),
            metrics={key: value for key, value in row.items() if value is not None and key != "epoch"},
            version=__version__,
        )

    def _wrapped_model(self) -> nn.Module:
        model = self.model
        if compiles(self.recipe, self.device):
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
            and recipe.opt in FUSED
            and amp_dtype(recipe.amp, self.device) is not torch.float16
            and not (recipe.mixes or recipe.reprob or recipe.nonfinite == "skip")
        )


def seed_everything(seed: int) -> None:
    """Python's, NumPy's and torch's generators, on all devices."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (what timm's mixup draws from)
    torch.manual_seed(seed)
