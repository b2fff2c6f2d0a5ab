"""The one place that chooses an implementation, for the step and for the head.

Every implementation has a function `supports`, which returns None or the reason why it cannot run. `"auto"` takes the
first supported implementation in order of preference. A named implementation either runs or raises. Under "auto" there
is one exception: plain torch makes a step whose kernel is not compiled yet while a CUDA graph is captured.
"""

import math
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from grassy.kernels import cross_entropy, fused_logits, reference, triton
from grassy.kernels.cpu import step as native
from grassy.kernels.cuda import step as cuda
from grassy.kernels.step_options import NotCompiledYet, StepOptions
from grassy.precision import exact_products

#: What `impl` may be: the names of the implementations, or "auto".
StepImpl = Literal["auto", "cuda", "triton", "native", "reference"]
LogitsImpl = Literal["auto", "triton", "reference"]
LossImpl = Literal["auto", "triton", "chunks", "reference"]
#: The implementations of the logits, in order of preference.
LOGITS = get_args(LogitsImpl)[1:]

Head = tuple[Tensor, Tensor, Tensor | None]  # weight, gradient and momentum, (C, K, N) each
DEFAULTS = StepOptions()


# --- the step -----------------------------------------------------------------------------------------------------


def explain(
    weight: Tensor, grad: Tensor | None = None, momentum_buffer: Tensor | None = None, **options: object
) -> dict[str, str | None]:
    """Explain which implementation of the step `impl="auto"` chooses.

    Args:
        weight: Subspaces (C, K, N).
        grad: Gradient (C, K, N). None assumes the dtype and layout of the weight.
        momentum_buffer: Momentum (C, K, N), or None.
        **options: Fields of `StepOptions`.

    Returns:
        The implementations in order of preference, each with the reason why it cannot run, or None. "auto" chooses the
        first without a reason.

    Raises:
        ValueError: If an option is invalid.

    Examples:
        >>> import torch, grassy
        >>> grassy.kernels.explain(torch.randn(10, 4, 64))["native"]
        'it pays off for weights with at least 1,048,576 elements'
    """
    asked = StepOptions(**options)  # type: ignore[arg-type]
    return {name: _why_not(name, weight, grad, momentum_buffer, asked) for name in _order(weight)}


def choose(
    impl: str,
    weight: Tensor,
    grad: Tensor | None = None,
    momentum_buffer: Tensor | None = None,
    options: StepOptions = DEFAULTS,
) -> str:
    """Return the name of the implementation of the step that `impl` selects for these tensors.

    Args:
        impl: "auto", "cuda", "triton", "native" or "reference".
        weight: Subspaces (C, K, N).
        grad: Gradient (C, K, N). None assumes the dtype and layout of the weight.
        momentum_buffer: Momentum (C, K, N), or None.
        options: Options of the step.

    Raises:
        ValueError: If `impl` is unknown.
        RuntimeError: If the named implementation cannot run. The message gives the reason.
    """
    if impl == "auto":
        # Lazily: asking an implementation may compile its kernel.
        return next(n for n in _order(weight) if _why_not(n, weight, grad, momentum_buffer, options) is None)
    _check_name(impl, StepImpl)
    if reason := _unsupported(impl, weight, grad, momentum_buffer, options):
        raise RuntimeError(f"impl={impl!r} cannot be used here: {reason}")
    return impl


def geodesic_steps(
    heads: Sequence[Head],
    lr: float | Tensor,
    momentum: float | Tensor,
    options: StepOptions,
    counts: Sequence[Tensor],
    skip: Tensor | None,
    impl: str,
) -> None:
    """Make one step of each head in place with the implementation that `impl` selects, and update `counts`.

    "cuda" steps heads with equal K and N in one launch.
    """
    for name, numbers in _launches(heads, options, impl):
        weight = heads[numbers[0]][0]
        by_host = skip is not None and "cpu" in (skip.device.type, weight.device.type)
        if skip is not None and by_host and bool(skip != 0):
            continue
        flag = None if skip is None or by_host else skip.to(weight.device, non_blocking=True)
        rates = _for_device(lr, "lr", weight), _for_device(momentum, "momentum", weight)
        if name == "cuda":  # its matmuls do not depend on torch's settings
            weights, grads, buffers = ([heads[i][part] for i in numbers] for part in range(3))
            totals = [counts[i] for i in numbers]
            cuda.geodesic_steps(weights, grads, buffers, *rates, options, totals, flag)  # type: ignore[arg-type]
            continue
        with exact_products(weight):
            (number,) = numbers
            try:
                _module(name).geodesic_step(*heads[number], *rates, options, counts[number], flag)
            except NotCompiledYet as error:
                if impl != "auto":
                    raise
                warnings.warn(f"{error}; using plain torch instead", stacklevel=2)
                reference.geodesic_step(*heads[number], *rates, options, counts[number], flag)


def _order(weight: Tensor) -> tuple[str, ...]:
    return ("cuda", "triton", "reference") if weight.device.type == "cuda" else ("native", "reference")


def _why_not(
    name: str, weight: Tensor, grad: Tensor | None, momentum_buffer: Tensor | None, options: StepOptions
) -> str | None:
    if name == "native" and weight.numel() < native.WORTH_COMPILING_FOR:
        return f"it pays off for weights with at least {native.WORTH_COMPILING_FOR:,} elements"
    return _unsupported(name, weight, grad, momentum_buffer, options)


