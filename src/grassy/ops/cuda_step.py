"""The step on an NVIDIA GPU in CUDA C++ (step.cu): one launch, each number read and written once.

Optional: it is compiled at first use by the NVRTC library that comes with torch. It takes float32 weights with k up to
32; gradients and momentum may be bfloat16. What it does not take goes to the reference. Learning rate, momentum and the
flag that skips a step may be tensors on the device, and nothing is read back: the step can live in a CUDA graph.
"""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grassy.ops import reference

__all__ = ["Plan", "geodesic_step", "plan", "unavailable"]

SOURCE = Path(__file__).with_name("step.cu")
#: Bytes of shared memory for the slice of a class that one thread block holds: three blocks share a multiprocessor.
SLICE_BYTES = 66 * 1024
#: KiB of shared memory that a thread block may have, by capability; those that are not listed, such as 8.6, have 99.
SHARED_KIB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
#: Of these the kernel's own variable takes so many bytes.
STATIC_BYTES = 16


class Plan(NamedTuple):
    """How a class is divided: `cluster` blocks hold `columns` columns each of its k rows; `rows` is k rounded up."""

    k: int
    rows: int
    cluster: int
    columns: int
    warps: int
    blocks: int  # that a multiprocessor is meant to hold at once, which bounds the registers of each

    @property
    def shared_bytes(self) -> int:
        return 4 * (2 * self.k * (self.columns + 4) + 32 + 9 * self.rows**2)


def plan(k: int, n: int, capability: tuple[int, int]) -> Plan | None:
    """How to launch the kernel for classes of K x N; None if it does not take them."""
    if k > 32 or capability < (8, 0):
        return None
    rows = next(size for size in (8, 16, 32) if k <= size)
    clusters = (1, 2, 4, 8) if capability >= (9, 0) else (1,)
    largest = SHARED_KIB.get(capability, 99) * 1024 - STATIC_BYTES
    for cluster in clusters:
        columns = 32 * -(-n // (32 * cluster))
        fits = 8 * k * columns <= SLICE_BYTES
        if fits or cluster == clusters[-1]:
            break
    warps = 8 if rows == 32 or (rows == 8 and k * columns > 6144) else 4
    shared = Plan(k, rows, cluster, columns, warps, 1).shared_bytes
    if shared > largest:
        return None
    by_registers = {8: 32 if warps == 4 else 24, 16: 12, 32: 16}[rows] // warps
    return Plan(k, rows, cluster, columns, warps, max(1, min(by_registers, 228 * 1024 // (shared + 1024))))


def unavailable(weight: Tensor) -> str | None:
    """Why the kernel cannot take such a weight here, or None if it can. The first call for a shape compiles."""
    if weight.device.type != "cuda" or torch.version.cuda is None:
        return "it needs an NVIDIA GPU"
    if weight.dtype != torch.float32 or not weight.is_contiguous() or weight.numel() == 0:
        return "it takes contiguous float32 weights"
    _, k, n = weight.shape
    chosen = plan(k, n, torch.cuda.get_device_capability(weight.device))
    if chosen is None:
        return f"classes of {k} x {n} are too large for it, or the GPU is too old"
    reason = _failure(chosen, weight.device)
    if reason and torch.cuda.is_current_stream_capturing():
        _failure.cache_clear()  # a module cannot always be loaded while a graph is captured: ask again afterwards
    return reason


@functools.cache
def _failure(chosen: Plan, device: torch.device) -> str | None:
    """Why the kernel could not be compiled or loaded. Found out once, as it may take seconds: steps ask every time."""
    try:
        _kernel(chosen, False, False, device)
    except (OSError, RuntimeError) as error:
        return str(error)
    return None


def geodesic_step(
    weight: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None,
    lr: float | Tensor,
    momentum: float | Tensor,
    *,
    skip: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`reference.geodesic_step` in one launch. If `skip`, a number on the device, is not 0, nothing is done."""
    grad = grad.contiguous()
    momentum_dtype = torch.float32 if momentum_buffer is None else momentum_buffer.dtype
    taken = all(dtype in (torch.float32, torch.bfloat16) for dtype in (grad.dtype, momentum_dtype))
    contiguous = momentum_buffer is None or momentum_buffer.is_contiguous()
    if options["retraction"] == "qf" or not taken or not contiguous:
        return reference.geodesic_step(weight, grad, momentum_buffer, lr, momentum, skip=skip, **options)
    classes, k, n = weight.shape
    chosen = plan(k, n, torch.cuda.get_device_capability(weight.device))
    if chosen is None:
        raise RuntimeError(f"impl='cuda' cannot take this weight: {unavailable(weight)}")
    max_angle = options["max_angle"]
    lr, momentum, skip = (_as_float32(value, weight.device) for value in (lr, momentum, skip))
    tensors = [tensor for tensor in (weight, grad, momentum_buffer) if tensor is not None]
    facts = (  # in the order of the flags in step.cu
        momentum_buffer is not None,
        options["transport"] == "parallel",
        max_angle is not None,
        options["maximize"],
        isinstance(lr, Tensor),
        isinstance(momentum, Tensor),
        n % 4 == 0 and all(tensor.data_ptr() % (4 * tensor.element_size()) == 0 for tensor in tensors),
        skip is not None,
    )
    flags = sum(2**bit for bit, fact in enumerate(facts) if fact)
    counts = torch.zeros(2, dtype=torch.int64, device=weight.device)
    with torch.cuda.device(weight.device):
        kernel = _kernel(chosen, grad.dtype == torch.bfloat16, momentum_dtype == torch.bfloat16, weight.device)
        arguments = [
            weight,
            grad,
            weight if momentum_buffer is None else momentum_buffer,
            counts,
            *(value if isinstance(value, Tensor) else weight for value in (lr, momentum, skip)),
            *(0.0 if isinstance(value, Tensor) else float(value) for value in (lr, momentum)),
            0.0 if max_angle is None else float(max_angle),
            *(k, n, chosen.columns, flags),
        ]
        kernel.launch(classes * chosen.cluster, 32 * chosen.warps, chosen.shared_bytes, arguments)
    # As torch does itself, so that autograd notices.
    torch.autograd.graph.increment_version([tensor for tensor in tensors if tensor is not grad])
    return counts[0], counts[1]


def _as_float32(value: Any, device: torch.device) -> Any:
    return value.to(device, torch.float32) if isinstance(value, Tensor) else value


@functools.cache
def _kernel(chosen: Plan, grad_is_bf16: bool, momentum_is_bf16: bool, device: torch.device) -> Any:
    from grassy.ops.nvrtc import compile_kernel

    defines = {
        "ROWS": chosen.rows,
        "CLUSTER": chosen.cluster,
        "WARPS": chosen.warps,
        "BLOCKS": chosen.blocks,
        "GRAD_BF16": int(grad_is_bf16),
        "MOMENTUM_BF16": int(momentum_is_bf16),
    }
    with torch.cuda.device(device):
        return compile_kernel(SOURCE.read_text(), "step", defines, torch.cuda.get_device_capability(device))
