"""Loss scaling for float16 when some gradients are divided over processes."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grassy.kernels.sampling import gradient_of_some
from grassy.shards import is_distributed, local


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for a model with plain and sharded gradients.

    torch's own takes either the ones or the others. Here an overflow in one process makes all of them skip the step:
    otherwise the copies of the backbone would part.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found = super()._unscale_grads_(_Local(optimizer), inv_scale, found_inf, allow_fp16)  # type: ignore[arg-type]
        if dist.is_initialized():
            found = found or {found_inf.device: found_inf}  # a process may have no gradient at all
            for flag in found.values():
                dist.all_reduce(flag, dist.ReduceOp.MAX)
        return found


class _Local:
    """An optimizer as a scaler looks at it, with what this process holds of each gradient."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups = [{"params": [_seen(p) for p in group["params"]]} for group in optimizer.param_groups]


def _seen(p: Any) -> Tensor:
    if (sampled := gradient_of_some(p)) is not None:
        return _with_gradient(sampled[1])
    if not is_distributed(p) or p.grad is None:
        return p  # type: ignore[no-any-return]
    return _with_gradient(local(p.grad))


def _with_gradient(grad: Tensor) -> Tensor:
    """A tensor with this gradient: a scaler looks at nothing else."""
    seen = grad.detach()
    seen.grad = grad
    return seen
