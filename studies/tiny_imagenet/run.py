"""Do the runs of a part of the study that have no line in the results yet. See README.md beside this file.

    python -m studies.tiny_imagenet.run --data DATA --part trials --minutes 9 --output results.jsonl
    python -m studies.tiny_imagenet.run --part all --list

All runs share one process, so that the network is compiled once. Each run is measured right after training and leaves
one line of numbers; its weights are then deleted.
"""

import argparse
import contextlib
import functools
import gc
import math
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch

from grassy.distributed.processes import find_device
from grassy.recipes.changes import with_changes
from grassy.recipes.recipe import Recipe
from grassy.runs import records
from grassy.runs.weights import LAST
from grassy.train import opening
from grassy.train.loop import TrainingStopped, train
from studies.cifar100.measure import View
from studies.cifar100.run import append, heads_outside_of_compiled_code
from studies.tiny_imagenet.data import Store
from studies.tiny_imagenet.heads import set_classifier_decay
from studies.tiny_imagenet.measure import measure
from studies.tiny_imagenet.mixing import DeviceMixing
from studies.tiny_imagenet.plan import PARTS, Entry, Lines, parsed, plan, read, recipe_of, seconds, to_do

HERE = Path(__file__).parent
#: What a run may take longer than it should: a share, and seconds.
LATE, SLACK = 0.1, 10.0
#: So many failures in a row that are not the settings' fault: something is wrong with the machine.
TOO_MANY = 5


@dataclass(frozen=True)
class Place:
    """Where things are, and what cannot be found out there."""

    scratch: Path
    device: str
    commit: str | None = None
    keep: bool = False
    at_once: int = 1


