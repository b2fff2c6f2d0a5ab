"""Outlier scores, computed during a model's forward pass, and the threshold above which an image is flagged.

The threshold is a quantile of the scores of validation images. It fixes the share of known images that is flagged, not
the share of images from unknown classes.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from grassy.heads import GrassmannHead, Head, heads_of
from grassy.inference.layer_inputs import LayerInputs

#: The share of the validation images that the threshold flags.
RATE = 0.05
#: The smallest number of images that has such a quantile.
FEWEST = round(1 / RATE)
#: No scores for heads with more classes: a score costs as much as another forward pass of the head.
MOST_CLASSES = 100_000


class OutlierScores(LayerInputs):
    """Collects outlier scores: `with OutlierScores(model) as scores:`, then `scores.of_last()` after each forward pass.

    There are no scores for several heads, for a head on a feature map, or for a weight sharded over processes.
    """

    def __init__(self, model: nn.Module) -> None:
        heads = heads_of(model)
        self.head: Head | None = heads[0] if len(heads) == 1 and _is_whole(heads[0]) else None
        super().__init__([] if self.head is None else [self.head])

    def of_last(self) -> Tensor | None:
        """Scores (B,) of the images of the last forward pass, or None if there are none."""
        features = [features for _, features in self.take()]
        if self.head is None or len(features) != 1 or any(size != 1 for size in features[0].shape[1:-1]):
            return None
        return self.head.outlier_score(features[0]).flatten()


def threshold_of(scores: Sequence[float]) -> float | None:
    """The score that at most `RATE` of the images exceed; None if there are too few images."""
    if len(scores) < FEWEST or not np.isfinite(scores).all():
        return None
    return float(np.quantile(np.asarray(scores), 1 - RATE, method="higher"))


def can_be_exported(model: nn.Module) -> bool:
    """Whether ONNX can compute the scores. A weight that is not orthonormal needs an eigensolver, which ONNX lacks."""
    head = OutlierScores(model).head
    return head is not None and not (isinstance(head, GrassmannHead) and not head.subspace_names)


def _is_whole(head: Head) -> bool:
    weight = getattr(head, "weight", None)
    sharded = getattr(head, "is_sharded", False)
    return type(weight) is torch.nn.Parameter and not sharded and head.num_classes <= MOST_CLASSES
