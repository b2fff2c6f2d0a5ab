"""The training loss of a whole model, with the target handed to the head inside the model's forward."""

import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grassy.criteria import create_criterion, is_binary_cross_entropy
from grassy.heads import Criterion, Head, HeadOnMap, LossRequest
from grassy.heads.base import with_classes_last
from grassy.heads.request import delivered, keep_for_recomputation


def classification_loss(
    model: nn.Module, inputs: Any, target: Tensor, criterion: Criterion | str | None = None
) -> Tensor:
    """The loss of `model(inputs)` against `target`, for any head; criterion is cross-entropy unless given.

    The model, wrapped in DDP or torch.compile or not, is called once: `model(inputs)`, or `model(**inputs)` if
    inputs is a mapping, as a Hugging Face processor gives. Heads that use the target (margin heads, or those with a
    loss of their own) get it there. For all others the result is `criterion(model(inputs), target)`.

    The classes of a head are the last axis of its logits: the loss of logits (B, T, C) is that of all T tokens. They
    are the second axis where the head replaces a 1x1 convolution, as they were before, and in models without a head.

    target: class indices (B,), or (B, T) of T tokens each, or probabilities (B, C) as mixup gives, for criteria and
        heads that take them.
    """
    if criterion is None:
        criterion = F.cross_entropy
    elif isinstance(criterion, str):
        criterion = create_criterion(criterion)
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a tensor of class indices or probabilities, got {type(target).__name__}")
    heads = [module for module in model.modules() if isinstance(module, Head)]
    for head in heads:
        head.check_target(target, criterion)
        if head.logits_are_nonnegative and is_binary_cross_entropy(criterion):
            warnings.warn(
                f"the logits of {type(head).__name__} are never negative, and their sigmoid never below 0.5: train it "
                "with softmax cross-entropy",
                stacklevel=2,
            )
    request = LossRequest(target, criterion, alone=len(heads) == 1)
    needing = [head for head in heads if head.needs(request)]
    if needing and isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
        raise ValueError(
            f"{type(needing[0]).__name__} needs the target, which nn.DataParallel does not divide among its devices: "
            "use DistributedDataParallel"
        )
    with delivered([head.inbox for head in heads], request):
        if isinstance(inputs, Mapping):  # labels among them would make a Hugging Face model compute its own loss
            outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        else:
            outputs = model(inputs)
    results = _tensors(outputs, len(heads))
    if answering := [head for head in heads if head.answers_with_loss(request)]:
        # A model may flatten what it takes for logits.
        losses = [loss.reshape(()) if loss.numel() == 1 else _refuse(loss, answering) for loss in results]
    else:
        apply = with_classes_last if _classes_are_last(model, heads, results) else _as_it_is
        losses = [apply(criterion, logits, target) for logits in results]
    loss = sum(losses[1:], start=losses[0]) / len(losses)
    if needing and not torch.compiler.is_compiling():
        keep_for_recomputation(needing, request, loss)
    return loss


def _tensors(outputs: Any, heads: int) -> list[Tensor]:
    """The logits, or losses, of a model's output: one; or one a head, as a distilled model gives in training."""
    if isinstance(outputs, Tensor):
        return [outputs]
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if isinstance(logits, Tensor):  # Hugging Face, torchvision's Inception and GoogLeNet
        return [logits]
    one_a_head = isinstance(outputs, tuple | list) and len(outputs) == max(1, heads)
    if one_a_head and all(isinstance(output, Tensor) for output in outputs):
        return list(outputs)
    kind = type(outputs).__name__
    size = f" of length {len(outputs)}" if isinstance(outputs, tuple | list) else ""
    raise TypeError(
        f"cannot find logits in the model's output, a {kind}{size}: it must be a tensor, have a field 'logits', or be "
        "a tuple with one tensor a head"
    )


def _classes_are_last(model: nn.Module, heads: list[Head], results: list[Tensor]) -> bool:
    """Whether the logits of a model have the classes on their last axis, as heads give them.

    They do not in a model without heads, on a map, and where the model has moved them: the last axis tells.
    """
    if not heads or any(isinstance(module, HeadOnMap) for module in model.modules()):
        return False
    return all(logits.shape[-1:] == (heads[0].num_classes,) for logits in results)


def _as_it_is(criterion: Criterion, logits: Tensor, target: Tensor) -> Tensor:
    return criterion(logits, target)


def _refuse(loss: Tensor, heads: list[Head]) -> NoReturn:
    names = ", ".join(sorted({type(head).__name__ for head in heads}))
    raise TypeError(f"{names} computes its loss itself, but the model made a tensor {tuple(loss.shape)} of it")
