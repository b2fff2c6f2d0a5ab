"""The portable step on a GPU, in a few launches: any n, and k up to 32, or 64 on a large GPU.

Mathematics and names are those of `reference._step`. A first pass over the columns sums the Gram matrices of W and
B = μM + D (`_grams`). All K x K matrices follow from these (`_turns`). A second pass computes the new W and M
(`_moves`). This makes eight passes through memory, where the memory-bound lower limit is five. Classes with a large
rotation angle need more passes, over H and W' themselves (`_grams` again, `_polish`).

Matmuls run on tensor cores as "tf32x3", three TF32 matmuls, which is almost float32. Tensor cores truncate their sums
instead of rounding them, so that long sums would drift. They therefore sum the columns of one block, and the blocks are
summed in float32. Other GPUs multiply in float32 ("ieee"). For these, tests compile the kernels but never ran them.
"""

import functools
from collections.abc import Hashable

import torch
import triton
import triton.language as tl
from torch import Tensor

from grassy.kernels.reference import MAX_DOUBLINGS
from grassy.kernels.step_options import NotCompiledYet, StepOptions
from grassy.kernels.triton.small_matrices import cosm1_sinc, dot, largest_singular_value

MAX_ROWS = 64
#: Columns of a block, by the padded number of rows of a class.
COLUMNS = {16: 64, 32: 32, 64: 32}
STAGES = 2
#: Shared memory that a program with 64 rows needs. Data-centre GPUs have it since Hopper.
BYTES_OF_64_ROWS = 200 * 1024
#: Columns per program in the last pass.
SHARE = 512
#: Bytes for the K x K matrices between the passes. More classes than fit are processed in parts.
SCRATCH_BYTES = 2**26
#: Dtypes of gradients and momenta.
TYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Kernel variants launched in this process. The first launch compiles and loads a variant, which is forbidden during
#: CUDA graph capture.
_LAUNCHED: set[Hashable] = set()
CAPTURED_TOO_EARLY = (
    "the Triton kernel cannot be compiled while a CUDA graph is captured; make a step of the same kind first"
)

#: Verdicts of `_turns` on a class.
SKIP, STILL, MOVE, CAREFUL, POLISH, GONE = (tl.constexpr(i) for i in range(6))


def supports(weight: Tensor, grad: Tensor, momentum_buffer: Tensor | None, options: StepOptions) -> str | None:
    """Return why the kernels cannot make this step, or None if they can."""
    if options.retraction != "geodesic":
        return "it supports retraction='geodesic'"
    if weight.dtype != torch.float32 or not weight.is_contiguous() or weight.numel() == 0:
        return "it supports contiguous float32 weights"
    momentum = weight if momentum_buffer is None else momentum_buffer
    if grad.dtype not in TYPES or momentum.dtype not in TYPES or not momentum.is_contiguous():
        return "it supports gradients and contiguous momenta in float32, bfloat16 and float16"
    most = _most_rows(weight.device) if weight.device.type == "cuda" else MAX_ROWS
    if weight.shape[1] > most:
        return f"it supports k up to {most} on this device, got {weight.shape[1]}"
    return None


@functools.cache
def precision(device: torch.device) -> str:
    """Return the precision of matmuls. GPUs of AMD, and of NVIDIA before Ampere, have no TF32 tensor cores."""
    if device.type != "cuda":  # the interpreter
        return "tf32x3"
    tf32 = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
    return "tf32x3" if tf32 else "ieee"


@functools.cache
def _most_rows(device: torch.device) -> int:
    """Return the largest K that a GPU supports."""
    shared = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
    return MAX_ROWS if precision(device) == "tf32x3" and shared >= BYTES_OF_64_ROWS else MAX_ROWS // 2


def warps(rows: int) -> int:
    """Return the number of warps per program for a padded number of rows."""
    return 8 if rows == 64 else 4


