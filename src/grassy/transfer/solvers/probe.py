"""Multinomial logistic regression, as in scikit-learn's LogisticRegression.

Shapes: B samples, P problems (one per fold), M columns (one per class, or a single one for two classes).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from grassy.transfer.solvers.folds import Array
from grassy.transfer.solvers.linear import SCORES_AT_ONCE, LinearClassifier, search_linear
from grassy.transfer.solvers.newton import Loss
from grassy.transfer.solvers.search import Metric, Search


class LogisticProbe(LinearClassifier):
    """Logistic regression: min ½‖W‖² + C Σ_i −log softmax(W x_i + b)[y_i], without regularisation of b.

    Two classes share one weight vector and the logistic loss. A fit ends when the objective is within `tol` (relative)
    of its minimum. With b at its minimum for W, the distance is at most ‖gradient‖²/2, computed in float64. A fit that
    misses `tol` in `max_iter` Newton steps warns.

    Args:
        C: Weight of the loss against the regulariser.
        tol: Largest relative distance of the objective from its minimum.
        max_iter: Largest number of Newton steps.
        normalize: Divide the features by their mean norm; `coef_` applies to the original features.
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
    """Σ_i −log softmax(z_i)[y_i], with y as one-hot targets (B, C). counted (B, P) is 0 for samples left out.

    For two classes the scores (B, P, 1) belong to the second class; the first has score 0.
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
    metric: Metric = "top1",
    normalize: bool = True,
    tol: float = 1e-6,
) -> Search[LogisticProbe]:
    """Choose the C with the highest accuracy in stratified cross-validation, and fit a probe to all samples.

    Args:
        features: Training features (B, N), tensor or NumPy array.
        labels: Integer labels (B,), with at least `folds` samples per class.
        Cs: Values of C to try.
        folds: Number of folds, equal to those of StratifiedKFold(shuffle=True, random_state=seed).
        seed: Seed of the folds.
        metric: "top1" or "mean_per_class".
        normalize: Divide the features by their mean norm over all samples.
        tol: As for `LogisticProbe`.

    Returns:
        The values tried, their accuracies on each fold, the chosen C and the fitted `LogisticProbe`.
    """

    def make(C: float) -> LogisticProbe:
        return LogisticProbe(C, tol=tol, normalize=normalize)

    return search_linear(make, features, labels, Cs, folds, seed, metric)
