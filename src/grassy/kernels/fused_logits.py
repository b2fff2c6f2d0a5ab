"""`reference.subspace_logits` by kernels, as a custom operator that torch.compile does not trace into.

Forward and backward have three large matmuls, in half precision under autocast. The B x C x K coordinates W_c x̂ of all
classes are written once in that precision and never in float32. Shapes: B batch, C classes, K subspace dimension,
N feature dimension.

Forward: y_c = W_c x̂, l_c = γ‖y_c‖. Backward, with g = ∂L/∂l: w_c = γ g_c y_c/‖y_c‖, ∂L/∂W_c = Σ_b w_bc x̂_bᵀ and
∂L/∂x = (v − x̂(x̂·v))/‖x‖ with v = Σ_c W_cᵀ w_c. Recomputing x̂ is cheaper than storing it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from grassy.kernels.reference import autocasts
from grassy.kernels.reference import unit as exact_unit
from grassy.precision import without_autocast

#: Dtypes that the kernels support. Plain torch handles all others.
DTYPES = (torch.float32, torch.bfloat16)


def subspace_logits(x: Tensor, weight: Tensor, gamma: float | Tensor, normalize: bool) -> Tensor:
    """Compute `reference.subspace_logits` by kernels, for tensors that `supports` accepts. No second derivatives."""
    x, gamma, normalize = absorbed(x, gamma, normalize)
    rows = x.reshape(-1, x.shape[-1])
    logits, _ = _forward(rows, weight, product_dtype(x, weight), wants_grad(x, weight), gamma, normalize)
    return logits.reshape(*x.shape[:-1], weight.shape[0])


def absorbed(x: Tensor, gamma: float | Tensor, normalize: bool) -> tuple[Tensor, float, bool]:
    """Multiply a gamma that is a tensor into the features, since the operators take a float. Its sign is lost.

    Returns features, gamma and whether the operator still has to normalise.
    """
    if not isinstance(gamma, Tensor):
        return x, float(gamma), normalize
    return gamma.reshape(()) * (exact_unit(x) if normalize else x.float()), 1.0, False


def supports(x: Tensor, weight: Tensor, gamma: float | Tensor) -> str | None:
    """Return why the operators do not support these tensors, or None if they do."""
    if isinstance(gamma, Tensor) and gamma.numel() != 1:
        return "gamma is a tensor with several elements"
    if torch.autograd.forward_ad._current_level >= 0:
        return "the operators have no derivatives in forward mode"
    plain = type(x) in (Tensor, nn.Parameter) and type(weight) in (Tensor, nn.Parameter)
    if not plain or torch._C._are_functorch_transforms_active():
        return "the operators support neither subclasses of Tensor nor the transforms of torch.func"
    if not {x.dtype, weight.dtype, product_dtype(x, weight)} <= set(DTYPES):
        return "it supports float32 and bfloat16"
    if weight.ndim != 3 or not x.ndim or not x.shape[-1] == weight.shape[-1] > 0 or x.device != weight.device:
        return "features (..., N) and weight (C, K, N) have incompatible shapes or are on different devices"
    return None


def product_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype of the matmul of features and weight: that of autocast, or of the weight.

    Args:
        x: Features.
        weight: Weight of the head.
    """
    return torch.get_autocast_dtype(x.device.type) if autocasts(x) else weight.dtype


def wants_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


@contextmanager
def as_given(x: Tensor) -> Iterator[None]:
    """Context manager inside an operator: autocast off, and kernels launched on the GPU of x."""
    with without_autocast(x), torch.cuda.device_of(x):
        yield


def product(a: Tensor, b: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Return A B in `dtype`. On a GPU it comes directly from the float32 accumulator."""
    if a.dtype == dtype:
        return torch.mm(a, b, out=out)
    if a.is_cuda and dtype == torch.float32:
        return torch.mm(a, b, out_dtype=dtype, out=out)
    result = torch.mm(a, b).to(dtype)
    return result if out is None else out.copy_(result)


@torch.library.custom_op("grassy::subspace_logits", mutates_args=())
def _forward(
    x: Tensor, weight: Tensor, dtype: torch.dtype, keep: bool, gamma: float, normalize: bool
) -> tuple[Tensor, Tensor]:
    """Return the logits (B, C) of x (B, N), and the coordinates (B, C·K) if `keep` is set for the backward."""
    from grassy.kernels.triton import head as triton_head

    with as_given(x):
        unit = triton_head.unit(x, dtype)[0] if normalize else x.to(dtype)
        y = torch.mm(unit, weight.flatten(0, 1).to(dtype).T)
        return triton_head.lengths(y, weight.shape[1], gamma), y if keep else y.new_empty(0)


@_forward.register_fake
def _(x: Tensor, weight: Tensor, dtype: torch.dtype, keep: bool, *_: Any) -> tuple[Tensor, Tensor]:
    batch, (classes, k, _n) = x.shape[0], weight.shape
    kept = x.new_empty(batch, classes * k, dtype=dtype) if keep else x.new_empty(0, dtype=dtype)
    return x.new_empty(batch, classes, dtype=torch.float32), kept


@torch.library.custom_op("grassy::subspace_logits_backward", mutates_args=())
def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, y: Tensor, gamma: float, normalize: bool, for_x: bool, for_weight: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight, given that of the logits. Those not needed are empty."""
    from grassy.kernels.triton import head as triton_head

    dx, dweight = x.new_empty(0), weight.new_empty(0)
    with as_given(x):
        unit, inverse = triton_head.unit(x, y.dtype) if normalize else (x.to(y.dtype), None)
        g = triton_head.lengths_grad(y.contiguous(), grad, weight.shape[1], gamma)
        if for_x:
            v = product(g, weight.flatten(0, 1).to(y.dtype), torch.float32)
            dx = x.new_empty(x.shape).copy_(v) if inverse is None else triton_head.unit_grad(x, inverse, v)
        if for_weight:
            dweight = weight.new_empty(weight.shape)
            product(g.T, unit, weight.dtype, out=dweight.view(-1, weight.shape[-1]))
    return dx, dweight


def no_second_derivative(*_: Any) -> None:
    raise RuntimeError(
        "the fused head has no second derivative: use grassy.kernels.subspace_logits(..., impl='reference')"
    )


_backward.register_autograd(no_second_derivative)


@_backward.register_fake
def fake_gradients(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    for_x, for_weight = rest[-2:]
    return x.new_empty(x.shape if for_x else 0), weight.new_empty(weight.shape if for_weight else 0)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _dtype, _keep, *ctx.options = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _y: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 6
    for_x, for_weight = ctx.needs_input_grad[:2]
    dx, dweight = _backward(grad, *ctx.saved_tensors, *ctx.options, for_x, for_weight)
    return dx if for_x else None, dweight if for_weight else None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup)
