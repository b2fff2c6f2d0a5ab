"""The training loss of a whole model, which passes the target to the head inside the model's forward."""

import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grassy.criteria import (
    Criterion,
    create_criterion,
    cross_entropy_options,
    ignored_label,
    is_binary_cross_entropy,
    one_loss,
    shape_of_losses,
    with_classes_last,
)
from grassy.heads import Head, HeadOnMap, LossRequest, heads_of
from grassy.heads.loss_request import (
    check_that_compiled_heads_are_not_recomputed,
    delivered,
    is_compiled,
    keep_for_recomputation,
)
from grassy.mixed_labels import MixedLabels


def classification_loss(
    model: nn.Module, inputs: Any, target: Tensor | MixedLabels, criterion: Criterion | str | None = None
) -> Tensor:
    """Compute the training loss of a model with any head.

    It calls the model once and passes the target to heads that use it: margin heads and heads with a loss of their own.
    For all other heads the result is `criterion(model(inputs), target)`. The model may be wrapped in DDP, FSDP or
    `torch.compile`.

    A head puts the classes into the last dimension of its logits: for logits (B, T, C) the loss covers all T tokens.
    The classes are dimension 1 in a model without a head, and where the head replaces a 1x1 convolution.

    Args:
        model: The model, in training or evaluation mode.
        inputs: The argument of the model. A mapping, as returned by a Hugging Face processor, is passed as
            `model(**inputs)`, without the key "labels".
        target: Class indices (B,), or (B, T) for T tokens. Or probabilities (B, C), as produced by mixup, if head and
            criterion accept them. Or `MixedLabels`, which become probabilities unless the classes are sharded or
            sampled.
        criterion: A callable `criterion(logits, target)` or a name for `create_criterion`. None means cross-entropy.

    Returns:
        The loss, usually a scalar.

    Raises:
        TypeError: If `target` is not a tensor, or the output of the model holds no logits.
        ValueError: If the target does not fit the head, such as a label out of range.

    Examples:
        >>> import torch, grassy
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        >>> head = grassy.replace_head(model, "arcface")
        >>> loss = grassy.classification_loss(model, torch.randn(8, 32), torch.randint(10, (8,)))
        >>> loss.backward()
    """
    if criterion is None:
        criterion = F.cross_entropy
    elif isinstance(criterion, str):
        criterion = create_criterion(criterion)
    heads = heads_of(model)
    if isinstance(target, MixedLabels) and not _takes(heads, target, criterion):
        if not heads:
            raise TypeError("target must be a tensor for a model without a grassy head, got MixedLabels")
        target = _probabilities(target, heads, criterion)
    if not isinstance(target, Tensor | MixedLabels):
        raise TypeError(f"target must be a tensor of class indices or probabilities, got {type(target).__name__}")
    for head in heads:
        head.check_target(target, criterion)  # type: ignore[arg-type]  # mixed labels only to heads that take them
        if head.logits_are_nonnegative and is_binary_cross_entropy(criterion):
            warnings.warn(
                f"the logits of {type(head).__name__} are never negative, and their sigmoid never below 0.5: train it "
                "with softmax cross-entropy",
                stacklevel=2,
            )
    request = LossRequest(target, criterion, alone=len(heads) == 1, with_gradient=torch.is_grad_enabled())
    needing = [head for head in heads if head.needs(request)]
    if needing and isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
        raise ValueError(
            f"{type(needing[0]).__name__} needs the target, which nn.DataParallel does not split over its devices: "
            "use DistributedDataParallel"
        )
    compiled = not torch.compiler.is_compiling() and any(is_compiled(module) for module in model.modules())
    with delivered([head.inbox for head in heads], request, take_turns=compiled):
        if isinstance(inputs, Mapping):  # with labels, a Hugging Face model would compute its own loss
            outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        else:
            outputs = model(inputs)
        without_gradient = [head for head in needing if head.inbox.compiled_without_gradient] if compiled else []
    results = _tensors(outputs, len(heads))
    if answering := [head for head in heads if head.answers_with_loss(request)]:
        # The model may have flattened the loss as if it were logits.
        shape = shape_of_losses(criterion, target)
        losses = [
            loss.reshape(shape) if loss.numel() == shape.numel() else _refuse(loss, answering) for loss in results
        ]
    else:
        apply = with_classes_last if _classes_are_last(model, heads, results) else _as_it_is
        assert isinstance(target, Tensor)
        losses = [apply(criterion, logits, target) for logits in results]
    loss = sum(losses[1:], start=losses[0]) / len(losses)
    if needing and not torch.compiler.is_compiling():
        check_that_compiled_heads_are_not_recomputed(without_gradient, loss)
        keep_for_recomputation(needing, request, loss)
    return loss


def _takes(heads: list[Head], target: MixedLabels, criterion: Criterion) -> bool:
    """Whether the only head of a model computes this loss from mixed labels."""
    if len(heads) != 1 or not heads[0].takes_mixed_labels:
        return False
    return one_loss(cross_entropy_options(criterion, target))


def _probabilities(target: MixedLabels, heads: list[Head], criterion: Criterion) -> Tensor:
    """Return mixed labels as probabilities (..., C), in which every row counts."""
    ignore_index = ignored_label(criterion)
    for head in heads:
        head.check_target(target.labels, criterion)
    on_cpu = target.labels.device.type == "cpu" and not torch.compiler.is_compiling()  # a GPU would have to wait
    if on_cpu and not bool(target.counted(ignore_index).all()):
        raise ValueError(
            f"rows of MixedLabels in which all labels are to be ignored ({ignore_index}) need a sharded or sampled "
            "head and cross-entropy: leave such rows out"
        )
    return target.dense(heads[0].num_classes, ignore_index)


def _tensors(outputs: Any, heads: int) -> list[Tensor]:
    """Return the logits or losses in a model's output: one, or one per head, as in training a distilled model."""
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
        "a tuple with one tensor per head"
    )


def _classes_are_last(model: nn.Module, heads: list[Head], results: list[Tensor]) -> bool:
    """Whether the logits of a model have the classes in their last dimension, as heads return them.

    They do not in a model without heads, on a feature map, and where the model has moved the dimension.
    """
    if not heads or not all(logits.shape[-1:] == (heads[0].num_classes,) for logits in results):
        return False
    several_axes = any(logits.ndim > 2 for logits in results)
    return not (several_axes and any(isinstance(module, HeadOnMap) for module in model.modules()))


def _as_it_is(criterion: Criterion, logits: Tensor, target: Tensor) -> Tensor:
    return criterion(logits, target)


def _refuse(loss: Tensor, heads: list[Head]) -> NoReturn:
    names = ", ".join(sorted({type(head).__name__ for head in heads}))
    raise TypeError(f"{names} computes its loss itself, but the model reshaped it to {tuple(loss.shape)}")
