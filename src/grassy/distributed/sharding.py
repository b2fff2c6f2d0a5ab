"""Shard the classes of a head over processes: each process holds all parameters of some classes.

A parameter (C, ...) becomes a DTensor with Shard(0) over a mesh of one dimension. The Riemannian step of a class needs
only that class, so the optimizer does not communicate. `kernels.sharded` computes the loss.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from grassy import shards
from grassy.heads import Head, heads_of
from grassy.heads.per_class import PerClassHead

#: Classes that are initialised from one seed. A process draws whole blocks, so the initial values of a class do not
#: depend on the number of processes.
BLOCK = 4096
#: Largest tensor, in bytes, that `whole` gathers.
WHOLE_AT_MOST = 2**33


def mesh(device_type: str | None = None) -> DeviceMesh:
    """Create a mesh of all processes with one dimension, "dp".

    Args:
        device_type: "cuda" or "cpu". None means "cuda" if there is a GPU and the process group supports NCCL.

    Returns:
        The mesh, for `shard_head` and `wrap`.

    Raises:
        RuntimeError: If there is no process group. Start the program with torchrun and initialise one.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "there is no process group: start the program with torchrun and call torch.distributed.init_process_group()"
        )
    # Without arguments, init_process_group names no backend, but one for each type of device.
    kind = device_type or ("cuda" if torch.cuda.is_available() and "nccl" in dist.get_backend_config() else "cpu")
    return init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("dp",))


def shard_head(model: nn.Module, mesh: DeviceMesh, *, seed: int = 0) -> nn.Module:
    """Shard the classes of every head of a model over the processes of a mesh, in place.

    Call it before `wrap` and before you create the optimizer. Each process initialises its own shard of a head on the
    meta device. The values depend on the seed but not on the number of processes. A head with memory must have equal
    values in all processes, and each process keeps its classes.

    Args:
        model: The model. Its heads must be "arcface", "cosine", "grassmann", "linear" or "subcenter-arcface".
        mesh: A mesh with one dimension, as created by `mesh`.
        seed: Seed for heads on the meta device.

    Returns:
        The same model.

    Raises:
        TypeError: If `model` is not a module.
        ValueError: If the mesh has several dimensions, or the model has no head, or one that cannot be sharded.

    Examples:
        Run under torchrun, with a process group:

        ```python
        mesh = grassy.distributed.mesh()
        grassy.replace_head(model, "grassmann", num_classes=1_000_000, k=8, device="meta")
        grassy.distributed.shard_head(model, mesh)
        model = grassy.distributed.wrap(model, mesh)
        optimizer = grassy.make_optimizer(model, "adamw", lr=1e-3)
        ```
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"shard_head takes a model, got {type(model).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f"mesh must have one dimension, over which classes are sharded, got {mesh.ndim}")
    heads = heads_of(model)
    if not heads:
        raise ValueError("the model has no grassy head: call grassy.replace_head(model, 'grassmann', k=8) first")
    for head in heads:
        if not isinstance(head, PerClassHead):
            raise ValueError(
                f"{type(head).__name__} cannot be sharded by class; these can: arcface, cosine, grassmann, linear, "
                "subcenter-arcface"
            )
    for head in heads:
        assert isinstance(head, PerClassHead)
        if not head.is_sharded:
            _shard(head, mesh, seed)
    return model


def is_sharded(what: nn.Module | Tensor) -> bool:
    """Return whether a tensor, or a head of a model, is sharded by class over processes.

    Args:
        what: A tensor or a model.
    """
    if isinstance(what, nn.Module):
        return any(isinstance(head, PerClassHead) and head.is_sharded for head in heads_of(what))
    return shards.is_sharded(what)


def whole(weight: Tensor) -> Tensor:
    """Return a whole tensor in each process. If it is sharded, all processes must call it together.

    Args:
        weight: A DTensor or a plain tensor.

    Returns:
        A plain, detached tensor.

    Raises:
        ValueError: If the whole tensor has more than 8 GiB.
    """
    if not shards.is_dtensor(weight):
        return weight.detach()
    if (size := weight.numel() * weight.element_size()) > WHOLE_AT_MOST:
        raise ValueError(
            f"the whole weight {tuple(weight.shape)} takes {size / 2**30:.1f} GiB in each process, and the limit is "
            f"{WHOLE_AT_MOST / 2**30:.0f} GiB: use the local part of each process, weight.to_local()"
        )
    result: Tensor = weight.detach().full_tensor()  # type: ignore[attr-defined]
    return result


def sharded_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are sharded by class, by their names in the model."""
    found = {}
    for prefix, module in model.named_modules():
        if isinstance(module, PerClassHead):
            for name in module.class_parameter_names:
                if shards.is_sharded(p := getattr(module, name)):
                    found[f"{prefix}.{name}" if prefix else name] = p
    return found


def _shard(head: PerClassHead, mesh: DeviceMesh, seed: int) -> None:
    from torch.distributed.tensor import DTensor, Shard

    device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else mesh.device_type
    start, stop = shards.bounds(head.num_classes, mesh.get_local_rank(), mesh.size())
    for number, name in enumerate(head.class_parameter_names):
        p = getattr(head, name)
        if p is None:
            continue
        if p.is_meta:
            local = torch.empty(stop - start, *p.shape[1:], dtype=p.dtype, device=device)
            _draw(head, name, local, start, (seed, number))
        else:
            local = p.detach()[start:stop].to(device, copy=True)
        sharded = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=p.shape, stride=torch.empty(p.shape, device="meta").stride()
        )
        setattr(head, name, nn.Parameter(sharded, requires_grad=p.requires_grad))
        shards.mark_as_replaced(p)
    head.is_sharded = True
    _create_the_rest(head, device)
    head.register_load_state_dict_pre_hook(_divide_what_is_loaded)  # type: ignore[no-untyped-call]


@torch.no_grad()
def _draw(head: PerClassHead, name: str, local: Tensor, start: int, seed: tuple[int, int]) -> None:
    """Initialise the parameter of the classes from `start` on, one block of classes at a time."""
    stop = start + len(local)
    generator = torch.Generator(local.device)
    for first in range(start - start % BLOCK, stop, BLOCK):
        # Seeds must differ in many bits, because generators of some devices start alike for similar seeds.
        generator.manual_seed(_mixed(seed[0], seed[1], first // BLOCK))
        count = min(BLOCK, head.num_classes - first)
        block = head.draw_classes(name, first, count, generator)
        low, high = max(first, start), min(first + count, stop)
        local[low - start : high - start] = block[low - first : high - first]


def _mixed(*numbers: int) -> int:
    """Hash several integers to one of 63 bits, by the finalizer of SplitMix64."""
    state, mask = 0, 2**64 - 1
    for number in numbers:
        state = (state + number * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return state >> 1


@torch.no_grad()
def _create_the_rest(head: Head, device: Any) -> None:
    """Initialise what else is on the meta device: batch statistics, counters and a learnable scale."""
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
    """Replace whole weights in a state_dict by this process's shards, so that a sharded head can load them."""
    for name in head.class_parameter_names:  # type: ignore[union-attr]
        p, value = getattr(head, str(name)), state_dict.get(f"{prefix}{name}")
        if isinstance(value, Tensor) and not shards.is_dtensor(value) and p is not None and value.shape == p.shape:
            state_dict[f"{prefix}{name}"] = shards.sharded_like(value, p)
