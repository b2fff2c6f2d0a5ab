"""Other ways to divide a class than the one that the step takes: `python -m benchmarks.step_plans 1000x8x384`.

Rules found on one GPU determine the launch: thread blocks per class, warps per block, blocks per multiprocessor, and
how long blocks wait for each other at the start. This script tries other values for a shape, classes x k x n with k up
to 16, and prints the fastest. It takes half a minute per shape, most of it for compilation.
"""

import argparse
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu import captured, copy_bandwidth, machine, medians, need_gpu, save
from benchmarks.step import LR, MOMENTUM
from grassy import geometry, kernels
from grassy.kernels.cuda import step as cuda_step
from grassy.kernels.cuda.step import Plan

#: Of a multiprocessor: registers, and those of them that a thread can do with.
REGISTERS, FEWEST = 65536, 64
#: Shares of the time after which the next block of a multiprocessor begins, where a block waits for the one before.
PAUSES = (0.0, 0.5, 1.0)
#: How many are printed.
SHOWN = 12


def candidates(k: int, n: int, capability: tuple[int, int]) -> Iterator[Plan]:
    """All plans that fit and are worth a look, the rule's own first."""
    own = cuda_step.plan(k, n, capability)
    if own is None or k > 16:
        return
    yield own
    limit = cuda_step.SHARED_KIB.get(capability, 99) * 1024 - cuda_step.STATIC_BYTES
    near = (own.cluster // 2, own.cluster, 2 * own.cluster)
    clusters = [size for size in near if size in (1, 2, 4, 8) and (size == 1 or capability >= (9, 0))]
    warps_of = {8: (2, 4, 8), 16: (4, 8)}[own.rows]
    # Of small classes two are taken together, or each by itself.
    for cluster, classes in itertools.product(clusters, {own.classes, 1}):
        columns = 32 * -(-n // (32 * cluster))
        for warps in warps_of:
            one = own._replace(cluster=cluster, columns=columns, warps=warps, blocks=1, classes=classes)
            if one.shared_bytes > limit:
                continue
            by_memory = (limit + 1024) // (one.shared_bytes + 1024)
            most = min(by_memory, REGISTERS // (32 * warps * FEWEST))
            for blocks in range(max(1, most // 2), most + 1):
                if (found := one._replace(blocks=blocks)) != own:
                    yield found


@contextmanager
def taken(chosen: Plan, pause: float) -> Iterator[None]:
    """As if the rules had chosen a plan, and a share of the longest pause."""
    longest = cuda_step._pause(chosen, rounds=True)
    with (
        mock.patch.object(cuda_step, "plan", return_value=chosen),
        mock.patch.object(cuda_step, "_pause", return_value=round(pause * longest)),
    ):
        yield


def measure(classes: int, k: int, n: int, bandwidth: float) -> dict[str, Any]:
    torch.manual_seed(0)
    w = geometry.random_subspace(classes, k, n, device="cuda")
    d, m = 1e-3 * torch.randn_like(w), torch.zeros_like(w)
    counts = torch.zeros(2, dtype=torch.int64, device="cuda")

    def step() -> None:
        kernels.geodesic_steps([w], [d], [m], LR, MOMENTUM, counts=[counts], impl="cuda")

    plans = list(candidates(k, n, torch.cuda.get_device_capability()))
    with ThreadPoolExecutor() as pool:  # kept on the disk, so that the second look finds them
        reasons = list(pool.map(lambda chosen: cuda_step._failure(chosen, False, False, w.device), plans))
    works: dict[str, Any] = {"as it is": captured(step)}
    for chosen, reason in zip(plans, reasons, strict=True):
        for pause in PAUSES if reason is None else ():
            with taken(chosen, pause):
                works[f"{chosen}, pause {pause:g}"] = captured(step)
    times = dict(sorted(medians(works).items(), key=lambda item: item[1]))
    failed = {str(chosen): reason for chosen, reason in zip(plans, reasons, strict=True) if reason}
    facts = {"classes": classes, "k": k, "n": n, "floor_ms": 5 * w.nbytes / bandwidth, "plan": str(plans[0])}
    return {**facts, "ms": times, "failed": failed}


def parse(text: str) -> tuple[int, int, int]:
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdigit() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"a shape is given as CLASSESxKxN, such as 1000x8x384, got {text!r}")
    classes, k, n = map(int, parts)
    if k > 16:
        raise argparse.ArgumentTypeError(f"k must be at most 16, got {text!r}: with more there is little to choose")
    return classes, k, n


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", type=parse, nargs="+", metavar="CLASSESxKxN")
    parser.add_argument("--output", type=Path, default=Path("runs/bench/step_plans_gpu.json"))
    args = parser.parse_args()
    need_gpu()
    bandwidth = copy_bandwidth()
    result = {**machine(), "rows": []}
    for shape in args.shapes:
        if cuda_step.plan(*shape[1:], torch.cuda.get_device_capability()) is None:
            print(f"{' x '.join(map(str, shape))}: too large for this kernel, or the GPU is too old")
            continue
        row = measure(*shape, bandwidth)
        result["rows"].append(row)
        print(f"{' x '.join(map(str, shape))}: floor {1e3 * row['floor_ms']:.1f} us")
        for number, (name, time) in enumerate(row["ms"].items()):
            if number < SHOWN or name == "as it is" or name.startswith(row["plan"]):
                mark = f": {row['plan']}" if name == "as it is" else ""
                print(f"  {1e3 * time:8.1f} us, {time / row['floor_ms']:.2f} floors: {name}{mark}", flush=True)
        for name, why in row["failed"].items():
            print(f"  failed: {name}: {why}")
        save(result, args.output)
    print(f"Saved {args.output}")


if __name__ == "__main__":
    main()
