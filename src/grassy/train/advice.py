"""Advice at the end of a run whose metrics show that something is wrong."""

import math

from grassy.heads import GrassmannHead
from grassy.inference.evaluate import Metrics

#: Below this mean effective rank, a vector would do nearly as well as a subspace.
NEAR_ONE = 1.5
#: With fewer validation images per class, the number of images limits the effective rank.
ENOUGH = 5
#: Standard deviations above chance up to which an accuracy counts as chance.
DEVIATIONS = 2.0
#: After fewer updates, the running statistics of batch normalisation lag behind the weights.
FEW_UPDATES = 100


def what_is_off(metrics: Metrics, num_classes: int, head: GrassmannHead | None, updates: int) -> list[str]:
    """One sentence per problem. head: the model's Grassmann head, if it has one. updates: how many the run has made."""
    found = []
    if is_chance(metrics, num_classes):
        cure = "check the labels, then try a tenth of lr, or more epochs"
        if updates < FEW_UPDATES:
            cure = f"{updates} updates are few: try more --epochs or a smaller --batch-size"
        found.append(
            f"top-1 {metrics.top1:.2f} on {metrics.images} images is not clearly above chance "
            f"({100 / num_classes:.2f}): {cure}"
        )
    k = 1 if head is None else head.weight.shape[1]
    rank = metrics.effective_rank
    if head is not None and rank is not None and rank < NEAR_ONE < k and metrics.images >= ENOUGH * num_classes:
        is_set = head.batch_norm is not None and not head.normalize
        cure = "more epochs" if is_set else "head.standardize=true head.normalize=false head.gamma=auto"
        found.append(
            f"classes use {rank:.1f} of their {k} directions on average, little more than a vector would: try {cure}, "
            "or a smaller head.k"
        )
    return found


def is_chance(metrics: Metrics, num_classes: int) -> bool:
    """Whether the accuracy is at most two standard deviations above chance, 1/C."""
    if num_classes < 2:
        return False
    guess = 1 / num_classes
    return metrics.top1 / 100 <= guess + DEVIATIONS * math.sqrt(guess * (1 - guess) / metrics.images)
