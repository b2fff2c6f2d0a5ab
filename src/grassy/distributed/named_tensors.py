"""The tensors of a model and its optimizer, named as in a save: "model.NAME", "optim.PARAMETER.KEY"."""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from grassy.distributed.saves import NAMES, Saved
from grassy.optim.joint import MANIFOLD
from grassy.shards import groups_of

#: The name by which torch.compile keeps the module that it compiled.
COMPILED = "_orig_mod"
#: Optimizer state that is a sum over classes. For a sharded weight, each rank has the sum over its own classes.
SUMMED = ("counts",)

T = TypeVar("T")


def kind_of(name: str) -> str:
    return name.partition(".")[0]


def _prefix_of_wrappers(model: nn.Module) -> str:
    """Return what DDP, averaged models and torch.compile around a model put before the names of its parameters."""
    prefix = ""
    while True:
        if isinstance(model, DistributedDataParallel | nn.DataParallel | AveragedModel):
            name = "module"
        elif COMPILED in model._modules:
            name = COMPILED
        else:
            return prefix
        model, prefix = getattr(model, name), f"{prefix}{name}."


def _plain_name(name: str, prefix: str) -> str:
    """Return the name of a parameter without the prefix of wrappers, and without those of compiled submodules."""
    return ".".join(part for part in name.removeprefix(prefix).split(".") if part != COMPILED)


def model_tensors(kind: str, model: nn.Module | None) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model. Tied ones appear under their first name."""
    tensors: dict[str, Tensor] = {}
    if model is None:
        return tensors
    seen: set[int] = set()
    prefix = _prefix_of_wrappers(model)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            if (plain := f"{kind}.{_plain_name(name, prefix)}") in tensors:
                raise ValueError(f"{type(model).__name__} has two tensors {plain.removeprefix(f'{kind}.')}")
            tensors[plain] = tensor.detach()
    return tensors


def dtypes_and_shapes(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Return the dtype and the shape of each tensor, as `state.json` stores them."""
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in NAMES)
            raise ValueError(f"{name} must be a tensor of {allowed}, got {tensor.dtype}")
    return {name: [NAMES[tensor.dtype], *tensor.shape] for name, tensor in sorted(tensors.items())}


def check_names(saved: Saved, prefix: str, names: set[str]) -> None:
    there = {name for name in saved.tensors if kind_of(name) == prefix}
    if wrong := sorted(there ^ names):
        where = "it has" if wrong[0] in there else "it lacks"
        raise ValueError(f"{saved.path} belongs to another model: {where} {wrong[0]}")


