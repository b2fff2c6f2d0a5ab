"""Wrap the rest of a model with a sharded head: replicated by DDP, or sharded by FSDP2."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from grassy.distributed.sharding import sharded_parameters
from grassy.shards import mark_as_replaced


def wrap(model: nn.Module, mesh: DeviceMesh, fsdp: bool | Iterable[nn.Module] = False, **options: Any) -> nn.Module:
    """Wrap a model for training in all processes of a mesh. Sharded heads are left as they are.

    Create the optimizer afterwards.

    Args:
        model: The model, after `shard_head`.
        mesh: The mesh of `shard_head`.
        fsdp: False replicates the rest of the model by `DistributedDataParallel`. True shards it by `fully_shard`
            (FSDP2), one block of layers at a time, in place. Or the blocks to shard, inner ones first.
        **options: Options of `DistributedDataParallel` or `fully_shard`.

    Returns:
        The wrapped model. It is the model itself with FSDP2, and if only sharded parameters are trained.

    Raises:
        ValueError: If FSDP2 would have to shard a scalar parameter, or a block contains the sharded head.
        TypeError: If `fsdp` is neither a boolean nor a list of modules.
    """
    shards = sharded_parameters(model)
    if isinstance(fsdp, bool) and not fsdp:
        return _replicated(model, mesh, list(shards), options)
    from torch.distributed.fsdp import fully_shard

    blocks = _blocks(model) if isinstance(fsdp, bool) else list(fsdp)
    if not all(isinstance(block, nn.Module) for block in blocks):
        raise TypeError(f"fsdp must be True, False or a list of modules, got {fsdp!r}")

    if scalars := [name for name, p in model.named_parameters() if p.ndim == 0]:
        raise ValueError(
            f"fsdp cannot shard {scalars[0]}, which is a scalar: use fsdp=False, or a head that does not learn its "
            "scale (learnable_gamma=False, learnable_scale=False)"
        )
    ignored = set(shards.values())
    before = list(model.parameters())
    for block in blocks:
        if any(p in ignored for p in block.parameters()):
            raise ValueError(f"fsdp names a {type(block).__name__} that holds the sharded head: leave it out")
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, ignored_params=ignored, **options)
    kept = {id(p) for p in model.parameters()}
    for p in before:
        if id(p) not in kept:
            mark_as_replaced(p)
    return model


def _replicated(model: nn.Module, mesh: DeviceMesh, names: list[str], options: dict[str, Any]) -> nn.Module:
    # If the head is the model itself, DDP calls its weight ".weight".
    ignored = [*names, *(f".{name}" for name in names if "." not in name)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    if not any(p.requires_grad for name, p in model.named_parameters() if name not in names):
        return model
    if mesh.device_type == "cuda":
        options = {"device_ids": [torch.cuda.current_device()], **options}
    return DistributedDataParallel(model, process_group=mesh.get_group(), **options)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the members of the outermost lists of layers, such as the blocks of a transformer."""
    ignored = {id(p) for p in sharded_parameters(model).values()}
    found = []
    for child in model.children():
        if any(id(p) in ignored for p in child.parameters()):
            found += _blocks(child) if not isinstance(child, nn.ModuleList | nn.Sequential) else []
        elif isinstance(child, nn.ModuleList | nn.Sequential):
            found += [layer for layer in child if any(True for _ in layer.parameters())]
        else:
            found += _blocks(child)
    return found
