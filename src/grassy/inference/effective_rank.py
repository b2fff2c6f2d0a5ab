"""Effective rank: how many directions of its subspace a class uses, accumulated during a forward pass.

Shapes: B batch, C classes, K subspace dimension, N feature dimension.
"""

import torch
from torch import Tensor, nn

from grassy.analysis.spectrum import effective_rank_of_moments
from grassy.distributed import processes
from grassy.heads import GrassmannHead, heads_of
from grassy.heads.base import evaluating
from grassy.inference.layer_inputs import LayerInputs
from grassy.kernels import unit
from grassy.shards import is_dtensor

#: Features per chunk. Each feature needs a copy of its class's basis, so this bounds the memory.
ROWS = 64


class SubspaceUse(LayerInputs):
    """Sums of t tᵀ (C, K, K) over the samples of each class, with t = W_c x̂ the coordinates in the class's subspace.

    Usage: `with SubspaceUse(model) as use:`, then `use.add(labels)` after each forward pass. The features
    that reach the Grassmann head are prepared as the head does, with its standardisation. A model without such a head,
    or with a head on feature maps, has no effective rank.
    """

    def __init__(self, model: nn.Module) -> None:
        found = [head for head in heads_of(model) if isinstance(head, GrassmannHead) and head.subspace_names]
        # With a sharded weight, a process lacks most bases of the classes that it sees.
        self.head = found[0] if found and not is_dtensor(found[0].weight) else None
        super().__init__([] if self.head is None else [self.head])
        self.moments: Tensor | None = None
        if self.head is not None:
            classes, k, _ = self.head.weight.shape
            self.moments = torch.zeros(classes, k, k, dtype=torch.float64, device=self.head.weight.device)

    @torch.no_grad()
    def add(self, labels: Tensor) -> None:
        """Add the features of the last forward pass. A negative label marks an image that could not be read."""
        taken = self.take()
        if self.head is None or self.moments is None or not taken or taken[-1][1].ndim != 2:
            return
        features = taken[-1][1]
        read = labels >= 0
        with evaluating(self.head):
            directions = unit(self.head.prepare(features[read])).to(self.head.weight.dtype)
        for x, own in zip(directions.split(ROWS), labels[read].split(ROWS), strict=True):
            coordinates = (self.head.weight[own].double() @ x.double().unsqueeze(-1)).squeeze(-1)  # (B, K)
            self.moments.index_add_(0, own, coordinates.unsqueeze(-1) * coordinates.unsqueeze(-2))

    def effective_rank(self, own_batches: bool = False) -> float | None:
        """Mean effective rank over the classes with images, as `analysis.class_effective_ranks` defines it.

        own_batches: each process has seen its own images; the mean covers all of them. None if there is nothing to
        measure.
        """
        if self.moments is None:
            return None
        moments = processes.summed(self.moments) if own_batches else self.moments
        if not bool(moments.isfinite().all()):  # the model has diverged, which the loss reports
            return None
        ranks = effective_rank_of_moments(moments.cpu())
        ranks = ranks[ranks > 0]  # classes with images
        return float(ranks.mean()) if len(ranks) else None
