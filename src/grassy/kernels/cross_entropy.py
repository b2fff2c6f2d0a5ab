"""Softmax cross-entropy of subspace logits without storing them, as a custom operator for torch.compile.

If there are many coordinates, B x C x K, they exist for one chunk of classes at a time. The forward updates the running
maximum and sums of each row, chunk by chunk. The backward recomputes the coordinates, except for the first chunks,
which are stored. A large batch is processed in blocks of rows within each chunk. Shapes: B batch, C classes, K subspace
dimension, N feature dimension. y (B, c·K) holds the coordinates of c classes.

Let l_c = γ‖y_c‖. Target probabilities t_c (1 for a label, 0 elsewhere) are smoothed to t'_c = (1−ε)t_c + ε/C, and
T = Σ t'_c. The loss of a row is Σ t'_c (log Σ exp l − l_c), and ∂loss/∂l_c = T p_c − t'_c with p = softmax(l).
"""

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from grassy.kernels.fused_logits import (
    absorbed,
    as_given,
    fake_gradients,
    no_second_derivative,
    product,
    product_dtype,
    wants_grad,
)
from grassy.kernels.fused_logits import supports as logits_support
from grassy.kernels.reference import scale_of_long_vectors, subspace_logits
from grassy.mixed_labels import MixedLabels

#: Up to this number of coordinates, or elements of the weight, which is cast to half precision, there is one chunk.
WHOLE = 2**26
#: Size of a chunk otherwise: 32 MiB in bfloat16, which fits into the cache of a large GPU.
CHUNK = 2**24
#: Largest number of coordinates stored for the backward: 224 MiB in bfloat16. The others are recomputed.
KEEP = 7 * CHUNK
#: Rows by which a chunk is sized. A larger batch would leave it few classes, and each row is read once per chunk.
ROWS = 2048
#: Largest number of coordinates of a block of rows: 256 MiB in bfloat16. Smaller blocks would fit into the cache, but
#: their kernels end before a slow host has launched the next ones.
BLOCK = 2**27


class Terms(NamedTuple):
    """Parameters of a loss that are not tensors."""

    classes: int
    k: int
    gamma: float
    smoothing: float
    ignore_index: int
    #: Added to the logits of the classes from `shifted_from` on.
    shift: float = 0.0
    shifted_from: int = 0
    #: Whether these are all classes, so that the last chunk completes the loss.
    finish: bool = True


def subspace_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    gamma: float | Tensor,
    label_smoothing: float,
    normalize: bool,
    reduction: str,
    ignore_index: int,
    impl: str,
) -> Tensor:
    """Compute `kernels.subspace_cross_entropy` with the given implementation."""
    soft = target.is_floating_point()
    # As int64: in uint8, which torch accepts, ignore_index -100 would be class 156.
    flat = target.reshape(-1, target.shape[-1]) if soft else target.reshape(-1).long()
    if impl != "reference":
        x, gamma, normalize = absorbed(x, gamma, normalize)
        rows = x.reshape(-1, x.shape[-1])
        size, keep = division(rows, weight)
        settings = gamma, float(label_smoothing), ignore_index, normalize, impl == "triton"
        keep = keep if wants_grad(x, weight) else 0
        loss, _, _ = _forward(rows, weight, flat, product_dtype(x, weight), size, keep, *settings)
    else:
        logits = subspace_logits(x, weight, gamma, normalize).reshape(-1, weight.shape[0])
        loss = F.cross_entropy(
            logits,
            flat.to(logits.dtype) if soft else flat,
            ignore_index=ignore_index,
            reduction="none",
            label_smoothing=label_smoothing,
        )
    if reduction == "none":
        return loss.reshape(x.shape[:-1])
    if reduction == "sum":
        return loss.sum()
    return loss.mean() if soft else loss.sum() / (flat != ignore_index).sum()


def supports(x: Tensor, weight: Tensor, target: Tensor, gamma: float | Tensor) -> str | None:
    """Return why the operators do not support these tensors, or None if they do."""
    return "the target requires a gradient" if wants_grad(target) else logits_support(x, weight, gamma)


def check_options(label_smoothing: float, reduction: str) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must lie in [0, 1], got {label_smoothing!r}")