def do(entry: Entry, store: Store, place: Place) -> dict[str, Any]:
    """One run: the line of results that it leaves, with the error if it failed."""
    recipe = recipe_of(entry)
    begin = time.monotonic()
    facts = {"stage": entry.stage, "row": entry.row, "number": entry.number, "name": entry.name}
    line = {"key": entry.key, **facts, "data": entry.data, "split": entry.split, "seed": recipe.seed}
    line["settings"] = entry.settings
    try:
        with as_the_study_trains(store.device):
            line |= _train_and_measure(entry, store, place)
    except Exception as error:  # whatever it is: the other runs go on
        line["diverged"] = isinstance(error, TrainingStopped) and error.__cause__ is None  # else out of memory
        line["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    finally:
        gc.collect()
        if store.device.type == "cuda":
            torch.cuda.empty_cache()
    taken = time.monotonic() - begin
    started = (datetime.now(UTC) - timedelta(seconds=taken)).isoformat(timespec="seconds")
    return {**line, **machine(place), "at_once": place.at_once, "seconds": round(taken, 2), "started": started}


def _train_and_measure(entry: Entry, store: Store, place: Place) -> dict[str, Any]:
    folder = place.scratch / "runs" / entry.key
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut short
    begin = time.monotonic()
    state = train(recipe_of(entry), store.training_folder(entry), folder, device=place.device, quiet=True)
    if state.stopped_by is not None:
        raise KeyboardInterrupt
    trained = time.monotonic()
    # The last weights, never the best ones, which would be chosen by the images that judge them.
    measures = measure(folder / LAST, entry, store)
    times = {"seconds_training": round(trained - begin, 2), "seconds_measuring": round(time.monotonic() - trained, 2)}
    if not place.keep:
        shutil.rmtree(folder)
    row = state.rows[-1]
    names = {"eval_top1": "top1", "eval_top5": "top5", "eval_loss": "loss", "train_loss": "train_loss"}
    names |= {"eval_effective_rank": "effective_rank", "seconds": "seconds_last_epoch"}
    found = {new: row[old] for old, new in names.items()} | measures | times
    return finite(found)


def finite(value: Any) -> Any:
    """The value without what JSON has no number for: None takes its place."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def as_the_study_trains(device: torch.device) -> Iterator[None]:
    """What differs from `grassy train` within this block.

    Heads stay outside compiled code, so that all runs share the network. Classifiers may have their own weight decay.
    Images are mixed on the device, so that a CUDA graph can capture such updates too. There are no curves.
    """
    build_optimizer, can_be_captured = opening.build_optimizer, opening.can_be_captured

    def with_classifier_decay(recipe: Recipe, model: torch.nn.Module, *options: Any) -> Any:
        return set_classifier_decay(build_optimizer(recipe, model, *options), model)

    def mixing(recipe: Recipe, num_classes: int, *_: Any) -> DeviceMixing | None:
        return DeviceMixing(recipe, num_classes, device) if recipe.mixes else None

    def although_it_mixes(recipe: Recipe, *rest: Any) -> bool:
        return can_be_captured(with_changes(recipe, {"mixup": 0.0, "cutmix": 0.0}), *rest)

    with contextlib.ExitStack() as stack:
        stack.enter_context(heads_outside_of_compiled_code())
        for place, name, value in (
            (opening, "build_optimizer", with_classifier_decay),
            (opening, "build_mixing", mixing),
            (opening, "can_be_captured", although_it_mixes),
            (records, "Curves", NoCurves),
        ):
            stack.callback(setattr, place, name, getattr(place, name))
            setattr(place, name, value)
        yield


class NoCurves:
    """In the place of `records.Curves`."""

    def __init__(self, *_: Any) -> None:
        pass

    def add(self, *_: Any) -> None:
        pass

    def close(self) -> None:
        pass


@functools.cache
def machine(place: Place) -> dict[str, Any]:
    """Versions, commit and hardware; asking git takes longer than one would like for every run."""
    facts = records.environment(find_device(place.device))
    del facts["started"]
    return {**facts, "commit": place.commit or facts["commit"]}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with tiny32, cifar100, cifar10, flowers64 and pets64")
    parser.add_argument("--part", nargs="+", default=["all"], choices=["all", *PARTS], help="in the order of the plan")
    parser.add_argument("--output", type=Path, default=HERE / "results.jsonl", help="lines of results are added to it")
    parser.add_argument("--scratch", type=Path, default=Path("runs/tiny_imagenet"), help="for data and weights")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run that would take longer")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--commit", help="of the code, where git cannot tell")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", dest="overrides", help="for all recipes")
    parser.add_argument(
        "--share", default="1/1", metavar="I/N", help="run every N-th entry, from the I-th on: see README.md"
    )
    parser.add_argument("--retry", action="store_true", help="repeat what failed, too")
    parser.add_argument("--keep", action="store_true", help="the folders of the runs, in SCRATCH/runs")
    parser.add_argument("--list", action="store_true", help="print what is done and what remains, and stop")
    args = parser.parse_args(words)
    begin = time.monotonic()
    try:
        args.overrides = parsed(tuple(args.overrides))
        args.share = share(args.share)
        lines = read(args.output)
        place = Place(args.scratch.resolve(), args.device, args.commit, args.keep, args.share[1])
        first = next((entry for entry in remaining(args, lines) if entry.base), None)
        if args.list:
            return show(args, lines, place)
        if first is None:
            return say(f"nothing to run; results in {args.output}")
        if args.data is None:
            parser.error("where are the images? give --data")
        store = Store(args.data.resolve(), place.scratch, find_device(args.device), View.of(recipe_of(first)))
        for entry in remaining(args, lines):
            if entry.base:
                store.check(entry)
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    work(args, lines, store, place, begin)
    rest = remaining(args, lines)
    say(f"{len(rest)} runs remain, about {minutes(rest, lines, place):.0f} minutes; results in {args.output}")


def work(args: argparse.Namespace, lines: Lines, store: Store, place: Place, begin: float) -> None:
    """Run what can be run, one after the other, until nothing is left that would end in time."""
    attempted: set[str] = set()
    failures = 0
    while True:
        lines |= read(args.output)  # other processes may have added some
        left = 60 * args.minutes - (time.monotonic() - begin)
        ready = [entry for entry in remaining(args, lines) if entry.base and entry.key not in attempted]
        entry = next((entry for entry in ready if (1 + LATE) * expected(entry, lines, place) + SLACK < left), None)
        if entry is None:
            return
        attempted.add(entry.key)
        say(f"{entry.name} begins, {left / 60:.1f} minutes left" if math.isfinite(left) else f"{entry.name} begins")
        line = do(entry, store, place)
        append(args.output, line)
        lines[entry.key] = line
        say(f"{entry.name}: {outcome(line)}, {line['seconds']:.0f} s")
        failures = failures + 1 if "error" in line and not line["diverged"] else 0
        if failures == TOO_MANY:
            sys.exit(f"stopped: {failures} failures in a row: {line['error']}")


def outcome(line: dict[str, Any]) -> str:
    """A line of results in a few words."""
    if "error" in line:
        return line["error"]
    kind = "transfer" if "transfer" in line else "transfer_cv"
    means = [f"{probe} {sum(sets.values()) / len(sets):.2f}" for probe, sets in line[kind].items()]
    return f"top-1 {line['top1']:.2f} of {line.get('images_train', 0):,} images, {', '.join(means)}"


def remaining(args: argparse.Namespace, lines: Lines) -> list[Entry]:
    """The runs of the parts asked for that have no line yet, in the order of the plan."""
    number, count = args.share
    asked = [entry for entry in plan(lines, args.overrides) if {"all", entry.stage} & set(args.part)]
    return list(to_do(asked[number - 1 :: count], lines, args.retry))  # type: ignore[arg-type]


def show(args: argparse.Namespace, lines: Lines, place: Place) -> None:
    rest = remaining(args, lines)
    for part in PARTS:
        entries = [entry for entry in plan(lines, args.overrides) if entry.stage == part]
        left = [entry for entry in rest if entry.stage == part]
        if {"all", part} & set(args.part):
            waiting = sum(not entry.base for entry in left)
            wait = f", {waiting} of them wait for earlier parts" if waiting else ""
            time_left = f"about {minutes(left, lines, place):.0f} minutes"
            say(f"{part}: {len(entries)} runs, {len(left)} remain{wait}, {time_left}")
    for line in lines.values():
        if "error" in line and not line["diverged"]:
            say(f"failed: {line['name']}: {line['error']}")


def expected(entry: Entry, lines: Lines, place: Place) -> float:
    return seconds(entry, lines, machine(place)["device"], place.at_once)


def minutes(entries: Sequence[Entry], lines: Lines, place: Place) -> float:
    return sum(expected(entry, lines, place) for entry in entries) / 60


def share(text: str) -> tuple[int, int]:
    """Which entries a process runs: (I, N) of "I/N"."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ValueError(f"--share must be I/N with 1 <= I <= N, got {text!r}")
    return int(number), int(count)


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)  # the run that was cut short has no line and is done again the next time
