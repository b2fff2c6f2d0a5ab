"""Which parts of a model are sharded over the processes of a run: the classes of its head, and the backbone."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from grassy.distributed import mesh, shard_head, wrap
from grassy.distributed.processes import Process
from grassy.heads import RECOMMENDED, RECOMMENDED_K, heads_of
from grassy.heads.per_class import PerClassHead
from grassy.models import create_model, without_pretrained
from grassy.recipes.recipe import Recipe
from grassy.shards import is_dtensor

#: Size of a head's weight in bytes from which its classes are sharded, unless the recipe decides.
MUCH = 256e6
#: Largest feature dimension of any timm model.
WIDEST = 2**13
#: What keeps DDP from sending buffers with each forward: torch 2.13 has a new name for it.
_NEW_NAME = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
SENDS_BUFFERS = "forward_sync_buffers" if _NEW_NAME else "broadcast_buffers"


@dataclass(frozen=True)
class Sharding:
    """Whether head and backbone are sharded; without a mesh neither is."""

    mesh: DeviceMesh | None
    head: bool
    backbone: bool
    seed: int

    @property
    def of_head(self) -> Callable[[nn.Module], object] | None:
        """A function that creates a sharded head in a model; None if the head is not sharded."""
        if self.mesh is None or not self.head:
            return None
        return lambda model: shard_head(model, self.mesh, seed=self.seed)  # type: ignore[arg-type]

    def wrapped(self, model: nn.Module) -> nn.Module:
        """The model for training, wrapped in DDP unless it is sharded."""
        if self.mesh is None or self.backbone:
            return model
        # Each process keeps the batch statistics of its own images; validation and checkpoints use their mean.
        return wrap(model, self.mesh, **{SENDS_BUFFERS: False})

    def shard_backbone(self, model: nn.Module) -> None:
        """Shard everything but the head, in place. Create the optimizer afterwards."""
        if self.mesh is not None and self.backbone:
            wrap(model, self.mesh, fsdp=True)


def sharding_of(recipe: Recipe, num_classes: int, process: Process, resumed_from: Path | None = None) -> Sharding:
    """The sharding that a recipe asks for, if there are several processes.

    resumed_from: a file holds unsharded weights, as one process saves them. A run resumed from it keeps its head whole
        unless the recipe sets shard_head=true.
    """
    if process.world_size == 1:
        return Sharding(None, False, False, recipe.seed)
    may_shard = resumed_from is None or resumed_from.is_dir()
    head = _shards_head(recipe, num_classes, may_shard)
    return Sharding(mesh(process.device.type), head, recipe.fsdp, recipe.seed)


def saves_shards(recipe: Recipe, num_classes: int) -> bool:
    """Whether a run that starts on one process saves shards, since several processes would shard its model.

    A head that is merely large counts only if other processes may come: they do not without torchrun.
    """
    return recipe.fsdp or _shards_head(recipe, num_classes, dist.is_initialized())


def _shards_head(recipe: Recipe, num_classes: int, if_large: bool) -> bool:
    if recipe.shard_head == "auto":
        return if_large and _is_large(recipe, num_classes)
    return recipe.shard_head == "true"


def has_sharded_weights(model: nn.Module) -> bool:
    """Whether a process holds only a shard of some weights."""
    return any(is_dtensor(p) for p in model.parameters())


def _is_large(recipe: Recipe, num_classes: int) -> bool:
    dims = recipe.head.get("k", RECOMMENDED_K if recipe.head["name"] in ("grassmann", RECOMMENDED) else 1)
    rows = sum(dims) if isinstance(dims, list) else num_classes * dims
    if rows * WIDEST * 4 <= MUCH or recipe.loss != "cross-entropy":
        return False
    options = without_pretrained(recipe.model_kwargs)
    with torch.device("meta"):
        heads = heads_of(create_model(recipe.model, num_classes, recipe.head, options, True))
    sizes = [math.prod(head.weight.shape) * 4 for head in heads if isinstance(head, PerClassHead)]
    return len(sizes) == len(heads) and sum(sizes) > MUCH
