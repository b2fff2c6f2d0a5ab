"""A random share of the classes for one update, and gradients of those classes alone.

A class takes part in an update if it is the label of a feature of any process, or if a hash of seed, update and class
is small. So the draw does not depend on how many processes there are, and nothing has to be sent for it.

A gradient of some classes of a parameter cannot be its `grad`: a dense one would have all classes, and a DTensor has no
sparse ones. It is kept beside, as what `add_gradient` has added since the last step, and the optimizer takes it.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from grassy.shards import Shard

_MASK = 2**32 - 1


class Sampling(NamedTuple):
    """How classes are drawn. rate: the share of those without a feature. update: the number of the update, a tensor.

    correct: let each class that was drawn stand for 1/rate of them in the sum of exponentials.
    parameter: what gets the gradient.
    """

    rate: float
    seed: int
    update: Tensor
    correct: bool
    parameter: Tensor


class ClassSample(NamedTuple):
    """The places (S,) in the shard of the classes that take part, first those that are labels, `positives` of them."""

    places: Tensor
    positives: int


def drawn(labels: Tensor, shard: Shard, sampling: Sampling) -> ClassSample:
    """The classes of this process that take part in an update with such labels (B,) of all processes."""
    here = labels[(labels >= shard.offset) & (labels < shard.stop)] - shard.offset
    classes = torch.arange(shard.offset, shard.stop, device=labels.device)
    negatives = hashed(classes, sampling.seed, sampling.update) < int(sampling.rate * 2**32)
    negatives[here] = False
    positives = here.unique()
    return ClassSample(torch.cat([positives, negatives.nonzero().flatten()]), len(positives))


def places_of(labels: Tensor, shard: Shard, sample: ClassSample) -> Tensor:
    """Where the labels (B,) are in the sample, -1 for those of other processes."""
    inverse = torch.full((shard.stop - shard.offset + 1,), -1, device=labels.device)
    inverse[sample.places] = torch.arange(len(sample.places), device=labels.device)
    is_here = (labels >= shard.offset) & (labels < shard.stop)
    return inverse[torch.where(is_here, labels - shard.offset, shard.stop - shard.offset)]


def hashed(classes: Tensor, seed: int, update: Tensor) -> Tensor:
    """A number in [0, 2^32) for each class: murmur3's finalizer of class, update and seed, one after the other."""
    update = update.to(classes.device)
    return _mixed(classes + _mixed(update + _mixed(torch.full_like(update, seed & _MASK))))


def _mixed(x: Tensor) -> Tensor:
    """Wraps around in int64, which leaves the lower 32 bits right."""
    x = (x + 0x9E3779B9) & _MASK
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


class TakeClasses(torch.autograd.Function):
    """Some classes (S, K, N) of a weight, whose gradient is added beside the parameter and is not the weight's."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, index: Tensor, parameter: Any) -> Tensor:
        ctx.save_for_backward(index)
        ctx.parameter = parameter[0]  # in a tuple, or autograd would take it for an input
        return weight[index]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        add_gradient(ctx.parameter, index, grad)
        return None, None, None


# --- gradients of some classes -------------------------------------------------------------------------------------


def add_gradient(parameter: Tensor, index: Tensor, values: Tensor) -> None:
    """Add a gradient (S, K, N) of the classes (S,) that this process holds at such places."""
    before = getattr(parameter, "sampled_gradient", None)
    if before is not None:  # of another part of the batch, with other classes
        index, inverse = torch.cat([before[0], index]).unique(return_inverse=True)
        both = torch.cat([before[1], values])
        values = values.new_zeros(len(index), *values.shape[1:]).index_add_(0, inverse, both)
    parameter.sampled_gradient = (index, values)  # type: ignore[attr-defined]


def gradient_of_some(parameter: Tensor) -> tuple[Tensor, Tensor] | None:
    """Places (S,) and gradient (S, K, N) of the classes that have got one, or None if none has."""
    found: tuple[Tensor, Tensor] | None = getattr(parameter, "sampled_gradient", None)
    return found


def forget_gradient(parameter: Tensor) -> None:
    if hasattr(parameter, "sampled_gradient"):
        del parameter.sampled_gradient
