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
    lr: float,
    lr_tensor: Tensor | None,
    momentum: float,
    momentum_tensor: Tensor | None,
    retraction: str,
    transport: str,
    max_angle: float | None,
    maximize: bool,
    direction: str,
    skip: Tensor | None,
    impl: str,
) -> None:
    from grassy import ops  # which imports this

    ops.geodesic_steps(
        weights,
        grads,
        momentum_buffers or [None] * len(weights),
        lr if lr_tensor is None else lr_tensor,
        momentum if momentum_tensor is None else momentum_tensor,
        retraction=retraction,
        transport=transport,
        max_angle=max_angle,
        maximize=maximize,
        direction=direction,
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
    """`grassy.ops.geodesic_steps` by the operator, for weights with momentum and then for those without."""
    rates = [(0.0, rate) if isinstance(rate, Tensor) else (float(rate), None) for rate in (lr, momentum)]
    for without in (False, True):
        chosen = [i for i, buffer in enumerate(momentum_buffers) if (buffer is None) == without]
        w, d, c = ([column[i] for i in chosen] for column in (weights, grads, counts))
        m = [buffer for buffer in momentum_buffers if buffer is not None and not without]
        if chosen:
            _geodesic_steps(w, d, m, c, *rates[0], *rates[1], **options)
