"""From a recipe to the parts of its training: optimizer, criterion, erasing and mixing, precision."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from grassy.criteria import create_criterion
from grassy.optim import make_optimizer
from grassy.optim.joint import JointOptimizer
from grassy.training.models import import_timm
from grassy.training.recipe import Recipe

#: Optimizers of torch whose step is one kernel on a GPU and can be captured in a graph.
FUSED = ("sgd", "adam", "adamw")


def build_optimizer(recipe: Recipe, model: nn.Module, device: torch.device, captured: bool = False) -> JointOptimizer:
    """The one optimizer of a recipe, for a model with or without subspaces."""
    options: dict[str, Any] = {"momentum": 0.9} if recipe.opt in ("sgd", "momentum", "nesterov") else {}
    options |= recipe.opt_kwargs
    if device.type == "cuda" and recipe.opt in FUSED:
        options.setdefault("fused", True)
        if captured and recipe.opt != "sgd":
            options.setdefault("capturable", True)
    for name, value in options.items():
        if isinstance(value, list):  # YAML has no tuples; betas must be one
            options[name] = tuple(value)
    on_manifold = any(head.subspace_names for head in model.modules() if hasattr(head, "subspace_names"))
    return make_optimizer(
        model,
        recipe.opt,
        recipe.lr,
        recipe.head_lr if on_manifold else None,  # one recipe can serve as the base of another, without subspaces
        recipe.head_momentum,
        retraction=recipe.retraction,
        transport=recipe.transport,
        max_angle=recipe.max_angle,
        direction=recipe.direction,
        weight_decay=recipe.weight_decay,
        decay_all=recipe.decay_all,
        layer_decay=recipe.layer_decay,
        **options,
    )


def build_criterion(recipe: Recipe) -> nn.Module:
    if recipe.loss in ("bce", "bce-sum"):
        return create_criterion("bce", reduction="sum" if recipe.loss == "bce-sum" else "mean")
    # Mixing has smoothed the targets already.
    if recipe.smoothing and not recipe.mixes:
        return create_criterion("label-smoothing", smoothing=recipe.smoothing)
    return create_criterion("cross-entropy")


def build_mixing(recipe: Recipe, num_classes: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """Mixup and cutmix, by timm, of a batch, which turn labels into soft, smoothed targets."""
    if not recipe.mixes:
        return None
    import_timm()
    from timm.data import Mixup

    return Mixup(
        recipe.mixup,
        recipe.cutmix,
        prob=recipe.mixup_prob,
        switch_prob=recipe.mixup_switch_prob,
        label_smoothing=recipe.smoothing,
        num_classes=num_classes,
    )


def build_erasing(recipe: Recipe, device: torch.device) -> Callable[[Tensor], Tensor] | None:
    """Random erasing, by timm, of a batch on the device."""
    if not recipe.reprob:
        return None
    import_timm()
    from timm.data.random_erasing import RandomErasing

    return RandomErasing(recipe.reprob, mode=recipe.remode, max_count=1, device=str(device))


def amp_dtype(recipe: Recipe, device: torch.device) -> torch.dtype | None:
    """The precision of products: bfloat16 on a GPU unless the recipe says otherwise, None for that of the weights."""
    if recipe.amp == "off" or (recipe.amp == "auto" and device.type != "cuda"):
        return None
    if recipe.amp == "float16" and device.type != "cuda":
        raise ValueError("amp=float16 needs a GPU; on a CPU there are off and bfloat16")
    return torch.float16 if recipe.amp == "float16" else torch.bfloat16


def compiles(recipe: Recipe, device: torch.device) -> bool:
    return recipe.torchcompile == "on" or (recipe.torchcompile == "auto" and device.type == "cuda")
