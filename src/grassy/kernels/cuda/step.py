"""The step on an NVIDIA GPU in CUDA C++ (step.cu): one launch, each number read and written once. Large classes have
three more launches before it (stream.py).

Optional: it is compiled at first use by the NVRTC library that comes with torch. It supports float32 weights with k up
to 32, as far as a class fits into shared memory; gradients and momentum may be bfloat16. Learning rate, momentum and
the flag that skips a step may be tensors on the device, and nothing is read back: the step can live in a CUDA graph.
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
from grassy.kernels.options import StepOptions

__all__ = ["HEADS", "Plan", "geodesic_steps", "plan", "source", "supports"]

SOURCE = Path(__file__).with_name("step.cu")
STREAM_SOURCE = SOURCE.with_name("stream.cu")
#: Heads that one launch takes.
HEADS = 32
#: The largest K.
MOST_ROWS = 32
#: Of gradients and momenta.
TYPES = (torch.float32, torch.bfloat16)
#: Up to this K two classes are taken together, if they fit: tensor cores work on 8 rows at least.
PAIRED_K = 4
#: KiB of shared memory for the slice of a class or pair that a thread block holds, by rows: an H200 was fastest so.
SLICE_KIB = {8: 32, 16: 64, 32: 128}
#: KiB of shared memory that a thread block may have, by capability; those that are not listed, such as 8.6, have 99.
SHARED_KIB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
#: Of these the kernel's own variable takes so many bytes.
STATIC_BYTES = 16
#: Of the L2 cache so much may be filled with what later clusters will take: more would be gone before they come.
SHARE_OF_L2 = 0.5
#: More clusters than there are: none of them brings anything ahead.
NOTHING_AHEAD = 2**31 - 1
#: Cycles in which the memory of an H200 delivers a KiB to each of its multiprocessors, or a few less.
MEMORY_CYCLES_PER_KIB = 50
#: Of the flags in launch.cuh, the one that is set here: classes on which there is another verdict are left alone.
CAREFUL_ONLY = 256


class Plan(NamedTuple):
    """How classes are divided: a cluster of blocks takes `classes`, and each block `columns` of their columns."""

    k: int
    rows: int  # of all classes together, rounded up
    cluster: int
    columns: int
    warps: int
    blocks: int  # that a multiprocessor is meant to hold at once, which bounds the registers of each
    classes: int = 1

    @property
    def pieces(self) -> int:
        """Of 128 columns, of one row, that a warp loads at once: all, or as equal parts of them as possible."""
        pieces = -(-self.columns // 128)
        most = 3 if self.rows == 8 and self.warps <= 4 else 4  # the former loads several rows at once, see launch.cuh
        return -(-pieces // -(-pieces // most))

    @property
    def shared_bytes(self) -> int:
        matrix = self.rows**2
        sums = 128 * {8: 2, 16: 6, 32: 20}[self.rows]  # TILES of 128 numbers
        buffers = {8: self.warps, 16: self.warps // 2, 32: 2}[self.rows]
        exchanged = 0 if self.cluster == 1 else sums * {8: 1, 16: 0, 32: 2}[self.rows]
        columns = 2 * self.classes * self.k * (self.columns + 4) + 32
        if self.rows == 8:  # sums lie where all matrices will be
            return 4 * (columns + exchanged + max(9 * matrix, buffers * sums))
        return 4 * (columns + exchanged + matrix + max(8 * matrix, buffers * sums))


#: What stream.cu is compiled for.
STREAMED = Plan(32, 32, 1, 32, 8, 1)


def plan(k: int, n: int, capability: tuple[int, int]) -> Plan | None:
    """How to launch the kernel for classes of K x N; None if it does not take them."""
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
    # More warps hide more, but each has fewer registers then. With 16 on a multiprocessor 500 pairs in clusters of four
    # are four rounds.
    registers_for = {8: 20 if classes == 1 else 16, 16: 12 if warps == 4 else 16, 32: 16}[rows]
    by_registers = registers_for // warps
    by_memory = (largest + 1024) // (shared + 1024)
    return Plan(k, rows, cluster, columns, warps, max(1, min(by_registers, by_memory)), classes)


def supports(weight: Tensor, grad: Tensor, momentum_buffer: Tensor | None, options: StepOptions) -> str | None:
    """Why the kernels cannot make such a step here, or None if they can. The first call for a shape compiles."""
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
    capability = torch.cuda.get_device_capability(weight.device)
    chosen = plan(k, n, capability)
    if chosen is None:
        old = capability < (8, 0)
        return "it needs an Ampere GPU or newer" if old else f"classes of {k} x {n} do not fit into shared memory"
    reason = _failure(chosen, grad.dtype == torch.bfloat16, momentum.dtype == torch.bfloat16, weight.device)
    if reason and torch.cuda.is_current_stream_capturing():
        _failure.cache_clear()  # a module cannot always be loaded while a graph is captured: ask again afterwards
    return reason


@functools.cache
def _failure(chosen: Plan, grad_is_bf16: bool, momentum_is_bf16: bool, device: torch.device) -> str | None:
    """Why the kernel could not be compiled or loaded. Found out once, as it may take seconds: steps ask every time."""
    try:
        kernel = _kernel(chosen, 1, grad_is_bf16, momentum_is_bf16, device)
        if _streamed(chosen):
            _stream_kernels(1, grad_is_bf16, momentum_is_bf16, device)
        with torch.cuda.device(device):
            if not _resident(kernel, chosen):
                return f"{chosen.cluster} of its thread blocks together do not fit on this GPU"
    except (OSError, RuntimeError, AttributeError) as error:  # the last of a driver that is too old for a function
        return str(error)
    return None


@functools.cache
def _heads(number: int) -> type[ctypes.Structure]:
    """The struct `Heads` of launch.cuh."""

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
    """`reference.geodesic_step` of up to HEADS weights (C_i, K, N) together, which `supports` has nothing against: of
    one K, N, device and types.

    All have momentum or none has. If `skip`, a number on the device, is not 0, nothing is done. counts: two elements
    for each weight to which those of this step are added.
    """
    grads = [grad.contiguous() for grad in grads]
    buffers = [buffer for buffer in momentum_buffers if buffer is not None]
    weight, dtypes = weights[0], (grads[0].dtype, buffers[0].dtype if buffers else torch.float32)
    _, k, n = weight.shape
    chosen = plan(k, n, torch.cuda.get_device_capability(weight.device))
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
    # A kernel for many heads takes a kilobyte of arguments, which is felt in the time of a launch.
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
            # While a graph is captured a module cannot always be loaded. That for one head is there.
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
    # As torch does itself, so that autograd notices.
    torch.autograd.graph.increment_version([*weights, *buffers])


def _as_float32(value: Any, device: torch.device) -> Any:
    return value.to(device, torch.float32) if isinstance(value, Tensor) else value


@functools.cache
def _resident(kernel: Any, chosen: Plan) -> int:
    """Clusters that the GPU holds at once."""
    return kernel.resident_clusters(chosen.cluster, 32 * chosen.warps, chosen.shared_bytes)


@functools.cache
def _bringing_ahead(kernel: Any, chosen: Plan, n: int, device: torch.device) -> int:
    """The clusters that are resident, of which the kernel brings what half of them take ahead; or NOTHING_AHEAD, if
    that were too much for the cache.
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
    """Cycles between blocks of a multiprocessor that begin a launch: until memory has delivered what one loads, if
    there is more than one round of them.
    """
    return round(MEMORY_CYCLES_PER_KIB * 12 * chosen.classes * chosen.k * chosen.columns / 1024) if rounds else 0


def _streamed(chosen: Plan) -> bool:
    """Whether stream.cu comes first: one such class fills the multiprocessors it is on, which then often wait."""
    return chosen.rows == 32 and chosen.cluster > 1


@functools.cache
def _stream_kernels(heads: int, grad_is_bf16: bool, momentum_is_bf16: bool, device: torch.device) -> Any:
    with torch.cuda.device(device):
        capability = torch.cuda.get_device_capability(device)
        macros = defines(STREAMED, heads, grad_is_bf16, momentum_is_bf16)
        return nvrtc.compile_kernels(source(STREAM_SOURCE), stream.KERNELS, macros, capability)


def source(file: Path = SOURCE) -> str:
    """The text of a kernel, with what it includes: NVRTC is given no folder to look in."""
    return re.sub(r'#include "(.+)"', lambda found: file.with_name(found[1]).read_text(), file.read_text())


def defines(chosen: Plan, heads: int, grad_is_bf16: bool, momentum_is_bf16: bool) -> dict[str, int]:
    """What step.cu and stream.cu are compiled with."""
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
