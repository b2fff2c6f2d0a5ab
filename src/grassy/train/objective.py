"""The optimizer and criterion of a recipe, and whether its model is compiled."""

from typing import Any

import torch
from torch import nn

from grassy.criteria import create_criterion
from grassy.optim import make_optimizer
from grassy.optim.joint import JointOptimizer
from grassy.recipes.recipe import Recipe

#: torch optimizers whose step is one kernel on a GPU and can be captured in a CUDA graph.
FUSED = ("sgd", "adam", "adamw")


def build_optimizer(recipe: Recipe, model: nn.Module, device: torch.device, captured: bool = False) -> JointOptimizer:
    """The optimizer of a recipe, for a model with or without subspaces."""
    options: dict[str, Any] = {"momentum": 0.9} if recipe.opt in ("sgd", "momentum", "nesterov") else {}
    options |= recipe.opt_kwargs
    if device.type == "cuda" and recipe.opt in FUSED:
        options.setdefault("fused", True)
        if captured and recipe.opt != "sgd":
            options.setdefault("capturable", True)
    for name, value in options.items():
        if isinstance(value, list):  # YAML has no tuples, but betas must be one
            options[name] = tuple(value)
    on_manifold = any(head.subspace_names for head in model.modules() if hasattr(head, "subspace_names"))
    return make_optimizer(
        model,
        recipe.opt,
        recipe.lr,
        recipe.head_lr if on_manifold else None,  # a recipe without subspaces may inherit head_lr from its base
        recipe.head_momentum,
        retraction=recipe.retraction,  # type: ignore[arg-type]
        transport=recipe.transport,  # type: ignore[arg-type]
        max_angle=recipe.max_angle,
        weight_decay=recipe.weight_decay,
        decay_all=recipe.decay_all,
        layer_decay=recipe.layer_decay,
        **options,
    )


def build_criterion(recipe: Recipe, mixes_labels: bool = False) -> nn.Module:
    """mixes_labels: what mixing makes are pairs of labels."""
    if recipe.loss in ("bce", "bce-sum"):
        return create_criterion("bce", reduction="sum" if recipe.loss == "bce-sum" else "mean")
    # Mixup and cutmix have already smoothed the targets, unless they give pairs of labels.
    if recipe.smoothing and (mixes_labels or not recipe.mixes):
        return create_criterion("label-smoothing", smoothing=recipe.smoothing)
    return create_criterion("cross-entropy")


def compiles(recipe: Recipe, device: torch.device) -> bool:
    return recipe.torchcompile == "on" or (recipe.torchcompile == "auto" and device.type == "cuda")
