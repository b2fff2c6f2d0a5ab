"""Open a run: build it from its recipe, or restore it from a saved state."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from grassy.data.batch_transforms import Preparation, build_erasing, build_mixing
from grassy.data.resident_loader import ResidentLoader
from grassy.data.run_data import Data, open_data
from grassy.distributed import processes
from grassy.distributed.processes import Process, everywhere
from grassy.heads import RECOMMENDED, GrassmannHead, heads_of, recommended_options
from grassy.models import without_pretrained
from grassy.optim import AveragedModel
from grassy.precision import amp_dtype
from grassy.recipes.recipe import Recipe
from grassy.runs import records
from grassy.runs.folder import RunFolder
from grassy.train.agreement import check_same_data, state_to_resume
from grassy.train.checkpoints import Checkpoints, run_of_state
from grassy.train.model import build_model
from grassy.train.objective import FUSED, build_criterion, build_optimizer, compiles
from grassy.train.progress import Progress
from grassy.train.reporter import Reporter
from grassy.train.run import Position, Run, Trained
from grassy.train.schedule import Schedule
from grassy.train.sharding import Sharding, sharding_of
from grassy.train.training_step import (
    CapturedSteps,
    EagerSteps,
    Steps,
    TrainingStep,
    learning_rates_on_device,
    seed_everything,
)


@contextlib.contextmanager
def opened_run(
    recipe: Recipe, data_dir: Path | None, output: Path, resume: str, process: Process, quiet: bool = False
) -> Iterator[tuple[Run, Steps, Checkpoints, Reporter]]:
    """A new or restored run, with the objects that take its steps, save it and report on it.

    While it is open, its folder is locked.
    """
    _check_first_weights(recipe)
    folder = RunFolder(output)
    resumed_from = state_to_resume(folder, resume)
    data = _open_data(recipe, data_dir, process, resumed_from)
    captured = can_be_captured(recipe, data, process)

    # Choose the fastest convolutions by trying them; the choice may differ between runs.
    torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()
    seed_everything(recipe.seed)  # the same initial weights in every process
    # A resumed run has its weights already; those it started from may no longer be available.
    beginning = recipe if resumed_from is None else _without_first_weights(recipe)
    sharding = sharding_of(recipe, data.num_classes, process, resumed_from)
    trained = _build_trained(beginning, data, process, captured, sharding)
    step = _build_step(recipe, trained, data, process, sharding)
    position = Position(data.train.updates)
    run = Run(recipe, output, process, data, trained, step, position)
    checkpoints = Checkpoints(run, folder)
    if resumed_from is not None:
        run = checkpoints.restore(resumed_from)
    if len(set(processes.gathered([position.done]))) > 1:  # equal paths on different disks
        raise ValueError("the processes found different checkpoints: --output must be one folder for all machines")
    steps: Steps = EagerSteps(step, data.train, recipe.seed, process.rank)
    if captured and isinstance(data.train, ResidentLoader):
        learning_rates_on_device(trained.optimizer, process.device)
        steps = CapturedSteps(step, data.train)
    with contextlib.ExitStack() as stack:
        curves = None
        if position.epoch < recipe.epochs:
            stack.callback(folder.release)
            processes.on_rank_0(lambda: _begin_records(run, folder, data_dir, resumed_from))  # if it cannot, all say so
            if process.is_main:
                curves = records.Curves(output, position.done)
                stack.callback(curves.close)
        quiet = quiet or not process.is_main
        progress = Progress(recipe.epochs, position.updates_per_epoch, data.batch_size, position.done, quiet)
        progress.accuracy = position.rows[-1]["eval_top1"] if position.rows else None
        yield run, steps, checkpoints, Reporter(run, progress, curves)


def _check_first_weights(recipe: Recipe) -> None:
    given = recipe.initial_checkpoint or recipe.pretrained or recipe.model_kwargs.get("pretrained")
    for setting in ("freeze", "finetune"):
        if getattr(recipe, setting) and not given:
            raise ValueError(
                f"{setting}=true needs weights to start from: give --initial-checkpoint, or pretrained=true"
            )


def _open_data(recipe: Recipe, data_dir: Path | None, process: Process, resumed_from: Path | None) -> Data:
    """The data of a run, equal in all processes. A resumed run holds out the images that it held out before."""
    recorded = everywhere(lambda: None if resumed_from is None else records.read_split(run_of_state(resumed_from)))
    data = everywhere(lambda: open_data(recipe, data_dir, process, recorded))
    check_same_data(data, data_dir)
    if resumed_from is not None and recorded is None and data.held_out is not None:
        data.notes.append(
            f"{run_of_state(resumed_from)} has no {records.SPLIT}: the images to hold out are drawn again"
        )
    return data


def _begin_records(run: Run, folder: RunFolder, data_dir: Path | None, resumed_from: Path | None) -> None:
    """Lock the folder of a run, and write what it begins with."""
    folder.claim()
    if resumed_from is not None:
        folder.adopt_best(resumed_from)
    split = run.data.held_out is not None
    records.save_settings(run.output, run.recipe, data_dir, split, run.process.world_size, run.process.device)
    if run.data.held_out is not None:
        records.save_split(run.output, run.recipe, run.data.held_out)


def _build_trained(recipe: Recipe, data: Data, process: Process, captured: bool, sharding: Sharding) -> Trained:
    """The model of a recipe with its initial weights, and its optimizer, schedule and average."""
    # FSDP2 supports only contiguous weights.
    channels_last = recipe.channels_last and not sharding.backbone
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    model = build_model(recipe, data.num_classes, data.notes.append, sharding.of_head)
    model = model.to(process.device, memory_format=memory_format)  # type: ignore[call-overload]
    if recipe.sync_bn and process.world_size > 1:
        if process.device.type != "cuda":
            raise ValueError("sync_bn=true needs GPUs: torch's SyncBatchNorm does not run on a CPU")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    sharding.shard_backbone(model)
    optimizer = build_optimizer(recipe, model, process.device, captured)
    average = None
    if recipe.model_ema:
        # TensorFlow's warm-up, step/(10 + step): 0.99 after 1,000 updates, 0.9999 after 100,000.
        warmup = {"use_warmup": recipe.model_ema_warmup, "warmup_gamma": 10.0, "warmup_power": 1.0}
        average = AveragedModel(model, recipe.model_ema_decay, **warmup)  # type: ignore[arg-type]
    found = [head for head in heads_of(model) if isinstance(head, GrassmannHead)]
    head = dict(recipe.head)
    if head["name"] == RECOMMENDED:
        head = {**head, "name": "grassmann"}
        head |= {name: value for name, value in recommended_options(found[0].in_features).items() if name not in head}
    if head.get("gamma") == "auto":
        head["gamma"] = found[0].initial_gamma
    return Trained(model, optimizer, Schedule(optimizer), average, head)


def _without_first_weights(recipe: Recipe) -> Recipe:
    """The same recipe without the weights to start from."""
    options = without_pretrained(recipe.model_kwargs)
    return dataclasses.replace(recipe, model_kwargs=options, pretrained=False, initial_checkpoint="")


def mixes_in_pairs(recipe: Recipe, model: torch.nn.Module) -> bool:
    """Whether mixing makes pairs of labels, where probabilities of all classes would be too many.

    They are left to cross-entropy, since no other criterion smooths them.
    """
    takes_pairs = all(head.takes_mixed_labels for head in heads_of(model))
    return recipe.mixes and recipe.loss == "cross-entropy" and takes_pairs


def _build_step(recipe: Recipe, trained: Trained, data: Data, process: Process, sharding: Sharding) -> TrainingStep:
    """The object that makes one update of the weights."""
    device = process.device
    model: Any = torch.compile(trained.model) if compiles(recipe, device) else trained.model
    model = sharding.wrapped(model)
    mixes_labels = mixes_in_pairs(recipe, trained.model)
    erase, mix = build_erasing(recipe, device), build_mixing(recipe, data.num_classes, mixes_labels)
    return TrainingStep(
        model,
        trained.optimizer,
        build_criterion(recipe, mixes_labels),
        Preparation(recipe.mean, recipe.std, device, recipe.channels_last, erase, mix),
        device,
        amp_dtype=amp_dtype(recipe.amp, device),
        clip_grad=recipe.clip_grad,
        skip_nonfinite=recipe.nonfinite == "skip",
    )


def can_be_captured(recipe: Recipe, data: Data, process: Process) -> bool:
    """Whether a CUDA graph can capture a whole update: nothing in it may wait for the host."""
    return (
        process.device.type == "cuda"
        and process.world_size == 1
        and isinstance(data.train, ResidentLoader)
        and recipe.opt in FUSED
        and amp_dtype(recipe.amp, process.device) is not torch.float16
        and not (recipe.mixes or recipe.reprob or recipe.nonfinite == "skip")
    )
