"""The training loss of a whole model, with the target handed to the head inside the model's forward."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from grassy.criteria import is_binary_cross_entropy
from grassy.heads import Criterion, Head, LossRequest


def classification_loss(model: nn.Module, inputs: Any, target: Tensor, criterion: Criterion | None = None) -> Tensor:
    """The loss of `model(inputs)` against `target`, for any head; criterion is cross-entropy unless given.

    The model, wrapped in DDP, FSDP or torch.compile or not, is called once: `model(inputs)`, or `model(**inputs)` if
    inputs is a mapping, as a Hugging Face processor gives. Heads that use the target (margin heads, or those with a
    loss of their own) get it there. For all others the result is `criterion(model(inputs), target)`.

    target: class indices (B,), or probabilities (B, C) as mixup gives, for criteria and heads that take them.
    """
    criterion = criterion or F.cross_entropy
    heads = [module for module in model.modules() if isinstance(module, Head)]
    for head in heads:
        head.check_target(target, criterion)
        if head.logits_are_nonnegative and is_binary_cross_entropy(criterion):
            warnings.warn(
                f"the logits of {type(head).__name__} are never negative, and their sigmoid never below 0.5: train it "
                "with softmax cross-entropy",
                stacklevel=2,
            )
    with _requested(heads, LossRequest(target, criterion)):
        outputs = model(**inputs) if hasattr(inputs, "keys") else model(inputs)
    results = _tensors(outputs)
    if any(head.has_own_loss() for head in heads):
        # A model may flatten what it takes for logits.
        losses = [loss.reshape(()) if loss.numel() == 1 else loss for loss in results]
    else:
        losses = [criterion(logits, target) for logits in results]
    return sum(losses[1:], start=losses[0]) / len(losses)


@contextmanager
def _requested(heads: list[Head], request: LossRequest) -> Iterator[None]:
    # On the head itself rather than in a global: two models, or two threads, cannot mix up their targets.
    for head in heads:
        head.loss_request = request
    try:
        yield
    finally:
        for head in heads:
            head.loss_request = None


def _tensors(outputs: Any) -> list[Tensor]:
    """The logits, or losses, of a model's output: two from a distilled model in training, else one."""
    if isinstance(outputs, Tensor):
        return [outputs]
    if isinstance(getattr(outputs, "logits", None), Tensor):  # Hugging Face, torchvision's Inception and GoogLeNet
        return [outputs.logits]
    if isinstance(outputs, tuple | list) and outputs and all(isinstance(output, Tensor) for output in outputs):
        return list(outputs)
    raise TypeError(f"cannot find logits in the model's output of type {type(outputs).__name__}")
