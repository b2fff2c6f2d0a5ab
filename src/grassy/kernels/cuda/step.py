"""The step on an NVIDIA GPU in CUDA C++ (step.cu): one launch that reads and writes each element once.

Large classes have three more launches before it (stream.py). NVRTC, which comes with torch, compiles the kernels at
first use. They support float32 weights with k up to 32, if a class fits into shared memory. Gradients and momentum may
be bfloat16. Learning rate, momentum and the skip flag may be tensors on the device, and nothing synchronises, so that
the step can be part of a CUDA graph.
"""

import ctypes
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grassy.kernels.cuda import nvrtc, stream
from grassy.kernels.step_options import StepOptions

__all__ = ["HEADS", "Plan", "geodesic_steps", "plan", "source", "supports"]

SOURCE = Path(__file__).with_name("step.cu")
STREAM_SOURCE = SOURCE.with_name("stream.cu")
#: Largest number of heads per launch.
HEADS = 32
#: Largest K.
MOST_ROWS = 32
#: Dtypes of gradients and momenta.
TYPES = (torch.float32, torch.bfloat16)
#: Up to this K two classes are processed together, if they fit, since tensor cores work on at least 8 rows.
PAIRED_K = 4
#: KiB of shared memory for the slice of a class or pair in a thread block, by rows: fastest on an H200.
SLICE_KIB = {8: 32, 16: 64, 32: 128}
#: Largest shared memory of a thread block in KiB, by compute capability. Others, such as 8.6, have 99.
SHARED_KIB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
#: Bytes of shared memory that the kernel declares statically.
STATIC_BYTES = 16
#: Fraction of the L2 cache for data prefetched for later clusters. More would be evicted before its use.
SHARE_OF_L2 = 0.5
#: Number of resident clusters that disables prefetching.
NOTHING_AHEAD = 2**31 - 1
#: Cycles in which the memory of an H200 delivers one KiB to each multiprocessor, slightly underestimated.
MEMORY_CYCLES_PER_KIB = 50
#: The flag of launch.cuh that restricts step.cu to classes with the verdict AGAIN.
CAREFUL_ONLY = 256


