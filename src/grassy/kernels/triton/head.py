# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
"""The kernels of the head on a GPU: everything except the three large matmuls, which BLAS computes.

Shapes: B batch, C classes, K subspace dimension, N feature dimension. Coordinates y (B, C·K), of all or some classes,
are read and written in the dtype of the matmuls. The arithmetic is float32. With TRITON_INTERPRET=1 the kernels run,
slowly, on CPU tensors. Nothing synchronises, so that they can be part of a CUDA graph.

`unit`, `unit_grad`, `observe` and `pull_back` correspond to the functions of `cross_entropy` in plain torch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["lengths", "lengths_grad", "observe", "pull_back", "unit", "unit_grad"]

#: Coordinates per program at a time, 16 per thread: with 32 per thread and an odd K, registers spill.
TILE = 2048
#: Largest number of classes per program, each with its own running maximum and sums.
CLASSES = 512
WARPS = 4


def unit(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x̂ = x/‖x‖ (B, N) in the dtype of the matmuls and 1/‖x‖ (B,). Both are 0 for a zero feature."""
    batch, n = x.shape
    result = torch.empty((batch, n), dtype=dtype, device=x.device)
    inverse = torch.empty(batch, dtype=torch.float32, device=x.device)
    _unit[(batch,)](x.contiguous(), result, inverse, n, BLOCK=_columns(n), num_warps=WARPS)
    return result, inverse


def unit_grad(x: Tensor, inverse: Tensor, v: Tensor) -> Tensor:
    """Return the gradient (v − x̂(x̂·v))/‖x‖ of x (B, N), given that of x̂, v (B, N) in float32."""
    batch, n = x.shape
    result = torch.empty((batch, n), dtype=x.dtype, device=x.device)
    _unit_grad[(batch,)](x.contiguous(), inverse, v, result, n, BLOCK=_columns(n), num_warps=WARPS)
    return result


def lengths(y: Tensor, k: int, gamma: float) -> Tensor:
    """Return the logits γ‖y_c‖, (B, C) in float32."""
    batch, classes = y.shape[0], y.shape[1] // k
    result = torch.empty((batch, classes), dtype=torch.float32, device=y.device)
    tile = _tile(k, classes)
    _lengths[_grid(batch, classes, tile)](y, result, classes, gamma, **tile, num_warps=WARPS)
    return result


def lengths_grad(y: Tensor, grad: Tensor, k: int, gamma: float) -> Tensor:
    """Return the gradient γ g_c y_c/‖y_c‖ of the coordinates, (B, C·K), given that of the logits, g (B, C)."""
    batch, classes = grad.shape
    result = torch.empty_like(y)
    tile = _tile(k, classes)
    _lengths_grad[_grid(batch, classes, tile)](y, grad.contiguous(), result, classes, gamma, **tile, num_warps=WARPS)
    return result


def observe(y, target, start, terms, state, loss, rows):
    here = y.shape[1] // terms.k
    _observe[(len(y),)](
        y,
        target,
        state,
        loss,
        rows,
        state.stride(0),  # that of rows, too
        start,
        here,
        terms.classes,
        terms.gamma,
        terms.smoothing,
        terms.ignore_index,
        terms.shift,
        terms.shifted_from,
        **_tile(terms.k, here),
        SOFT=target.is_floating_point(),
        FIRST=start == 0,
        LAST=terms.finish and start + here == terms.classes,
        num_warps=WARPS,
    )


def pull_back(y, target, start, terms, rows, grad, out):
    batch, here = y.shape[0], y.shape[1] // terms.k
    tile = _tile(terms.k, here)
    _pull_back[_grid(batch, here, tile)](
        y,
        target,
        rows,
        grad,
        out,
        rows.stride(0),
        start,
        here,
        terms.classes,
        terms.gamma,
        terms.smoothing,
        terms.ignore_index,
        terms.shift,
        terms.shifted_from,
        **tile,
        SOFT=target.is_floating_point(),
        num_warps=WARPS,
    )
    return out


def _columns(n: int) -> int:
    return min(TILE, triton.next_power_of_2(n))


