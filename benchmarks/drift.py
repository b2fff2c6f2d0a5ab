"""Drift from orthonormality, and accuracy of a step: `python -m benchmarks.drift`.

The same random gradients drive three optimizers in float32: the paper's Algorithm 1 without its step 5, Algorithm 1
with step 5 (a QR decomposition in every fifth step, as in the paper), and `kernels.geodesic_step`. The error is the
largest entry of |W Wᵀ − I|, computed in float64. The gradients rotate classes by some hundredths of a radian per step.

One float32 step of grassy is also compared with Algorithm 1 in float64 from the same state. The result is the largest
distance, over classes, between the subspaces that they reach.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import machine, need_gpu, save
from grassy import geometry, kernels, paper

LR, MOMENTUM, TURN = 0.1, 0.9, 0.03
QR_EVERY = 5


def algorithm_1(s: Tensor, m: Tensor, d: Tensor, driver: str | None) -> None:
    """Steps 1 to 4 in the paper's columns (C, N, K), in place; descending."""
    m.copy_(MOMENTUM * (m - s @ (s.mT @ m)) + d - s @ (s.mT @ d))
    u, sigma, vt = torch.linalg.svd(-m, full_matrices=False, driver=driver)
    s.copy_(((s @ vt.mT) * (LR * sigma).cos().unsqueeze(-2) + u * (LR * sigma).sin().unsqueeze(-2)) @ vt)


def size_of_gradients(n: int) -> float:
    """The standard deviation that rotates a class by about TURN radians per step.

    A singular value of a Gaussian N x K matrix is about √N standard deviations. The momentum of independent gradients
    is larger than one of them by a factor of 1/√(1 − μ²).
    """
    return TURN / LR * (1 - MOMENTUM**2) ** 0.5 / n**0.5


def error(weight: Tensor) -> float:
    return float(geometry.orthonormality_error(weight.double()))


def drift(classes: int, k: int, n: int, device: str, steps: list[int]) -> dict[str, Any]:
    torch.manual_seed(0)
    driver = "gesvda" if device == "cuda" else None
    w = geometry.random_subspace(classes, k, n, device=device)
    m = torch.zeros_like(w)
    without, with_qr = (w.mT.clone(memory_format=torch.contiguous_format) for _ in range(2))
    m_without, m_with_qr = torch.zeros_like(without), torch.zeros_like(without)

    def row(step: int) -> dict[str, float]:
        errors = {"without_step_5": error(without.mT), "with_step_5": error(with_qr.mT), "ours": error(w)}
        return {"step": step, **errors}

    rows, scale = [row(0)], size_of_gradients(n)
    for step in range(1, max(steps) + 1):
        d = scale * torch.randn_like(w)
        algorithm_1(without, m_without, d.mT, driver)
        algorithm_1(with_qr, m_with_qr, d.mT, driver)
        if step % QR_EVERY == 0:
            with_qr.copy_(torch.linalg.qr(with_qr).Q)
        kernels.geodesic_step(w, d, m, LR, MOMENTUM)
        if step in steps:
            rows.append(row(step))
    turns = LR * torch.linalg.svdvals(m.double())
    return {"rows": rows, "radians_per_step": {"smallest": float(turns.min()), "largest": float(turns.max())}}


def distance_to_float64(classes: int, k: int, n: int, device: str) -> float:
    """The largest distance, over classes, of one step in float32 to Algorithm 1 in float64."""
    torch.manual_seed(1)
    w = geometry.random_subspace(classes, k, n, device=device)
    scale = size_of_gradients(n)
    m = geometry.project(w, scale / (1 - MOMENTUM**2) ** 0.5 * torch.randn_like(w))
    d = scale * torch.randn_like(w)
    s = geometry.orthonormalize(w.double()).mT.contiguous()  # rounding of the start is none of the step's errors
    algorithm_1(s, m.double().mT.contiguous(), d.double().mT, None)
    kernels.geodesic_step(w, d, m, LR, MOMENTUM)
    return float(geometry.distance(geometry.orthonormalize(w.double()), s.mT).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, nargs="+", default=[100, 1000, 5000])
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--n", type=int, default=256)
    parser.add_argument("--output", type=Path, help="default runs/bench/drift_gpu.json, or drift_cpu.json")
    args = parser.parse_args()
    need_gpu(args.device)
    if args.device == "cpu":
        torch.set_num_threads(1)  # the matrices are so small that threads would only wait for each other
    output = args.output or Path(f"runs/bench/drift_{'gpu' if args.device == 'cuda' else 'cpu'}.json")
    shape = args.classes, args.k, args.n
    result: dict[str, Any] = {
        **machine(args.device),
        "classes": args.classes,
        "k": args.k,
        "n": args.n,
        "implementation": kernels.choose("auto", torch.empty(shape, device=args.device)),
        "qr_every": QR_EVERY,
        "distance_to_float64": distance_to_float64(*shape, args.device),
        "paper": paper.figures("drift")["after_iterations"],
        **drift(*shape, args.device, args.steps),
    }
    print(f"{'steps':>6} {'without step 5':>15} {f'QR every {QR_EVERY}th':>15} {'ours':>10}")
    for row in result["rows"]:
        print(f"{row['step']:>6} {row['without_step_5']:>15.1e} {row['with_step_5']:>15.1e} {row['ours']:>10.1e}")
    turn = result["radians_per_step"]
    print(f"Directions turned by {turn['smallest']:.3f} to {turn['largest']:.3f} radians in the last step; one step is "
          f"{result['distance_to_float64']:.1e} from Algorithm 1 in float64.")  # fmt: skip
    save(result, output)
    print(f"Saved {output}")


if __name__ == "__main__":
    main()
