"""What to say at the end of a run whose figures show that something is off, and what to try."""

import math

from grassy.heads import GrassmannHead
from grassy.inference.evaluate import Metrics

#: Of a mean effective rank below this, a vector would do nearly as well as a subspace.
NEAR_ONE = 1.5
#: With fewer validation images per class, the effective rank is that of the images rather than of the class.
ENOUGH = 5
#: Standard deviations that a number of right guesses may lie above its mean.
DEVIATIONS = 2.0


def what_is_off(metrics: Metrics, num_classes: int, head: GrassmannHead | None) -> list[str]:
    """One sentence for each thing that is off. head: the Grassmann head of the model, if it has one."""
    found = []
    if is_chance(metrics, num_classes):
        found.append(
            f"top-1 {metrics.top1:.2f} is what guessing among {num_classes} classes gives: see whether the folders "
            "hold what their names say, then try a tenth of lr, or more epochs"
        )
    k = 1 if head is None else head.weight.shape[1]
    rank = metrics.effective_rank
    if rank is not None and rank < NEAR_ONE and k > 1 and metrics.images >= ENOUGH * num_classes:
        found.append(
            f"classes use {rank:.1f} of their {k} directions in the mean, little more than a vector would: try "
            "head.standardize=true head.normalize=false head.gamma=auto, or a smaller head.k"
        )
    return found


def is_chance(metrics: Metrics, num_classes: int) -> bool:
    """Whether the accuracy is one that guessing has, too: at most two standard deviations above 1/C."""
    if num_classes < 2:
        return False
    guess = 1 / num_classes
    return metrics.top1 / 100 <= guess + DEVIATIONS * math.sqrt(guess * (1 - guess) / metrics.images)