def check(x: Tensor, weight: Tensor, target: Tensor, label_smoothing: float, reduction: str) -> None:
    check_options(label_smoothing, reduction)
    if weight.ndim != 3 or x.ndim == 0 or x.shape[-1] != weight.shape[-1] or weight.shape[0] == 0:
        raise ValueError(
            f"need features (..., N) and a weight (C, K, N) of at least one class, got {tuple(x.shape)} and "
            f"{tuple(weight.shape)}"
        )
    expected = (*x.shape[:-1], weight.shape[0]) if target.is_floating_point() else x.shape[:-1]
    if target.shape != torch.Size(expected):
        raise ValueError(f"need a target of shape {tuple(expected)} for these features, got {tuple(target.shape)}")


# --- the pieces in plain torch ----------------------------------------------------------------------------------


def unit(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x̂ = x/‖x‖ (B, N) in the dtype of the matmuls and 1/‖x‖ (B,). Both are 0 for a zero feature."""
    x = x.float()
    scale = scale_of_long_vectors(x)
    x = x * scale
    length = torch.linalg.vector_norm(x, dim=-1)
    inverse = torch.where(length == 0, 0, 1 / length)  # NaN stays NaN
    return (x * inverse.unsqueeze(-1)).to(dtype), inverse * scale.squeeze(-1)


def unit_grad(x: Tensor, inverse: Tensor, v: Tensor) -> Tensor:
    """Return the gradient (v − x̂(x̂·v))/‖x‖ of x (B, N), given that of x̂, v (B, N) in float32."""
    inverse = inverse.unsqueeze(-1)
    exact = x.float() * inverse
    return ((v - exact * (exact * v).sum(-1, keepdim=True)) * inverse).to(x.dtype)


def observe(y: Tensor, target: Tensor, start: int, terms: Terms, state: Tensor, loss: Tensor, rows: Tensor) -> None:
    """Update the state by the classes from `start` on. After the last chunk, write the loss (B,) and rows (2, B).

    The state (5, B) holds max l_c, Σ exp(l_c − max), Σ t_c l_c, Σ l_c and Σ t_c so far. `rows` holds what the backward
    needs: log Σ exp l_c and T. A label that is no class gives a NaN.
    """
    logits = _logits(_norms(y, terms.k), start, terms)
    stop = start + logits.shape[1]
    maximum, exponentials, picked, total, mass = state
    if start == 0:
        state.zero_()
        maximum.fill_(-torch.inf)
    raised = torch.maximum(maximum, logits.amax(-1))
    exponentials.mul_((maximum - raised).exp()).add_((logits - raised.unsqueeze(-1)).exp().sum(-1))
    maximum.copy_(raised)
    total += logits.sum(-1)
    soft = target.is_floating_point()
    shares = _shares(target, start, stop)
    picked += (shares * logits).sum(-1) if soft else logits.where(shares, 0).sum(-1)
    mass += shares.sum(-1)
    if terms.finish and stop == terms.classes:
        eps = terms.smoothing
        if not soft:
            mass.fill_(1)
            picked.masked_fill_((target < 0) | (target >= terms.classes), torch.nan)
        # Relative to the largest logit, because a small loss is a small difference of logits.
        rows[1] = (1 - eps) * mass + eps
        rest = (1 - eps) * (picked - mass * maximum) + eps * (total / terms.classes - maximum)
        loss.copy_(rows[1] * exponentials.log() - rest)
        rows[0] = maximum + exponentials.log()
        if not soft:
            loss.masked_fill_(target == terms.ignore_index, 0)


def pull_back(y: Tensor, target: Tensor, start: int, terms: Terms, rows: Tensor, grad: Tensor, out: Tensor) -> Tensor:
    """Write the gradient of the coordinates of the classes from `start` on into `out`, which may be y itself.

    It is g (T p_c − t'_c) γ y_c/‖y_c‖, and 0 where y_c = 0. Here g (B,) is the gradient of the losses.
    """
    norms = _norms(y, terms.k)
    probabilities = (_logits(norms, start, terms) - rows[0].unsqueeze(-1)).exp()
    shares = _shares(target, start, start + norms.shape[1]) * (1 - terms.smoothing) + terms.smoothing / terms.classes
    if not target.is_floating_point():
        grad = torch.where(target == terms.ignore_index, 0, grad)
    slopes = grad.unsqueeze(-1) * (rows[1].unsqueeze(-1) * probabilities - shares)
    slopes = torch.where(norms == 0, 0, terms.gamma * slopes / norms)
    torch.mul(y.unflatten(-1, (-1, terms.k)), slopes.unsqueeze(-1), out=out.unflatten(-1, (-1, terms.k)))
    return out


def _norms(y: Tensor, k: int) -> Tensor:
    return torch.linalg.vector_norm(y.unflatten(-1, (-1, k)), dim=-1, dtype=torch.float32)


def _logits(norms: Tensor, start: int, terms: Terms) -> Tensor:
    logits = terms.gamma * norms
    if terms.shift:
        logits[:, max(0, terms.shifted_from - start) :] += terms.shift
    return logits


def _shares(target: Tensor, start: int, stop: int) -> Tensor:
    """Return t_c of some classes, (B, c): probabilities in float32, or booleans for labels."""
    if target.is_floating_point():
        return target[:, start:stop].float()
    return target.unsqueeze(-1) == torch.arange(start, stop, device=target.device)


# --- the operator -----------------------------------------------------------------------------------------------


def pieces_of(kernels: bool) -> Any:
    if not kernels:
        return sys.modules[__name__]
    from grassy.kernels.triton import head  # imports triton, which is optional

    return head


def division(x: Tensor, weight: Tensor) -> tuple[int, int]:
    """Return the number of classes per chunk, and of how many classes the coordinates are stored."""
    classes, k, _ = weight.shape
    batch, n = x.shape
    of_a_class = max(1, batch, n) * k
    if of_a_class * classes <= WHOLE:
        return max(1, classes), classes
    size = max(1, CHUNK // (max(1, min(batch, ROWS), n) * k))
    return size, min(classes, KEEP // (size * of_a_class) * size)


def chunks(classes: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the first class of each chunk and that of the next one."""
    return ((start, min(start + size, classes)) for start in range(0, classes, size))


def _batch_blocks(batch: int, size: int, k: int) -> list[slice]:
    """Return blocks of as many rows each, with up to BLOCK coordinates of a chunk of `size` classes."""
    most = max(1, BLOCK // (size * k))
    rows = -(-batch // max(1, -(-batch // most)))
    return [slice(start, min(start + rows, batch)) for start in range(0, max(1, batch), max(1, rows))]


@torch.library.custom_op("grassy::subspace_cross_entropy", mutates_args=())
def _forward(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    dtype: torch.dtype,
    size: int,
    keep: int,
    gamma: float,
    smoothing: float,
    ignore_index: int,
    normalize: bool,
    kernels: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses (B,) of x (B, N), `rows` (2, B) of `observe`, and the stored coordinates by chunk."""
    pieces, terms = pieces_of(kernels), Terms(weight.shape[0], weight.shape[1], gamma, smoothing, ignore_index)
    state, loss, rows = (x.new_empty(*shape, len(x), dtype=torch.float32) for shape in ((5,), (), (2,)))
    with as_given(x):
        features = pieces.unit(x, dtype)[0] if normalize else x.to(dtype)
        kept = observe_chunks(features, weight, target.contiguous(), terms, size, keep, pieces, state, loss, rows)
    return loss, rows, kept


def observe_chunks(
    features: Tensor,
    weight: Tensor,
    target: Tensor | MixedLabels,
    terms: Terms,
    size: int,
    keep: int,
    pieces: Any,
    *results: Tensor,
) -> Tensor:
    """Call `observe` for all chunks of `size` classes. Returns the coordinates of the first `keep` classes."""
    blocks = _batch_blocks(len(features), size, terms.k)
    kept = features.new_empty(len(features) * keep * terms.k)
    for start, stop in chunks(weight.shape[0], size):
        part = weight[start:stop].flatten(0, 1).to(features.dtype)
        for block in blocks:
            out = _of_chunk(kept, features, weight, start, stop)[block] if stop <= keep else None
            y = torch.mm(features[block], part.T, out=out)
            pieces.observe(y, target[block], start, terms, *(result[..., block] for result in results))
            del y, out  # free the memory before the next product
    return kept


def pull_back_chunks(
    features: Tensor,
    weight: Tensor,
    target: Tensor | MixedLabels,
    terms: Terms,
    size: int,
    keep: int,
    pieces: Any,
    rows: Tensor,
    grad: Tensor,
    kept: Tensor,
    for_x: bool,
    for_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of features (B, N), in float32, and weight (C, K, N), given that of the losses (B,)."""
    blocks = _batch_blocks(len(features), size, terms.k)
    # The gradient of a half-precision weight is a sum over blocks, too.
    dtype = weight.dtype if len(blocks) == 1 else torch.promote_types(weight.dtype, torch.float32)
    dweight = weight.new_empty(weight.shape if for_weight else 0, dtype=dtype)
    v = features.new_zeros(features.shape, dtype=torch.float32)
    for start, stop in chunks(weight.shape[0], size):
        part = weight[start:stop].flatten(0, 1).to(features.dtype)
        is_kept = stop <= keep
        for block in blocks:
            y = _of_chunk(kept, features, weight, start, stop)[block] if is_kept else torch.mm(features[block], part.T)
            out = torch.empty_like(y) if is_kept else y
            g = pieces.pull_back(y, target[block], start, terms, rows[:, block], grad[block], out)
            if for_x:
                v[block].add_(product(g, part, torch.float32))
            if for_weight and block.start == 0:
                product(g.T, features[block], dtype, out=dweight[start:stop].flatten(0, 1))
            elif for_weight:
                dweight[start:stop].flatten(0, 1).add_(product(g.T, features[block], dtype))
            del y, out, g  # free the memory before the next product
    return v, dweight.to(weight.dtype)


def _of_chunk(kept: Tensor, x: Tensor, weight: Tensor, start: int, stop: int) -> Tensor:
    """Return the view of a chunk (B, c·K) in the stored coordinates."""
    of_a_class = len(x) * weight.shape[1]
    return kept[start * of_a_class : stop * of_a_class].view(len(x), (stop - start) * weight.shape[1])


@_forward.register_fake
def _(
    x: Tensor, weight: Tensor, target: Tensor, dtype: torch.dtype, size: int, keep: int, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    batch, k = x.shape[0], weight.shape[1]
    kept = x.new_empty(batch * keep * k, dtype=dtype)
    return x.new_empty(batch, dtype=torch.float32), x.new_empty(2, batch, dtype=torch.float32), kept


@torch.library.custom_op("grassy::subspace_cross_entropy_backward", mutates_args=())
def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    rows: Tensor,
    kept: Tensor,
    size: int,
    keep: int,
    gamma: float,
    smoothing: float,
    ignore_index: int,
    normalize: bool,
    kernels: bool,
    for_x: bool,
    for_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight, given that of the losses (B,). Those not needed are empty."""
    pieces, terms = pieces_of(kernels), Terms(weight.shape[0], weight.shape[1], gamma, smoothing, ignore_index)
    dtype = kept.dtype
    grad, target, rows, kept = (tensor.contiguous() for tensor in (grad, target, rows, kept))
    dx = x.new_empty(0)
    with as_given(x):
        features, inverse = pieces.unit(x, dtype) if normalize else (x.to(dtype), None)
        v, dweight = pull_back_chunks(
            features, weight, target, terms, size, keep, pieces, rows, grad, kept, for_x, for_weight
        )
        if for_x:
            dx = x.new_empty(x.shape).copy_(v) if inverse is None else pieces.unit_grad(x, inverse, v)
    return dx, dweight


_backward.register_fake(fake_gradients)
_backward.register_autograd(no_second_derivative)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, target, _dtype, *ctx.options = inputs
    _, rows, kept = output
    ctx.save_for_backward(x, weight, target, rows, kept)
    ctx.mark_non_differentiable(rows, kept)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 9
    if grad is None:
        return None, None, *nothing
    for_x, for_weight = ctx.needs_input_grad[:2]
    dx, dweight = _backward(grad, *ctx.saved_tensors, *ctx.options, for_x, for_weight)
    return dx if for_x else None, dweight if for_weight else None, *nothing


_forward.register_autograd(_differentiate, setup_context=_setup)