def _tile(k: int, classes: int) -> dict[str, int]:
    """Return K, K rounded up to a power of two, and the number of classes per program, as kernel constants.

    With K as a constant, Triton knows the alignment of a class and can vectorise its load.
    """
    padded = triton.next_power_of_2(k)
    return {"K": k, "PADDED": padded, "BLOCK": max(1, min(CLASSES, TILE // padded, triton.next_power_of_2(classes)))}


def _grid(batch: int, classes: int, tile: dict[str, int]) -> tuple[int]:
    return (batch * triton.cdiv(classes, tile["BLOCK"]),)


@triton.jit
def _unit(x_pointer, result_pointer, inverse_pointer, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_pointer += row * n
    result_pointer += row * n
    lane = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, n, BLOCK):
        x = tl.load(x_pointer + first + lane, first + lane < n, other=0.0).to(tl.float32)
        squares += x * x
    length = tl.sqrt(tl.sum(squares, axis=0))
    scale = 1.0
    if length == float("inf"):  # the squares overflow: `reference.scale_of_long_vectors`
        scale = 7.888609052210118e-31  # 2^-100
        squares = tl.zeros([BLOCK], tl.float32)
        for first in range(0, n, BLOCK):
            x = tl.load(x_pointer + first + lane, first + lane < n, other=0.0).to(tl.float32) * scale
            squares += x * x
        length = tl.sqrt(tl.sum(squares, axis=0))
    inverse = tl.where(length == 0, 0.0, 1.0 / length)  # NaN stays NaN
    tl.store(inverse_pointer + row, inverse * scale)
    for first in range(0, n, BLOCK):
        x = tl.load(x_pointer + first + lane, first + lane < n, other=0.0).to(tl.float32) * scale
        tl.store(result_pointer + first + lane, x * inverse, first + lane < n)


@triton.jit
def _unit_grad(x_pointer, inverse_pointer, v_pointer, result_pointer, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_pointer += row * n
    v_pointer += row * n
    result_pointer += row * n
    inverse = tl.load(inverse_pointer + row)
    lane = tl.arange(0, BLOCK)
    products = tl.zeros([BLOCK], tl.float32)
    for first in range(0, n, BLOCK):
        inside = first + lane < n
        x = tl.load(x_pointer + first + lane, inside, other=0.0).to(tl.float32) * inverse
        products += x * tl.load(v_pointer + first + lane, inside, other=0.0)
    along = tl.sum(products, axis=0)
    for first in range(0, n, BLOCK):
        inside = first + lane < n
        x = tl.load(x_pointer + first + lane, inside, other=0.0).to(tl.float32) * inverse
        v = tl.load(v_pointer + first + lane, inside, other=0.0)
        tl.store(result_pointer + first + lane, (v - x * along) * inverse, inside)


@triton.jit
def _lengths(y_pointer, result_pointer, classes, gamma, K: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    row, column = _row_and_classes(classes, BLOCK)
    y, _place, _inside = _coordinates(y_pointer, row, column, classes, K, PADDED)
    tl.store(result_pointer + row * classes + column, gamma * _norm(y), column < classes)


@triton.jit
def _lengths_grad(
    y_pointer, grad_pointer, result_pointer, classes, gamma, K: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr
):
    row, column = _row_and_classes(classes, BLOCK)
    y, place, inside = _coordinates(y_pointer, row, column, classes, K, PADDED)
    slope = tl.load(grad_pointer + row * classes + column, column < classes, other=0.0).to(tl.float32)
    tl.store(result_pointer + place, _direction(y, _norm(y), gamma * slope), inside)


@triton.jit
def _observe(
    y_pointer,
    target_pointer,
    state_pointer,
    loss_pointer,
    rows_pointer,
    stride,
    start,
    here,
    classes,
    gamma,
    smoothing,
    ignore_index,
    shift,
    shifted_from,
    K: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    SOFT: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
):
    """One program per row. Each lane has its own running maximum and sums, which are combined at the end."""
    LOWEST: tl.constexpr = -3.0e38  # finite, to avoid Inf − Inf in lanes without a class
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    maxima = tl.full([BLOCK], LOWEST, tl.float32)
    exponentials = tl.zeros([BLOCK], tl.float32)
    picks = tl.zeros([BLOCK], tl.float32)
    totals = tl.zeros([BLOCK], tl.float32)
    masses = tl.zeros([BLOCK], tl.float32)
    if not SOFT:
        label = tl.load(target_pointer + row).to(tl.int64)
    for first in range(0, here, BLOCK):
        column = first + lane
        present = column < here
        y, _place, _inside = _coordinates(y_pointer, row, column, here, K, PADDED)
        logit = gamma * _norm(y) + tl.where(start + column >= shifted_from, shift, 0.0)
        logit = tl.where(present, logit, 0.0)
        raised = tl.maximum(maxima, tl.where(present, logit, LOWEST))
        exponentials = exponentials * tl.exp(maxima - raised) + tl.where(present, tl.exp(logit - raised), 0.0)
        maxima = raised
        totals += logit
        if SOFT:
            share = tl.load(target_pointer + row * classes + start + column, present, other=0.0).to(tl.float32)
            picks += share * logit
            masses += share
        else:
            picks += tl.where(start + column == label, logit, 0.0)
    maximum = tl.max(maxima, axis=0)
    exponential = tl.sum(exponentials * tl.exp(maxima - maximum), axis=0)
    picked = tl.sum(picks, axis=0)
    total = tl.sum(totals, axis=0)
    mass = tl.sum(masses, axis=0)

    state_pointer += row
    if not FIRST:
        before = tl.load(state_pointer)
        raised = tl.maximum(before, maximum)
        exponential = exponential * tl.exp(maximum - raised)
        exponential += tl.load(state_pointer + stride) * tl.exp(before - raised)
        maximum = raised
        picked += tl.load(state_pointer + 2 * stride)
        total += tl.load(state_pointer + 3 * stride)
        mass += tl.load(state_pointer + 4 * stride)
    if LAST:
        logarithm = tl.log(exponential)
        if SOFT:
            weight = (1 - smoothing) * mass + smoothing
            picked -= mass * maximum
        else:
            weight = 1.0
            # A label that is no class gives a NaN.
            picked = tl.where((label >= 0) & (label < classes), picked - maximum, float("nan"))
        loss = weight * logarithm - (1 - smoothing) * picked - smoothing * (total / classes - maximum)
        if not SOFT:
            loss = tl.where(label == ignore_index, 0.0, loss)
        tl.store(loss_pointer + row, loss)
        tl.store(rows_pointer + row, maximum + logarithm)
        tl.store(rows_pointer + stride + row, weight)
    else:
        tl.store(state_pointer, maximum)
        tl.store(state_pointer + stride, exponential)
        tl.store(state_pointer + 2 * stride, picked)
        tl.store(state_pointer + 3 * stride, total)
        tl.store(state_pointer + 4 * stride, mass)


@triton.jit
def _pull_back(
    y_pointer,
    target_pointer,
    rows_pointer,
    grad_pointer,
    out_pointer,
    stride,
    start,
    here,
    classes,
    gamma,
    smoothing,
    ignore_index,
    shift,
    shifted_from,
    K: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    SOFT: tl.constexpr,
):
    row, column = _row_and_classes(here, BLOCK)
    y, place, inside = _coordinates(y_pointer, row, column, here, K, PADDED)
    norm = _norm(y)
    grad = tl.load(grad_pointer + row)
    if SOFT:
        share = tl.load(target_pointer + row * classes + start + column, column < here, other=0.0).to(tl.float32)
    else:
        label = tl.load(target_pointer + row).to(tl.int64)
        share = (start + column == label).to(tl.float32)
        grad = tl.where(label == ignore_index, 0.0, grad)
    share = (1 - smoothing) * share + smoothing / classes
    logit = gamma * norm + tl.where(start + column >= shifted_from, shift, 0.0)
    probability = tl.exp(logit - tl.load(rows_pointer + row))
    slope = grad * (tl.load(rows_pointer + stride + row) * probability - share)
    tl.debug_barrier()  # out may be y, and several threads of a small tile read the same element
    tl.store(out_pointer + place, _direction(y, norm, gamma * slope), inside)


@triton.jit
def _row_and_classes(classes, BLOCK: tl.constexpr):
    """Return the row and the block of classes of this program."""
    blocks = tl.cdiv(classes, BLOCK)
    row = tl.program_id(0) // blocks
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    return row.to(tl.int64), column


@triton.jit
def _coordinates(y_pointer, row, column, classes, K: tl.constexpr, PADDED: tl.constexpr):
    """Return the coordinates (BLOCK, PADDED) of some classes of a row, their offsets, and the mask."""
    part = tl.arange(0, PADDED)
    place = row * classes * K + (column[:, None] * K + part[None, :])
    inside = (column < classes)[:, None] & (part < K)[None, :]
    return tl.load(y_pointer + place, inside, other=0.0).to(tl.float32), place, inside


@triton.jit
def _norm(y):
    return tl.sqrt(tl.sum(y * y, axis=1))


@triton.jit
def _direction(y, norm, slope):
    """Return slope_c y_c/‖y_c‖, and 0 where y_c = 0."""
    return y * tl.where(norm == 0, 0.0, slope / norm)[:, None]
