"""Fitting, prediction and the search for C, shared by the linear SVM and logistic regression.

Shapes: B samples, N features, F folds, K columns of weights: one per class, or a single one for two classes.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from grassy.transfer.solvers.design_matrix import Design
from grassy.transfer.solvers.folds import (
    Array,
    as_features,
    as_labels,
    as_training_set,
    mean_norm,
    row_blocks,
    stratified_folds,
)
from grassy.transfer.solvers.newton import Loss, Solver
from grassy.transfer.solvers.search import Search, best, check_search, fold_accuracies

SCORES_AT_ONCE = 2**28  # elements of a (B, P, M) tensor of the solver, which holds about eight of them


class LinearClassifier(ABC):
    """A linear classifier fitted by Newton's method.

    `fit` sets `classes_` (C,), `coef_` (K, N) and `intercept_` (K,), for features as given. For each problem it sets
    `objective_`, `gap_` (a bound on the relative distance from the minimum) and `n_iter_`.
    """

    penalised: bool  # whether the intercept is regularised
    classes_: Tensor
    coef_: Tensor
    intercept_: Tensor
    objective_: Tensor
    gap_: Tensor
    n_iter_: int

    def __init__(self, C: float, tol: float, max_iter: int, normalize: bool) -> None:
        if not C > 0:
            raise ValueError(f"C must be positive, got {C}")
        if not tol > 0:
            raise ValueError(f"tol must be positive, got {tol}")
        if max_iter < 0:
            raise ValueError(f"max_iter must not be negative, got {max_iter}")
        self.C, self.tol, self.max_iter, self.normalize = C, tol, max_iter, normalize

    @abstractmethod
    def _losses(self, index: Tensor, classes: int, held_out: Tensor, folds: int) -> Iterator[Loss]:
        """The losses of all folds, in groups small enough to solve at once, with F·K columns of weights in total.

        A fold's loss ignores the samples that the fold holds out.
        """

    def fit(self, features: Array, labels: Array) -> Self:
        """Fit to features (B, N) and integer labels (B,) of at least two classes."""
        tensor, self.classes_, index = as_training_set(features, labels)
        self._adopt(self._solver(tensor), index, None)
        return self

    def decision_function(self, features: Array) -> Array:
        """Scores (B, C), or (B,) for the second of two classes; a NumPy array if the features are one."""
        return _like(features, self._scores(as_features(features, self._width())))

    def predict(self, features: Array) -> Array:
        """The label (B,) with the highest score; a NumPy array if the features are one."""
        return _like(features, self._predict(as_features(features, self._width())))

    def score(self, features: Array, labels: Array) -> float:
        """The accuracy on features (B, N) with labels (B,)."""
        tensor = as_features(features, self._width())
        return float((self._predict(tensor) == as_labels(labels, len(tensor)).to(tensor.device)).double().mean())

    def _width(self) -> int:
        if not hasattr(self, "coef_"):
            raise ValueError(f"this {type(self).__name__} is not fitted yet, call fit first")
        return self.coef_.shape[1]

    def _scores(self, tensor: Tensor) -> Tensor:
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        coef, intercept = self.coef_.to(tensor.device, dtype), self.intercept_.to(tensor.device, dtype)
        out = torch.cat([torch.addmm(intercept, rows.to(dtype), coef.mT) for _, rows in row_blocks(tensor)])
        return out if len(self.coef_) > 1 else out[:, 0]

    def _predict(self, tensor: Tensor) -> Tensor:
        return self.classes_.to(tensor.device)[_decide(self._scores(tensor))]

    def _solver(self, features: Tensor) -> Solver:
        norm = mean_norm(features)
        if not 1e-30 < norm < (1e30 if self.normalize else 1e12):
            advice = "" if self.normalize else ", or pass normalize=True"
            raise ValueError(f"features have a mean norm of {norm:.0e}, too far from 1 to compute with: scale{advice}")
        scale = norm if self.normalize else 1.0
        return Solver(Design(features, scale), self.penalised, self.tol, self.max_iter)

    def _adopt(self, solver: Solver, index: Tensor, start: Tensor | None, solve: bool = True) -> None:
        """Solve for all samples from start (N + 1, K) and store the result. With solve=False, store start itself."""
        losses = self._losses(index, len(self.classes_), torch.full_like(index, -1), 1)
        found = _solve_path(solver, losses, [self.C], start, solve)[0]
        self.coef_ = (found.weight[:-1] / solver.design.scale).mT.contiguous()
        self.intercept_ = found.weight[-1]
        self.objective_, self.gap_, self.n_iter_ = found.objective, found.gap, found.steps


class Found(NamedTuple):
    """The solution at one C: weights (N + 1, F·K), objectives (P,), relative gaps (P,), steps taken."""

    weight: Tensor
    objective: Tensor
    gap: Tensor
    steps: int


def _solve_path(
    solver: Solver, losses: Iterator[Loss], Cs: Sequence[float], start: Tensor | None = None, solve: bool = True
) -> list[Found]:
    """Solve for one C after the other, each from the previous solution, which saves most Newton steps.

    start (N + 1, F·K): where to start for the first C. With solve=False, only evaluate its objectives and gaps.
    """
    features = solver.design.features
    groups: list[list[Found]] = [[] for _ in Cs]
    first = 0
    for loss in losses:
        shape = (features.shape[1] + 1, *loss.shape)
        after = first + shape[1] * shape[2]
        weight = (
            features.new_zeros(shape, dtype=torch.float64) if start is None else start[:, first:after].reshape(shape)
        )
        first = after
        for group, C in zip(groups, Cs, strict=True):
            weight, value, gap, steps = solver.minimise(loss, C, weight) if solve else solver.evaluate(loss, C, weight)
            group.append(Found(weight.flatten(1), value, gap / value.clamp(min=1e-300), steps))
    path = []
    for C, group in zip(Cs, groups, strict=True):
        weights, values, gaps, steps_taken = zip(*group, strict=True)
        path.append(Found(torch.cat(weights, 1), torch.cat(values), torch.cat(gaps), max(steps_taken)))
        if solve:
            _warn_if_missed(path[-1].gap, solver, C)
    return path


def _warn_if_missed(gap: Tensor, solver: Solver, C: float) -> None:
    missed = int((~(gap <= solver.tol)).sum())
    if missed:
        warnings.warn(
            f"{missed} of {len(gap)} problems at C={C} did not reach tol={solver.tol} in max_iter={solver.max_iter} "
            f"Newton steps; the largest relative gap is {float(gap.max()):.1e}",
            stacklevel=5,
        )


Classifier = TypeVar("Classifier", bound=LinearClassifier)


def search_linear(
    make: Callable[[float], Classifier],
    features: Array,
    labels: Array,
    Cs: Sequence[float],
    folds: int,
    seed: int,
    metric: str,
) -> Search[Classifier]:
    """Solve every fold for every C, with all folds and classes in one batch, and refit all samples with the best C."""
    values = check_search(Cs, "Cs", metric)
    tensor, classes, index = as_training_set(features, labels)
    held_out = stratified_folds(index, folds, seed)
    one = make(values[0])
    solver = one._solver(tensor)
    order = sorted(range(len(values)), key=values.__getitem__)
    losses = one._losses(index, len(classes), held_out, folds)
    weights = [found.weight for found in _solve_path(solver, losses, [values[i] for i in order])]
    accuracies = torch.empty(len(values), folds, dtype=torch.float64)
    for i, weight in zip(order, weights, strict=True):
        correct = _correct_when_held_out(solver.design, weight.unflatten(1, (folds, -1)), index, held_out)
        accuracies[i] = fold_accuracies(correct, index, held_out, metric)
    winner = best(accuracies)
    model = make(values[winner])
    model.classes_ = classes
    model._adopt(solver, index, weights[order.index(winner)].unflatten(1, (folds, -1)).mean(1))
    return Search(values, accuracies, values[winner], model)


def _correct_when_held_out(design: Design, weight: Tensor, index: Tensor, held_out: Tensor) -> Tensor:
    """Which samples (B,) are classified correctly by the weights (N + 1, F, K) of the fold that held them out."""
    correct = torch.empty_like(index, dtype=torch.bool)
    for start, rows in row_blocks(design.features):
        block = slice(start, start + len(rows))
        scores = Design(rows, design.scale).scores(weight.float())
        scores = scores[torch.arange(len(rows), device=rows.device), held_out[block]]
        correct[block] = _decide(scores if scores.shape[1] > 1 else scores[:, 0]) == index[block]
    return correct


def _decide(scores: Tensor) -> Tensor:
    """The class index (B,) with the highest of the scores (B, C), or by the sign of scores (B,) for two classes."""
    return scores.argmax(-1) if scores.ndim == 2 else (scores > 0).long()


def _like(features: Array, result: Tensor) -> Array:
    return result.cpu().numpy() if isinstance(features, np.ndarray) else result
