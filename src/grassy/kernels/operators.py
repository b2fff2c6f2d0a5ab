"""The step as a custom operator, which torch.compile does not trace into."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grassy.kernels import dispatch
from grassy.kernels.options import StepOptions


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
    options = StepOptions(retraction, transport, max_angle, maximize)
    dispatch.geodesic_steps(heads, lr, momentum, options, counts, skip, impl)


@_geodesic_steps.register_fake
def _(*_: Any) -> None:
    """Return nothing: the operator writes in place."""


def geodesic_steps(
    heads: Sequence[dispatch.Head],
    lr: float | Tensor,
    momentum: float | Tensor,
    options: StepOptions,
    counts: Sequence[Tensor],
    skip: Tensor | None,
    impl: str,
) -> None:
    """Call the operator once per device, separately for heads with and without momentum."""
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
