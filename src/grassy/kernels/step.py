"""The public functions of the step: checks, then the dispatcher, or one operator if torch.compile is looking."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grassy.kernels import dispatch, operators
from grassy.kernels.options import StepCounts, StepOptions


def geodesic_step(
    weight: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None,
    lr: float | Tensor,
    momentum: float | Tensor = 0.0,
    *,
    skip: Tensor | None = None,
    impl: str = "auto",
    **options: Any,
) -> StepCounts:
    """One Riemannian descent step (paper, Algorithm 1) of all classes of weight (C, K, N), in place.

    grad: the Euclidean gradient (C, K, N). momentum_buffer: the tangent momentum (C, K, N), updated in place, or None.
    options: the fields of `StepOptions`: retraction, transport, max_angle, maximize.
    skip: a tensor of one number, such as a GradScaler's `found_inf`; unless it is 0, nothing is changed.
    impl: "auto", or the name of an implementation, which then makes the step or raises; see `explain`.

    Classes whose gradient holds a NaN or an Inf keep weight and momentum, as all do if lr is not finite. On a GPU lr,
    momentum and skip are read there if they are tensors, so that a step can be part of a CUDA graph.
    """
    (counts,) = geodesic_steps([weight], [grad], [momentum_buffer], lr, momentum, skip=skip, impl=impl, **options)
    return counts


@torch.no_grad()
def geodesic_steps(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor | None],
    lr: float | Tensor,
    momentum: float | Tensor = 0.0,
    *,
    skip: Tensor | None = None,
    counts: Sequence[Tensor] | None = None,
    impl: str = "auto",
    **options: Any,
) -> list[StepCounts]:
    """`geodesic_step` of several weights (C_i, K_i, N_i). Those of one K and N that "cuda" takes are taken together.

    counts: two elements for each weight, int64 on its device, to which those of this step are added, and which are then
    returned: that saves the launches that would set new ones to 0 and add them up.
    """
    asked = StepOptions(**options)
    heads = list(zip(weights, grads, momentum_buffers, strict=True))
    for head in heads:
        _check_head(*head)
    if counts is None:
        counts = [torch.zeros(2, dtype=torch.int64, device=weight.device) for weight in weights]
    for weight, count in zip(weights, counts, strict=True):
        _check_counts(weight, count)
    take = operators.geodesic_steps if torch.compiler.is_compiling() else dispatch.geodesic_steps
    take(heads, lr, momentum, asked, counts, skip, impl)
    return [StepCounts(count[0], count[1]) for count in counts]


def _check_head(weight: Tensor, grad: Tensor, momentum_buffer: Tensor | None) -> None:
    if weight.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"subspaces are updated in float32 or float64, got {weight.dtype}: keep the weight in float32 and train "
            "with autocast"
        )
    if weight.ndim != 3 or grad.shape != weight.shape:
        raise ValueError(
            f"need weight and gradient of one shape (C, K, N), got {tuple(weight.shape)} and {tuple(grad.shape)}"
        )
    others = [tensor for tensor in (grad, momentum_buffer) if tensor is not None]
    if any(tensor.shape != weight.shape or tensor.device != weight.device for tensor in others):
        raise ValueError(
            f"need gradient and momentum of the weight's shape {tuple(weight.shape)} on {weight.device}, got "
            + " and ".join(f"{tuple(tensor.shape)} on {tensor.device}" for tensor in others)
        )


def _check_counts(weight: Tensor, count: Tensor) -> None:
    if count.shape != (2,) or count.dtype != torch.int64 or count.device != weight.device or count.stride() != (1,):
        raise ValueError(
            f"counts are two numbers, int64 on {weight.device}, for each weight, got {tuple(count.shape)}, "
            f"{count.dtype} on {count.device}"
        )
