"""Criteria: losses of logits and a target. Create them by name, and tell what a given one computes.

The names are those of the paper's Section 5.2: softmax cross-entropy, with or without label smoothing, and sigmoid BCE.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grassy.mixed_labels import MixedLabels, is_soft
from grassy.spelling import nearest

#: A loss of logits (..., C) and a target, such as `torch.nn.functional.cross_entropy`.
Criterion = Callable[[Tensor, Tensor], Tensor]


class BinaryCrossEntropy(nn.Module):
    """Sigmoid cross-entropy of each class against all others (Beyer et al. 2020), averaged over the batch.

    The target holds class indices (B,) or probabilities (B, C).

    Args:
        reduction: Reduction over the classes. "sum" has gradients of the size of softmax cross-entropy. "mean" is what
            timm and the RSB recipes use.
        ignore_index: Labels with this value do not count, as in `nn.CrossEntropyLoss`.

    Raises:
        ValueError: If `reduction` is unknown.
    """

    def __init__(self, reduction: Literal["sum", "mean"] = "sum", ignore_index: int = -100) -> None:
        super().__init__()
        if reduction not in ("sum", "mean"):
            raise ValueError(f"reduction must be 'sum' or 'mean', got {reduction!r}")
        self.reduction, self.ignore_index = reduction, ignore_index

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        if target.is_floating_point():
            losses = F.binary_cross_entropy_with_logits(logits, target.to(logits.dtype), reduction="none")
            counted = losses.new_ones(losses.shape[:-1])
        else:
            target = target.long()
            valid = target != self.ignore_index
            one_hot = F.one_hot(target.where(valid, 0), logits.shape[-1]).to(logits.dtype)
            losses = F.binary_cross_entropy_with_logits(logits, one_hot, reduction="none")
            counted = valid.to(losses.dtype)
        each = losses.sum(-1) if self.reduction == "sum" else losses.mean(-1)
        return (each * counted).sum() / counted.sum()


def _label_smoothing(smoothing: float = 0.1, **options: Any) -> nn.Module:
    return nn.CrossEntropyLoss(label_smoothing=smoothing, **options)


CRITERIA: dict[str, Callable[..., nn.Module]] = {
    "cross-entropy": nn.CrossEntropyLoss,
    "label-smoothing": _label_smoothing,
    "bce": BinaryCrossEntropy,
}


def create_criterion(name: str, **options: Any) -> nn.Module:
    """Create a criterion by name.

    Args:
        name: "cross-entropy", "label-smoothing" (0.1 by default) or "bce".
        **options: Options of the criterion, such as `smoothing=0.2` or `ignore_index=255`.

    Returns:
        A module that maps logits (B, C) and a target to a scalar loss.

    Raises:
        ValueError: If the criterion is unknown.

    Examples:
        >>> import grassy
        >>> grassy.create_criterion("label-smoothing", smoothing=0.2).label_smoothing
        0.2
    """
    if name not in CRITERIA:
        raise ValueError(f"unknown criterion {name!r}{nearest(name, CRITERIA)}; known: {', '.join(sorted(CRITERIA))}")
    return CRITERIA[name](**options)


# --- what a criterion computes --------------------------------------------------------------------------------------


def option(criterion: Criterion | None, name: str, default: Any) -> Any:
    """Return an option of a criterion: an attribute, or a keyword of a functools.partial."""
    return getattr(criterion, name, getattr(criterion, "keywords", {}).get(name, default))


def ignored_label(criterion: Criterion | None) -> Any:
    """Return the label that does not count, -100 unless the criterion has another one."""
    return option(criterion, "ignore_index", -100)


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


def shape_of_losses(criterion: Criterion, target: Tensor | MixedLabels) -> torch.Size:
    """Return the shape of what a criterion returns: that of the labels without reduction, else a scalar's."""
    if option(criterion, "reduction", None) != "none" or isinstance(target, MixedLabels):
        return torch.Size()
    return target.shape[:-1] if target.is_floating_point() else target.shape


def is_binary_cross_entropy(criterion: Criterion) -> bool:
    """Whether a criterion of grassy, torch or timm applies a sigmoid to the logits."""
    names = {cls.__name__ for cls in type(criterion).__mro__} | {getattr(criterion, "__name__", "")}
    return bool(names & {"BinaryCrossEntropy", "BCEWithLogitsLoss", "binary_cross_entropy_with_logits"})


def with_classes_last(criterion: Criterion, logits: Tensor, target: Tensor) -> Tensor:
    """Apply a criterion to logits (..., C) against labels (...) or probabilities (..., C).

    torch's cross-entropy expects the classes in dimension 1, and timm's criteria accept (B, C) only. Both get flattened
    logits, one row per label. Other criteria get the logits unchanged.
    """
    function = criterion.func if isinstance(criterion, functools.partial) else criterion
    cross_entropy = function is nn.functional.cross_entropy or isinstance(function, nn.CrossEntropyLoss)
    if logits.ndim < 3 or not (cross_entropy or type(function).__module__.startswith("timm.loss")):
        return criterion(logits, target)
    soft = target.is_floating_point()
    expected = logits.shape if soft else logits.shape[:-1]
    if target.shape != expected:
        raise ValueError(
            f"target must have shape {tuple(expected)} for logits {tuple(logits.shape)} with the classes last, got "
            f"{tuple(target.shape)}"
        )
    loss = criterion(logits.flatten(0, -2), target.flatten(0, -2) if soft else target.flatten())
    return loss.reshape(logits.shape[:-1]) if loss.ndim else loss
