"""The paper's table of SVD and QR times, beside a whole step of ours: `python -m benchmarks.svd_qr`.

1,000 Gaussian matrices of 2,048 x k, as Algorithm 1 meets them when training on ImageNet. On a GPU the thin SVD is
cuSOLVER's `gesvda`, which the paper uses, and `gesvdj`, which goes from matrix to matrix; on a CPU (`--device cpu`) it
is LAPACK's. They are timed by the clock, from an idle GPU to an idle GPU: they cannot be captured. A contestant that
takes longer than the limit is not tried with larger k. The step is `kernels.geodesic_step` with momentum, all five
parts of Algorithm 1: on a GPU a CUDA graph with the L2 cache emptied first.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import captured, machine, medians, need_gpu, save
from grassy import geometry, kernels, paper

LR, MOMENTUM = 1e-4, 0.9
LIMIT_S = 3.0


def median_ms(run: Callable[[], object], device: str, runs: int, limit: float) -> float:
    """The median after one run that does not count, in ms; of fewer runs once they have taken the limit together."""
    times: list[float] = []
    while len(times) <= runs and sum(times) < limit:
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[1:] or times)


def measure(classes: int, n: int, k: int, device: str, runs: int, limit: float, skip: set[str]) -> dict[str, Any]:
    torch.manual_seed(0)
    matrices = torch.randn(classes, n, k, device=device)
    row: dict[str, Any] = {"classes": classes, "n": n, "k": k, "ms": {}}
    first = factorisations(matrices[:2], device)
    for name, run in factorisations(matrices, device).items():
        if name in skip:
            continue
        try:
            # Two matrices first: libraries are loaded, and a contestant that goes from matrix to matrix is found out.
            if len(matrices) / 2 * median_ms(first[name], device, 1, limit) > 3e3 * limit:
                skip.add(name)
                continue
            row["ms"][name] = median_ms(run, device, runs, limit)
        except RuntimeError as error:  # a driver of cuSOLVER need not take every shape
            print(f"{name} fails with k = {k}: {str(error).splitlines()[0]}")
            skip.add(name)
            continue
        if row["ms"][name] > 1e3 * limit:
            skip.add(name)
    w = geometry.random_subspace(classes, k, n, device=device)
    d, m = 1e-3 * torch.randn_like(w), torch.zeros_like(w)

    def step() -> None:
        kernels.geodesic_step(w, d, m, LR, MOMENTUM)

    row["step_ms"] = medians({"step": captured(step)})["step"] if device == "cuda" else median_ms(step, device, 9, 1.0)
    row["implementation"] = kernels.choose("auto", w)
    return row


def factorisations(matrices: Tensor, device: str) -> dict[str, Callable[[], object]]:
    def svd(driver: str | None = None) -> object:
        return torch.linalg.svd(matrices, full_matrices=False, driver=driver)

    found: dict[str, Callable[[], object]] = {"svd": svd}
    if device == "cuda":
        found = {"svd gesvda": lambda: svd("gesvda"), "svd gesvdj": lambda: svd("gesvdj")}
    return {**found, "qr": lambda: torch.linalg.qr(matrices)}


def of_paper(k: int, device: str) -> dict[str, float]:
    """What the paper says about this k, on its own machine, in ms."""
    key, place = f"time-k{k}", "gpu" if device == "cuda" else "cpu"
    if key not in paper.rows():
        return {}
    return {what: paper.figures(key)[f"{what}_ms"][place] for what in ("svd", "qr")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--n", type=int, default=2048)
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for all runs of a contestant with one k")
    parser.add_argument("--output", type=Path, help="default runs/bench/svd_qr_gpu.json, or svd_qr_cpu.json")
    args = parser.parse_args()
    need_gpu(args.device)
    output = args.output or Path(f"runs/bench/svd_qr_{'gpu' if args.device == 'cuda' else 'cpu'}.json")
    result = {**machine(args.device), "rows": []}
    skip: set[str] = set()
    for k in args.k:
        row = measure(args.classes, args.n, k, args.device, args.runs, args.limit, skip)
        row["paper_ms"] = of_paper(k, args.device) if (args.classes, args.n) == (1000, 2048) else {}
        result["rows"].append(row)
        times = ", ".join(f"{name} {value:.2f} ms ({value / row['step_ms']:.0f} steps)"
                          for name, value in row["ms"].items())  # fmt: skip
        theirs = "".join(f", {name} {value:g}" for name, value in row["paper_ms"].items())
        print(f"{args.classes} x {args.n} x {k}: a whole step {row['step_ms']:.3f} ms, {times}"
              f"{'; the paper' + theirs[1:] if theirs else ''}", flush=True)  # fmt: skip
        save(result, output)
    print(f"Saved {output}")


if __name__ == "__main__":
    main()