def geodesic_step(
    weight: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None,
    lr: float | Tensor,
    momentum: float | Tensor,
    options: StepOptions,
    counts: Tensor,
    skip: Tensor | None = None,
) -> None:
    """Make the step in a few launches, for tensors that `supports` accepts, and add to `counts`.

    Raises NotCompiledYet if it would have to compile during CUDA graph capture.
    """
    grad = grad.contiguous()
    arguments = map(_kind, (weight, grad, momentum_buffer, lr, momentum, skip, counts))
    variant = (weight.device, *weight.shape, options, *arguments)
    if variant not in _LAUNCHED and _capturing(weight):
        raise NotCompiledYet(f"{tuple(weight.shape)}: {CAPTURED_TOO_EARLY}")
    classes, k, n = weight.shape
    rows = max(16, triton.next_power_of_2(k))
    parallel, max_angle = options.transport == "parallel", options.max_angle
    matrices = 6 if parallel else 4
    part = max(1, min(classes, SCRATCH_BYTES // (4 * matrices * rows * rows)))
    # Per class: some K x K matrices, a row that marks which of its rows are present, and a verdict.
    scratch = torch.empty((part, matrices * rows + 1, rows), dtype=torch.float32, device=weight.device)
    verdicts = torch.empty(part, dtype=torch.int32, device=weight.device)

    own = {"CAN_SKIP": skip is not None, "PRECISION": precision(weight.device), "num_warps": warps(rows)}
    sizes = {**own, "K": rows, "N": COLUMNS[rows], "num_stages": STAGES}
    both = {**sizes, "HAS_MOMENTUM": momentum_buffer is not None, "MAXIMIZE": options.maximize}
    both["MOMENTUM_ON_DEVICE"] = isinstance(momentum, Tensor)
    turns = {**own, "K": rows, "LR_ON_DEVICE": isinstance(lr, Tensor), "CAPPED": max_angle is not None}
    turns |= {"PARALLEL": parallel, "LARGEST": float(2**MAX_DOUBLINGS)}
    limit = float("inf") if max_angle is None else float(max_angle)
    for first in range(0, classes, part):
        many = min(part, classes - first)
        w, d = weight[first : first + many], grad[first : first + many]
        m = w if momentum_buffer is None else momentum_buffer[first : first + many]
        between = (scratch, verdicts, weight if skip is None else skip)
        tensors = (w, d, m, *between, momentum, k, n, matrices)
        with torch.cuda.device_of(weight):  # Triton launches on the current device
            _grams[(many,)](*tensors, CAREFUL_ONLY=False, **both)
            _turns[(many,)](*between, counts, lr, limit, matrices, 0, **turns)
            _grams[(many,)](*tensors, CAREFUL_ONLY=True, **both)
            _turns[(many,)](*between, counts, lr, limit, matrices, 1, **turns)
            for careful in (False, True):
                grid = (many, triton.cdiv(n, SHARE))
                _moves[grid](*tensors, CAREFUL_ONLY=careful, PARALLEL=parallel, SHARE=SHARE, **both)
            _polish[(many,)](w, *between, k, n, **sizes)
    _LAUNCHED.add(variant)
    # As torch's in-place operations do, so that autograd notices the change.
    torch.autograd.graph.increment_version([weight] if momentum_buffer is None else [weight, momentum_buffer])


def _kind(value: float | Tensor | None) -> Hashable:
    """Return the properties of an argument that Triton specialises on."""
    return (value.dtype, value.data_ptr() % 16 == 0) if isinstance(value, Tensor) else value is None


def _capturing(weight: Tensor) -> bool:
    return weight.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@triton.jit
def _grams(
    weight_pointer,
    grad_pointer,
    momentum_pointer,
    scratch_pointer,
    verdict_pointer,
    skip,
    momentum,
    k,
    n,
    matrices,
    K: tl.constexpr,
    PRECISION: tl.constexpr,
    N: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr,
    MOMENTUM_ON_DEVICE: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    CAN_SKIP: tl.constexpr,
    CAREFUL_ONLY: tl.constexpr,
):
    """Compute W Wᵀ, B Wᵀ and B Bᵀ; or, for classes with the verdict CAREFUL, H Wᵀ and H Hᵀ from H itself."""
    if CAN_SKIP:  # noqa: SIM102 (this one is decided when the kernel is compiled)
        if tl.load(skip) != 0:
            return
    if CAREFUL_ONLY:  # noqa: SIM102
        if tl.load(verdict_pointer + tl.program_id(0)) != CAREFUL:
            return
    mu = tl.load(momentum).to(tl.float32) if MOMENTUM_ON_DEVICE else momentum
    row = tl.arange(0, K)[:, None]
    column = tl.arange(0, N)[None, :]
    place = tl.program_id(0).to(tl.int64) * k * n + row * n + column
    nothing = _nothing(n, K)
    matrix = scratch_pointer + _matrix(matrices, K)
    present = tl.load(scratch_pointer + _presence(matrices, K)) > 0  # valid in the careful pass only
    x = tl.load(matrix + K * K)
    gram_w = tl.zeros([K, K], tl.float32)
    overlap = tl.zeros([K, K], tl.float32)
    square = tl.zeros([K, K], tl.float32)
    for begin in range(0, n, N):
        inside = (row < k) & (begin + column < n)
        w = tl.load(weight_pointer + place + begin, inside, other=0.0)
        b = _sum(grad_pointer, momentum_pointer, place + begin, inside, mu, HAS_MOMENTUM, MAXIMIZE)
        if CAREFUL_ONLY:
            b = tl.where(present[:, None], b - dot(x, w, PRECISION), 0.0)
        else:
            gram_w += tl.dot(w, tl.trans(w), nothing, input_precision=PRECISION)
        overlap += tl.dot(b, tl.trans(w), nothing, input_precision=PRECISION)
        square += tl.dot(b, tl.trans(b), nothing, input_precision=PRECISION)
    if CAREFUL_ONLY:
        tl.store(matrix + 3 * K * K, overlap)
    else:
        tl.store(matrix, gram_w)
        tl.store(matrix + K * K, overlap)
    tl.store(matrix + 2 * K * K, square)


@triton.jit(do_not_specialize=["careful"])  # one kernel for both calls
def _turns(
    scratch_pointer,
    verdict_pointer,
    skip,
    counts_pointer,
    lr,
    max_angle,
    matrices,
    careful,
    K: tl.constexpr,
    PRECISION: tl.constexpr,
    LR_ON_DEVICE: tl.constexpr,
    CAN_SKIP: tl.constexpr,
    CAPPED: tl.constexpr,
    PARALLEL: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Replace the Gram matrices by the factors Y, X and V of W' = W + Y W + V H, H = B − X W and M'.

    With `careful`, H of the classes with the verdict CAREFUL is projected a second time, H − X' W, which suffices. If
    that removes most of H, then H was rounding only, and the class does not move. This happens for a gradient inside
    the subspace, and for k = n.
    """
    if CAN_SKIP:  # noqa: SIM102 (this one is decided when the kernel is compiled)
        if tl.load(skip) != 0:
            return
    rate = tl.load(lr).to(tl.float32) if LR_ON_DEVICE else lr
    matrix = scratch_pointer + _matrix(matrices, K)
    verdict_pointer += tl.program_id(0)
    verdict = tl.load(verdict_pointer, mask=careful != 0, other=MOVE)
    row = tl.arange(0, K)
    eye = (row[:, None] == row[None, :]).to(tl.float32)
    gram_w = tl.load(matrix)
    x = tl.load(matrix + K * K)
    a = tl.load(matrix + 2 * K * K)
    mass = tl.sum(tl.sum(gram_w * eye, axis=1), axis=0)
    energy = tl.sum(tl.sum(a * eye, axis=1), axis=0)
    present = tl.sum(gram_w * eye, axis=1) > 0  # absent rows are zero
    eye = tl.where(present[:, None], eye, 0.0)
    defect = gram_w - eye
    if careful != 0:
        x = tl.load(matrix + 3 * K * K)
    overlap = tl.where(present[:, None], x, 0.0)
    x = overlap - dot(overlap, defect, PRECISION)  # B Wᵀ (W Wᵀ)⁻¹ to first order, or H Wᵀ (W Wᵀ)⁻¹
    square = a
    a = tl.where(present[:, None] & present[None, :], a - dot(x, tl.trans(overlap), PRECISION), 0.0)
    length = energy  # ‖B‖² or ‖H‖²
    left = tl.sum(tl.sum(a * eye, axis=1), axis=0)
    energy = tl.maximum(left, 0.0)
    if careful != 0:
        verdict = tl.where(verdict == CAREFUL, tl.where(2 * energy < length, GONE, POLISH), SKIP)
        if verdict != SKIP:
            tl.store(verdict_pointer, verdict)
            tl.store(matrix + 3 * K * K, x)
    else:
        # A class that does not move stays bit-identical.
        verdict = tl.where(tl.sum(tl.sum(square * eye, axis=1), axis=0) > 0, MOVE, STILL)
        # Cancellation leaves an error in A of the size of rounding in B Bᵀ. It matters only for large rotation angles,
        # or if the length of H itself matters.
        far = rate * rate * length > 1
        if CAPPED:
            far = far | (64 * energy < length)
        verdict = tl.where(far, CAREFUL, verdict)
        if (mass - mass) + (length - length) + (left - left) + (rate - rate) != 0:  # a NaN or Inf anywhere
            verdict = SKIP
            tl.atomic_add(counts_pointer, 1)
        tl.store(verdict_pointer, verdict)
        tl.store(scratch_pointer + _presence(matrices, K), present.to(tl.float32))
        tl.store(matrix + K * K, x)

    if (verdict == STILL) | (verdict == MOVE) | (verdict == POLISH):
        speed = tl.sqrt(energy)
        if CAPPED:
            speed = largest_singular_value(a, PRECISION)
        limit = tl.minimum(LARGEST, max_angle)
        tau = rate
        if rate * speed > limit:
            tau = limit / speed
            tl.atomic_add(counts_pointer + 1, 1)
        cosm1, sinc = cosm1_sinc(tau * tau * a, eye, PRECISION)
        # The polar factor of P W + Q H is 1 − (P (W Wᵀ) P − P²) / 2, up to its square, since cos² + sin² = 1.
        off = dot(cosm1, defect, PRECISION)
        off = defect + off + tl.trans(off)
        tl.store(matrix, cosm1 - 0.5 * (off + dot(off, cosm1, PRECISION)))
        tl.store(matrix + 2 * K * K, -tau * (sinc - 0.5 * dot(off, sinc, PRECISION)))
        if PARALLEL:
            tl.store(matrix + 4 * K * K, tau * dot(a, sinc, PRECISION))
            tl.store(matrix + 5 * K * K, cosm1)


@triton.jit
def _moves(
    weight_pointer,
    grad_pointer,
    momentum_pointer,
    scratch_pointer,
    verdict_pointer,
    skip,
    momentum,
    k,
    n,
    matrices,
    K: tl.constexpr,
    PRECISION: tl.constexpr,
    N: tl.constexpr,
    SHARE: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr,
    MOMENTUM_ON_DEVICE: tl.constexpr,
    PARALLEL: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    CAN_SKIP: tl.constexpr,
    CAREFUL_ONLY: tl.constexpr,
):
    """Compute the new W and M of some columns, for classes that need care or for all others."""
    if CAN_SKIP:  # noqa: SIM102 (this one is decided when the kernel is compiled)
        if tl.load(skip) != 0:
            return
    verdict = tl.load(verdict_pointer + tl.program_id(0))
    if (verdict == SKIP) | ((verdict >= POLISH) != CAREFUL_ONLY):
        return
    mu = tl.load(momentum).to(tl.float32) if MOMENTUM_ON_DEVICE else momentum
    row = tl.arange(0, K)[:, None]
    column = tl.arange(0, N)[None, :]
    place = tl.program_id(0).to(tl.int64) * k * n + row * n + column
    moving = row < tl.where((verdict == STILL) | (verdict == GONE), 0, k)
    matrix = scratch_pointer + _matrix(matrices, K)
    present = (tl.load(scratch_pointer + _presence(matrices, K)) > 0) & (verdict != GONE)
    along_w = tl.load(matrix)
    x = tl.load(matrix + K * K)
    along_h = tl.load(matrix + 2 * K * K)
    start = tl.program_id(1) * SHARE
    for begin in range(start, tl.minimum(start + SHARE, n), N):
        inside = (row < k) & (begin + column < n)
        w = tl.load(weight_pointer + place + begin, inside, other=0.0)
        b = _sum(grad_pointer, momentum_pointer, place + begin, inside, mu, HAS_MOMENTUM, MAXIMIZE)
        h = tl.where(present[:, None], b - dot(x, w, PRECISION), 0.0)
        if CAREFUL_ONLY:
            h -= tl.where(present[:, None], dot(tl.load(matrix + 3 * K * K), w, PRECISION), 0.0)
        new = w + (dot(along_w, w, PRECISION) + dot(along_h, h, PRECISION))
        tl.store(weight_pointer + place + begin, new, inside & moving)
        if HAS_MOMENTUM:
            if PARALLEL:
                turned = tl.load(matrix + 4 * K * K)
                cosm1 = tl.load(matrix + 5 * K * K)
                more = dot(cosm1, h, PRECISION) + dot(turned, w, PRECISION)
                h += tl.where(verdict != GONE, more, 0.0) if CAREFUL_ONLY else more
            tl.store(momentum_pointer + place + begin, h, inside)


@triton.jit
def _polish(
    weight_pointer,
    scratch_pointer,
    verdict_pointer,
    skip,
    k,
    n,
    K: tl.constexpr,
    PRECISION: tl.constexpr,
    N: tl.constexpr,
    CAN_SKIP: tl.constexpr,
):
    """Take the polar factor of W' itself after a rotation so large that rounding in A matters."""
    if CAN_SKIP:  # noqa: SIM102 (this one is decided when the kernel is compiled)
        if tl.load(skip) != 0:
            return
    if tl.load(verdict_pointer + tl.program_id(0)) != POLISH:
        return
    row = tl.arange(0, K)
    column = tl.arange(0, N)[None, :]
    place = tl.program_id(0).to(tl.int64) * k * n + row[:, None] * n + column
    eye = (row[:, None] == row[None, :]).to(tl.float32)
    nothing = _nothing(n, K)
    gram = tl.zeros([K, K], tl.float32)
    for begin in range(0, n, N):
        w = tl.load(weight_pointer + place + begin, (row[:, None] < k) & (begin + column < n), other=0.0)
        gram += tl.dot(w, tl.trans(w), nothing, input_precision=PRECISION)
    half = 0.5 * (eye - gram)
    for begin in range(0, n, N):
        inside = (row[:, None] < k) & (begin + column < n)
        w = tl.load(weight_pointer + place + begin, inside, other=0.0)
        tl.store(weight_pointer + place + begin, w + dot(half, w, PRECISION), inside)


# ------------------------------------------------------------------------------------------------------ helpers


@triton.jit
def _sum(grad_pointer, momentum_pointer, place, inside, mu, HAS_MOMENTUM: tl.constexpr, MAXIMIZE: tl.constexpr):
    """Return B = μM + D."""
    b = tl.load(grad_pointer + place, inside, other=0.0).to(tl.float32)
    if MAXIMIZE:
        b = -b
    if HAS_MOMENTUM:
        b += mu * tl.load(momentum_pointer + place, inside, other=0.0).to(tl.float32)
    return b


@triton.jit
def _nothing(n, K: tl.constexpr):
    """Return 0 in a form that hides it from the compiler, which would otherwise sum all blocks in the tensor cores."""
    return tl.zeros([K, K], tl.float32) + tl.where(n < 0, 1.0, 0.0)


@triton.jit
def _matrix(matrices, K: tl.constexpr):
    """Return the offsets of the entries of the first matrix of a class."""
    index = tl.arange(0, K)
    return tl.program_id(0).to(tl.int64) * (matrices * K + 1) * K + index[:, None] * K + index[None, :]


@triton.jit
def _presence(matrices, K: tl.constexpr):
    """Return the offsets of the marks of present rows of a class."""
    return tl.program_id(0).to(tl.int64) * (matrices * K + 1) * K + matrices * K * K + tl.arange(0, K)
