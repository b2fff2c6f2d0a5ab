"""The hot paths and the one place that chooses their implementation.

`impl="auto"` takes the fastest implementation that fits the tensors; naming one asks for that one or an error.
"""

import functools
import importlib
import importlib.util
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from grassy.kernels import cross_entropy as fused_loss
from grassy.kernels import logits as fused_logits
from grassy.kernels import operators as step_operator
from grassy.kernels.cpu import step as native
from grassy.kernels.reference import autocasts, unit
from grassy.kernels.reference import subspace_logits as reference_logits
from grassy.precision import exact_products
from grassy.spelling import nearest

RETRACTIONS = ("geodesic", "qf")
TRANSPORTS = ("projection", "parallel")

#: In which file each implementation is; loaded when it is first used.
_IMPLEMENTATIONS = {
    "reference": "reference",
    "native": "cpu.step",
    "triton": "triton.register_step",
    "cuda": "cuda.step",
}
#: Up to this K the kernel in Triton comes before the one in CUDA C++, unless there are several heads of at most so many
#: numbers: then launches are what takes time.
SMALL_K, SMALL_HEAD = 2, 2**16
#: Found out once: torch.compile cannot look for modules.
_TRITON = importlib.util.find_spec("triton") is not None


class StepCounts(NamedTuple):
    """How many classes a step left alone, their gradient not being finite, and how many it turned less than asked.

    A gradient so large that its square overflows counts as not finite.
    """

    skipped: Tensor
    capped: Tensor


def choose(impl: str, weight: Tensor) -> str:
    """The name of the implementation of the step that `impl` stands for, for such a weight; `explain` says why."""
    if impl == "auto":
        # One after the other: a kernel that is not needed would be compiled to be asked about.
        return next(name for name in _order(weight) if _why_not(name, weight) is None)
    if impl not in _IMPLEMENTATIONS:
        raise ValueError(f"impl must be 'auto' or one of {sorted(_IMPLEMENTATIONS)}, got {impl!r}")
    if reason := _impossible(impl, weight):
        raise RuntimeError(f"impl={impl!r} cannot be used here: {reason}")
    return impl


def explain(weight: Tensor) -> dict[str, str | None]:
    """The implementations of the step in the order of preference for such a weight, each with why it is not taken.

    The first without a reason is the one that `impl="auto"` takes for a weight by itself. Several that are alike are
    taken by "cuda" together, if it can.
    """
    return {name: _why_not(name, weight) for name in _order(weight)}


def explain_logits(x: Tensor, weight: Tensor, gamma: float | Tensor = 25.0) -> dict[str, str | None]:
    """As `explain`, of the implementations of `subspace_logits` and `subspace_cross_entropy` for such tensors."""
    if _by_kernels("auto", weight):
        reason = fused_logits.unfit(x, weight, gamma)
    elif weight.device.type != "cuda":
        reason = "the weight is not on a GPU"
    else:
        reason = _impossible("triton", weight) or "the model is being exported"
    return {"triton": reason, "reference": None}


def _order(weight: Tensor) -> list[str]:
    if weight.device.type != "cuda":
        return ["native", "reference"]
    # Small classes fit into the registers of a few warps, where Triton's plain code is faster than tensor cores are.
    small = weight.shape[-2] <= SMALL_K and _TRITON and _load("triton").fits(weight)
    return ["triton", "cuda", "reference"] if small else ["cuda", "triton", "reference"]


def _why_not(name: str, weight: Tensor) -> str | None:
    return _impossible(name, weight) or _unfit(name, weight)


def _impossible(impl: str, weight: Tensor) -> str | None:
    """Why an implementation cannot run at all."""
    if impl == "cuda":
        return _load("cuda").unavailable(weight)
    if impl == "triton" and not _TRITON:
        return "triton is not installed (it comes with torch for GPUs)"
    if impl == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        if weight.device.type != "cuda":
            return "it needs a GPU, or TRITON_INTERPRET=1 in the environment from the start"
        return _triton_failure(weight.device)
    return None


def _triton_failure(device: torch.device) -> str | None:
    """Why no kernel in Triton can be launched on a GPU: it needs a C compiler, for one, and the headers of Python."""
    if torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return None  # nothing can be tried out here; by now kernels have run, as a rule
    try:
        return _failure_of_a_launch(device)
    except torch.OutOfMemoryError:
        return None  # which says nothing about Triton


@functools.cache
def _failure_of_a_launch(device: torch.device) -> str | None:
    try:
        with _disable_current_modes():  # fake tensors cannot be launched on
            _load("triton.head").unit(torch.ones(1, 1, device=device), torch.float32)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"Triton fails: {' '.join(str(error).split())[:200]}"
    return None


def _unfit(impl: str, weight: Tensor) -> str | None:
    """Why an implementation that could run would only hand such a weight to the reference, or be no faster."""
    if impl == "triton" and not (_load("triton").fits(weight) or _load("triton.step").fits(weight)):
        return (
            "it takes contiguous float32 weights of up to 64 rows a class, more than 8, or than fit into registers, on "
            "NVIDIA GPUs from Ampere on, and more than 32 with 192 KiB of shared memory"
        )
    if impl == "native" and not native.worth_it(weight):
        return (
            native.unavailable() if native.large_enough(weight) else "it pays for float32 weights of a million numbers"
        )
    return None


