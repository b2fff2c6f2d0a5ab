"""Outlier scores while a model looks at images anyway, and the threshold above which an image is taken for an outlier.

The threshold is chosen on validation images, so that a stated share of these is above it: how many images of no known
class are above it, nobody knows before they are tried.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from grassy.heads import GrassmannHead, Head, heads_of

#: The share of the validation images that the threshold flags.
RATE = 0.05
#: With fewer images there is no telling what one in twenty of them is.
FEWEST = round(1 / RATE)
#: A head of more classes is not asked twice for an image.
MOST_CLASSES = 100_000


class OutlierScores:
    """Used around forward passes: `with OutlierScores(model) as scores: ...; scores.of_last()` after each of them.

    A model with several heads, a head on a map, or one whose weight is spread over processes has no scores.
    """

    def __init__(self, model: nn.Module) -> None:
        heads = heads_of(model)
        self.head: Head | None = heads[0] if len(heads) == 1 and _is_whole(heads[0]) else None
        self.features: list[Tensor] = []
        self.hook: Any = None

    def __enter__(self) -> "OutlierScores":
        if self.head is not None:
            # What reaches the head differs from model to model, in name and in place; a hook sees it in all of them.
            self.hook = self.head.register_forward_pre_hook(self._keep)
        return self

    def __exit__(self, *_: object) -> None:
        if self.hook is not None:
            self.hook.remove()

    def _keep(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.features.append(inputs[0])

    def of_last(self) -> Tensor | None:
        """Scores (B,) of the images of the last forward pass, or None if there are none."""
        features, self.features = self.features, []
        if self.head is None or len(features) != 1 or any(size != 1 for size in features[0].shape[1:-1]):
            return None
        return self.head.outlier_score(features[0]).flatten()


def threshold_of(scores: Sequence[float]) -> float | None:
    """The score that at most `RATE` of the images are above; None if there are too few images to say."""
    if len(scores) < FEWEST or not np.isfinite(scores).all():
        return None
    return float(np.quantile(np.asarray(scores), 1 - RATE, method="higher"))


def can_be_exported(model: nn.Module) -> bool:
    """Whether ONNX has the operations of the scores: those of an ordinary weight solve an eigenvalue problem."""
    head = OutlierScores(model).head
    return head is not None and not (isinstance(head, GrassmannHead) and not head.subspace_names)


def _is_whole(head: Head) -> bool:
    weight = getattr(head, "weight", None)
    sharded = getattr(head, "is_sharded", False)
    return type(weight) is torch.nn.Parameter and not sharded and head.num_classes <= MOST_CLASSES
