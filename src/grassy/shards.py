"""Weights that are divided over processes by class: DTensors with Shard(0), seen as plain local tensors.

`torch.distributed.tensor` takes a while to import, so nothing here imports it. A tensor that is a DTensor has been made
by somebody who did.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor


class Shard(NamedTuple):
    """Which classes this process holds: those from `offset` to `stop`, of `classes` in all, over the ranks of `group`.

    The last ranks may hold fewer classes than the others, or none. group: None for all classes in one process.
    """

    offset: int
    stop: int
    classes: int
    group: Any = None


def bounds(classes: int, rank: int, world: int) -> tuple[int, int]:
    """First class of a rank, and of the next one: ⌈C/W⌉ classes each, as `torch.chunk` and DTensor divide."""
    each = -(-classes // world)
    return min(rank * each, classes), min((rank + 1) * each, classes)


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a DTensor that holds some of its rows in each process."""
    return any(placement.is_shard(0) for placement in getattr(tensor, "placements", ()))


def is_distributed(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, divided or replicated."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: all of a plain one. It shares memory with the tensor, and gets gradients."""
    return tensor.to_local() if is_distributed(tensor) else tensor  # type: ignore[attr-defined, no-any-return]


def shard_of(weight: Tensor) -> Shard:
    """Which classes of a weight (C, ...) this process holds."""
    classes = weight.shape[0]
    if not is_sharded(weight):
        return Shard(0, classes, classes)
    mesh: Any = weight.device_mesh  # type: ignore[attr-defined]
    if mesh.ndim != 1:
        raise ValueError(f"classes are sharded over a mesh of one dimension, got one of {mesh.ndim}")
    return Shard(*bounds(classes, mesh.get_local_rank(), mesh.size()), classes, mesh.get_group())


def groups_of(tensor: Tensor) -> list[Any]:
    """The process groups over which a tensor is divided: none for a plain or replicated one."""
    placements: Sequence[Any] = getattr(tensor, "placements", ())
    return [tensor.device_mesh.get_group(dim) for dim, each in enumerate(placements) if each.is_shard()]  # type: ignore[attr-defined]


def largest_of_all(value: Tensor, tensor: Tensor) -> Tensor:
    """The largest of the values that the processes have which share the tensor. All of them have to ask.

    NaN counts as infinite: a maximum over processes may leave it out.
    """
    for group in groups_of(tensor):
        value = value.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)  # a copy
        dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
    return value


def first_row(tensor: Tensor) -> int:
    """The index, in the whole tensor, of the first row that this process holds."""
    if not is_distributed(tensor):
        return 0
    return int(tensor.__create_chunk_list__()[0].offsets[0])  # type: ignore[attr-defined]


def divided_like(whole: Tensor, weight: Tensor) -> Tensor:
    """The rows of a whole tensor that belong here, as a DTensor divided like the weight."""
    shard = shard_of(weight)
    part = whole[shard.offset : shard.stop].to(weight.device).clone()
    return with_local(weight, part)


def with_local(tensor: Tensor, part: Tensor) -> Tensor:
    """A tensor divided like another one, of which this process holds `part`; the part itself for a plain one."""
    if not is_distributed(tensor):
        return part
    like: Any = tensor
    made: Tensor = type(like).from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return made
