"""Weights that are sharded over processes by class: DTensors with Shard(0), seen as plain local tensors.

`torch.distributed.tensor` is slow to import, so nothing here imports it. Whoever created a DTensor has imported it.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor


class Shard(NamedTuple):
    """The range of classes that this process holds. The last ranks may hold fewer classes than others, or none.

    Attributes:
        offset: First class of this process.
        stop: Last class of this process, plus 1.
        classes: Number of all classes C.
        group: Process group over which the classes are sharded. None if this process holds all of them.
    """

    offset: int
    stop: int
    classes: int
    group: Any = None


def bounds(classes: int, rank: int, world: int) -> tuple[int, int]:
    """Return the first class of a rank and that of the next one: ⌈C/W⌉ classes each, as in DTensor."""
    each = -(-classes // world)
    return min(rank * each, classes), min((rank + 1) * each, classes)


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a DTensor that is sharded along dimension 0."""
    return any(placement.is_shard(0) for placement in getattr(tensor, "placements", ()))


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, sharded or replicated."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def mark_as_replaced(p: Tensor) -> None:
    """Mark a parameter that a sharded one has replaced in its module."""
    p.replaced_by_a_shard = True  # type: ignore[attr-defined]


def was_replaced(p: Tensor) -> bool:
    """Whether a sharded parameter has replaced this one, so that an optimizer that still holds it is useless."""
    return getattr(p, "replaced_by_a_shard", False)


def local(tensor: Tensor) -> Tensor:
    """Return the local part of a DTensor, or a plain tensor itself. It shares memory and passes gradients."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def shard_of(weight: Tensor) -> Shard:
    """Return the classes of a weight (C, ...) that this process holds."""
    classes = weight.shape[0]
    if not is_sharded(weight):
        return Shard(0, classes, classes)
    mesh: Any = weight.device_mesh  # type: ignore[attr-defined]
    if mesh.ndim != 1:
        raise ValueError(f"classes must be sharded over a mesh of one dimension, got one of {mesh.ndim}")
    return Shard(*bounds(classes, mesh.get_local_rank(), mesh.size()), classes, mesh.get_group())


def groups_of(tensor: Tensor) -> list[Any]:
    """Return the process groups over which a tensor is sharded: none for a plain or replicated one."""
    placements: Sequence[Any] = getattr(tensor, "placements", ())
    return [tensor.device_mesh.get_group(dim) for dim, each in enumerate(placements) if each.is_shard()]  # type: ignore[attr-defined]


def largest_of_all(value: Tensor, tensor: Tensor) -> Tensor:
    """Return the largest value over the processes that share the tensor. All of them must call it.

    NaN counts as infinite, because a maximum over processes may ignore it.
    """
    for group in groups_of(tensor):
        value = value.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)  # a copy
        dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
    return value


def first_row(tensor: Tensor) -> int:
    """Return the global index of the first row that this process holds."""
    if not is_dtensor(tensor):
        return 0
    return int(tensor.__create_chunk_list__()[0].offsets[0])  # type: ignore[attr-defined]


def sharded_like(whole: Tensor, weight: Tensor) -> Tensor:
    """Return this process's rows of a whole tensor, as a DTensor sharded like the weight."""
    shard = shard_of(weight)
    part = whole[shard.offset : shard.stop].to(weight.device).clone()
    return with_local(weight, part)


def with_local(tensor: Tensor, part: Tensor) -> Tensor:
    """Return a DTensor with the layout of `tensor` and the local part `part`, or `part` for a plain tensor."""
    if not is_dtensor(tensor):
        return part
    like: Any = tensor
    made: Tensor = type(like).from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return made
