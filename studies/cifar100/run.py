"""Do the jobs of the study that have no line in the results yet. See README.md beside this file.

    python -m studies.cifar100.run --data-dir DIR --minutes 8
    python -m studies.cifar100.run --list

Each job trains, measures its weights in the same process and appends one line of numbers; weights are then deleted.
"""

import argparse
import contextlib
import fnmatch
import functools
import gc
import hashlib
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch

from grassy.distributed.processes import find_device
from grassy.heads.base import Head
from grassy.recipes.changes import with_changes
from grassy.runs.records import environment
from grassy.runs.weights import LAST
from grassy.spelling import nearest
from grassy.train.loop import TrainingStopped, train
from studies.cifar100.measure import STAMP, Lab, View, check, write_arrays
from studies.cifar100.plan import (
    CONTESTANTS,
    FINAL,
    STARTS,
    TUNE,
    VARIANTS,
    Job,
    Lines,
    Variant,
    plan,
    read,
    seconds,
    to_do,
)

HERE = Path(__file__).parent
#: What a job may take longer than it should: a share, and seconds.
LATE, SLACK = 0.15, 10.0
#: So many failures in a row that are not the settings' fault: something is wrong here, a GPU that is lost perhaps.
TOO_MANY = 3


@dataclass(frozen=True)
class Place:
    """Where things are."""

    scratch: Path
    device: str
    keep: bool = False
    at_once: int = 1


def do(job: Job, place: Place) -> dict[str, Any]:
    """One job: the line of results that it leaves, with the error if it failed."""
    assert job.recipe is not None
    begin, device = time.monotonic(), find_device(place.device)
    facts = {"stage": job.stage, "row": job.row, "number": job.number, "seed": job.recipe.seed}
    line = {"key": job.key, **facts, "settings": job.settings, "start": job.start.key if job.start else None}
    try:
        with heads_outside_of_compiled_code():
            line |= _train_and_measure(job, place)
    except Exception as error:  # whatever it is: the other runs go on
        line["diverged"] = isinstance(error, TrainingStopped) and error.__cause__ is None  # else out of memory
        line["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    finally:
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
    started = datetime.now(UTC) - timedelta(seconds=time.monotonic() - begin)
    times = {"seconds": round(time.monotonic() - begin, 2), "started": started.isoformat(timespec="seconds")}
    return {**line, **_machine(place.device), "at_once": place.at_once, "mps": mps_is_running(), **times}


@contextlib.contextmanager
def heads_outside_of_compiled_code() -> Iterator[None]:
    """So that all rows of a process share the compiled network. A head's own kernels are few, and fused already."""
    before = Head.forward
    Head.forward = _forward_as_it_is()  # type: ignore[method-assign]
    try:
        yield
    finally:
        Head.forward = before  # type: ignore[method-assign]


@functools.cache  # a new one would be compiled for anew
def _forward_as_it_is() -> Any:
    return torch.compiler.disable(Head.forward)


@functools.cache
def _machine(device: str) -> dict[str, Any]:
    """Versions, commit and hardware; asking git takes longer than one would like for every job."""
    return environment(find_device(device))


def _train_and_measure(job: Job, place: Place) -> dict[str, Any]:
    assert job.recipe is not None
    folder = place.scratch / "runs" / job.key
    start = None if job.start is None else _start(job.start, place, folder)
    row = _trained(job, place, folder, None if start is None else start.weights)
    # The last weights, never the best ones, which would be chosen on the images that they are judged by.
    measures = _lab(place).measure(folder / LAST, job.recipe, job.stage)
    if not place.keep:
        shutil.rmtree(folder)
    names = {"eval_top1": "top1", "eval_top5": "top5", "eval_loss": "loss", "train_loss": "train_loss"}
    names |= {"eval_effective_rank": "effective_rank", "seconds": "seconds_last_epoch"}
    found = {new: row[old] for old, new in names.items()} | measures
    if start is not None:
        found["start_top1"] = start.top1
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in found.items()}


def _trained(job: Job, place: Place, folder: Path, weights: Path | None = None) -> dict[str, Any]:
    """Train into a folder, from weights if they are given; the row of the last epoch."""
    recipe = job.recipe
    assert recipe is not None
    if weights is not None:
        recipe = with_changes(recipe, {"initial_checkpoint": str(weights)})
    shutil.rmtree(folder, ignore_errors=True)  # of a job that was cut short
    state = train(recipe, place.scratch / "data" / job.stage, folder, device=place.device, quiet=True)
    if state.stopped_by is not None:
        raise KeyboardInterrupt
    if job.stage == FINAL and job.row in STARTS:
        keep_start(folder / LAST, state.rows[-1]["eval_top1"], _start_folder(job, place))
    return state.rows[-1]


class Start(NamedTuple):
    """Weights that a run begins with, and their top-1."""

    weights: Path
    top1: float


def _start(job: Job, place: Place, folder: Path) -> Start:
    """What is kept of a run that others begin with; if there is nothing it runs again, beside a folder."""
    kept = _start_folder(job, place)
    if not kept.exists():
        _trained(job, place, beside := folder.with_name(f"{folder.name}-start"))
        shutil.rmtree(beside)
    return Start(kept / LAST, json.loads((kept / "top1.json").read_text()))


