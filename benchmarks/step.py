"""The cost of one Riemannian step on a GPU: `python -m benchmarks.step`.

The memory-bound lower limit is five passes: weight, gradient and momentum are read once, weight and momentum are
written once. It is computed from the bandwidth of a device copy measured in the same run.

The peers are the Gram form in eager torch (`impl="reference"`), a kernel that copies as many bytes, and the paper's
Algorithm 1. The latter has a thin SVD by cuSOLVER's `gesvda` in every step and a batched QR in every fifth. All run as
CUDA graphs with the L2 cache emptied first, except the two factorisations, which a graph cannot capture.

The step is also timed in three other situations. In the first, the cache is full of another kernel's output, which must
be written to memory first. In the second, it is part of a larger graph, without the time of a launch. In the third,
the rotation angle is large.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import captured, copy_bandwidth, machine, medians, medians_in_graphs, need_gpu, save
from grassy import geometry, kernels

LR, MOMENTUM = 1e-4, 0.9  # small, so that the subspaces stay where the gradient still points elsewhere
FAR = 0.3  # radians by which a class turns, in all: too far for the shortest way through the kernels
SHAPES = (
    *((1000, k, 2048) for k in (1, 2, 4, 8, 16, 32, 64)),
    (1000, 8, 768),
    (1000, 8, 384),
    (21841, 8, 768),
)


def svd_step(s: Tensor, m: Tensor, d: Tensor, lr: float = LR) -> None:
    """Steps 1 to 4 of Algorithm 1 in the paper's columns, in place."""
    m.copy_(MOMENTUM * (m - s @ (s.mT @ m)) + d - s @ (s.mT @ d))
    u, sigma, vt = torch.linalg.svd(-m, full_matrices=False, driver="gesvda" if m.is_cuda else None)
    s.copy_(((s @ vt.mT) * (lr * sigma).cos().unsqueeze(-2) + u * (lr * sigma).sin().unsqueeze(-2)) @ vt)


def measure(classes: int, k: int, n: int, bandwidth: float, peers: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    w = geometry.random_subspace(classes, k, n, device="cuda")
    d, m = 1e-3 * torch.randn_like(w), torch.zeros_like(w)
    chosen = kernels.choose("auto", w, d, m)
    others = [name for name, reason in kernels.explain(w, d, m).items() if reason is None and name != chosen]
    counts = torch.zeros(2, dtype=torch.int64, device="cuda")

    def step(impl: str) -> None:
        kernels.geodesic_steps([w], [d], [m], LR, MOMENTUM, counts=[counts], impl=impl)  # as the optimizer calls it

    contestants = {name: captured(lambda name=name: step(name)) for name in ["auto", *others]}
    contestants["launch"] = captured(lambda: counts.add_(0))  # next to nothing: what comes with every launch
    source = torch.empty(5 * w.numel() // 2, device="cuda")
    target = torch.empty_like(source)
    contestants["copy"] = captured(lambda: torch.neg(source, out=target))  # as many bytes, at this size
    times = medians(contestants)
    dirty = medians({"auto": contestants["auto"]}, dirty=True)
    works = {
        "step": lambda: step("auto"),
        "copy": lambda: torch.neg(source, out=target),
        "launch": lambda: counts.add_(0),
    }
    among_others = medians_in_graphs(works)

    def to_and_fro() -> None:
        lr = FAR / (1e-3 * (k * n) ** 0.5)
        for maximize in (False, True):
            kernels.geodesic_steps([w], [d], [m], lr, 0.0, maximize=maximize, counts=[counts])

    far = medians({"both": captured(to_and_fro)}, 10)["both"] / 2
    floor = 5 * w.nbytes / bandwidth
    row: dict[str, Any] = {"classes": classes, "k": k, "n": n, "implementation": chosen, "floor_ms": floor}
    row |= {"step_ms": times["auto"], "step_over_floor": times["auto"] / floor, "all_ms": times}
    row |= {"launch_ms": times.pop("launch"), "copy_ms": times.pop("copy")}
    row |= {"dirty_step_ms": dirty["auto"], "dirty_step_over_floor": dirty["auto"] / floor}
    row |= {"in_graph_ms": among_others, "in_graph_over_floor": among_others["step"] / floor}
    row |= {"far_step_ms": far, "far_step_over_floor": far / floor}
    if peers:
        s, ms, ds = (t.mT.contiguous() for t in (w, m, d))
        slow = medians({"svd": lambda: svd_step(s, ms, ds), "qr": lambda: s.copy_(torch.linalg.qr(s).Q)}, 3)
        row["algorithm_1_parts_ms"] = slow
        row["algorithm_1_ms"] = slow["svd"] + slow["qr"] / 5
        row["algorithm_1_over_step"] = row["algorithm_1_ms"] / row["step_ms"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-peers", action="store_true", help="only the floor and grassy's own kernels")
    parser.add_argument("--output", type=Path, default=Path("runs/bench/step_gpu.json"))
    args = parser.parse_args()
    need_gpu()
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: a copy runs at {bandwidth / 1e9:.2f} TB/s")
    result = {**machine(), "copy_bytes_per_ms": bandwidth, "rows": []}
    for shape in SHAPES:
        row = measure(*shape, bandwidth, peers=not args.no_peers and shape[0] <= 1000)
        result["rows"].append(row)
        times = ", ".join(f"{name} {1e3 * value:.1f}" for name, value in row["all_ms"].items())
        peer = (
            f"; Algorithm 1 takes {row['algorithm_1_over_step']:.0f} times as long" if "algorithm_1_ms" in row else ""
        )
        print(f"{' x '.join(map(str, shape)):>16}: floor {1e3 * row['floor_ms']:.1f} us, a copy "
              f"{1e3 * row['copy_ms']:.1f} us, {row['implementation']} "
              f"{row['step_over_floor']:.2f} x the floor, in a larger graph {row['in_graph_over_floor']:.2f} x, "
              f"turning far {row['far_step_over_floor']:.2f} x ({times} us){peer}", flush=True)  # fmt: skip
        save(result, args.output)
    print(f"Saved {args.output}")


if __name__ == "__main__":
    main()
