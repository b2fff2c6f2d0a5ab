"""The public functions of the step: checks, then the dispatcher, or a custom operator under torch.compile."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grassy.kernels import dispatch
from grassy.kernels.dispatch import StepImpl
from grassy.kernels.step_options import StepCounts, StepOptions


def geodesic_step(
    weight: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None,
    lr: float | Tensor,
    momentum: float | Tensor = 0.0,
    *,
    skip: Tensor | None = None,
    impl: StepImpl = "auto",
    **options: Any,
) -> StepCounts:
    """Make one Riemannian descent step of all classes in place (paper, Algorithm 1).

    Classes whose gradient holds a NaN or an Inf keep their weight and momentum. If lr is not finite, all classes do.
    On a GPU, lr, momentum and skip may be tensors on the device, so that the step can be part of a CUDA graph.

    Args:
        weight: Subspaces (C, K, N), float32 or float64, updated in place.
        grad: Euclidean gradient (C, K, N).
        momentum_buffer: Tangent momentum (C, K, N), updated in place, or None.
        lr: Learning rate.
        momentum: Momentum factor.
        skip: A tensor with one element, such as `found_inf` of a GradScaler. If it is not 0, nothing changes.
        impl: "auto", or the name of an implementation, which then runs or raises. See `explain`.
        **options: Fields of `StepOptions`: retraction, transport, max_angle, maximize.

    Returns:
        The numbers of skipped and capped classes.

    Raises:
        TypeError: If the weight is neither float32 nor float64.
        ValueError: If shapes, devices or options are invalid.
        RuntimeError: If the named implementation cannot run.

    Examples:
        >>> import torch
        >>> from grassy import geometry, kernels
        >>> weight = geometry.random_subspace(10, 4, 64)
        >>> counts = kernels.geodesic_step(weight, torch.randn(10, 4, 64), None, lr=0.01)
        >>> int(counts.skipped)
        0
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
    impl: StepImpl = "auto",
    **options: Any,
) -> list[StepCounts]:
    """Make one step of several weights, as `geodesic_step` does. "cuda" steps weights with equal K and N in one launch.

    Args:
        weights: Subspaces (C_i, K_i, N_i), updated in place.
        grads: Euclidean gradients of the same shapes.
        momentum_buffers: Tangent momenta of the same shapes, updated in place, or None.
        lr: Learning rate.
        momentum: Momentum factor.
        skip: A tensor with one element. If it is not 0, nothing changes.
        counts: For each weight an int64 tensor (2,) on its device, to which the step adds its counts. Passing it saves
            the launches for new tensors.
        impl: "auto", or the name of an implementation.
        **options: Fields of `StepOptions`.

    Returns:
        The counts of each weight: those of this step, or the updated `counts`.

    Raises:
        TypeError: As `geodesic_step`.
        ValueError: As `geodesic_step`.
        RuntimeError: As `geodesic_step`.
    """
    heads = list(zip(weights, grads, momentum_buffers, strict=True))
    if counts is None:
        counts = [torch.zeros(2, dtype=torch.int64, device=weight.device) for weight in weights]
    add_steps(heads, lr, momentum, counts, skip, impl, **options)
    return [StepCounts(count[0], count[1]) for count in counts]


def add_steps(
    heads: Sequence[dispatch.Head],
    lr: float | Tensor,
    momentum: float | Tensor,
    counts: Sequence[Tensor],
    skip: Tensor | None = None,
    impl: str = "auto",
    **options: Any,
) -> None:
    """Make the steps of `geodesic_steps` and add to `counts`, for callers under `no_grad` who read no counts.

    Taking the counts apart would cost a tenth of the host time of a step.
    """
    compiling = torch.compiler.is_compiling()
    asked = StepOptions(**options) if compiling else _checked(**options)
    for head, count in zip(heads, counts, strict=True):
        _check_head(*head)
        _check_counts(head[0], count)
    take = _by_operator if compiling else dispatch.geodesic_steps
    take(heads, lr, momentum, asked, counts, skip, impl)


def _checked(**options: Any) -> StepOptions:
    """Options that are checked once, not in every step."""
    try:
        return _cached(**options)
    except TypeError:  # a value that cannot be hashed: the check names it
        return StepOptions(**options)


_cached = functools.lru_cache(StepOptions)


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
    device = weight.device
    if grad.device == device and (
        momentum_buffer is None or (momentum_buffer.shape == weight.shape and momentum_buffer.device == device)
    ):
        return
    others = [tensor for tensor in (grad, momentum_buffer) if tensor is not None]
    raise ValueError(
        f"need gradient and momentum of the weight's shape {tuple(weight.shape)} on {weight.device}, got "
        + " and ".join(f"{tuple(tensor.shape)} on {tensor.device}" for tensor in others)
    )


def _check_counts(weight: Tensor, count: Tensor) -> None:
    if count.shape != (2,) or count.dtype != torch.int64 or count.device != weight.device or count.stride() != (1,):
        raise ValueError(
            f"counts must be one int64 tensor (2,) on {weight.device} per weight, got {tuple(count.shape)}, "
            f"{count.dtype} on {count.device}"
        )


# --- under torch.compile, which does not trace into a custom operator --------------------------------------------


@torch.library.custom_op("grassy::geodesic_steps", mutates_args=("weights", "momentum_buffers", "counts"))
def _geodesic_steps(
    weights: list[Tensor],
    grads: list[Tensor],
    momentum_buffers: list[Tensor],
    counts: list[Tensor],
    lr: Tensor,
    momentum: Tensor,
    retraction: str,
    transport: str,
    max_angle: float | None,
    maximize: bool,
    skip: Tensor | None,
    impl: str,
) -> None:
    """Call the dispatcher. An operator takes plain values only, so the options are repeated here."""
    buffers: Sequence[Tensor | None] = momentum_buffers or [None] * len(weights)
    heads = list(zip(weights, grads, buffers, strict=True))
    options = StepOptions(retraction, transport, max_angle, maximize)  # type: ignore[arg-type]  # an operator has str
    dispatch.geodesic_steps(heads, lr, momentum, options, counts, skip, impl)


@_geodesic_steps.register_fake
def _(*_: Any) -> None:
    """Return nothing: the operator writes in place."""


def _by_operator(
    heads: Sequence[dispatch.Head],
    lr: float | Tensor,
    momentum: float | Tensor,
    options: StepOptions,
    counts: Sequence[Tensor],
    skip: Tensor | None,
    impl: str,
) -> None:
    """Make the steps by the custom operator: one call per device for heads with momentum, and one for those without."""
    asked = (options.retraction, options.transport, options.max_angle, options.maximize)
    alike: dict[Any, list[int]] = {}
    for i, (weight, _, buffer) in enumerate(heads):
        alike.setdefault((weight.device, buffer is None), []).append(i)
    for (device, _), chosen in alike.items():
        w, d = ([heads[i][part] for i in chosen] for part in range(2))
        m = [heads[i][2] for i in chosen if heads[i][2] is not None]
        # A Python number would be compiled in, and every new learning rate would recompile.
        facts = {"dtype": torch.float32 if device.type == "mps" else torch.float64, "device": device}
        rates = (x if isinstance(x, Tensor) else torch.full((), x, **facts) for x in (lr, momentum))
        _geodesic_steps(w, d, m, [counts[i] for i in chosen], *rates, *asked, skip, impl)