def keep_start(weights: Path, top1: float, kept: Path) -> None:
    """Keep weights that others begin with, and their top-1, in a folder that is there as a whole or not at all."""
    part = kept.with_name(f"{kept.name}.{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    shutil.copyfile(weights, part / LAST)
    (part / "top1.json").write_text(json.dumps(top1))
    try:
        part.rename(kept)
    except OSError:  # another run of the same has come first, and others may have begun with it
        shutil.rmtree(part)


def _start_folder(job: Job, place: Place) -> Path:
    """Where the weights of a run are kept that others begin with, of the images that are there now."""
    stamp = place.scratch / "data" / STAMP
    images = hashlib.sha256(stamp.read_bytes()).hexdigest()[:8] if stamp.exists() else "none"
    return place.scratch / "starts" / f"{job.key}-{images}"


@functools.cache
def _lab(place: Place) -> Lab:
    """The images to measure on, read once a process."""
    return Lab.open(place.scratch / "data", find_device(place.device))


def append(path: Path, line: dict[str, Any]) -> None:
    """One line, on the disk when this returns; after half a line of a crash, on a line of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        file.seek(0, os.SEEK_END)
        if file.tell():
            file.seek(-1, os.SEEK_END)
            whole = file.read(1) == b"\n"
        else:
            whole = True
        file.write((b"" if whole else b"\n") + json.dumps(line, allow_nan=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def mps_is_running() -> bool:
    """Whether runs at once share the GPU, instead of taking turns."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control").exists()


