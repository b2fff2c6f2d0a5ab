"""The step as an operator: torch.compile calls it as it is, and does not look into it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


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
    from grassy import kernels

    kernels.geodesic_steps(
        weights,
        grads,
        momentum_buffers or [None] * len(weights),
        lr,
        momentum,
        retraction=retraction,
        transport=transport,
        max_angle=max_angle,
        maximize=maximize,
        skip=skip,
        counts=counts,
        impl=impl,
    )


@_geodesic_steps.register_fake
def _(*_: Any) -> None:
    """Everything is written in place."""


def geodesic_steps(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor | None],
    counts: Sequence[Tensor],
    lr: float | Tensor,
    momentum: float | Tensor,
    **options: Any,
) -> None:
    """`kernels.geodesic_steps` by the operator, on each device for weights with momentum and for those without."""
    alike: dict[Any, list[int]] = {}
    for i, buffer in enumerate(momentum_buffers):
        alike.setdefault((weights[i].device, buffer is None), []).append(i)
    for (device, _), chosen in alike.items():
        w, d, c = ([column[i] for i in chosen] for column in (weights, grads, counts))
        m = [momentum_buffers[i] for i in chosen if momentum_buffers[i] is not None]
        # A number would become part of the code, which every new rate would compile again.
        facts = {"dtype": torch.float32 if device.type == "mps" else torch.float64, "device": device}
        rates = (x if isinstance(x, Tensor) else torch.full((), x, **facts) for x in (lr, momentum))
        _geodesic_steps(w, d, m, c, *rates, **options)