class Plan(NamedTuple):
    """How the work is divided: a cluster of blocks processes `classes` classes, each block `columns` columns."""

    k: int
    rows: int  # of all its classes, rounded up to 8, 16 or 32
    cluster: int
    columns: int
    warps: int
    blocks: int  # per multiprocessor, which bounds the registers of each
    classes: int = 1

    @property
    def pieces(self) -> int:
        """How many pieces of 128 columns of a row a warp loads at once, in parts as equal as possible."""
        pieces = -(-self.columns // 128)
        most = 3 if self.rows == 8 and self.warps <= 4 else 4  # 8 rows: several rows at once, see launch.cuh
        return -(-pieces // -(-pieces // most))

    @property
    def shared_bytes(self) -> int:
        matrix = self.rows**2
        sums = 128 * {8: 2, 16: 6, 32: 20}[self.rows]  # TILES of 128 floats
        buffers = {8: self.warps, 16: self.warps // 2, 32: 2}[self.rows]
        exchanged = 0 if self.cluster == 1 else sums * {8: 1, 16: 0, 32: 2}[self.rows]
        columns = 2 * self.classes * self.k * (self.columns + 4) + 32
        if self.rows == 8:  # the sums share memory with all matrices
            return 4 * (columns + exchanged + max(9 * matrix, buffers * sums))
        return 4 * (columns + exchanged + matrix + max(8 * matrix, buffers * sums))


#: The plan that stream.cu is compiled for.
STREAMED = Plan(32, 32, 1, 32, 8, 1)


@functools.cache
def plan(k: int, n: int, capability: tuple[int, int]) -> Plan | None:
    """Return how to launch the kernel for classes of K x N, or None if it does not support them."""
    if k > MOST_ROWS or capability < (8, 0):
        return None
    together = _plan(k, n, 2, capability) if k <= PAIRED_K else None
    return together or _plan(k, n, 1, capability)


def _plan(k: int, n: int, classes: int, capability: tuple[int, int]) -> Plan | None:
    rows = next(size for size in (8, 16, 32) if classes * k <= size)
    clusters = (1, 2, 4, 8) if capability >= (9, 0) else (1,)
    largest = SHARED_KIB.get(capability, 99) * 1024 - STATIC_BYTES
    for cluster in clusters:
        columns = 32 * -(-n // (32 * cluster))
        slice_kib = 8 * classes * k * columns / 1024
        if slice_kib <= SLICE_KIB[rows]:
            break
    warps = {8: 4 if slice_kib <= 48 else 8, 16: 4 if slice_kib <= 64 else 8, 32: 8 if slice_kib <= 64 else 16}[rows]
    shared = Plan(k, rows, cluster, columns, warps, 1, classes).shared_bytes
    if shared > largest:
        return None
    # More warps hide more latency but have fewer registers each. With 16 warps per multiprocessor, 500 pairs in
    # clusters of four take four rounds.
    registers_for = {8: 20 if classes == 1 else 16, 16: 12 if warps == 4 else 16, 32: 16}[rows]
    by_registers = registers_for // warps
    by_memory = (largest + 1024) // (shared + 1024)
    return Plan(k, rows, cluster, columns, warps, max(1, min(by_registers, by_memory)), classes)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def supports(weight: Tensor, grad: Tensor, momentum_buffer: Tensor | None, options: StepOptions) -> str | None:
    """Return why the kernels cannot make this step, or None if they can. The first call for a shape compiles."""
    if weight.device.type != "cuda" or torch.version.cuda is None:
        return "it needs an NVIDIA GPU"
    if options.retraction != "geodesic":
        return "it supports retraction='geodesic'"
    if weight.dtype != torch.float32 or not weight.is_contiguous() or weight.numel() == 0:
        return "it supports contiguous float32 weights"
    momentum = weight if momentum_buffer is None else momentum_buffer
    if grad.dtype not in TYPES or momentum.dtype not in TYPES or not momentum.is_contiguous():
        return "it supports gradients and contiguous momenta in float32 and bfloat16"
    _, k, n = weight.shape
    if k > MOST_ROWS:
        return f"it supports k up to {MOST_ROWS}"
    capability = _capability(weight.device)
    chosen = plan(k, n, capability)
    if chosen is None:
        old = capability < (8, 0)
        return "it needs an Ampere GPU or newer" if old else f"classes of {k} x {n} do not fit into shared memory"
    reason = _failure(chosen, grad.dtype == torch.bfloat16, momentum.dtype == torch.bfloat16, weight.device)
    if reason and torch.cuda.is_current_stream_capturing():
        _failure.cache_clear()  # loading may fail during graph capture: try again afterwards
    return reason


@functools.cache
def _failure(chosen: Plan, grad_is_bf16: bool, momentum_is_bf16: bool, device: torch.device) -> str | None:
    """Return why the kernel cannot be compiled or loaded, or None. Cached, since compiling takes seconds."""
    try:
        kernel = _kernel(chosen, 1, grad_is_bf16, momentum_is_bf16, device)
        if _streamed(chosen):
            _stream_kernels(1, grad_is_bf16, momentum_is_bf16, device)
        with torch.cuda.device(device):
            if not _resident(kernel, chosen):
                return f"{chosen.cluster} of its thread blocks together do not fit on this GPU"
    except (OSError, RuntimeError, AttributeError) as error:  # AttributeError: the driver is too old
        return str(error)
    return None


@functools.cache
def _heads(number: int) -> type[ctypes.Structure]:
    """Return the struct `Heads` of launch.cuh."""

    class Heads(ctypes.Structure):
        _fields_ = (
            ("weight", ctypes.c_void_p * number),
            ("grad", ctypes.c_void_p * number),
            ("momentum", ctypes.c_void_p * number),
            ("counts", ctypes.c_void_p * number),
            ("classes", ctypes.c_int * number),
            ("end", ctypes.c_int * number),
        )

    return Heads


def geodesic_steps(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor | None],
    lr: float | Tensor,
    momentum: float | Tensor,
    options: StepOptions,
    counts: Sequence[Tensor],
    skip: Tensor | None = None,
) -> None:
    """Make the step of up to HEADS weights (C_i, K, N) that `supports` accepts, with equal K, N, device and dtypes.

    Either all have momentum or none. If `skip`, a scalar on the device, is not 0, nothing happens. The step adds its
    counts to `counts`, (2,) per weight.
    """
    grads = [grad.contiguous() for grad in grads]
    buffers = [buffer for buffer in momentum_buffers if buffer is not None]
    weight, dtypes = weights[0], (grads[0].dtype, buffers[0].dtype if buffers else torch.float32)
    _, k, n = weight.shape
    chosen = plan(k, n, _capability(weight.device))
    assert chosen is not None
    max_angle = options.max_angle
    lr, momentum, skip = (_as_float32(value, weight.device) for value in (lr, momentum, skip))
    tensors = [*weights, *grads, *buffers]
    facts = (  # in the order of the flags in launch.cuh
        bool(buffers),
        options.transport == "parallel",
        max_angle is not None,
        options.maximize,
        isinstance(lr, Tensor),
        isinstance(momentum, Tensor),
        n % 4 == 0 and all(tensor.data_ptr() % (4 * tensor.element_size()) == 0 for tensor in tensors),
        skip is not None,
    )
    flags = sum(2**bit for bit, fact in enumerate(facts) if fact)
    # The kernel for many heads has a kilobyte of arguments, which makes its launch slower.
    number = 1 if len(weights) == 1 else HEADS
    heads, clusters = _heads(number)(), 0
    for i, (each, grad) in enumerate(zip(weights, grads, strict=True)):
        clusters += -(-len(each) // chosen.classes)
        heads.weight[i], heads.grad[i] = each.data_ptr(), grad.data_ptr()
        heads.classes[i], heads.end[i] = len(each), clusters
        heads.momentum[i], heads.counts[i] = buffers[i].data_ptr() if buffers else None, counts[i].data_ptr()
    with torch.cuda.device(weight.device):
        types = [dtype == torch.bfloat16 for dtype in dtypes]
        try:
            kernel = _kernel(chosen, number, *types, weight.device)
            stream_kernels = _stream_kernels(number, *types, weight.device) if _streamed(chosen) else None
        except RuntimeError:
            if number == 1 or not torch.cuda.is_current_stream_capturing():
                raise
            # Loading a module may fail during graph capture, but the kernel for one head is loaded already.
            for w, d, m, total in zip(weights, grads, momentum_buffers, counts, strict=True):
                if len(w):
                    geodesic_steps([w], [d], [m], lr, momentum, options, [total], skip)
            return
        pointers = [value if isinstance(value, Tensor) else weight for value in (lr, momentum, skip)]
        values = [0.0 if isinstance(value, Tensor) else float(value) for value in (lr, momentum)]
        values.append(0.0 if max_angle is None else float(max_angle))
        verdicts, ahead = weight, _bringing_ahead(kernel, chosen, n, weight.device)
        pause = _pause(chosen, clusters > ahead)
        if stream_kernels:
            verdicts = stream.steps(stream_kernels, heads, clusters, weight, pointers, values, k, n, flags)
            flags, ahead, pause = flags | CAREFUL_ONLY, NOTHING_AHEAD, 0
        arguments = [heads, *pointers, verdicts, *values, k, n, chosen.columns, ahead, pause, flags]
        kernel.launch(clusters * chosen.cluster, 32 * chosen.warps, chosen.shared_bytes, arguments)
    # As torch's in-place operations do, so that autograd notices the change.
    torch.autograd.graph.increment_version([*weights, *buffers])


def _as_float32(value: Any, device: torch.device) -> Any:
    return value.to(device, torch.float32) if isinstance(value, Tensor) else value


@functools.cache
def _resident(kernel: Any, chosen: Plan) -> int:
    """Return the number of clusters that the GPU holds at once."""
    return kernel.resident_clusters(chosen.cluster, 32 * chosen.warps, chosen.shared_bytes)


@functools.cache
def _bringing_ahead(kernel: Any, chosen: Plan, n: int, device: torch.device) -> int:
    """Return the number of resident clusters, or NOTHING_AHEAD if prefetching does not fit into the L2 cache.

    The kernel prefetches the data of half as many clusters.
    """
    resident = _resident(kernel, chosen)
    ahead = resident / 2 * chosen.classes * chosen.k * n * 12  # bytes: weight, gradient and momentum
    fits = ahead <= SHARE_OF_L2 * torch.cuda.get_device_properties(device).L2_cache_size
    return resident if fits else NOTHING_AHEAD


@functools.cache
def _kernel(chosen: Plan, heads: int, grad_is_bf16: bool, momentum_is_bf16: bool, device: torch.device) -> Any:
    with torch.cuda.device(device):
        capability = torch.cuda.get_device_capability(device)
        macros = defines(chosen, heads, grad_is_bf16, momentum_is_bf16)
        return nvrtc.compile_kernels(source(), ["step"], macros, capability)[0]


def _pause(chosen: Plan, rounds: bool) -> int:
    """Return the cycles by which the first blocks on a multiprocessor start apart: the load time of one block.

    It is 0 if all blocks are resident at once.
    """
    return round(MEMORY_CYCLES_PER_KIB * 12 * chosen.classes * chosen.k * chosen.columns / 1024) if rounds else 0


def _streamed(chosen: Plan) -> bool:
    """Whether stream.cu runs first: such a class would occupy whole multiprocessors, which often idle."""
    return chosen.rows == 32 and chosen.cluster > 1


@functools.cache
def _stream_kernels(heads: int, grad_is_bf16: bool, momentum_is_bf16: bool, device: torch.device) -> Any:
    with torch.cuda.device(device):
        capability = torch.cuda.get_device_capability(device)
        macros = defines(STREAMED, heads, grad_is_bf16, momentum_is_bf16)
        return nvrtc.compile_kernels(source(STREAM_SOURCE), stream.KERNELS, macros, capability)


def source(file: Path = SOURCE) -> str:
    """Return the source of a kernel with its includes inlined, because NVRTC has no include path."""
    return re.sub(r'#include "(.+)"', lambda found: file.with_name(found[1]).read_text(), file.read_text())


def defines(chosen: Plan, heads: int, grad_is_bf16: bool, momentum_is_bf16: bool) -> dict[str, int]:
    """Return the macros for step.cu and stream.cu."""
    return {
        "ROWS": chosen.rows,
        "PAIRS": chosen.classes - 1,
        "CLUSTER": chosen.cluster,
        "WARPS": chosen.warps,
        "BLOCKS": chosen.blocks,
        "PIECES_AT_ONCE": chosen.pieces,
        "HEADS": heads,
        "GRAD_BF16": int(grad_is_bf16),
        "MOMENTUM_BF16": int(momentum_is_bf16),
    }
