"""Which criteria are a softmax cross-entropy, that a head can compute without its logits."""

import functools
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from grassy.heads.request import Criterion


def cross_entropy_options(criterion: Criterion, target: Tensor) -> dict[str, Any] | None:
    """The label_smoothing, ignore_index and reduction that make a cross-entropy this criterion; None if there are none.

    The target tells for timm's criteria, one of which is for labels and one for probabilities.
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
        if type(criterion).__name__ == "LabelSmoothingCrossEntropy" and not target.is_floating_point():
            options = {"label_smoothing": criterion.smoothing}  # type: ignore[attr-defined]
        elif type(criterion).__name__ == "SoftTargetCrossEntropy" and target.is_floating_point():
            options = {}
    return options if options is not None and options.keys() <= set(names) else None


def one_loss(options: dict[str, Any] | None) -> bool:
    """Whether such options give one number, which can take the place of logits in a model."""
    return options is not None and options.get("reduction") != "none"
