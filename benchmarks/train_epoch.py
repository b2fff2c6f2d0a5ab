"""The cost of an epoch of a recipe, compared with a linear head and with the bare work.

    python -m benchmarks.train_epoch --data-dir DATA            CIFAR-100, ResNet-18: on a GPU
    python -m benchmarks.train_epoch --digits                   scikit-learn's digits: on a CPU

The bare work is a plain PyTorch loop: forward, backward and step of the same model and optimizer on one prepared batch.
It is captured in a CUDA graph if the run captures its own. It is timed after every epoch, for as many updates as an
epoch has, so that both see the same state of the machine. The two heads take turns as well. The first epochs, in which
kernels are compiled, do not count.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import grassy
from grassy.data.resident_loader import ResidentLoader
from grassy.distributed.processes import Process, find_device
from grassy.recipes.changes import with_changes
from grassy.recipes.files import load_recipe
from grassy.runs.records import environment
from grassy.train import loop
from grassy.train.objective import build_optimizer, compiles
from grassy.train.opening import can_be_captured, opened_run
from grassy.train.run import Run

HEADS: dict[str, dict[str, Any]] = {
    "linear": {"name": "linear"},
    "grassmann": {"name": "grassmann", "k": 8, "gamma": 25.0},
}


@dataclass
class Times:
    """How long each epoch took, and how long the bare work took right after it."""

    epoch: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)


def measured(*arguments: Any) -> Times:
    """Train a run from its beginning to its end."""
    times = Times()
    work: list[Callable[[], None]] = []
    finish_epoch = loop.finish_epoch

    def finish_and_measure(run: Run, *others: Any) -> None:
        finish_epoch(run, *others)
        times.epoch.append(run.position.rows[-1]["seconds"])
        if not work:
            work.append(bare_update(run))
        run.trained.model.train()
        _wait(run.process.device)
        start = time.monotonic()
        for _ in range(run.position.updates_per_epoch):
            work[0]()
        _wait(run.process.device)
        times.bare.append(time.monotonic() - start)

    with mock.patch.object(loop, "finish_epoch", finish_and_measure), opened_run(*arguments) as handed:
        loop.train_epochs(*handed)
    return times


def bare_update(run: Run) -> Callable[[], None]:
    """Forward, backward and step on a fixed batch, on copies of nothing: the run's own model, with a rate of 0."""
    loader = run.data.train
    assert isinstance(loader, ResidentLoader)
    device, amp_dtype = run.process.device, run.step.amp_dtype
    captured = can_be_captured(run.recipe, run.data, run.process)
    images, labels = run.step.prepare(*loader.assemble(next(loader.plans(0))[0]))
    model = torch.compile(run.trained.model) if compiles(run.recipe, device) else run.trained.model
    optimizer = build_optimizer(run.recipe, run.trained.model, device, captured)
    for group in optimizer.param_groups:  # it must not move the weights that the run is training
        group["lr"] = torch.zeros((), device=device) if captured else 0.0
        group["weight_decay"] = 0.0

    def update() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, amp_dtype, enabled=amp_dtype is not None):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    if not captured:
        return update
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            update()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update()

    def replay() -> None:
        graph.replay()

    replay.keeps = (update, images, labels)  # type: ignore[attr-defined]  # what the graph reads must stay alive
    return replay


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--digits", action="store_true")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("runs/bench/train_epoch.json"))
    args = parser.parse_args()
    device = find_device("auto")
    times: dict[str, dict[str, list[float]]] = {name: {"epoch": [], "bare": []} for name in HEADS}
    for turn in range(args.turns):
        for name, head in HEADS.items():
            recipe = load_recipe("digits-grassmann" if args.digits else "cifar100-resnet18-grassmann")
            recipe = with_changes(
                recipe, {"head": head, "epochs": args.epochs, "warmup_epochs": 0, "val_interval": args.epochs}
            )
            folder = args.output.parent / f"train_epoch-{name}-{turn}-{time.time_ns()}"
            found = measured(recipe, args.data_dir, folder, "", Process(device), True)
            times[name]["epoch"] += found.epoch[1:]
            times[name]["bare"] += found.bare[1:]
    medians = {
        name: {kind: statistics.median(values) for kind, values in kinds.items()} for name, kinds in times.items()
    }
    for name, row in medians.items():
        over = row["epoch"] / row["bare"] - 1
        print(f"{name:10} epoch {row['epoch']:.3f} s, bare {row['bare']:.3f} s: the loop costs {100 * over:+.1f} %")
    ratio = medians["grassmann"]["epoch"] / medians["linear"]["epoch"] - 1
    print(f"grassmann against linear: {100 * ratio:+.1f} %")
    facts = {**environment(device), "grassy": grassy.__version__, "threads": torch.get_num_threads()}
    result = {**facts, "data": "digits" if args.digits else "CIFAR-100", "medians": medians, "seconds": times}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"Saved {args.output}")


if __name__ == "__main__":
    main()