def _named_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[tuple[str, Tensor]]]:
    """Return the parameters of each group with their names."""
    prefix = _prefix_of_wrappers(model)
    names = {id(p): _plain_name(name, prefix) for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        if any(id(p) not in names for p in group["params"]):
            raise ValueError("the optimizer has a parameter that the model does not have: was it made before sharding?")
    return [[(names[id(p)], p) for p in group["params"]] for group in optimizer.param_groups]


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of an optimizer's state by name, and the other values of its groups and state."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {"groups": [], "state": {}}
    for group, params in zip(optimizer.param_groups, _named_groups(model, optimizer), strict=True):
        options = {key: value for key, value in group.items() if key != "params"}
        options = {key: float(value) if isinstance(value, Tensor) else value for key, value in options.items()}
        plain["groups"].append({"params": [name for name, _ in params], "options": options})
        for name, p in params:
            for key, value in optimizer.state.get(p, {}).items():
                if not isinstance(value, Tensor):
                    plain["state"].setdefault(name, {})[key] = value
                elif key in SUMMED and (groups := groups_of(p)):
                    total = value.clone()
                    dist.all_reduce(total, group=groups[0])
                    tensors[f"optim.{name}.{key}"] = total
                else:
                    tensors[f"optim.{name}.{key}"] = value
    return tensors, plain


def _by_parameter(tensors: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Group the tensors of an optimizer's state by parameter and key."""
    states: dict[str, dict[str, T]] = {}
    for full, value in tensors.items():
        if kind_of(full) == "optim":
            name, _, key = full.removeprefix("optim.").rpartition(".")
            states.setdefault(name, {})[key] = value
    return states


def empty_optimizer_state(saved: Saved, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return empty tensors for the saved state of an optimizer, sharded like its parameters."""
    if saved.optimizer is None:
        raise ValueError(f"{saved.path} holds no optimizer state")
    groups = _named_groups(model, optimizer)
    for group, options in zip(optimizer.param_groups, _options_of_groups(saved, groups), strict=True):
        lost, new = sorted(options.keys() - group.keys()), sorted(group.keys() - options.keys() - {"params"})
        if lost and new:  # either alone may be that of a scheduler, or of another version
            raise ValueError(
                f"{saved.path} holds the state of another optimizer: it has {lost[0]}, and this one has {new[0]}"
            )
        for key, value in options.items():
            if key in group and not _fits(key, value, group[key]):
                raise ValueError(f"{saved.path} has {key}={value!r} where this optimizer has {group[key]!r}")
    states, tensors = _by_parameter(saved.tensors), dict[str, Tensor]()
    for group, params in zip(optimizer.param_groups, groups, strict=True):
        on_device = group.get("capturable") or group.get("fused")
        for name, p in params:
            for key, (dtype, shape) in states.get(name, {}).items():
                full = f"optim.{name}.{key}"
                if key == "step":  # torch keeps it on the CPU unless a fused or capturable step reads it
                    tensors[full] = torch.zeros(shape, dtype=dtype, device=p.device if on_device else "cpu")
                elif shape == tuple(p.shape):
                    tensors[full] = torch.zeros_like(p.detach(), dtype=dtype)
                else:
                    tensors[full] = torch.zeros(shape, dtype=dtype, device=p.device)
    return tensors


def _options_of_groups(saved: Saved, groups: list[list[tuple[str, Tensor]]]) -> list[dict[str, Any]]:
    """Return the saved options of each group of parameters.

    A sharded weight has a group of its own, so groups may be divided in another way than in the save, as long as all
    parameters of a group had the same options.
    """
    assert saved.optimizer is not None
    options = {name: group["options"] for group in saved.optimizer["groups"] for name in group["params"]}
    if options.keys() != {name for params in groups for name, _ in params}:
        raise ValueError(f"{saved.path} holds the state of an optimizer with different parameters")
    found = [[options[name] for name, _ in params] for params in groups]
    if any(each != own[0] for own in found for each in own):
        raise ValueError(f"{saved.path} holds the state of an optimizer with different parameter groups")
    return [own[0] if own else {} for own in found]


def _fits(key: str, value: Any, now: Any) -> bool:
    """Whether a saved option may replace that of an optimizer: one of its kind, and never another manifold."""
    if key == MANIFOLD:
        return bool(value == now)
    return value is None or now is None or _kind(value) == _kind(now)


def _kind(value: Any) -> type:
    if isinstance(value, Tensor | int | float) and not isinstance(value, bool):
        return float
    return list if isinstance(value, list | tuple) else type(value)


def fill_optimizer(
    saved: Saved, model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    """Put the loaded tensors into the state of an optimizer, and the saved options into its groups."""
    assert saved.optimizer is not None
    described, groups = saved.optimizer, _named_groups(model, optimizer)
    states = _by_parameter(tensors)
    for group, params, options in zip(optimizer.param_groups, groups, _options_of_groups(saved, groups), strict=True):
        for key, value in options.items():
            if isinstance(now := group.get(key), Tensor):
                now.fill_(value)
            elif key in group:
                group[key] = tuple(value) if isinstance(now, tuple) else value
        for name, p in params:
            state: dict[str, Any] = dict(states.get(name, {}))
            for key in SUMMED:
                if key in state and any(dist.get_rank(group) for group in groups_of(p)):
                    state[key].zero_()  # the first rank keeps the sum
            state |= described["state"].get(name, {})
            optimizer.state[p].clear()
            optimizer.state[p].update(state)


def rows_of_ranks(tensor: Tensor) -> Tensor:
    """Combine a tensor that differs between ranks into a DTensor with one row per rank."""
    row = tensor.detach().clone()[None]
    if not dist.is_initialized():
        return row
    from torch.distributed.tensor import DTensor, Shard

    # Of the existing group: a new mesh would make a new group for each tensor of each save.
    group = dist.group.WORLD
    assert group is not None
    mesh = DeviceMesh.from_group(group, tensor.device.type)
    return DTensor.from_local(row, mesh, [Shard(0)], run_check=False)
