"""The step of small classes on a GPU: one launch, one program a class, everything in registers.

A class fits if its block of K x N numbers, both rounded up to powers of two, has at most `MAX_ELEMENTS`. Larger ones,
and some that are quicker there, go to `triton_stream`, or to the reference. The arithmetic is float32 throughout, and
follows `reference._step` line by line. With TRITON_INTERPRET=1 the kernel runs, slowly, on tensors of the CPU.

Learning rate and momentum may be tensors on the device, and nothing is read back: the step can live in a CUDA graph.
"""

import warnings
from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from grassy.kernels import reference
from grassy.kernels.reference import MAX_DOUBLINGS
from grassy.kernels.triton import step as triton_stream
from grassy.kernels.triton.small_matrices import cosm1_sinc, dot, largest_singular_value

__all__ = ["fits", "geodesic_step", "streamed"]

#: Two such blocks, the weight and the tangent vector, in the registers of at most eight warps.
MAX_ELEMENTS = 8192
#: So that a lane holds 32 numbers of each block, or 64 of a block with more than two rows, whose sums take longer.
ELEMENTS_OF_A_WARP, MORE_ELEMENTS = 1024, 2048
#: The loops over rows are unrolled: with 16 of them the kernel takes minutes to compile.
MAX_ROWS = 8
#: A block with more rows than this and more numbers takes longer here than streamed: 1.6 times with 8 x 768.
QUICK_ROWS, QUICK_ELEMENTS = 4, 4096
#: Variants of the kernels that have been launched in this process: the first launch of one compiles and loads it, which
#: is forbidden while a CUDA graph is captured.
_LAUNCHED: set[Hashable] = set()
CAPTURED_TOO_EARLY = (
    "a CUDA graph is captured before such a step was made once: it gets plain torch instead of the kernel, which "
    "cannot be compiled now; make a step of the same kind first"
)


def fits(weight: Tensor) -> bool:
    """Whether the kernel takes a weight of this shape, dtype and layout."""
    small = _elements(weight) <= MAX_ELEMENTS and weight.shape[1] <= MAX_ROWS
    return small and weight.dtype == torch.float32 and weight.is_contiguous() and weight.numel() > 0


def streamed(weight: Tensor) -> bool:
    """Whether a weight goes to `triton_stream`: it does not fit here, or would take longer."""
    slow = weight.shape[1] > QUICK_ROWS and _elements(weight) > QUICK_ELEMENTS
    return triton_stream.fits(weight) and (slow or not fits(weight))


def _elements(weight: Tensor) -> int:
    _, k, n = weight.shape
    return triton.next_power_of_2(k) * triton.next_power_of_2(n)


