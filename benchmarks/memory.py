"""Peak memory of the head on a GPU, and a step with a million classes: `python -m benchmarks.memory --large`.

It measures the peak of forward and backward under bfloat16 autocast, without the weight, its gradient and earlier
allocations. The contestants are the loss without logits (`kernels.subspace_cross_entropy`), the logits by kernels, the
logits in eager torch, and `nn.Linear(n, C)`, all with cross-entropy. `nn.Linear(n, C*k)` is measured without a loss.

`--large` adds a whole training step with a million classes: forward, backward and `kernels.geodesic_step`. Its time, as
a CUDA graph and in eager torch, is compared with a lower limit measured in the same run. The limit is the sum of four
matmuls in bfloat16 (forward, its recomputation in the backward, and two gradients), five passes of the step, and one
cast of the weight to bfloat16. Passes and cast count at the bandwidth of a device copy.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpu import captured, copy_bandwidth, machine, medians, need_gpu, save
from grassy import geometry, kernels

#: Batch, feature dimension, classes and subspace dimension: ImageNet-21K, and a million classes.
SHAPE, LARGE = (1024, 768, 21841, 8), (1024, 512, 1_000_000, 4)
LR, MOMENTUM = 1e-4, 0.9


def peak_of(work: Callable[[], Any], *tensors: Tensor) -> tuple[int, int]:
    """Bytes at the peak of the work and bytes before it, gradients of these tensors dropped first."""
    before = 0
    for _ in range(2):  # the first time compiles kernels and takes the workspace of the BLAS library
        for tensor in tensors:
            tensor.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), before


def measure(batch: int, n: int, classes: int, k: int) -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.randn(batch, n, device="cuda", requires_grad=True)
    weight = nn.Parameter(geometry.random_subspace(classes, k, n, device="cuda"))
    target = torch.randint(0, classes, (batch,), device="cuda")
    short = nn.Parameter(torch.randn(classes, n, device="cuda"))
    losses: dict[str, tuple[Tensor, Callable[[], Tensor]]] = {
        "fused": (weight, lambda: kernels.subspace_cross_entropy(x, weight, target)),
        "logits": (weight, lambda: F.cross_entropy(kernels.subspace_logits(x, weight), target)),
        "naive": (weight, lambda: F.cross_entropy(kernels.subspace_logits(x, weight, impl="reference"), target)),
        "linear C": (short, lambda: F.cross_entropy(F.linear(x, short), target)),
        "linear C*k": (weight, lambda: F.linear(x, weight.flatten(0, 1)).sum()),
    }
    extra = {}
    for name, (own, loss) in losses.items():
        peak, before = peak_of(lambda loss=loss: backward(loss), x, own)  # type: ignore[misc]
        extra[name] = (peak - before - own.nbytes) / 2**20
    return {"batch": batch, "n": n, "classes": classes, "k": k, "weight_mib": weight.nbytes / 2**20, "extra_mib": extra}


def backward(loss: Callable[[], Tensor]) -> None:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        result = loss()
    result.backward()


def measure_large(batch: int, n: int, classes: int, k: int) -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.randn(batch, n, device="cuda", requires_grad=True)
    weight = nn.Parameter(cheap_subspaces(classes, k, n))
    buffer = torch.zeros_like(weight)
    target = torch.randint(0, classes, (batch,), device="cuda")

    def step() -> None:
        x.grad = weight.grad = None
        backward(lambda: kernels.subspace_cross_entropy(x, weight, target))
        assert weight.grad is not None
        kernels.geodesic_step(weight, weight.grad, buffer, LR, MOMENTUM)

    peak, _ = peak_of(step, x, weight)
    bandwidth = copy_bandwidth()
    columns = weight.detach().flatten(0, 1)[: 2**16].bfloat16().T
    features = x.detach().bfloat16()
    product = torch.empty(batch, columns.shape[1], device="cuda", dtype=torch.bfloat16)
    times = medians({"product": captured(lambda: torch.mm(features, columns, out=product))}, 20)
    flops_per_ms = 2 * product.numel() * n / times["product"]
    times |= medians({"eager": step, "graph": captured(step)}, 5)
    numbers = weight.numel()
    parts = {
        "four_products_ms": 4 * 2 * batch * numbers / flops_per_ms,
        "five_passes_ms": 5 * 4 * numbers / bandwidth,
        "cast_ms": 6 * numbers / bandwidth,
    }
    total = sum(parts.values())
    return {
        "batch": batch,
        "n": n,
        "classes": classes,
        "k": k,
        "implementation": kernels.choose("auto", weight),
        "peak_gib": peak / 2**30,
        "step_ms": times["graph"],
        "eager_ms": times["eager"],
        "product_tflops": flops_per_ms / 1e9,
        "copy_bytes_per_ms": bandwidth,
        **parts,
        "sum_ms": total,
        "step_over_sum": times["graph"] / total,
        "eager_over_sum": times["eager"] / total,
        "orthonormality_error": float(geometry.orthonormality_error(weight.detach()[: 2**14])),
    }


def cheap_subspaces(classes: int, k: int, n: int) -> Tensor:
    """Random orthonormal rows without a factorisation of each class.

    Row i is random on the columns i, i+k, i+2k... and zero elsewhere: rows of a class have no column in common, so they
    are orthogonal. Turning all of them by one orthogonal matrix fills the zeros, on which a GPU would run faster than
    on real weights, and keeps the angles.
    """
    weight = torch.empty(classes, k, n, device="cuda")
    turn = torch.linalg.qr(torch.randn(n, n, device="cuda")).Q
    for part in weight.split(2**16):
        sparse = torch.zeros_like(part)
        for i in range(k):
            columns = sparse[:, i, i::k]
            columns.copy_(F.normalize(torch.randn_like(columns), dim=-1))
        torch.mm(sparse.flatten(0, 1), turn, out=part.flatten(0, 1))
    return weight


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="also a whole training step of a million classes")
    parser.add_argument("--output", type=Path, default=Path("runs/bench/memory_gpu.json"))
    args = parser.parse_args()
    need_gpu()
    row = measure(*SHAPE)
    result = {**machine(), **row}
    save(result, args.output)
    extra = ", ".join(f"{name} {value:.0f}" for name, value in row["extra_mib"].items())
    print(f"B {SHAPE[0]}, n {SHAPE[1]}, C {SHAPE[2]}, k {SHAPE[3]}: MiB beyond the weight ({row['weight_mib']:.0f}) "
          f"and its gradient: {extra}", flush=True)  # fmt: skip
    if args.large:
        torch.cuda.empty_cache()
        large = measure_large(*LARGE)
        result["large"] = large
        print(f"B {LARGE[0]}, n {LARGE[1]}, C {LARGE[2]}, k {LARGE[3]}: {large['peak_gib']:.1f} GiB (target 40), a "
              f"step takes {large['step_ms']:.1f} ms ({large['eager_ms']:.1f} ms eagerly), "
              f"{large['step_over_sum']:.2f} x (target 1.6) the sum of {large['sum_ms']:.1f} ms: four "
              f"products {large['four_products_ms']:.1f} ({large['product_tflops']:.0f} TFLOP/s), five "
              f"passes {large['five_passes_ms']:.1f}, a cast {large['cast_ms']:.1f}")  # fmt: skip
        save(result, args.output)
    print(f"Saved {args.output}")


if __name__ == "__main__":
    main()
