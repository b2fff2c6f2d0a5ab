"""One process of many that share a head: `python -m benchmarks.scale_out` measures it on one GPU.

torch's "fake" process group replaces the other processes. Its collectives have the right sizes and return wrong values.
So memory, kernels and launches are those of one process of W, and the loss is meaningless. A collective should cost
nothing here, but the fake gathering launches a copy for each process: it is replaced by one copy of all.

For each case it measures the time of an update (loss, backward and step), the peak memory, and the bytes sent, counted
and by formula. It compares them with the same local work in one process without sharding: the classes of one shard, and
the features of all processes. `--tables` prints the tables of docs/scale-out.md: modelled communication times in three
networks, what fits on a GPU, and the saved measurements. It measures nothing and needs no GPU. `--device cpu --small`
shows on any machine that the script works.
"""

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import grassy
from benchmarks.gpu import machine, need_gpu, save
from benchmarks.markdown import table
from benchmarks.traffic import Traffic, head_bytes, partial_fc_bytes
from grassy.kernels import collectives


@dataclass(frozen=True)
class Case:
    """One process of `world`, each with `rows` features of `n` elements."""

    world: int
    classes: int
    rows: int = 128
    k: int = 4
    n: int = 512
    sample: float = 1.0


CASES = (
    Case(1, 300_000, rows=1024),
    Case(8, 1_000_000),
    Case(32, 10_000_000),
    Case(32, 10_000_000, sample=0.1),
    Case(8, 40_000_000),
    Case(256, 100_000_000, sample=0.1),
)
SMALL = (Case(1, 2_000, 32, 2, 64), Case(8, 16_000, 8, 2, 64), Case(64, 100_000, 4, 2, 64, sample=0.1))

RESULTS = Path(__file__).parent / "results/scale_out_gpu.json"

#: Seconds that a collective takes to start, and bytes that a process sends in a second.
NETWORKS = {
    "NVLink": (20e-6, 360e9),
    "InfiniBand 400": (60e-6, 45e9),
    "Ethernet 100": (100e-6, 11e9),
}
#: Operations in a second of a product in bfloat16 on an H200, from docs/performance.md.
PRODUCTS = 619e12
COLLECTIVES = 6


def measure(case: Case, device: str, repeats: int) -> dict[str, Any]:
    """Time and memory of an update of the first process, and of the same work alone."""
    dist.init_process_group("fake", rank=0, world_size=case.world, store=FakeStore())  # type: ignore[no-untyped-call]
    try:
        mesh = grassy.distributed.mesh(device)
        head = grassy.create_head(
            "grassmann", case.n, case.classes, k=case.k, gamma="auto", sample=case.sample, device="meta"
        )
        grassy.distributed.shard_head(head, mesh)
        work = update(head, case, case.rows, device)
        with Traffic(case.world) as traffic:
            work()
        with mock.patch.object(collectives, "_all_gather", gather):
            sharded = cost(work, device, repeats)
    finally:
        dist.destroy_process_group()
    del work
    alone = None
    if case.sample == 1:
        weight = head.weight.to_local().detach()  # type: ignore[operator, union-attr]
        whole = grassy.create_head("grassmann", case.n, len(weight), k=case.k, fuse_loss=True, device="meta")
        whole.weight = torch.nn.Parameter(weight)  # the same memory: there may be none for a second one
        alone = cost(update(whole, case, case.rows * case.world, device), device, repeats)
    formula = head_bytes(case.world, case.rows, case.n, precision=2 if device == "cuda" else 4)
    return {
        **asdict(case),
        "sharded": sharded,
        "alone": alone,
        "ratio": sharded["seconds"] / alone["seconds"] if alone else None,
        "collectives": traffic.calls,
        "bytes": traffic.sent,
        "bytes by formula": formula,
        "bytes of PartialFC v2 by formula": partial_fc_bytes(case.world, case.rows, case.n),
    }


def gather(result: torch.Tensor, rows: torch.Tensor, group: Any) -> None:
    """Fill the result as if all processes had the same rows, in one launch."""
    result.unflatten(0, (-1, len(rows))).copy_(rows)


def update(head: grassy.Head, case: Case, rows: int, device: str) -> Callable[[], None]:
    """Loss, backward and step of a head with such features, under bfloat16 autocast on a GPU."""
    optimizer = grassy.make_optimizer(head, "sgd", lr=0.1, bfloat16_momentum=True)
    x = torch.randn(rows, case.n, device=device, requires_grad=True)
    y = torch.randint(0, min(head.num_classes, case.classes), (rows,), device=device)
    head.train()

    def work() -> None:
        optimizer.zero_grad()
        x.grad = None
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = grassy.classification_loss(head, x, y)
        loss.backward()
        optimizer.step()

    return work


