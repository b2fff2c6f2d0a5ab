"""The cost of the head on a GPU, forward and backward with cross-entropy: `python -m benchmarks.head`.

The baseline is the unavoidable arithmetic in torch: `nn.Linear(n, C*k, bias=False)`, forward, and backward from a given
gradient. The contestants are the loss without logits (`kernels.subspace_cross_entropy`), the logits by kernels with
torch's cross-entropy, the same in eager torch (`impl="reference"`), and the usual `nn.Linear(n, C)` with cross-entropy.

All run under bfloat16 autocast with float32 weights, features and gradients; each run computes fresh gradients. They
are CUDA graphs, take turns, and start with an empty L2 cache.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpu import captured, machine, medians, need_gpu, save
from grassy import geometry, kernels
from grassy.kernels import cross_entropy

#: Batch, feature dimension, classes and subspace dimension.
SHAPES = ((256, 2048, 1000, 8), (1024, 2048, 1000, 8), (1024, 768, 21841, 8))
YARDSTICK = "linear C*k"


def forward_and_backward(
    inputs: list[Tensor], function: Callable[[], Tensor], gradient: Tensor | None = None
) -> Callable[[], None]:
    """The function and its backward. Gradients are dropped first: a graph then has its own, and writes them anew."""

    def work() -> None:
        for tensor in inputs:
            tensor.grad = None
        with torch.autocast("cuda", dtype=torch.bfloat16):
            result = function()
        result.backward(gradient)

    return work


def measure(batch: int, n: int, classes: int, k: int) -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.randn(batch, n, device="cuda", requires_grad=True)
    target = torch.randint(0, classes, (batch,), device="cuda")
    weight = nn.Parameter(geometry.random_subspace(classes, k, n, device="cuda"))
    long = nn.Parameter(weight.detach().flatten(0, 1).clone())
    short = nn.Linear(n, classes, device="cuda")
    gradient = torch.randn(batch, classes * k, device="cuda", dtype=torch.bfloat16) / batch
    works = {
        YARDSTICK: forward_and_backward([x, long], lambda: F.linear(x, long), gradient),
        "fused": forward_and_backward([x, weight], lambda: kernels.subspace_cross_entropy(x, weight, target)),
        "logits": forward_and_backward(
            [x, weight], lambda: F.cross_entropy(kernels.subspace_logits(x, weight), target)
        ),
        "naive": forward_and_backward(
            [x, weight], lambda: F.cross_entropy(kernels.subspace_logits(x, weight, impl="reference"), target)
        ),
        "linear C": forward_and_backward([x, *short.parameters()], lambda: F.cross_entropy(short(x), target)),
    }
    times = medians({name: captured(work) for name, work in works.items()}, 20)
    kept = cross_entropy.division(x, weight)[1] / classes
    return {
        "batch": batch,
        "n": n,
        "classes": classes,
        "k": k,
        "ms": times,
        "over_yardstick": {name: value / times[YARDSTICK] for name, value in times.items()},
        "fused_products": 4 - kept,  # coordinates that were not kept are computed again in the backward
        "yardstick_tflops": 6e-9 * batch * n * classes * k / times[YARDSTICK],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/bench/head_gpu.json"))
    args = parser.parse_args()
    need_gpu()
    result = {**machine(), "rows": []}
    for shape in SHAPES:
        row = measure(*shape)
        result["rows"].append(row)
        ratios = ", ".join(f"{name} {value:.2f}" for name, value in row["over_yardstick"].items() if name != YARDSTICK)
        print(f"B {shape[0]}, n {shape[1]}, C {shape[2]}, k {shape[3]}: yardstick {row['ms'][YARDSTICK]:.3f} ms "
              f"({row['yardstick_tflops']:.0f} TFLOP/s); over it: {ratios}", flush=True)  # fmt: skip
        save(result, args.output)
    print(f"Saved {args.output}")


if __name__ == "__main__":
    main()