def _load(name: str) -> ModuleType:
    return importlib.import_module(f"grassy.kernels.{_IMPLEMENTATIONS.get(name, name)}")


def check_step_options(retraction: str, transport: str, max_angle: float | None = None) -> None:
    """Raise a ValueError that lists what is allowed."""
    if retraction not in RETRACTIONS:
        raise ValueError(
            f"retraction must be one of {RETRACTIONS}, got {retraction!r}{nearest(retraction, RETRACTIONS)}"
        )
    if transport not in TRANSPORTS:
        raise ValueError(f"transport must be one of {TRANSPORTS}, got {transport!r}{nearest(transport, TRANSPORTS)}")
    if retraction == "qf" and transport == "parallel":
        raise ValueError("transport='parallel' follows a geodesic; with retraction='qf' use transport='projection'")
    if max_angle is not None and not max_angle > 0:
        raise ValueError(f"max_angle must be None or positive, in radians, got {max_angle!r}")


def subspace_logits(
    x: Tensor, weight: Tensor, gamma: float | Tensor = 25.0, *, normalize: bool = True, impl: str = "auto"
) -> Tensor:
    """Length of the projection of each feature (..., N) onto each subspace of weight (C, K, N): logits (..., C).

    Features are first scaled to length gamma; with ``normalize=False`` they are multiplied by gamma as they are.

    On a GPU by kernels, which keep the coordinates of all classes in half precision under autocast, and which have no
    second derivative. Of a gamma that is a tensor they take the absolute value. float16 and float64 are left to plain
    torch.
    """
    if _by_kernels(impl, weight) and fused_logits.fits(x, weight, gamma):
        return fused_logits.subspace_logits(x, weight, gamma, normalize)
    return reference_logits(x, weight, gamma, normalize)


def subspace_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    gamma: float | Tensor = 25.0,
    label_smoothing: float = 0.0,
    *,
    normalize: bool = True,
    reduction: str = "mean",
    ignore_index: int = -100,
    impl: str = "auto",
) -> Tensor:
    """Softmax cross-entropy of `subspace_logits(x, weight, gamma)` without ever having them: for very many classes.

    target: class indices (...) of features (..., N), or probabilities (..., C). The other options are those of
    `torch.nn.functional.cross_entropy`. A label that is no class makes the loss NaN.

    The coordinates W_c x̂, of size B x C x K, are kept for the backward if they are few; otherwise those of the first
    classes are, and the others are computed again there, a chunk of classes at a time. There is no second derivative,
    and of a gamma that is a tensor the absolute value counts.
    float16, float64 and a target that wants a gradient are left to plain torch, which keeps them all.
    """
    kernels = _by_kernels(impl, weight)
    return fused_loss.subspace_cross_entropy(
        x, weight, target, gamma, label_smoothing, normalize, reduction, ignore_index, kernels
    )


def _by_kernels(impl: str, weight: Tensor) -> bool:
    """Whether `impl` stands for the kernels of the head, for such a weight."""
    if impl == "auto":  # an export must not depend on an operator that others do not know
        usable = weight.device.type == "cuda" and _TRITON and not torch.compiler.is_exporting()
        return usable and _triton_failure(weight.device) is None
    return choose(impl, weight) == "triton"


def geodesic_step(
    weight: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None,
    lr: float | Tensor,
    momentum: float | Tensor = 0.0,
    *,
    retraction: str = "geodesic",
    transport: str = "projection",
    max_angle: float | None = None,
    maximize: bool = False,
    skip: Tensor | None = None,
    impl: str = "auto",
) -> StepCounts:
    """One Riemannian descent step (paper, Algorithm 1) of all classes of weight (C, K, N), in place.

    grad is the Euclidean gradient; momentum_buffer, the tangent momentum, is updated in place, or None for none.
    Classes whose gradient holds a NaN or an Inf keep weight and momentum, as all do if lr is not finite. No class turns
    by more than `max_angle` radians if that is given. If `skip`, a tensor of one number such as a GradScaler's
    `found_inf`, is not 0, nothing is changed. On a GPU it is read there, as are lr and momentum if they are tensors, so
    that a step can be part of a CUDA graph.
    """
    (counts,) = geodesic_steps(
        [weight],
        [grad],
        [momentum_buffer],
        lr,
        momentum,
        retraction=retraction,
        transport=transport,
        max_angle=max_angle,
        maximize=maximize,
        skip=skip,
        impl=impl,
    )
    return counts


