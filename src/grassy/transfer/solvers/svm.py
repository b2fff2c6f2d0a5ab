"""Linear support vector machines, one-vs-rest, as in scikit-learn's LinearSVC.

Shapes: B samples, N features, P problems: one for each fold and class.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import numpy as np
import torch
from torch import Tensor

from grassy.transfer.solvers.folds import Array, as_training_set, stratified_folds
from grassy.transfer.solvers.linear import SCORES_AT_ONCE, LinearClassifier, search_linear
from grassy.transfer.solvers.newton import Loss, Solver
from grassy.transfer.solvers.search import Metric, Search, best, check_search

Backend = Literal["torch", "sklearn"]
BACKENDS = get_args(Backend)


class LinearSVM(LinearClassifier):
    """Linear SVM: min ½‖w‖² + C Σ_i max(0, 1 − y_i w·x_i)² for each class against the rest, or once for two classes.

    x ends with a constant 1, so the intercept is the last entry of w and is regularised. The objective is 1-strongly
    convex: its distance from the minimum is at most ‖gradient‖²/2, which is also the duality gap. A fit ends when this
    bound, in float64, is at most `tol` times the objective. A fit that misses it in `max_iter` Newton steps warns.

    Features are tensors or NumPy arrays of any floating dtype, on CPU or CUDA. They are neither copied nor changed, and
    matmuls run in float32.

    Args:
        C: Weight of the loss against the regulariser.
        tol: Largest relative distance of the objective from its minimum.
        max_iter: Largest number of Newton steps.
        normalize: Divide the features by their mean norm; `coef_` applies to the original features.
        backend: "torch", or "sklearn" to run LinearSVC itself, with its own meaning of `tol` and up to 10,000
            iterations.
    """

    penalised = True

    def __init__(
        self,
        C: float = 1.0,
        *,
        tol: float = 1e-6,
        max_iter: int = 100,
        normalize: bool = False,
        backend: Backend = "torch",
    ) -> None:
        super().__init__(C, tol, max_iter, normalize)
        self.backend = _known(backend)

    def fit(self, features: Array, labels: Array) -> Self:
        """Fit to features (B, N) and integer labels (B,) of at least two classes."""
        if self.backend == "torch":
            return super().fit(features, labels)
        tensor, self.classes_, index = as_training_set(features, labels)
        solver = self._solver(tensor)
        self._fit_svc(solver, _scaled(solver), index)
        return self

    def _fit_svc(self, solver: Solver, rows: np.ndarray, index: Tensor) -> None:
        svc = _linear_svc(self.C, self.tol).fit(rows, index.cpu().numpy())
        weight = torch.from_numpy(np.vstack([svc.coef_.T, svc.intercept_])).to(index.device, torch.float64)
        self._adopt(solver, index, weight, solve=False)
        self.n_iter_ = int(svc.n_iter_)

    def _losses(self, index: Tensor, classes: int, held_out: Tensor, folds: int) -> Iterator[Loss]:
        sought = torch.arange(classes, device=index.device) if classes > 2 else torch.ones_like(index[:1])
        target = sought.repeat(folds)
        fold = torch.arange(folds, device=index.device).repeat_interleave(len(sought))
        at_once = max(1, SCORES_AT_ONCE // len(index))
        for t, f in zip(target.split(at_once), fold.split(at_once), strict=True):
            signs = torch.where(index[:, None] == t, 1.0, -1.0)
            yield SquaredHinge(signs.masked_fill_(held_out[:, None] == f, 0.0))


@dataclass(frozen=True)
class SquaredHinge:
    """Σ_i max(0, 1 − y_i z_i)², with y (B, P) equal to 1 or −1, or 0 for a sample left out."""

    signs: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.signs.shape[1], 1

    def _excess(self, scores: Tensor) -> Tensor:
        """The signed excess y max(0, 1 − y z), (B, P), from which loss, slope and curvature follow."""
        return (1 - self.signs * scores[..., 0]).clamp_(min=0).mul_(self.signs)

    def value(self, scores: Tensor) -> Tensor:
        return self._excess(scores).square_().sum(0, dtype=torch.float64)

    def at(self, scores: Tensor) -> "SquaredHingeAt":
        return SquaredHingeAt(self._excess(scores))

    def select(self, kept: Tensor) -> "SquaredHinge":
        return SquaredHinge(self.signs[:, kept])


class SquaredHingeAt:
    def __init__(self, excess: Tensor) -> None:
        self.slope = -2 * excess.unsqueeze(-1)
        self.second = 2 * (excess != 0).to(excess.dtype).unsqueeze(-1)
        self.level = self.second.mean(0)

    def curve(self, direction: Tensor) -> Tensor:
        return self.second * direction


def search_svm(
    features: Array,
    labels: Array,
    Cs: Sequence[float] = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 20),
    folds: int = 5,
    seed: int = 0,
    *,
    metric: Metric = "top1",
    normalize: bool = True,
    tol: float = 1e-6,
    backend: Backend = "torch",
) -> Search[LinearSVM]:
    """Choose the C with the highest accuracy in stratified cross-validation, and fit a LinearSVM to all samples.

    Args:
        features: Training features (B, N), tensor or NumPy array.
        labels: Integer labels (B,), with at least `folds` samples per class.
        Cs: Values of C to try.
        folds: Number of folds, equal to those of StratifiedKFold(shuffle=True, random_state=seed).
        seed: Seed of the folds.
        metric: "top1" or "mean_per_class".
        normalize: Divide the features by their mean norm over all samples.
        tol: As for `LinearSVM`.
        backend: "torch", or "sklearn" to run GridSearchCV with LinearSVC on all cores.

    Returns:
        The values tried, their accuracies on each fold, the chosen C and the fitted `LinearSVM`.
    """

    def make(C: float) -> LinearSVM:
        return LinearSVM(C, tol=tol, normalize=normalize, backend=backend)

    if _known(backend) == "torch":
        return search_linear(make, features, labels, Cs, folds, seed, metric)
    values = check_search(Cs, "Cs", metric)
    tensor, classes, index = as_training_set(features, labels)
    held_out = stratified_folds(index, folds, seed).cpu().numpy()
    solver = make(values[0])._solver(tensor)
    rows = _scaled(solver)
    accuracies = _grid_search(rows, index.cpu().numpy(), values, held_out, metric, tol)
    model = make(values[best(accuracies)])
    model.classes_ = classes
    model._fit_svc(solver, rows, index)
    return Search(values, accuracies, model.C, model)


def _grid_search(
    rows: np.ndarray, index: np.ndarray, Cs: Sequence[float], held_out: np.ndarray, metric: str, tol: float
) -> Tensor:
    from sklearn.model_selection import GridSearchCV, PredefinedSplit

    scoring = {"top1": "accuracy", "mean_per_class": "balanced_accuracy"}[metric]
    grid = GridSearchCV(
        _linear_svc(1.0, tol), {"C": list(Cs)}, cv=PredefinedSplit(held_out), scoring=scoring, n_jobs=-1, refit=False
    ).fit(rows, index)
    columns = [grid.cv_results_[f"split{fold}_test_score"] for fold in range(held_out.max() + 1)]
    return torch.from_numpy(np.stack(columns, 1))


def _linear_svc(C: float, tol: float) -> Any:
    from sklearn.svm import LinearSVC

    return LinearSVC(C=C, tol=tol, max_iter=10_000, random_state=0)


def _scaled(solver: Solver) -> np.ndarray:
    return (solver.design.features.double() / solver.design.scale).cpu().numpy()


def _known(backend: str) -> str:
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    return backend
