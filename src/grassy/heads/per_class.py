"""Heads with one row of parameters per class, so that the classes can be sharded over processes."""

from typing import Any

import torch
from torch import Tensor, nn

from grassy import shards
from grassy.arguments import positive_integer
from grassy.criteria import Criterion, cross_entropy_options, one_loss
from grassy.heads.base import Head, drawn_like_linear, evaluating
from grassy.heads.loss_request import LossRequest
from grassy.kernels import (
    product_dtype,
    sharded_cross_entropy,
    sharded_largest_probability,
    sharded_logits,
    sharded_top,
)
from grassy.kernels.sharded import NO_PROBABILITIES
from grassy.mixed_labels import MixedLabels


class PerClassHead(Head):
    """Base class of heads in which the logit of a class depends only on the feature and that class's parameters.

    A subclass defines `rows` and `class_logits` in place of `logits`, and `draw_classes` if it starts from other values
    than a linear layer. After `grassy.distributed.shard_head` each process holds the parameters of some classes. Then
    all processes must call the head together, each with the same number of features.
    """

    #: Names of the parameters (C, ...) with one row per class.
    class_parameter_names: tuple[str, ...] = ("weight",)
    weight: nn.Parameter
    #: Whether the classes are sharded over processes. The weight alone does not tell: FSDP shards it too, except in a
    #: forward.
    is_sharded = False

    def rows(self, features: Tensor) -> Tensor:
        """Apply what all classes share, such as normalisation or a learnable scale, to features (..., N)."""
        raise NotImplementedError(f"{type(self).__name__} must define rows(features)")

    def class_logits(self, rows: Tensor, target: Tensor | None, *params: Tensor) -> Tensor:
        """Return the logits (..., c) of the c classes in `params`.

        Labels (...) are relative to the first of these classes and may lie outside.
        """
        raise NotImplementedError(f"{type(self).__name__} must define class_logits(rows, target, *params)")

    def draw_classes(self, name: str, first: int, count: int, generator: torch.Generator) -> Tensor:
        """Return initial values (count, ...) of the parameter `name` for the classes from `first` on.

        By default they are vectors (..., N), drawn as those of `nn.Linear`.
        """
        shape = self.get_parameter(name).shape[1:]
        if shape[-1:] != (self.in_features,):
            raise NotImplementedError(f"{type(self).__name__} must define draw_classes(name, first, count, generator)")
        drawn = drawn_like_linear(count * shape[:-1].numel(), self.in_features, generator)
        return drawn.reshape(count, *shape)

    @property
    def shard(self) -> shards.Shard:
        """The range of classes that this process holds."""
        return shards.shard_of(self.weight)

    def class_parameters(self) -> list[Tensor]:
        """The parameters of the classes that this process holds."""
        found = [getattr(self, name) for name in self.class_parameter_names]
        return [shards.local(p) if self.is_sharded else p for p in found if p is not None]

    def logits(self, features: Tensor, target: Tensor | None = None) -> Tensor:
        """Return the logits of all classes. If these are sharded, it gathers the logits, up to a size limit."""
        if not self.is_sharded:
            return self.class_logits(self.rows(features), target, *self.class_parameters())
        return sharded_logits(self._sent(features), target, self.class_logits, self.class_parameters(), self.shard)

    def loss(self, features: Tensor, target: Tensor, criterion: Criterion) -> Tensor:
        """Return the criterion on the logits. Cross-entropy is computed without them if `skips_logits` is set."""
        options = cross_entropy_options(criterion, target) if self.skips_logits else None
        if options is None:
            return super().loss(features, target, criterion)
        return self.cross_entropy(self.prepare(features, target, criterion), target, **options)

    @property
    def skips_logits(self) -> bool:
        """Whether `loss` computes cross-entropy without all logits, which may not fit into memory."""
        return self.is_sharded

    def cross_entropy(self, features: Tensor, target: Tensor | MixedLabels, **options: Any) -> Tensor:
        """Return the cross-entropy of this process's prepared features, with the options of `sharded_cross_entropy`."""
        params, shard = self.class_parameters(), self.shard
        return sharded_cross_entropy(self._sent(features), target, self.class_logits, params, shard, **options)

    def has_own_loss(self) -> bool:
        return self.skips_logits or type(self).loss is not PerClassHead.loss

    def answers_with_loss(self, request: LossRequest) -> bool:
        if type(self).loss is not PerClassHead.loss:
            return super().answers_with_loss(request)
        # A model with several heads may average their logits, so only a single head may return its loss instead.
        same = request.alone and one_loss(cross_entropy_options(request.criterion, request.target))
        return same and self.skips_logits and (self.training or self.is_sharded)

    @torch.no_grad()
    def top(self, features: Tensor, count: int = 5) -> tuple[Tensor, Tensor]:
        """Return the largest logits and their classes, without storing the logits of all classes at once.

        Like `scores`, it applies neither dropout nor margin.

        Args:
            features: Features (..., N).
            count: How many classes to return, at most C.

        Returns:
            Logits (..., count) in descending order and the indices (..., count) of their classes.

        Raises:
            ValueError: If `count` is not between 1 and C.
        """
        count = positive_integer("count", count)
        if count > self.num_classes:
            raise ValueError(f"count must be at most the number of classes, {self.num_classes}, got {count}")
        with evaluating(self):
            rows = self._sent(self.prepare(features))
            return sharded_top(rows, self.class_logits, self.class_parameters(), self.shard, count)

    def outlier_score(self, features: Tensor) -> Tensor:
        if not self.is_sharded:
            return super().outlier_score(features)
        with torch.no_grad(), evaluating(self):
            rows, params = self._sent(self.prepare(features)), self.class_parameters()
            return 1 - sharded_largest_probability(rows, self.class_logits, params, self.shard)

    @property
    def takes_mixed_labels(self) -> bool:  # type: ignore[override]
        return self.is_sharded and self.takes_soft_targets

    def check_target(self, target: Any, criterion: Criterion | None = None) -> None:
        if isinstance(target, MixedLabels):
            super().check_target(target.labels, criterion)
            return
        super().check_target(target, criterion)
        if self.is_sharded and target.is_floating_point():
            raise ValueError(f"{NO_PROBABILITIES}: {type(self).__name__} got a target of shape {tuple(target.shape)}")

    def _sent(self, features: Tensor) -> Tensor:
        """Return rows in the dtype of their matmul, to send no more bytes between processes than needed."""
        rows = self.rows(features)
        return rows.to(product_dtype(rows, self.weight)) if self.is_sharded else rows
