"""Collectives on plain tensors between the processes that share a head.

Only this file knows the names of these functions in different versions of torch. With one process, or without a group,
nothing is sent.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor

# The new names exist since torch 2.13, where the old ones warn.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def world_size(group: Any) -> int:
    return 1 if group is None else dist.get_world_size(group)


def gathered(rows: Tensor, group: Any) -> Tensor:
    """Concatenate the rows (B_l, ...) of all processes: (W·B_l, ...). B_l must be equal in all of them."""
    if (world := world_size(group)) == 1:
        return rows
    result = rows.new_empty(world * rows.shape[0], *rows.shape[1:])
    _all_gather(result, rows.contiguous(), group=group)
    return result


def scattered_sum(rows: Tensor, group: Any) -> Tensor:
    """Sum the rows (W·B_l, ...) over all processes and return those of this process: (B_l, ...)."""
    if (world := world_size(group)) == 1:
        return rows
    result = rows.new_empty(rows.shape[0] // world, *rows.shape[1:])
    _reduce_scatter(result, rows.contiguous(), group=group)
    return result


def maximum(values: Tensor, group: Any) -> Tensor:
    """Return the elementwise maximum over all processes."""
    return _reduced(values, dist.ReduceOp.MAX, group)


def total(values: Tensor, group: Any) -> Tensor:
    """Return the elementwise sum over all processes."""
    return _reduced(values, dist.ReduceOp.SUM, group)


def exchanged(blocks: Tensor, group: Any) -> Tensor:
    """Send block i of blocks (W, ...) to process i and return the blocks received from all processes: (W, ...)."""
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
