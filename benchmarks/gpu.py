"""How the GPU benchmarks measure: the work in a CUDA graph, caches emptied before each launch, contestants in turns."""

import json
import platform
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

import grassy
from grassy.runs.records import environment


def need_gpu(device: str = "cuda") -> None:
    """End the script with one sentence if it is to run on a GPU and there is none."""
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA GPU, and torch finds none here.")


def machine(device: str = "cuda") -> dict[str, Any]:
    """The first fields of a results file."""
    versions = {"grassy": grassy.__version__, "torch": torch.__version__, "python": platform.python_version()}
    versions["commit"] = environment(torch.device("cpu"))["commit"]  # of the code, so that a figure can be traced to it
    try:
        import triton

        versions["triton"] = triton.__version__
    except ImportError:
        pass
    where: dict[str, Any] = {"gpu": None, "threads": torch.get_num_threads()}
    if device == "cuda":
        where = {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return {"date": date.today().isoformat(), **where, **versions}


def save(result: dict[str, Any], output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")


@dataclass(frozen=True)
class Captured:
    """A CUDA graph, and the work in it: what that allocated before, such as an optimizer's state, must live on."""

    graph: torch.cuda.CUDAGraph
    work: Callable[[], Any]

    def __call__(self) -> None:
        self.graph.replay()


def captured(work: Callable[[], Any]) -> Captured:
    """The work as a CUDA graph: one launch, whatever the host costs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return Captured(graph, work)


def medians(contestants: dict[str, Callable[[], Any]], rounds: int = 30, dirty: bool = False) -> dict[str, float]:
    """Median milliseconds of each contestant; they take turns.

    Before each run a gigabyte is written, then read. This empties the L2 cache and lets the host run ahead, so that
    only the work lies between the two events. Without the read, written bytes would still fill the cache, and the work
    would wait until they reach memory; `dirty` leaves them there.
    """
    flush = torch.empty(2**28, device="cuda")
    total = torch.empty((), device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in contestants}
    for _ in range(rounds + 2):
        for name, run in contestants.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            if not dirty:
                torch.sum(flush, dim=0, out=total)
            start.record()
            run()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: statistics.median(start.elapsed_time(end) for start, end in pairs[2:]) for name, pairs in events.items()
    }


def medians_in_graphs(contestants: dict[str, Callable[[], Any]], rounds: int = 30) -> dict[str, float]:
    """Median milliseconds of each contestant within a larger graph, between two events that are nodes of that graph.

    Earlier nodes empty the cache, as `medians` does. The times exclude the launch of a graph by the host, a few
    microseconds, but include the gap between two kernels.
    """
    flush = torch.empty(2**28, device="cuda")
    total = torch.empty((), device="cuda")
    graphs = {}
    for name, work in contestants.items():
        start, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))

        def whole(work=work, start=start, end=end) -> None:
            flush.zero_()
            torch.sum(flush, dim=0, out=total)
            start.record()
            work()
            end.record()

        graphs[name] = captured(whole), start, end
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds + 2):
        for name, (replay, start, end) in graphs.items():
            replay()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end))
    return {name: statistics.median(values[2:]) for name, values in times.items()}


def copy_bandwidth() -> float:
    """Bytes per millisecond, read and written, of the fastest copy of a gigabyte: by the driver or by a kernel."""
    source = torch.empty(2**28, device="cuda")
    target = torch.empty_like(source)
    ways = {"driver": lambda: target.copy_(source), "kernel": captured(lambda: torch.neg(source, out=target))}
    return 2 * source.nbytes / min(medians(ways, 20).values())
