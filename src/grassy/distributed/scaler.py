"""Loss scaling for float16 if some gradients are sharded over processes."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grassy.kernels.sampling import gradient_of_some
from grassy.shards import is_dtensor, local


class GradScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` for models with both plain and sharded gradients, which torch's class cannot mix.

    An overflow in one process makes all processes skip the step. Otherwise the copies of the backbone would diverge.

    Examples:
        >>> from grassy.distributed import GradScaler
        >>> scaler = GradScaler("cpu", init_scale=2.0**10)
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found = super()._unscale_grads_(_Local(optimizer), inv_scale, found_inf, allow_fp16)  # type: ignore[arg-type]
        if dist.is_initialized():
            found = found or {found_inf.device: found_inf}  # this process may have no gradients
            for flag in found.values():
                dist.all_reduce(flag, dist.ReduceOp.MAX)
        return found


class _Local:
    """The view of an optimizer that a GradScaler needs, with the local part of each gradient."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups = [{"params": [_seen(p) for p in group["params"]]} for group in optimizer.param_groups]


def _seen(p: Any) -> Tensor:
    if (sampled := gradient_of_some(p)) is not None:
        return _with_gradient(sampled[1])
    if not is_dtensor(p) or p.grad is None:
        return p
    return _with_gradient(local(p.grad))


def _with_gradient(grad: Tensor) -> Tensor:
    """Return a tensor with this gradient, which is all that a GradScaler reads."""
    seen = grad.detach()
    seen.grad = grad
    return seen