class InThisProcess(Executor):
    """Runs what is submitted at once."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*args, **options))
        return future


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="folder with cifar100, cifar10, flowers, pets, or torchvision's")
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl")
    parser.add_argument("--scratch", type=Path, default=Path("runs/cifar100"), help="for data and weights")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin nothing that would take longer")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once; on one GPU start MPS first, see README.md")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="rows, such as 'grassmann-*'")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", dest="overrides", help="for all recipes")
    parser.add_argument("--retry", action="store_true", help="what failed, too")
    parser.add_argument("--keep", action="store_true", help="the folders of the runs, in SCRATCH/runs")
    parser.add_argument("--list", action="store_true", help="print the plan and how long it will take, and stop")
    args = parser.parse_args()
    if args.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {args.jobs}")
    if args.results.is_dir():
        parser.error(f"--results {args.results} is a folder, not a file")
    if args.scratch.exists() and not args.scratch.is_dir():
        parser.error(f"--scratch {args.scratch} is a file, not a folder")
    begin = time.monotonic()
    place = Place(args.scratch.resolve(), args.device, args.keep, args.jobs)
    try:
        lines = read(args.results)
        rows = {job.row for job in plan(lines, args.overrides)}
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    for pattern in args.only:
        if not fnmatch.filter(rows, pattern):
            parser.error(f"--only {pattern}: there is no such row{nearest(pattern, rows)}")
    if args.list:
        return list_jobs(args, lines, place)
    if args.data_dir is None:
        parser.error("where are the images? give --data-dir")
    try:
        check(args.data_dir)
        find_device(args.device)
    except ValueError as error:
        parser.error(str(error))
    hardware = _machine(args.device)["device"]
    if args.jobs > 1 and find_device(args.device).type == "cuda" and not mps_is_running():
        print("MPS is not running: runs at once will take turns on the GPU. See README.md", file=sys.stderr)
    first = next((job for job in remaining(args, lines) if job.base), None)
    if first is not None and first.recipe is not None:
        write_arrays(args.data_dir.resolve(), place.scratch / "data", View.of(first.recipe))
    pool = InThisProcess() if args.jobs == 1 else ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn"))
    try:
        with pool:
            stopped = work(pool, args, lines, place, hardware, begin)
    except BrokenProcessPool:
        stopped = "a worker was killed, by the system for want of memory perhaps; what was running has no line"
    rest = list(remaining(args, lines))
    known = {job.key for job in plan(lines, args.overrides) if job.base}
    failed = sum("error" in line and not line["diverged"] for key, line in lines.items() if key in known)
    left = f"{len(rest)} jobs remain, about {minutes(rest, lines, place, hardware):.0f} minutes"
    repeat = f"; {failed} failed, to be repeated with --retry" if failed else ""
    print(f"{left if rest else 'all jobs are done'}{repeat}; results in {args.results}", flush=True)
    if rest and (awaited := awaited_rows(rest, args, lines)):
        print(f"they wait for trials of {', '.join(awaited)}, which --only leaves out", flush=True)
    if stopped:
        sys.exit(f"stopped: {stopped}")


def work(
    pool: Executor, args: argparse.Namespace, lines: Lines, place: Place, hardware: str, begin: float
) -> str | None:
    """Begin what can be begun and append what is finished, until there is nothing left; if it stops early, why."""
    running: dict[Future[Any], Job] = {}
    attempted: set[str] = set()
    failures, stopped = 0, None  # in a row, and why nothing begins any more
    try:
        while True:
            left = 60 * args.minutes - (time.monotonic() - begin)
            for job in remaining(args, lines) if stopped is None else ():
                if len(running) >= args.jobs:
                    break
                if not job.base or job.key in attempted or _in_the_making(job.start, running.values(), place):
                    continue
                if (1 + LATE) * expected(job, lines, hardware, place) + SLACK < left or math.isinf(left):
                    attempted.add(job.key)
                    running[pool.submit(do, job, place)] = job
            if not running:
                return stopped
            done = wait(running, return_when=FIRST_COMPLETED).done
            for future in sorted(done, key=lambda each: each.exception() is not None):  # what is finished first
                line = future.result()
                job = running.pop(future)
                append(args.results, line)
                lines[job.key] = line
                report(job, line, args, lines, place, hardware, begin)
                failures = failures + 1 if "error" in line and not line["diverged"] else 0
                if failures == TOO_MANY:
                    stopped = f"{failures} failures in a row: {line['error']}"
    except KeyboardInterrupt:
        for child in multiprocessing.active_children():
            child.terminate()
        raise


def _in_the_making(start: Job | None, running: Iterable[Job], place: Place) -> bool:
    """Whether the weights that a job would begin with are being trained."""
    if start is None or _start_folder(start, place).exists():
        return False
    return any(start.key in (job.key, job.start and job.start.key) for job in running)


def remaining(args: argparse.Namespace, lines: Lines) -> list[Job]:
    jobs = plan(lines, args.overrides)
    asked = [job for job in jobs if any(fnmatch.fnmatch(job.row, pattern) for pattern in args.only)]
    return list(to_do(asked, lines, args.retry))


def awaited_rows(rest: list[Job], args: argparse.Namespace, lines: Lines) -> list[str]:
    """Rows whose trials have to be made before any of the rest can begin, and were not asked for."""
    if any(job.base for job in rest):
        return []
    needed = set()
    for row in {job.row for job in rest}:
        variant = VARIANTS.get(row, Variant(row, {}))
        needed |= {variant.of, variant.start, *(CONTESTANTS if row in CONTESTANTS else ())}
    trials = {job.row for job in to_do(plan(lines, args.overrides), lines) if job.stage == TUNE}
    return sorted(row for row in needed & trials if not any(fnmatch.fnmatch(row, each) for each in args.only))


def expected(job: Job, lines: Lines, hardware: str | None, place: Place) -> float:
    """Seconds of a job, with those of the run that it begins with, if its weights are not there."""
    jobs = [job]
    if job.start is not None and not _start_folder(job.start, place).exists():
        jobs.append(job.start)
    return sum(seconds(each, lines, hardware, place.at_once) for each in jobs)


def minutes(jobs: list[Job], lines: Lines, place: Place, hardware: str | None = None) -> float:
    """Of jobs, with those that some of them begin with, if their weights are not there."""
    starts = {job.start.key: job.start for job in jobs if job.start is not None}
    known = {job.key for job in jobs if job.base}
    again = [job for key, job in starts.items() if key not in known and not _start_folder(job, place).exists()]
    return sum(seconds(job, lines, hardware, place.at_once) for job in [*jobs, *again]) / 60 / place.at_once


def report(
    job: Job, line: dict[str, Any], args: argparse.Namespace, lines: Lines, place: Place, hardware: str, begin: float
) -> None:
    rest = list(remaining(args, lines))
    said = f"failed: {line['error']}" if "error" in line else f"top-1 {line['top1']:.2f}"
    if transfer := line.get("transfer"):
        said += f", transfer {sum(transfer.values()) / len(transfer):.2f}"
    spent = (time.monotonic() - begin) / 60
    limit = "" if math.isinf(args.minutes) else f" of {args.minutes:g}"
    go = f"{len(rest)} jobs, about {minutes(rest, lines, place, hardware):.0f} min, to go"
    print(f"{job.name}: {said}, {line['seconds']:.0f} s; {spent:.1f}{limit} min spent, {go}", flush=True)


def list_jobs(args: argparse.Namespace, lines: Lines, place: Place) -> None:
    """Every job: done, failed, to do, or waiting for trials to decide its settings; times are those of the lines."""
    jobs = [job for job in plan(lines, args.overrides) if any(fnmatch.fnmatch(job.row, each) for each in args.only)]
    for job in jobs:
        line = lines.get(job.key) if job.base else None
        state = "waits" if not job.base else "to do" if line is None else "FAILED" if "error" in line else "done"
        print(f"{state:6} {job.name:42} {seconds(job, lines, at_once=args.jobs):6.0f} s")
    for stage in (TUNE, FINAL):
        rest = [job for job in to_do(jobs, lines) if job.stage == stage]
        of = sum(job.stage == stage for job in jobs)
        print(f"{stage}: {len(rest)} of {of} jobs to do, about {minutes(rest, lines, place):.0f} minutes")
    devices = sorted({line["device"] for line in lines.values()}) or ["NVIDIA H200"]
    print(f"Times are those of {' and '.join(devices)}, {args.jobs} at once.")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: no worker is left behind
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)  # the job that was running has no line and is done again the next time
    except BrokenPipeError:  # the reader of --list has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
