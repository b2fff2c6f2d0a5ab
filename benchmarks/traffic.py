"""What a process sends while it trains a head whose classes are divided over processes, counted and by formula."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: What a ring sends in a process, in parts of the whole tensor, times (W − 1)/W.
SENT = {"_allgather_base_": 1, "_reduce_scatter_base_": 1, "allreduce_": 2, "alltoall_base_": 1}


class Traffic(TorchDispatchMode):
    """Within this, the collectives that this process takes part in are counted, and the bytes that it sends by them."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.world, self.sent, self.calls = world, 0.0, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("c10d::")
        if func.namespace == "c10d":
            tensors = [t for arg in args for t in (arg if isinstance(arg, list | tuple) else [arg])]
            whole = max(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
            self.calls.append(name)
            self.sent += SENT.get(name, 1) * (self.world - 1) / self.world * whole
        return func(*args, **(kwargs or {}))


def head_bytes(world: int, rows: int, width: int, *, precision: int = 2, smoothing: bool = False) -> float:
    """Sent by one of `world` processes in one update with `rows` features of `width` each, for any C and K.

    The forward gathers labels, and features in the dtype of the matmul. It reduces the largest logits and two or three
    sums per row. The backward gathers the losses' gradients, and reduce-scatters the features' gradients in float32.
    """
    batch = world * rows
    moved = batch * (width * precision + 8 + 4 + width * 4)
    reduced = batch * 4 * (4 if smoothing else 3)
    return (world - 1) / world * (moved + 2 * reduced)


def partial_fc_bytes(world: int, rows: int, width: int) -> float:
    """The same of PartialFC v2: float32 features and labels gathered, three sums reduced, W reductions of gradients."""
    batch = world * rows
    return (world - 1) / world * (batch * (width * 4 + 8 + width * 4) + 2 * batch * 4 * 3)
