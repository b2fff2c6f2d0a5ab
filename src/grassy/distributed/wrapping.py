"""The rest of a model beside a sharded head: replicated by DDP, or divided by FSDP2."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from grassy.distributed.sharding import sharded_parameters


def wrap(model: nn.Module, mesh: DeviceMesh, fsdp: bool | Iterable[nn.Module] = False, **options: Any) -> nn.Module:
    """The model for training in all processes of the mesh, whose shards of classes are left to the head.

    fsdp: False replicates the rest of the model in each process by `DistributedDataParallel`; True divides it by
        `fully_shard` (FSDP2), each block of layers for itself; or the blocks to divide, from the inner ones outwards.
        FSDP2 changes the model in place.
    options: those of `DistributedDataParallel` or `fully_shard`.

    Make the optimizer afterwards. If nothing but shards is trained, there is nothing to average, and the model itself
    is returned.
    """
    shards = sharded_parameters(model)
    if isinstance(fsdp, bool) and not fsdp:
        return _replicated(model, mesh, list(shards), options)
    from torch.distributed.fsdp import fully_shard

    if scalars := [name for name, p in model.named_parameters() if p.ndim == 0]:
        raise ValueError(
            f"fsdp cannot divide {scalars[0]}, which is one number: use fsdp=False, or a head that does not learn its "
            "scale (learnable_gamma=False, learnable_scale=False)"
        )
    ignored = set(shards.values())
    for block in _blocks(model) if isinstance(fsdp, bool) else fsdp:
        if any(p in ignored for p in block.parameters()):
            raise ValueError(f"fsdp names a {type(block).__name__} that holds the sharded head: leave it out")
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, ignored_params=ignored, **options)
    return model


def _replicated(model: nn.Module, mesh: DeviceMesh, names: list[str], options: dict[str, Any]) -> nn.Module:
    # DDP looks for ".weight" if the head is the model itself.
    ignored = [*names, *(f".{name}" for name in names if "." not in name)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    if not any(p.requires_grad for name, p in model.named_parameters() if name not in names):
        return model
    if mesh.device_type == "cuda":
        options = {"device_ids": [torch.cuda.current_device()], **options}
    return DistributedDataParallel(model, process_group=mesh.get_group(), **options)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The members of the outermost lists of layers, as transformers and residual networks have them."""
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
