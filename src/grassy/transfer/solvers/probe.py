"""Multinomial logistic regression, as scikit-learn's LogisticRegression has it.

Shapes: B samples, P problems: one a fold, M columns: one a class, or a single one for two classes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from grassy.transfer.solvers.folds import Array
from grassy.transfer.solvers.linear import SCORES_AT_ONCE, LinearClassifier, search_linear
from grassy.transfer.solvers.newton import Loss
from grassy.transfer.solvers.search import Search


class LogisticProbe(LinearClassifier):
    """min ½‖W‖² + C Σ_i −log softmax(W x_i + b)[y_i], the intercept b not regularised.

    Two classes have one vector of weights and the logistic loss. A fit ends when the distance of the objective from its
    minimum is at most `tol` times the objective. Where b is at its minimum for W, to which it is brought, the distance
    is at most ‖gradient‖²/2, which is computed in float64. Missing it in `max_iter` Newton steps warns.

    Features are as for `LinearSVM`.
    """

    penalised = False

    def __init__(self, C: float = 1.0, *, tol: float = 1e-6, max_iter: int = 100, normalize: bool = False) -> None:
        super().__init__(C, tol, max_iter, normalize)

    def _losses(self, index: Tensor, classes: int, held_out: Tensor, folds: int) -> Iterator[Loss]:
        numbers = torch.arange(folds, device=index.device)
        targets = one_hot(index, classes).to(torch.float32)
        for fold in numbers.split(max(1, SCORES_AT_ONCE // targets.numel())):
            counted = (held_out[:, None] != fold).to(torch.float32)
            yield Softmax(targets, counted)


@dataclass(frozen=True)
class Softmax:
    """Σ_i −log softmax(z_i)[y_i], with y as one-hot targets (B, C) and counted (B, P) 0 for samples left out.

    For two classes the scores (B, P, 1) are those of the second class, the first having 0.
    """

    targets: Tensor
    counted: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        classes = self.targets.shape[1]
        return self.counted.shape[1], classes if classes > 2 else 1

    def _full(self, scores: Tensor) -> Tensor:
        return scores if self.targets.shape[1] > 2 else torch.cat([torch.zeros_like(scores), scores], -1)

    def value(self, scores: Tensor) -> Tensor:
        scores = self._full(scores)
        of_target = (scores * self.targets[:, None]).sum(-1)
        return ((scores.logsumexp(-1) - of_target) * self.counted).sum(0, dtype=torch.float64)

    def at(self, scores: Tensor) -> "SoftmaxAt":
        return SoftmaxAt(self._full(scores).softmax(-1), self.targets, self.counted, self.shape[1])

    def select(self, kept: Tensor) -> "Softmax":
        return Softmax(self.targets, self.counted[:, kept])


class SoftmaxAt:
    def __init__(self, probability: Tensor, targets: Tensor, counted: Tensor, columns: int) -> None:
        counts = counted.unsqueeze(-1).to(probability.dtype)
        self.slope = ((probability - targets[:, None]) * counts)[..., -columns:]
        self.probability = probability[..., -columns:]  # (B, P, M)
        self.weighted = self.probability * counts
        self.level = (self.weighted * (1 - self.probability)).mean(0)

    def curve(self, direction: Tensor) -> Tensor:
        return self.weighted * (direction - (self.probability * direction).sum(-1, keepdim=True))


def search_probe(
    features: Array,
    labels: Array,
    Cs: Sequence[float] = (0.1, 1, 10, 100, 1000),
    folds: int = 5,
    seed: int = 0,
    *,
    metric: str = "top1",
    normalize: bool = True,
    tol: float = 1e-6,
) -> Search[LogisticProbe]:
    """The C of the highest accuracy in stratified cross-validation, and the probe with it, fitted to all samples.

    Arguments are those of `search_svm`.
    """

    def make(C: float) -> LogisticProbe:
        return LogisticProbe(C, tol=tol, normalize=normalize)

    return search_linear(make, features, labels, Cs, folds, seed, metric)
