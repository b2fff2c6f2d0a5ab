"""What the processes that share a head say to each other, on plain tensors.

The only file that knows which names these functions have in which version of torch. With one process, or with no group,
nothing is sent.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor

# Of torch 2.13 on; the older names warn there.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def world_size(group: Any) -> int:
    return 1 if group is None else dist.get_world_size(group)


def gathered(rows: Tensor, group: Any) -> Tensor:
    """The rows (B_l, ...) of all processes, one after the other: (W·B_l, ...). All must bring equally many."""
    if (world := world_size(group)) == 1:
        return rows
    result = rows.new_empty(world * rows.shape[0], *rows.shape[1:])
    _all_gather(result, rows.contiguous(), group=group)
    return result


def scattered_sum(rows: Tensor, group: Any) -> Tensor:
    """The sum over all processes of their (W·B_l, ...), and of that the rows of this process: (B_l, ...)."""
    if (world := world_size(group)) == 1:
        return rows
    result = rows.new_empty(rows.shape[0] // world, *rows.shape[1:])
    _reduce_scatter(result, rows.contiguous(), group=group)
    return result


def maximum(values: Tensor, group: Any) -> Tensor:
    """The largest value of any process, element by element."""
    return _reduced(values, dist.ReduceOp.MAX, group)


def total(values: Tensor, group: Any) -> Tensor:
    """The sum over all processes, element by element."""
    return _reduced(values, dist.ReduceOp.SUM, group)


def exchanged(blocks: Tensor, group: Any) -> Tensor:
    """Of blocks (W, ...), the i-th for process i, those that the others have for this one: (W, ...)."""
    if world_size(group) == 1:
        return blocks
    result = blocks.new_empty(blocks.shape)
    dist.all_to_all_single(result, blocks.contiguous(), group=group)
    return result


def _reduced(values: Tensor, how: Any, group: Any) -> Tensor:
    if world_size(group) == 1:
        return values
    values = values.clone()
    dist.all_reduce(values, how, group=group)
    return values
