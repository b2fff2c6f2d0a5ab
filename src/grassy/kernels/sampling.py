"""A random sample of the classes for one update, and gradients of those classes only.

A class takes part in an update if it is the label of a feature in any process, or if a hash of seed, update and class
is small. So the draw does not depend on the number of processes and needs no communication.

The gradient of some classes cannot be the `grad` of the parameter: a dense one would have all classes, and DTensor has
no sparse ones. `add_gradient` accumulates it in an attribute of the parameter, from which the optimizer takes it.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from grassy.shards import Shard

_MASK = 2**32 - 1


class Sampling(NamedTuple):
    """How to sample the classes of an update.

    Attributes:
        rate: Fraction of the classes to draw among those that are no label in the batch.
        seed: Seed of the draw.
        update: Number of the update, a tensor.
        correct: Weight each drawn class by 1/rate in the sum of exponentials.
        parameter: The parameter that gets the gradient.
    """

    rate: float
    seed: int
    update: Tensor
    correct: bool
    parameter: Tensor


class ClassSample(NamedTuple):
    """The indices (S,) in the shard of the sampled classes: first the `positives` classes that are labels."""

    places: Tensor
    positives: int


def drawn(labels: Tensor, shard: Shard, sampling: Sampling) -> ClassSample:
    """Return the sampled classes of this process, given the labels (B,) of all processes."""
    here = labels[(labels >= shard.offset) & (labels < shard.stop)] - shard.offset
    classes = torch.arange(shard.offset, shard.stop, device=labels.device)
    negatives = hashed(classes, sampling.seed, sampling.update) < int(sampling.rate * 2**32)
    negatives[here] = False
    positives = here.unique()
    return ClassSample(torch.cat([positives, negatives.nonzero().flatten()]), len(positives))


def places_of(labels: Tensor, shard: Shard, sample: ClassSample) -> Tensor:
    """Return the index of each label (B,) in the sample, or -1 for labels of other processes."""
    inverse = torch.full((shard.stop - shard.offset + 1,), -1, device=labels.device)
    inverse[sample.places] = torch.arange(len(sample.places), device=labels.device)
    is_here = (labels >= shard.offset) & (labels < shard.stop)
    return inverse[torch.where(is_here, labels - shard.offset, shard.stop - shard.offset)]


def hashed(classes: Tensor, seed: int, update: Tensor) -> Tensor:
    """Return a hash in [0, 2^32) for each class: murmur3's finalizer of seed, update and class in turn."""
    update = update.to(classes.device)
    return _mixed(classes + _mixed(update + _mixed(torch.full_like(update, seed & _MASK))))


def _mixed(x: Tensor) -> Tensor:
    """Apply murmur3's finalizer. Overflow in int64 keeps the lower 32 bits correct."""
    x = (x + 0x9E3779B9) & _MASK
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


class TakeClasses(torch.autograd.Function):
    """Select classes (S, K, N) of a weight. The backward calls `add_gradient` and gives the weight no gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, index: Tensor, parameter: Any) -> Tensor:
        ctx.save_for_backward(index)
        ctx.parameter = parameter[0]  # in a tuple, since autograd would treat it as an input
        return weight[index]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        (index,) = ctx.saved_tensors
        add_gradient(ctx.parameter, index, grad)
        return None, None, None


# --- gradients of some classes -------------------------------------------------------------------------------------


def add_gradient(parameter: Tensor, index: Tensor, values: Tensor) -> None:
    """Add a gradient (S, K, N) of the classes with the local indices (S,)."""
    before = getattr(parameter, "sampled_gradient", None)
    if before is not None:  # from another micro-batch, with other classes
        index, inverse = torch.cat([before[0], index]).unique(return_inverse=True)
        both = torch.cat([before[1], values])
        values = values.new_zeros(len(index), *values.shape[1:]).index_add_(0, inverse, both)
    parameter.sampled_gradient = (index, values)  # type: ignore[attr-defined]


def gradient_of_some(parameter: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the local indices (S,) and the gradient (S, K, N) of the sampled classes, or None."""
    found: tuple[Tensor, Tensor] | None = getattr(parameter, "sampled_gradient", None)
    return found


def forget_gradient(parameter: Tensor) -> None:
    if hasattr(parameter, "sampled_gradient"):
        del parameter.sampled_gradient
