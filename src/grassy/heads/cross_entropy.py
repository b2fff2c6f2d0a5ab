"""Recognise criteria that are a softmax cross-entropy, which a head can compute without storing its logits."""

import functools
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from grassy.heads.request import Criterion
from grassy.mixed_labels import MixedLabels, is_soft


def cross_entropy_options(criterion: Criterion, target: Tensor | MixedLabels) -> dict[str, Any] | None:
    """Return the label_smoothing, ignore_index and reduction of a criterion that is a cross-entropy, or None.

    timm has one criterion for labels and one for probabilities, so the result depends on the target too.
    """
    options: dict[str, Any] | None = None
    names = ("label_smoothing", "ignore_index", "reduction")
    if criterion is F.cross_entropy:
        options = {}
    elif isinstance(criterion, functools.partial) and criterion.func is F.cross_entropy:
        options = None if criterion.args else dict(criterion.keywords)
    elif type(criterion) is nn.CrossEntropyLoss and criterion.weight is None:
        options = {name: getattr(criterion, name) for name in names}
    elif type(criterion).__module__.startswith("timm.loss"):
        if type(criterion).__name__ == "LabelSmoothingCrossEntropy" and not is_soft(target):
            options = {"label_smoothing": criterion.smoothing}  # type: ignore[attr-defined]
        elif type(criterion).__name__ == "SoftTargetCrossEntropy" and is_soft(target):
            options = {}
    return options if options is not None and options.keys() <= set(names) else None


def one_loss(options: dict[str, Any] | None) -> bool:
    """Whether the cross-entropy with these options is a scalar, which a model can return in place of logits."""
    return options is not None and options.get("reduction") != "none"