def geodesic_step(
    weight: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None,
    lr: float | Tensor,
    momentum: float | Tensor,
    *,
    retraction: str,
    transport: str,
    max_angle: float | None,
    maximize: bool,
    skip: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`reference.geodesic_step` in one launch, or a few. counts: two numbers to which those of this step are added."""
    parts, contiguous = streamed(weight), momentum_buffer is None or momentum_buffer.is_contiguous()
    max_angle = None if max_angle is None else float(max_angle)
    options: dict[str, Any] = {"transport": transport, "max_angle": max_angle, "maximize": maximize, "skip": skip}
    taken = retraction != "qf" and contiguous and (parts or fits(weight))
    if taken:
        grad = grad.contiguous()
        arguments = map(_kind, (weight, grad, momentum_buffer, lr, momentum, skip))
        size = weight.shape if parts else weight.shape[1:]  # parts of many classes may lie otherwise in memory
        aligned = counts is None or counts.data_ptr() % 16 == 0
        variant = (weight.device, *size, transport, max_angle is None, maximize, aligned, *arguments)
        if variant not in _LAUNCHED and _capturing(weight):
            warnings.warn(f"{tuple(weight.shape)}: {CAPTURED_TOO_EARLY}", stacklevel=2)
            taken = False
    if not taken:
        found = reference.geodesic_step(weight, grad, momentum_buffer, lr, momentum, retraction=retraction, **options)
        if counts is None:
            return found
        counts += torch.stack(found)
        return counts[0], counts[1]
    if counts is None:
        counts = torch.zeros(2, dtype=torch.int64, device=weight.device)
    launch = triton_stream.launch if parts else _launch
    launch(weight, grad, momentum_buffer, counts, lr, momentum, **options)
    _LAUNCHED.add(variant)
    # As torch does itself, so that autograd notices.
    torch.autograd.graph.increment_version([weight] if momentum_buffer is None else [weight, momentum_buffer])
    return counts[0], counts[1]


def _kind(value: float | Tensor | None) -> Hashable:
    """Of an argument, what Triton compiles a variant of its own for."""
    return (value.dtype, value.data_ptr() % 16 == 0) if isinstance(value, Tensor) else value is None


def _capturing(weight: Tensor) -> bool:
    return weight.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _launch(
    weight: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None,
    counts: Tensor,
    lr: float | Tensor,
    momentum: float | Tensor,
    *,
    transport: str,
    max_angle: float | None,
    maximize: bool,
    skip: Tensor | None,
) -> None:
    """One step of contiguous tensors whose classes fit into registers, in place."""
    classes, k, n = weight.shape
    rows, columns = triton.next_power_of_2(k), triton.next_power_of_2(n)
    with torch.cuda.device_of(weight):  # Triton launches on the current device
        _step[(classes,)](
            weight,
            grad,
            weight if momentum_buffer is None else momentum_buffer,
            counts,
            lr,
            momentum,
            weight if skip is None else skip,
            float("inf") if max_angle is None else max_angle,
            k,
            n,
            K=rows,
            N=columns,
            HAS_MOMENTUM=momentum_buffer is not None,
            LR_ON_DEVICE=isinstance(lr, Tensor),
            MOMENTUM_ON_DEVICE=isinstance(momentum, Tensor),
            CAN_SKIP=skip is not None,
            CAPPED=max_angle is not None,
            PARALLEL=transport == "parallel",
            MAXIMIZE=maximize,
            LARGEST=float(2**MAX_DOUBLINGS),
            num_warps=max(1, min(8, rows * columns // (ELEMENTS_OF_A_WARP if rows <= 2 else MORE_ELEMENTS))),
        )


@triton.jit
def _step(
    weight_pointer,
    grad_pointer,
    momentum_pointer,
    counts_pointer,
    lr,
    momentum,
    skip,
    max_angle,
    k,
    n,
    K: tl.constexpr,
    N: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr,
    LR_ON_DEVICE: tl.constexpr,
    MOMENTUM_ON_DEVICE: tl.constexpr,
    CAN_SKIP: tl.constexpr,
    CAPPED: tl.constexpr,
    PARALLEL: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    LARGEST: tl.constexpr,
):
    if CAN_SKIP:  # noqa: SIM102 (this one is decided when the kernel is compiled)
        if tl.load(skip) != 0:
            return
    rate = tl.load(lr).to(tl.float32) if LR_ON_DEVICE else lr
    mu = tl.load(momentum).to(tl.float32) if MOMENTUM_ON_DEVICE else momentum
    row = tl.arange(0, K)
    column = tl.arange(0, N)
    eye = (row[:, None] == row[None, :]).to(tl.float32)
    inside = (row[:, None] < k) & (column[None, :] < n)
    place = tl.program_id(0).to(tl.int64) * k * n + row[:, None] * n + column[None, :]

    # Steps 1 to 3 of Algorithm 1: B = μM + D, projected.
    w = tl.load(weight_pointer + place, inside, other=0.0)
    h = tl.load(grad_pointer + place, inside, other=0.0).to(tl.float32)
    if MAXIMIZE:
        h = -h
    if HAS_MOMENTUM:
        h += mu * tl.load(momentum_pointer + place, inside, other=0.0).to(tl.float32)
    gram_w = _gram(w, w, row, K)
    overlap = _gram(h, w, row, K)
    h -= _times(2 * overlap - dot(overlap, gram_w, False), w, row, K)
    # 0, or NaN if there is a NaN or Inf anywhere, in an absent row too.
    lost = tl.sum(tl.sum(h - h, axis=1), axis=0) + (rate - rate)
    present = tl.sum(gram_w * eye, axis=1) > 0
    h = tl.where(present[:, None], h, 0.0)
    a = _gram(h, h, row, K)

    energy = tl.sum(tl.sum(a * eye, axis=1), axis=0)  # ‖H‖²
    if energy - energy + lost == 0:
        speed = tl.sqrt(energy)
        if CAPPED:
            speed = largest_singular_value(a, False)
        limit = tl.minimum(LARGEST, max_angle)
        tau = rate
        if rate * speed > limit:
            tau = limit / speed
            tl.atomic_add(counts_pointer + 1, 1)

        # Step 4, the geodesic, with step 5 folded in: W' = polar (P W + Q H).
        cosm1, sinc = cosm1_sinc(tau * tau * a, eye, False)
        p = cosm1 + eye
        q = -tau * sinc
        if HAS_MOMENTUM:
            if PARALLEL:
                moved = _times(p, h, row, K) + _times(tau * dot(a, sinc, False), w, row, K)
                tl.store(momentum_pointer + place, moved, inside)
            else:
                tl.store(momentum_pointer + place, h, inside)
        if energy > 0:  # a class that does not move is left alone, to the bit
            gram = dot(dot(p, gram_w, False), p, False) + dot(dot(q, a, False), q, False)
            polar = 1.5 * eye - 0.5 * gram
            new = _times(dot(polar, p, False), w, row, K) + _times(dot(polar, q, False), h, row, K)
            if rate * rate * energy > 1:  # rounding in A is felt: look at the result itself
                new = _times(1.5 * eye - 0.5 * _gram(new, new, row, K), new, row, K)
            tl.store(weight_pointer + place, new, inside)
    else:
        tl.atomic_add(counts_pointer, 1)


@triton.jit
def _gram(a, b, row, K: tl.constexpr):
    """A Bᵀ, (K, K), of blocks (K, N)."""
    result = tl.zeros([K, K], tl.float32)
    for j in tl.static_range(K):
        b_j = tl.sum(tl.where(row[:, None] == j, b, 0.0), axis=0)
        result += tl.where(row[None, :] == j, tl.sum(a * b_j[None, :], axis=1)[:, None], 0.0)
    return result


@triton.jit
def _times(p, w, row, K: tl.constexpr):
    """P W, (K, N), of a (K, K) and a (K, N) block."""
    result = tl.zeros_like(w)
    for j in tl.static_range(K):
        w_j = tl.sum(tl.where(row[:, None] == j, w, 0.0), axis=0)
        p_j = tl.sum(tl.where(row[None, :] == j, p, 0.0), axis=1)
        result += p_j[:, None] * w_j[None, :]
    return result
