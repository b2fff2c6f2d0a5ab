"""`GrassmannClassifier`: a scikit-learn classifier with one subspace per class."""

import math
from typing import Any, Literal, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor

from grassy import geometry, kernels
from grassy.arguments import check_booleans, nonnegative, number, positive, positive_integer
from grassy.heads.gamma import recommended_gamma
from grassy.sklearn.directions import Directions, fit_directions
from grassy.sklearn.lbfgs import minimize
from grassy.sklearn.objective import CrossEntropy, rows_at_once
from grassy.sklearn.principal import principal_subspaces

#: Subspace dimension of the paper, used if the feature dimension is large enough.
AUTOMATIC_K = 8


class GrassmannClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Classifies features by one subspace per class: p(c|x) = softmax_c(γ‖W_c x̂‖), with x̂ the unit feature.

    It starts from the principal directions of each class and minimises the cross-entropy of all samples by L-BFGS on
    the manifold. The result is deterministic. Features are NumPy arrays. For float32 features it computes in float32,
    in half the time of float64.

    Args:
        k: Dimension of the subspaces. "auto" is 8, or half of the feature dimension below 16, since larger subspaces
            always intersect. A class whose samples span fewer dimensions gets fewer.
        gamma: Scale of the logits, which lie in [0, gamma]. Like C of `LogisticRegression`, a larger value fits the
            data more closely. "auto" uses `grassy.heads.recommended_gamma`.
        fit_intercept: Centre the features and append a constant coordinate. Without it, x and −x get the same class.
        intercept_scaling: The constant coordinate, in units of the root mean square of the centred features.
        standardize: Standardise every feature dimension to mean 0 and variance 1 first. Without it, the result does not
            depend on the common scale of all features, nor on a rotation of the feature space.
        class_weight: None, "balanced" or a dict, as in scikit-learn.
        max_iter: Largest number of steps. 0 keeps the principal directions.
        tol: Stop when a step lowers the loss by less than this fraction.

    Attributes:
        classes_: Class labels (C,).
        subspaces_: Subspaces (C, K, M) with orthonormal rows, where M is N, or N + 1 with the constant coordinate.
        dims_: Dimension of each class (C,).
        gamma_: Scale of the logits.
        n_iter_: Number of steps.
        loss_curve_: Loss before the first and after each step.

    Examples:
        >>> from sklearn.datasets import load_digits
        >>> from grassy.sklearn import GrassmannClassifier
        >>> X, y = load_digits(return_X_y=True)
        >>> classifier = GrassmannClassifier(k=8).fit(X[:1000], y[:1000])
        >>> bool(classifier.score(X[1000:], y[1000:]) > 0.9)
        True
    """

    def __init__(
        self,
        k: int | Literal["auto"] = "auto",
        gamma: float | Literal["auto"] = "auto",
        *,
        fit_intercept: bool = True,
        intercept_scaling: float = 4.0,
        standardize: bool = False,
        class_weight: dict[Any, float] | Literal["balanced"] | None = None,
        max_iter: int = 50,
        tol: float = 1e-3,
    ) -> None:
        self.k = k
        self.gamma = gamma
        self.fit_intercept = fit_intercept
        self.intercept_scaling = intercept_scaling
        self.standardize = standardize
        self.class_weight = class_weight
        self.max_iter = max_iter
        self.tol = tol

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit the subspaces.

        Args:
            X: Features (B, N).
            y: Labels (B,) of any type.
            sample_weight: Weights (B,). Samples with weight 0 are ignored.

        Returns:
            The estimator itself.

        Raises:
            ValueError: If an option or the data is invalid, or there are fewer than two classes.
            TypeError: If a boolean option is not a boolean.
        """
        check_booleans(fit_intercept=self.fit_intercept, standardize=self.standardize)
        max_iter = 0 if self.max_iter == 0 else positive_integer("max_iter", self.max_iter)
        tol = nonnegative("tol", self.tol)
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32])
        check_classification_targets(y)
        weights = np.asarray(_check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True))
        if isinstance(self.class_weight, dict):
            weights = weights * compute_sample_weight(self.class_weight, y)
        elif self.class_weight not in (None, "balanced"):
            raise ValueError(f"class_weight must be None, 'balanced' or a dictionary, got {self.class_weight!r}")
        counts = weights > 0
        X, y, weights = X[counts], y[counts], weights[counts]
        self.classes_, labels = np.unique(y, return_inverse=True)
        if self.class_weight == "balanced":  # scikit-learn would ignore the sample weights
            weights = weights * (weights.sum() / len(self.classes_) / np.bincount(labels, weights))[labels]
        if len(self.classes_) < 2:
            raise ValueError(
                f"GrassmannClassifier needs samples of at least two classes, got {len(self.classes_)} class"
            )
        constant = positive("intercept_scaling", self.intercept_scaling) if self.fit_intercept else 0.0
        k = self._dimension(X.shape[1] + bool(constant))
        self.gamma_ = self._gamma(k, X.shape[1] + bool(constant))
        directions = fit_directions(X, weights, bool(self.standardize), constant)
        rows, target, sample_weights = directions(X), torch.from_numpy(labels), torch.from_numpy(weights)
        start = principal_subspaces(rows, target, sample_weights, k)
        loss = CrossEntropy(rows, target, sample_weights, self.gamma_)
        found, losses = minimize(loss, start, max_iter, tol)
        self.mean_, self.scale_, self.constant_ = directions
        self.subspaces_ = geometry.orthonormalize(found).numpy()
        self.dims_ = geometry.present_rows(start).sum(-1).numpy()
        self.loss_curve_ = losses
        self.n_iter_ = len(losses) - 1
        return self

    def decision_function(self, X: Any) -> Any:
        """Return the logits (B, C), or for two classes their difference (B,): second minus first.

        Args:
            X: Features (B, N).
        """
        logits = self._logits(X)
        return logits[:, 1] - logits[:, 0] if len(self.classes_) == 2 else logits

    def predict_proba(self, X: Any) -> Any:
        """Return the class probabilities (B, C): the softmax of the logits.

        Args:
            X: Features (B, N).
        """
        logits = self._logits(X)
        return torch.from_numpy(logits).softmax(-1).numpy()

    def predict(self, X: Any) -> Any:
        """Return the classes (B,) with the largest logits.

        Args:
            X: Features (B, N).
        """
        best = self._logits(X).argmax(axis=1)
        return self.classes_[best]

    def outlier_score(self, X: Any) -> Any:
        """Return the fraction of each sample's energy outside the nearest class subspace, (B,) in [0, 1].

        Args:
            X: Features (B, N).
        """
        largest = self._logits(X).max(axis=1)
        return np.clip(1 - np.square(largest / self.gamma_), 0, 1)

    def _logits(self, X: Any) -> Any:
        """Return γ‖W_c x̂‖, (B, C)."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        weight = torch.from_numpy(self.subspaces_)
        directions = Directions(self.mean_, self.scale_, self.constant_)
        size = rows_at_once(weight)
        parts: list[Tensor] = [
            kernels.subspace_logits(directions(X[start : start + size]).to(weight.dtype), weight, self.gamma_)
            for start in range(0, len(X), size)
        ]
        return torch.cat(parts).numpy()

    def _dimension(self, available: int) -> int:
        if isinstance(self.k, str) and self.k == "auto":
            return max(1, min(AUTOMATIC_K, available // 2))
        k = positive_integer("k", self.k) if not isinstance(self.k, str) else 0
        if not 1 <= k < available:
            raise ValueError(
                f"k must be 'auto' or lie between 1 and {available - 1}, below the {available} dimensions of the "
                f"features{' and the constant' if self.fit_intercept else ''}, got {self.k!r}"
            )
        return k

    def _gamma(self, k: int, available: int) -> float:
        if isinstance(self.gamma, str) and self.gamma == "auto":
            return recommended_gamma(len(self.classes_), k, available)
        if not 0 < number(self.gamma) < math.inf:
            raise ValueError(f"gamma must be positive or 'auto', got {self.gamma!r}")
        return float(self.gamma)
