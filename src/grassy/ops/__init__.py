"""The hot paths and the one place that chooses their implementation.

`impl="auto"` takes the fastest implementation that fits the tensors; naming one asks for that one or an error.
"""

import functools
import importlib
import importlib.util
import os
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from grassy import geometry
from grassy.ops import native
from grassy.ops.reference import autocasts, unit
from grassy.ops.reference import subspace_logits as reference_logits

RETRACTIONS = ("geodesic", "qf")
TRANSPORTS = ("projection", "parallel")

#: In which file each implementation is; loaded when it is first used.
_IMPLEMENTATIONS = {"reference": "reference", "native": "native", "triton": "triton_step"}


class StepCounts(NamedTuple):
    """How many classes a step left alone, their gradient not being finite, and how many it turned less than asked.

    A gradient so large that its square overflows counts as not finite.
    """

    skipped: Tensor
    capped: Tensor


def choose(impl: str, weight: Tensor) -> str:
    """The name of the implementation of the step that `impl` stands for, for such a weight."""
    if impl == "auto":
        if weight.device.type == "cuda" and _triton_is_here() and _load("triton").fits(weight):
            return "triton"
        return "native" if native.worth_it(weight) else "reference"
    if impl not in _IMPLEMENTATIONS:
        raise ValueError(f"impl must be 'auto' or one of {sorted(_IMPLEMENTATIONS)}, got {impl!r}")
    if impl == "triton" and not _triton_is_here():
        raise RuntimeError("impl='triton' cannot be used here: triton is not installed (it comes with torch for GPUs)")
    if impl == "triton" and weight.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("impl='triton' needs a GPU, or TRITON_INTERPRET=1 in the environment from the start")
    return impl


def _load(name: str) -> ModuleType:
    return importlib.import_module(f"grassy.ops.{_IMPLEMENTATIONS[name]}")


@functools.cache
def _triton_is_here() -> bool:
    return importlib.util.find_spec("triton") is not None


def check_step_options(retraction: str, transport: str) -> None:
    """Raise a ValueError that lists what is allowed."""
    if retraction not in RETRACTIONS:
        raise ValueError(f"retraction must be one of {RETRACTIONS}, got {retraction!r}")
    if transport not in TRANSPORTS:
        raise ValueError(f"transport must be one of {TRANSPORTS}, got {transport!r}")
    if retraction == "qf" and transport == "parallel":
        raise ValueError("transport='parallel' follows a geodesic; with retraction='qf' use transport='projection'")


def subspace_logits(
    x: Tensor, weight: Tensor, gamma: float | Tensor = 25.0, *, normalize: bool = True, impl: str = "auto"
) -> Tensor:
    """Length of the projection of each feature (..., N) onto each subspace of weight (C, K, N): logits (..., C).

    Features are first scaled to length gamma; with ``normalize=False`` they are multiplied by gamma as they are.
    """
    if impl != "auto":  # there is one implementation so far, under all names
        choose(impl, weight)
    return reference_logits(x, weight, gamma, normalize)


@torch.no_grad()
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
    impl: str = "auto",
) -> StepCounts:
    """One Riemannian descent step (paper, Algorithm 1) of all classes of weight (C, K, N), in place.

    grad is the Euclidean gradient; momentum_buffer, the tangent momentum, is updated in place, or None for none.
    Classes whose gradient holds a NaN or an Inf keep weight and momentum. No class turns by more than `max_angle`
    radians if that is given.
    """
    check_step_options(retraction, transport)
    if weight.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"subspaces are updated in float32 or float64, got {weight.dtype}: keep the weight in float32 and train "
            "with autocast"
        )
    if weight.ndim != 3 or grad.shape != weight.shape:
        raise ValueError(
            f"need weight and gradient of one shape (C, K, N), got {tuple(weight.shape)} and {tuple(grad.shape)}"
        )
    with geometry.without_autocast(weight):
        counts = _load(choose(impl, weight)).geodesic_step(
            weight,
            grad,
            momentum_buffer,
            lr,
            momentum,
            retraction=retraction,
            transport=transport,
            max_angle=max_angle,
            maximize=maximize,
        )
    return StepCounts(*counts)


__all__ = [
    "RETRACTIONS",
    "TRANSPORTS",
    "StepCounts",
    "autocasts",
    "check_step_options",
    "choose",
    "geodesic_step",
    "subspace_logits",
    "unit",
]
