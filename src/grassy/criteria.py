"""The criteria of the paper's Section 5.2 by name: softmax cross-entropy, with label smoothing, and sigmoid BCE."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from grassy.spelling import nearest


class BinaryCrossEntropy(nn.Module):
    """Sigmoid cross-entropy of each class against all others (Beyer et al. 2020), for indices or soft targets.

    reduction: over classes, "sum", whose gradients are of the size of softmax cross-entropy's, or "mean", as timm and
        the RSB recipes have it. The mean is taken over the batch.
    ignore_index: labels of this value do not count, as in `nn.CrossEntropyLoss`.
    """

    def __init__(self, reduction: str = "sum", ignore_index: int = -100) -> None:
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
    """The criterion registered under `name`: "cross-entropy", "label-smoothing" (0.1) or "bce"."""
    if name not in CRITERIA:
        raise ValueError(f"unknown criterion {name!r}{nearest(name, CRITERIA)}; known: {', '.join(sorted(CRITERIA))}")
    return CRITERIA[name](**options)


def is_binary_cross_entropy(criterion: Callable[..., Tensor]) -> bool:
    """Whether a criterion puts logits through a sigmoid: grassy's, torch's or timm's."""
    names = {cls.__name__ for cls in type(criterion).__mro__} | {getattr(criterion, "__name__", "")}
    return bool(names & {"BinaryCrossEntropy", "BCEWithLogitsLoss", "binary_cross_entropy_with_logits"})