def _unsupported(
    name: str, weight: Tensor, grad: Tensor | None, momentum_buffer: Tensor | None, options: StepOptions
) -> str | None:
    if name == "triton" and (missing := triton.unavailable(weight.device)):
        return missing
    reason: str | None = _module(name).supports(weight, weight if grad is None else grad, momentum_buffer, options)
    return reason


def _module(name: str) -> ModuleType:
    if name == "triton":
        from grassy.kernels.triton import step  # imports triton, which is optional

        return step
    return {"cuda": cuda, "native": native, "reference": reference}[name]


def _launches(heads: Sequence[Head], options: StepOptions, impl: str) -> list[tuple[str, list[int]]]:
    """Return pairs of an implementation and the indices of the heads that it steps in one launch.

    A weight without elements, as of a process without classes, needs no step.
    """
    if impl != "auto":
        _check_name(impl, StepImpl)
    if len(heads) == 1:
        return [(choose(impl, *heads[0], options), [0])] if heads[0][0].numel() else []
    alike: dict[object, list[int]] = {}
    seen: dict[int, int] = {}  # a weight that is given twice makes two steps in order
    for i, head in enumerate(heads):
        seen[id(head[0])] = times = seen.get(id(head[0]), 0) + 1
        kinds = [None if t is None else (t.dtype, t.device, t.is_contiguous()) for t in head]
        if head[0].numel():
            alike.setdefault((times, head[0].shape[1:], *kinds), []).append(i)
    launches: list[tuple[str, list[int]]] = []
    for numbers in alike.values():
        name = choose(impl, *heads[numbers[0]], options)
        if name == "cuda":
            launches += [(name, numbers[at : at + cuda.HEADS]) for at in range(0, len(numbers), cuda.HEADS)]
        else:
            launches += [(choose(impl, *heads[i], options), [i]) for i in numbers]
    return launches


def _for_device(value: float | Tensor, name: str, weight: Tensor) -> float | Tensor:
    """Return a float, or a 0-dimensional tensor on the device of the weight, which a kernel can read without a copy.

    A value beyond the range of the weight's dtype becomes infinite. A learning rate that is not finite moves nothing.
    """
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{name} must be one number, got a tensor of shape {tuple(value.shape)}")
    if isinstance(value, Tensor) and value.device.type != "cpu" and weight.device.type != "cpu":
        return value.detach().reshape(()).to(weight.device, non_blocking=True)
    number = float(value)
    return number if abs(number) <= torch.finfo(weight.dtype).max else math.copysign(math.inf, number)


# --- the head -----------------------------------------------------------------------------------------------------


def explain_logits(x: Tensor, weight: Tensor, gamma: float | Tensor = 25.0) -> dict[str, str | None]:
    """Explain which implementation of `subspace_logits` `impl="auto"` chooses.

    Args:
        x: Features (..., N).
        weight: Subspaces (C, K, N).
        gamma: Scale of the logits.

    Returns:
        The implementations in order of preference, each with the reason why it cannot run, or None.
    """
    return {name: _why_not_logits(name, x, weight, gamma) for name in LOGITS}


def choose_logits(impl: str, x: Tensor, weight: Tensor, gamma: float | Tensor) -> str:
    """Return the name of the implementation of `subspace_logits` that `impl` selects for these tensors."""
    if impl == "auto":
        return next(name for name in LOGITS if _why_not_logits(name, x, weight, gamma) is None)
    _check_name(impl, LogitsImpl)
    if reason := _no_fused_logits(x, weight, gamma) if impl == "triton" else None:
        raise RuntimeError(f"impl={impl!r} cannot be used here: {reason}")
    return impl


def choose_loss(impl: str, x: Tensor, weight: Tensor, target: Tensor, gamma: float | Tensor) -> str:
    """Return the name of the implementation of `subspace_cross_entropy` that `impl` selects for these tensors."""
    unsupported = cross_entropy.supports(x, weight, target, gamma)
    if impl == "auto":
        if unsupported is not None:
            return "reference"
        return "triton" if _why_not_logits("triton", x, weight, gamma) is None else "chunks"
    _check_name(impl, LossImpl)
    reason = None if impl == "reference" else unsupported
    if reason is None and impl == "triton":
        reason = _no_fused_logits(x, weight, gamma)
    if reason:
        raise RuntimeError(f"impl={impl!r} cannot be used here: {reason}")
    return impl


def _why_not_logits(name: str, x: Tensor, weight: Tensor, gamma: float | Tensor) -> str | None:
    if name == "reference":
        return None
    if weight.device.type != "cuda":
        return "the weight is not on a GPU"
    if torch.compiler.is_exporting():  # other runtimes do not know our operator
        return "the model is being exported"
    return _no_fused_logits(x, weight, gamma)


def _no_fused_logits(x: Tensor, weight: Tensor, gamma: float | Tensor) -> str | None:
    return triton.unavailable(weight.device) or fused_logits.supports(x, weight, gamma)


def _check_name(impl: str, known: Any) -> None:
    auto, *names = get_args(known)
    if impl not in (auto, *names):
        raise ValueError(f"impl must be 'auto' or one of {sorted(names)}, got {impl!r}")