def cost(work: Callable[[], None], device: str, repeats: int) -> dict[str, float]:
    """The median of seconds, and the peak of memory in GiB: on a CPU that of the whole process so far."""
    work()
    work()
    synchronize(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - begun)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else kilobytes * 1024
    return {"seconds": statistics.median(times), "peak GiB": peak / 2**30}


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# --- models: arithmetic, no measurement ----------------------------------------------------------------------------


def communication(case: Case, network: str) -> float:
    """Modelled seconds: six collectives, each with a start, and all bytes at the network's rate, none hidden."""
    start, rate = NETWORKS[network]
    return COLLECTIVES * start + head_bytes(case.world, case.rows, case.n) / rate


def products(case: Case) -> float:
    """Modelled seconds of the four matrix products of an update: forward, again in the backward, two gradients."""
    return 8 * case.world * case.rows * (case.classes / case.world) * case.sample * case.k * case.n / PRODUCTS


def weak_scaling() -> str:
    rows = []
    for world in (8, 32, 128, 256, 512, 1024):
        case = Case(world, 10_000_000)
        compute = products(case)
        times = [communication(case, network) for network in NETWORKS]
        cells = [f"{1e3 * each:.2f} ms ({100 * each / compute:.1f} %)" for each in times]
        rows.append(
            [str(world), f"{head_bytes(world, case.rows, case.n) / 1e6:.1f} MB", f"{1e3 * compute:.1f} ms", *cells]
        )
    return table(["processes", "sent per update", "matmuls", *NETWORKS], rows)


def bytes_per_class(k: int, n: int, sample: float = 1.0) -> float:
    """Weight in float32, gradient in float32, momentum in bfloat16; of a sample, copies of weight and momentum too."""
    if sample == 1:
        return k * n * (4 + 4 + 2)
    return k * n * (4 + 2 + sample * (4 + 4 + 2))


def what_fits(rest: float = 8 * 2**30) -> str:
    """Millions of classes on GPUs with so much memory, when the backbone and all else take `rest` bytes of each."""
    rows = []
    for name, memory in (("24 GB", 24e9), ("80 GB", 80e9), ("H200, 141 GB", 141e9)):
        for gpus in (1, 8, 64):
            kinds = [(1, 512, 1.0), (4, 512, 1.0), (4, 512, 0.1), (8, 768, 1.0)]
            cells = [f"{gpus * (memory - rest) / bytes_per_class(*kind) / 1e6:.1f}" for kind in kinds]
            rows.append([f"{gpus} x {name}", *cells])
    return table(["GPUs", "k=1, n=512", "k=4, n=512", "k=4, n=512, sample=0.1", "k=8, n=768"], rows)


def measured(result: dict[str, Any]) -> str:
    """What the saved cases cost."""
    rows = [
        [
            f"{case['classes'] / 1e6:g} million",
            str(case["world"]),
            f"{case['sample']:g}",
            f"{1e3 * case['sharded']['seconds']:.1f}",
            f"{case['ratio']:.2f}" if case["ratio"] else "–",
            f"{case['sharded']['peak GiB']:.1f}",
            f"{case['bytes'] / 1e6:.1f}",
        ]
        for case in result["cases"]
    ]
    heads = ["classes", "processes", "sample", "update (ms)", "times the work alone", "peak (GiB)", "sent (MB)"]
    return table(heads, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tables", action="store_true", help="print the tables of the page and measure nothing")
    parser.add_argument("--output", type=Path, help="where to write the results, as JSON")
    arguments = parser.parse_args()
    if arguments.tables:
        saved = json.loads(RESULTS.read_text(encoding="utf-8"))
        print(f"{what_fits()}\n\n{weak_scaling()}\n\n{measured(saved)}")
        return
    need_gpu(arguments.device)
    results = []
    for case in SMALL if arguments.small else CASES:
        found = measure(case, arguments.device, arguments.repeats)
        results.append(found)
        ratio = f", {found['ratio']:.2f} times the work alone" if found["ratio"] else ""
        print(
            f"{case}: {1e3 * found['sharded']['seconds']:.1f} ms{ratio}, peak {found['sharded']['peak GiB']:.2f} GiB, "
            f"{len(found['collectives'])} collectives, {found['bytes'] / 1e6:.2f} MB sent",
            flush=True,
        )
        if arguments.output:
            save({**machine(arguments.device), "cases": results}, arguments.output)


if __name__ == "__main__":
    main()
