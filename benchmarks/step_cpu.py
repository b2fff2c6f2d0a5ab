"""The cost of one Riemannian step on a CPU: `make bench`.

The memory-bound lower limit is five passes: weight S, gradient D and momentum M are read once, S and M are written
once. It is computed from the bandwidth of a plain copy of S (two passes) measured in the same run. The peer is the
paper's Algorithm 1, with a thin SVD in every step and a QR in every fifth.

The step is the one that `impl="auto"` chooses, in C++ if there is a compiler. Further contestants are the reference in
plain torch and its six batched matmuls alone.

All contestants run in turn, many times; the table gives medians and their ratios.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

import grassy
from grassy import geometry, kernels

LR, MOMENTUM = 0.1, 0.9


def algorithm_1(s: Tensor, m: Tensor, d: Tensor) -> None:
    """Steps 1 to 4 in the paper's columns, by `torch.linalg.svd`, in place."""
    m.copy_(MOMENTUM * (m - s @ (s.mT @ m)) + d - s @ (s.mT @ d))
    u, sigma, vt = torch.linalg.svd(-m, full_matrices=False)
    s.copy_(((s @ vt.mT) * (LR * sigma).cos().unsqueeze(-2) + u * (LR * sigma).sin().unsqueeze(-2)) @ vt)


def qr(s: Tensor) -> None:
    """Step 5."""
    s.copy_(torch.linalg.qr(s).Q)


def medians(contestants: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds, the contestants taking turns so that a busy moment of the machine hits all of them."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds + 1):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def measure(classes: int, k: int, n: int, rounds: int) -> dict[str, float | str]:
    torch.manual_seed(0)
    w = geometry.random_subspace(classes, k, n)
    d, m, out = 1e-3 * torch.randn_like(w), torch.zeros_like(w), torch.empty_like(w)
    gram, tall = torch.empty(classes, k, k), torch.empty_like(w)
    fast = medians(
        {
            "copy": lambda: out.copy_(w),
            "step": lambda: kernels.geodesic_step(w, d, m, LR, MOMENTUM),
            "plain torch": lambda: kernels.geodesic_step(w, d, m, LR, MOMENTUM, impl="reference"),
            "one Gram matrix": lambda: torch.bmm(w, d.mT, out=gram),
            "one product": lambda: torch.bmm(gram, w, out=tall),
        },
        rounds,
    )
    s, ms, ds = (t.mT.contiguous() for t in (w, m, d))
    slow = medians({"svd": lambda: algorithm_1(s, ms, ds), "qr": lambda: qr(s)}, 2)
    floor = 2.5 * fast["copy"]
    peer = slow["svd"] + slow["qr"] / 5
    return {
        "classes": classes,
        "k": k,
        "n": n,
        "copy_ms": fast["copy"],
        "floor_ms": floor,
        "step_ms": fast["step"],
        "implementation": kernels.choose("auto", w),
        "step_over_floor": fast["step"] / floor,
        "plain_torch_over_floor": fast["plain torch"] / floor,
        "products_over_floor": 3 * (fast["one Gram matrix"] + fast["one product"]) / floor,
        "algorithm_1_ms": peer,
        "algorithm_1_over_step": peer / fast["step"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--output", type=Path, default=Path("runs/bench/step_cpu.json"))
    args = parser.parse_args()
    shapes = [(1000, 1, 2048), (1000, 4, 2048), (1000, 8, 2048), (1000, 16, 2048), (1000, 8, 768)]
    heads = ("floor", "step", "step / floor", "torch / floor", "products / floor", "Algorithm 1 / step")
    print(f"{'C x k x n':>16}", *(f"{head:>{len(head) + 2}}" for head in heads))
    rows = []
    for shape in shapes:
        row = measure(*shape, rounds=args.rounds)
        rows.append(row)
        numbers = (
            f"{row['floor_ms']:.1f}ms",
            f"{row['step_ms']:.1f}ms",
            f"{row['step_over_floor']:.2f}",
            f"{row['plain_torch_over_floor']:.2f}",
            f"{row['products_over_floor']:.2f}",
            f"{row['algorithm_1_over_step']:.1f}",
        )
        cells = (f"{number:>{len(head) + 2}}" for head, number in zip(heads, numbers, strict=True))
        print(f"{' x '.join(map(str, shape)):>16}", *cells, flush=True)
    print(f"The step is {rows[-1]['implementation']!r}; torch is the reference; products are its six alone.")
    result = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "grassy": grassy.__version__,
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "rows": rows,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"Saved {args.output}")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


if __name__ == "__main__":
    main()
