"""Divide the classes of a head over processes: each process holds the parameters of some classes whole.

A parameter (C, ...) becomes a DTensor with Shard(0) over a mesh of one dimension. The Riemannian step of a class needs
that class alone, so the optimizer communicates nothing; the loss is that of `kernels.sharded`.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from grassy import shards
from grassy.heads import Head, heads_of
from grassy.heads.per_class import PerClassHead

#: Classes that are drawn from one seed. A process draws the blocks of its classes whole, so what a class gets does not
#: depend on how many processes there are.
BLOCK = 4096
#: The largest tensor, in bytes, that `whole` makes of the parts of all processes.
WHOLE_AT_MOST = 2**33


def mesh(device_type: str | None = None) -> DeviceMesh:
    """All processes in one dimension, "dp". The process group must exist, as under `torchrun`."""
    if not dist.is_initialized():
        raise RuntimeError(
            "there is no process group: start the program with torchrun and call torch.distributed.init_process_group()"
        )
    kind = device_type or ("cuda" if torch.cuda.is_available() and "nccl" in dist.get_backend() else "cpu")
    return init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("dp",))


def shard_head(model: nn.Module, mesh: DeviceMesh, *, seed: int = 0) -> nn.Module:
    """Divide the classes of every head of the model over the processes of the mesh, in place; returns the model.

    A head on the meta device is created here, a shard in each process, with values that depend on the seed but not on
    the number of processes. Any other must hold the same values in all processes, and each keeps its classes of them.
    Call it before the optimizer is made, and before `wrap`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"shard_head takes a model, got {type(model).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f"mesh must have one dimension, over which classes are divided, got {mesh.ndim}")
    heads = heads_of(model)
    if not heads:
        raise ValueError("the model has no head of grassy's: call grassy.replace_head(model, 'grassmann', k=8) first")
    for head in heads:
        if not isinstance(head, PerClassHead):
            raise ValueError(
                f"{type(head).__name__} cannot be divided by class; these can: arcface, cosine, grassmann, linear, "
                "subcenter-arcface"
            )
    for head in heads:
        assert isinstance(head, PerClassHead)
        if not head.is_sharded:
            _shard(head, mesh, seed)
    return model


def is_sharded(what: nn.Module | Tensor) -> bool:
    """Whether the classes of a tensor, or of a head in a model, are divided over processes."""
    if isinstance(what, nn.Module):
        return any(isinstance(head, PerClassHead) and head.is_sharded for head in heads_of(what))
    return shards.is_sharded(what)


def whole(weight: Tensor) -> Tensor:
    """All of a tensor that is divided over processes, in each of them; all have to ask. A plain tensor is whole."""
    if not shards.is_distributed(weight):
        return weight.detach()
    if (size := weight.numel() * weight.element_size()) > WHOLE_AT_MOST:
        raise ValueError(
            f"the whole weight {tuple(weight.shape)} takes {size / 2**30:.1f} GiB in each process, and the limit is "
            f"{WHOLE_AT_MOST / 2**30:.0f} GiB: use what each process holds, weight.to_local()"
        )
    result: Tensor = weight.detach().full_tensor()  # type: ignore[attr-defined]
    return result


def sharded_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are divided by class, by the names that they have in the model."""
    found = {}
    for prefix, module in model.named_modules():
        if isinstance(module, PerClassHead):
            for name in module.class_names:
                if shards.is_sharded(p := getattr(module, name)):
                    found[f"{prefix}.{name}" if prefix else name] = p
    return found


def _shard(head: PerClassHead, mesh: DeviceMesh, seed: int) -> None:
    from torch.distributed.tensor import DTensor, Shard

    device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else mesh.device_type
    start, stop = shards.bounds(head.num_classes, mesh.get_local_rank(), mesh.size())
    for number, name in enumerate(head.class_names):
        p = getattr(head, name)
        if p is None:
            continue
        if p.is_meta:
            local = torch.empty(stop - start, *p.shape[1:], dtype=p.dtype, device=device)
            _draw(head, name, local, start, (seed, number))
        else:
            local = p.detach()[start:stop].to(device, copy=True)
        divided = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=p.shape, stride=torch.empty(p.shape, device="meta").stride()
        )
        setattr(head, name, nn.Parameter(divided, requires_grad=p.requires_grad))
    head.is_sharded = True
    _create_the_rest(head, device)
    head.register_load_state_dict_pre_hook(_divide_what_is_loaded)  # type: ignore[no-untyped-call]


@torch.no_grad()
def _draw(head: PerClassHead, name: str, local: Tensor, start: int, seed: tuple[int, int]) -> None:
    """Fill the parameter of the classes from `start` on, a block of classes at a time."""
    stop = start + len(local)
    generator = torch.Generator(local.device)
    for first in range(start - start % BLOCK, stop, BLOCK):
        # Two blocks have seeds that differ in many bits, or the generators of some devices would start alike.
        generator.manual_seed(_mixed(seed[0], seed[1], first // BLOCK))
        count = min(BLOCK, head.num_classes - first)
        block = head.draw_classes(name, first, count, generator)
        low, high = max(first, start), min(first + count, stop)
        local[low - start : high - start] = block[low - first : high - first]


def _mixed(*numbers: int) -> int:
    """One number of 63 bits from several (the finalizer of SplitMix64, once for each)."""
    state, mask = 0, 2**64 - 1
    for number in numbers:
        state = (state + number * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return state >> 1


@torch.no_grad()
def _create_the_rest(head: Head, device: Any) -> None:
    """Create what else is on the meta device: batch statistics, and a scale that is learned."""
    if head.batch_norm is not None and any(buffer.is_meta for buffer in head.batch_norm.buffers()):
        head.batch_norm.to_empty(device=device)
        head.batch_norm.reset_parameters()  # type: ignore[operator]
    for name, buffer in list(head.named_buffers(recurse=False)):
        if buffer.is_meta:  # a counter
            head.register_buffer(name, torch.zeros(buffer.shape, dtype=buffer.dtype, device=device))
    for name, p in list(head.named_parameters(recurse=False)):
        if p.is_meta:
            value = head.options[name]
            setattr(head, name, nn.Parameter(torch.full(p.shape, value, dtype=p.dtype, device=device)))


def _divide_what_is_loaded(head: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let a state dict that holds whole weights be loaded: of each, the classes of this process."""
    for name in head.class_names:  # type: ignore[union-attr]
        p, value = getattr(head, str(name)), state_dict.get(f"{prefix}{name}")
        if isinstance(value, Tensor) and not shards.is_distributed(value) and p is not None and value.shape == p.shape:
            state_dict[f"{prefix}{name}"] = shards.divided_like(value, p)
