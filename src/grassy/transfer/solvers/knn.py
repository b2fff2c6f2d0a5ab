"""Nearest neighbours by Euclidean distance with uniform votes, as in scikit-learn's brute-force search.

Shapes: Q queries, B samples, N features, K neighbours.
"""

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor

from grassy.transfer.solvers.folds import Array, as_features, as_labels, as_training_set, row_blocks, stratified_folds
from grassy.transfer.solvers.search import Metric, Search, best, check_search, fold_accuracies

KS = range(1, 50, 2)  # the paper's grid
FOLDS = 5
QUERIES_AT_ONCE = 1024  # queries per tile of distances
DISTANCES_AT_ONCE = 2**24
VOTES_AT_ONCE = 2**22


class KNN:
    """k-nearest-neighbour classifier: the most frequent class among the k nearest samples, on a tie the smallest label.

    `fit` keeps a reference to the features (B, N), without a copy. Distances are computed in tiles, in float64. The
    order of samples at equal distance, up to rounding, is undefined, as in scikit-learn.

    Args:
        k: Number of neighbours.
    """

    classes_: Tensor

    def __init__(self, k: int = 5) -> None:
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        self.k = k

    def fit(self, features: Array, labels: Array) -> Self:
        """Store at least k features (B, N) and their integer labels (B,)."""
        tensor, classes, index = as_training_set(features, labels, least_classes=1)
        self._remember(tensor, classes, index)
        return self

    def predict(self, features: Array) -> Array:
        """Predicted labels (Q,) of features (Q, N); a NumPy array if the features are one."""
        predicted = self._predict(self._checked(features))
        return predicted.cpu().numpy() if isinstance(features, np.ndarray) else predicted

    def score(self, features: Array, labels: Array) -> float:
        """The accuracy on features (Q, N) with labels (Q,)."""
        tensor = self._checked(features)
        expected = as_labels(labels, len(tensor)).to(tensor.device)
        return float((self._predict(tensor) == expected).double().mean())

    def _remember(self, features: Tensor, classes: Tensor, index: Tensor) -> None:
        if self.k > len(features):
            raise ValueError(f"k must be at most the number of samples, {len(features)}, got {self.k}")
        self.features_, self.classes_, self.index_ = features, classes, index

    def _checked(self, features: Array) -> Tensor:
        if not hasattr(self, "features_"):
            raise ValueError("this KNN is not fitted yet, call fit first")
        return as_features(features, self.features_.shape[1])

    def _predict(self, queries: Tensor) -> Tensor:
        nearest = nearest_neighbours(queries, self.features_, self.k)
        votes = vote(self.index_[nearest], [self.k])[0]
        return self.classes_[votes].to(queries.device)


def search_knn(
    features: Array,
    labels: Array,
    ks: Sequence[int] = KS,
    folds: int = FOLDS,
    seed: int = 0,
    *,
    metric: Metric = "top1",
) -> Search[KNN]:
    """Choose the k with the highest accuracy in stratified cross-validation, on a tie the smallest, and fit a KNN.

    All k and folds share one neighbour search, because each sample is a query only for the fold that holds it out.

    Args:
        features: Training features (B, N), tensor or NumPy array.
        labels: Integer labels (B,), with at least `folds` samples per class.
        ks: Values of k to try. None may exceed the number of samples outside a fold.
        folds: Number of folds, equal to those of StratifiedKFold(shuffle=True, random_state=seed).
        seed: Seed of the folds.
        metric: "top1" or "mean_per_class".

    Returns:
        The values tried, their accuracies on each fold, the chosen k and the fitted `KNN`.
    """
    values = tuple(int(k) for k in check_search(ks, "ks", metric))
    if values != tuple(ks):
        raise ValueError(f"ks must be integers, got {tuple(ks)}")
    tensor, classes, index = as_training_set(features, labels)
    held_out = stratified_folds(index, folds, seed)
    smallest = samples_outside_folds(len(index), folds)
    if max(values) > smallest:
        raise ValueError(f"ks must be at most {smallest}, the number of samples outside a fold, got {max(values)}")
    nearest = nearest_neighbours(tensor, tensor, max(values), held_out)
    votes = vote(index[nearest], values)
    accuracies = torch.stack([fold_accuracies(row == index, index, held_out, metric) for row in votes])
    model = KNN(values[best(accuracies)])
    model._remember(tensor, classes, index)
    return Search(values, accuracies, model.k, model)


def samples_outside_folds(samples: int, folds: int = FOLDS) -> int:
    """The number of samples outside the largest stratified fold, which is the largest possible k."""
    return samples - -(-samples // folds)


@torch.no_grad()
def nearest_neighbours(queries: Tensor, samples: Tensor, k: int, group: Tensor | None = None) -> Tensor:
    """Indices (Q, k) of the samples (B, N) nearest to each query (Q, N), nearest first.

    group (B,): the queries are the samples themselves, and samples of the same group are not neighbours.
    """
    center = torch.stack([rows.double().sum(0) for _, rows in row_blocks(samples)]).sum(0) / len(samples)
    distances = torch.full((len(queries), k), torch.inf, dtype=torch.float64, device=samples.device)
    nearest = torch.zeros(len(queries), k, dtype=torch.int64, device=samples.device)
    for start, rows in row_blocks(samples, DISTANCES_AT_ONCE // QUERIES_AT_ONCE):
        block = rows.double() - center  # centred, because a common offset would cost precision
        squares = block.square().sum(-1)
        for first in range(0, len(queries), QUERIES_AT_ONCE):
            chunk = slice(first, first + QUERIES_AT_ONCE)
            query = queries[chunk].to(samples.device).double() - center
            tile = torch.addmm(squares, query, block.mT, alpha=-2)  # the squared distance less ‖query‖²
            if group is not None:
                tile.masked_fill_(group[chunk, None] == group[start : start + len(rows)], torch.inf)
            near, at = tile.topk(min(k, len(rows)), largest=False, sorted=False)
            near, at = torch.cat([distances[chunk], near], 1), torch.cat([nearest[chunk], at + start], 1)
            distances[chunk], order = near.topk(k, largest=False)
            nearest[chunk] = at.gather(1, order)
    return nearest


def vote(neighbours: Tensor, ks: Sequence[int]) -> Tensor:
    """The most frequent class (len(ks), Q) among the first k neighbours (Q, K), given as class indices.

    The smallest index wins a tie. The cost is K² per query, independent of the number of classes.
    """
    classes = int(neighbours.max()) + 1
    wanted = torch.tensor(ks, device=neighbours.device) - 1
    winners = []
    for labels in neighbours.split(max(1, VOTES_AT_ONCE // neighbours.shape[1] ** 2)):
        same = labels[:, :, None] == labels[:, None, :]
        votes = same.cumsum(1)[:, wanted]  # (q, len(ks), K): for the class of each neighbour, among the first k
        winners.append(-(votes * classes - labels[:, None, :]).amax(-1) % classes)
    return torch.cat(winners).mT
