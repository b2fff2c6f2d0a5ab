"""Heads whose parameters have one row for each class, so that the classes can be divided over processes."""

from typing import Any

import torch
from torch import Tensor, nn

from grassy import shards
from grassy.heads.base import Head, positive_integer
from grassy.heads.cross_entropy import cross_entropy_options, one_loss
from grassy.heads.request import Criterion, LossRequest
from grassy.kernels import (
    product_dtype,
    sharded_cross_entropy,
    sharded_largest_probability,
    sharded_logits,
    sharded_top,
)


class PerClassHead(Head):
    """Logits of which that of a class depends on the feature and on the parameters of that class alone.

    A new head of this kind defines `rows`, `class_logits` and `draw_classes` in place of `logits`. After
    `grassy.distributed.shard_head` each process holds the parameters of some classes. Then all processes have to call
    the head together, with equally many features each.
    """

    #: Names of the parameters (C, ...) that have one row for each class.
    class_names: tuple[str, ...] = ("weight",)
    weight: nn.Parameter
    #: Whether this process holds some of the classes only. The weight does not tell: FSDP divides it too, but not in a
    #: forward.
    is_sharded = False

    def rows(self, features: Tensor) -> Tensor:
        """What classes see of features (..., N): (..., N), with parameters that all classes share applied to it."""
        raise NotImplementedError(f"{type(self).__name__} must define rows(features)")

    def class_logits(self, rows: Tensor, target: Tensor | None, *params: Tensor) -> Tensor:
        """Logits (..., c) of c classes; labels (...) are counted from the first of them, and may lie outside."""
        raise NotImplementedError(f"{type(self).__name__} must define class_logits(rows, target, *params)")

    def draw_classes(self, name: str, first: int, count: int, generator: torch.Generator) -> Tensor:
        """Random values (count, ...) to start the parameter `name` of the classes from `first` on with."""
        raise NotImplementedError(f"{type(self).__name__} must define draw_classes(name, first, count, generator)")

    @property
    def shard(self) -> shards.Shard:
        """Which classes this process holds."""
        return shards.shard_of(self.weight)

    def class_parameters(self) -> list[Tensor]:
        """The parameters of the classes that this process holds."""
        found = [getattr(self, name) for name in self.class_names]
        return [shards.local(p) if self.is_sharded else p for p in found if p is not None]

    def logits(self, features: Tensor, target: Tensor | None = None) -> Tensor:
        """If the classes are divided over processes, the logits of all of them are gathered, up to a limit."""
        if not self.is_sharded:
            return self.class_logits(self.rows(features), target, *self.class_parameters())
        return sharded_logits(self._sent(features), target, self.class_logits, self.class_parameters(), self.shard)

    def loss(self, features: Tensor, target: Tensor, criterion: Criterion) -> Tensor:
        """The criterion on the logits; cross-entropy of classes that are divided over processes without the logits."""
        options = cross_entropy_options(criterion, target) if self.is_sharded else None
        if options is None:
            return super().loss(features, target, criterion)
        return self.sharded_loss(self.prepare(features, target, criterion), target, **options)

    def sharded_loss(self, features: Tensor, target: Tensor, **options: Any) -> Tensor:
        """The cross-entropy of prepared features of this process; options: those of `sharded_cross_entropy`."""
        params, shard = self.class_parameters(), self.shard
        return sharded_cross_entropy(self._sent(features), target, self.class_logits, params, shard, **options)

    def has_own_loss(self) -> bool:
        return self.is_sharded or type(self).loss is not PerClassHead.loss

    def answers_with_loss(self, request: LossRequest) -> bool:
        # A loss without logits must be that of the logits, which a model may average if it has several heads. In
        # evaluation the logits of sharded classes may be too many to have.
        if type(self).loss is not PerClassHead.loss:
            return super().answers_with_loss(request)
        return self.is_sharded and request.alone and one_loss(cross_entropy_options(request.criterion, request.target))

    @torch.no_grad()
    def top(self, features: Tensor, count: int = 5) -> tuple[Tensor, Tensor]:
        """The largest logits of features (..., N), and the classes that have them: (..., count) each, largest first.

        As `scores`, without dropout or margin, but never with the logits of all classes at once.
        """
        count = positive_integer("count", count)
        if count > self.num_classes:
            raise ValueError(f"count must be at most the number of classes, {self.num_classes}, got {count}")
        with self.evaluating():
            rows = self._sent(self.prepare(features))
            return sharded_top(rows, self.class_logits, self.class_parameters(), self.shard, count)

    def outlier_score(self, features: Tensor) -> Tensor:
        if not self.is_sharded:
            return super().outlier_score(features)
        with torch.no_grad(), self.evaluating():
            rows, params = self._sent(self.prepare(features)), self.class_parameters()
            return 1 - sharded_largest_probability(rows, self.class_logits, params, self.shard)

    def check_target(self, target: Tensor, criterion: Criterion | None = None) -> None:
        super().check_target(target, criterion)
        if self.is_sharded and target.is_floating_point():
            raise ValueError(
                f"a {type(self).__name__} that is divided over processes takes class indices, not probabilities of "
                "shape (B, C): train it without mixup, cutmix and the like"
            )

    def _sent(self, features: Tensor) -> Tensor:
        """Rows in the precision in which they are multiplied, since that is how far they have to travel."""
        rows = self.rows(features)
        return rows.to(product_dtype(rows, self.weight)) if self.is_sharded else rows