@torch.no_grad()
def geodesic_steps(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor | None],
    lr: float | Tensor,
    momentum: float | Tensor = 0.0,
    *,
    retraction: str = "geodesic",
    transport: str = "projection",
    max_angle: float | None = None,
    maximize: bool = False,
    skip: Tensor | None = None,
    counts: Sequence[Tensor] | None = None,
    impl: str = "auto",
) -> list[StepCounts]:
    """`geodesic_step` of several weights (C_i, K_i, N_i). Those of one K and N that "cuda" takes are taken together.

    counts: for each weight two numbers, int64 on its device, to which those of this step are added, and which are then
    returned: that saves the launches that would set new ones to 0 and add them up.
    """
    check_step_options(retraction, transport, max_angle)
    heads = list(zip(weights, grads, momentum_buffers, strict=True))
    for head in heads:
        _check_step(*head)
    for weight, count in zip(weights, counts or [], strict=counts is not None):
        if count.shape != (2,) or count.dtype != torch.int64 or count.device != weight.device or count.stride() != (1,):
            raise ValueError(
                f"counts are two numbers, int64 on {weight.device}, for each weight, got {tuple(count.shape)}, "
                f"{count.dtype} on {count.device}"
            )
    options: dict[str, Any] = {"retraction": retraction, "transport": transport}
    options |= {"max_angle": max_angle, "maximize": maximize}
    if torch.compiler.is_compiling():
        counts = counts or [_no_counts(weight) for weight in weights]
        options |= {"skip": skip, "impl": impl}
        step_operator.geodesic_steps(weights, grads, momentum_buffers, counts, lr, momentum, **options)
        return [StepCounts(*each) for each in counts]
    found: dict[int, StepCounts] = {}
    for together in _launches(heads, impl, retraction):
        weight = weights[together[0]]
        rates = (_for_device(lr, weight), _for_device(momentum, weight))
        by_host = skip is not None and "cpu" in (skip.device.type, weight.device.type)
        if skip is not None and by_host and bool(skip != 0):
            found |= {i: StepCounts(*(counts[i] if counts else _no_counts(weights[i]))) for i in together}
            continue
        options["skip"] = None if skip is None or by_host else skip.to(weight.device, non_blocking=True)
        with exact_products(weight):
            name = "cuda" if len(together) > 1 else choose(impl, weight)
            totals = None if counts is None else [counts[i] for i in together]
            if name == "cuda":
                columns = [[heads[i][part] for i in together] for part in range(3)]
                now = _load("cuda").geodesic_steps(*columns, *rates, counts=totals, **options)
            elif name == "triton":
                own = None if totals is None else totals[0]
                now = [_load("triton").geodesic_step(*heads[together[0]], *rates, counts=own, **options)]
            else:
                now = [_load(name).geodesic_step(*heads[together[0]], *rates, **options)]
                if totals is not None:
                    now = [totals[0].add_(torch.stack(now[0]))]
        found |= {i: StepCounts(*each) for i, each in zip(together, now, strict=True)}
    return [found[i] for i in range(len(heads))]


def _no_counts(weight: Tensor) -> Tensor:
    return torch.zeros(2, dtype=torch.int64, device=weight.device)


def _check_step(weight: Tensor, grad: Tensor, momentum_buffer: Tensor | None) -> None:
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


def _for_device(value: float | Tensor, weight: Tensor) -> float | Tensor:
    """A float, or a tensor where the weight is: a kernel cannot read one on the host, and copying it would wait."""
    keep = isinstance(value, Tensor) and (value.device.type != "cpu" or weight.device.type == "cpu")
    return value if keep else float(value)


Head = tuple[Tensor, Tensor, Tensor | None]  # weight, gradient, momentum


def _launches(heads: Sequence[Head], impl: str, retraction: str) -> list[list[int]]:
    """The numbers of the heads whose steps are made together: alike, and taken by the kernel in CUDA C++."""
    alike: dict[Any, list[int]] = {}
    seen: dict[int, int] = {}  # one weight that is given twice makes two steps, one after the other
    for i, head in enumerate(heads):
        seen[id(head[0])] = times = seen.get(id(head[0]), 0) + 1
        tensors = [tensor for tensor in head if tensor is not None]
        kinds = [(tensor.dtype, tensor.device, tensor.is_contiguous()) for tensor in tensors]
        alike.setdefault((times, head[0].shape[1:], *kinds), []).append(i)
    launches = []
    for numbers in alike.values():
        first = next((heads[i][0] for i in numbers if heads[i][0].numel()), heads[numbers[0]][0])
        one_by_one = len(numbers) == 1 or impl not in ("auto", "cuda") or retraction != "geodesic"
        if impl == "auto" and first.shape[-2] <= SMALL_K:
            one_by_one = one_by_one or max(heads[i][0].numel() for i in numbers) > SMALL_HEAD
        if one_by_one or _impossible("cuda", first):
            launches += [[i] for i in numbers]
        else:
            most = _load("cuda").HEADS
            launches += [numbers[at : at + most] for at in range(0, len(numbers), most)]
    return launches


__all__ = [
    "RETRACTIONS",
    "TRANSPORTS",
    "StepCounts",
    "autocasts",
    "check_step_options",
    "choose",
    "explain",
    "explain_logits",
    "geodesic_step",
    "geodesic_steps",
    "subspace_cross_entropy",
    "subspace_logits",
    "unit",
]
