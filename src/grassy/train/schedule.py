"""The learning rate schedule: one factor for all parameter groups, so that head_lr/lr stays constant."""

import math

import torch

from grassy.recipes.recipe import Recipe


def learning_rate_factor(recipe: Recipe, epoch: float) -> float:
    """The factor of every group's learning rate at a time in epochs, from 0 to `recipe.epochs`.

    Warm-up is linear from warmup_lr/lr; the cosine continues from its end to min_lr/lr.
    """
    if recipe.lr == 0:
        return 1.0
    if epoch < recipe.warmup_epochs:
        start = recipe.warmup_lr / recipe.lr
        return start + (1 - start) * epoch / recipe.warmup_epochs
    if recipe.sched == "step":
        return recipe.decay_rate ** sum(epoch >= milestone for milestone in recipe.decay_milestones)
    if recipe.sched == "constant":
        return 1.0
    progress = (epoch - recipe.warmup_epochs) / (recipe.epochs - recipe.warmup_epochs)
    end = recipe.min_lr / recipe.lr
    return end + (1 - end) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


class Schedule:
    """Sets the learning rates of an optimizer's groups to their initial values times a factor."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer  # not its groups: load_state_dict makes new ones
        self.initial = [float(group["lr"]) for group in optimizer.param_groups]

    def set(self, factor: float) -> None:
        for group, lr in zip(self.optimizer.param_groups, self.initial, strict=True):
            if isinstance(group["lr"], torch.Tensor):  # a captured step reads this tensor
                group["lr"].fill_(lr * factor)
            else:
                group["lr"] = lr * factor
