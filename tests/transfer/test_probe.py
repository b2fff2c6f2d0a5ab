import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold

import grassy.transfer.solvers.folds as folds_module
import grassy.transfer.solvers.probe as probe_module
from grassy.transfer import LogisticProbe, search_probe
from grassy.transfer.solvers.folds import mean_norm


def clusters(samples=90, width=6, classes=4, spread=1.0, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(samples) % classes
    centers = torch.randn(classes, width, generator=generator, dtype=torch.float64)
    features = centers[labels] + spread * torch.randn(samples, width, generator=generator, dtype=torch.float64)
    return features.to(dtype), 3 * labels - 4


def digits():
    pixels, labels = load_digits(return_X_y=True)
    return pixels / np.linalg.norm(pixels, axis=1).mean(), labels


def objective(features, labels, coef, intercept, C):
    """½‖W‖² + C Σ −log softmax, or the logistic loss of one vector for two classes."""
    coef, intercept = np.asarray(coef), np.asarray(intercept)
    scores = features @ coef.T + intercept
    if len(coef) == 1:
        scores = np.c_[np.zeros(len(scores)), scores]
    index = np.unique(labels, return_inverse=True)[1]
    return np.square(coef).sum() / 2 + C * (logsumexp(scores, 1) - scores[np.arange(len(scores)), index]).sum()


@pytest.mark.parametrize("C", [0.1, 10.0, 1000.0])
def test_it_minimises_the_objective_of_logistic_regression_and_labels_as_it_does(C):
    features, labels = digits()
    train, test = slice(0, 900), slice(900, None)
    ours = LogisticProbe(C).fit(features[train], labels[train])
    theirs = LogisticRegression(C=C, tol=1e-8, max_iter=20_000, solver="newton-cg").fit(features[train], labels[train])
    a, b = (objective(features[train], labels[train], m.coef_, m.intercept_, C) for m in (ours, theirs))
    assert a <= b * (1 + 1e-4)
    assert float(ours.objective_) == pytest.approx(a)
    assert np.mean(ours.predict(features[test]) == theirs.predict(features[test])) >= 0.998


@pytest.fixture
def tiny_blocks(monkeypatch):
    monkeypatch.setattr(folds_module, "ELEMENTS_AT_ONCE", 100)
    monkeypatch.setattr(probe_module, "SCORES_AT_ONCE", 200)


@pytest.mark.parametrize("width", [1, 5, 120])
@pytest.mark.parametrize("classes", [2, 3, 6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_awkward_shapes_and_dtypes(width, classes, dtype, tiny_blocks):
    features, labels = clusters(samples=37, width=width, classes=classes, dtype=dtype)
    rows, numbers = features.double().numpy(), labels.numpy()
    ours = LogisticProbe(3.0).fit(features, labels)
    theirs = LogisticRegression(C=3.0, tol=1e-9, max_iter=50_000).fit(rows, numbers)
    a, b = (objective(rows, numbers, m.coef_, m.intercept_, 3.0) for m in (ours, theirs))
    assert a <= b * (1 + 1e-4)
    assert ours.coef_.shape == theirs.coef_.shape
    assert ours.decision_function(features).shape == theirs.decision_function(rows).shape


@pytest.mark.parametrize("classes", [2, 4])
def test_the_stated_gap_bounds_the_distance_from_the_minimum(classes):
    features, labels = clusters(samples=150, width=12, classes=classes, spread=2.0)
    best = LogisticProbe(5.0, tol=1e-12).fit(features, labels)
    for tol in (1e-2, 1e-3, 1e-4, 1e-6):
        found = LogisticProbe(5.0, tol=tol).fit(features, labels)
        above = float((found.objective_ - best.objective_) / found.objective_)
        assert above <= float(found.gap_) + 1e-11
        assert float(found.gap_) <= tol


@pytest.mark.parametrize("offset", [1.0, 10.0])
@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("C", [0.1, 1.0, 100.0])
def test_the_gap_is_a_bound_for_features_with_an_offset_too(offset, classes, C):
    """An offset ties intercept and weights together: the curvature of the intercept alone says too little of it."""
    rng = np.random.default_rng(0)
    features = np.abs(rng.standard_normal((300, 20))) + offset
    labels = rng.integers(0, classes, 300) if C < 5 else np.argsort(np.argsort(features[:, 0])) * classes // 300
    best = LogisticProbe(C, tol=1e-12, max_iter=500).fit(features, labels)
    for tol in (1e-2, 1e-4, 1e-6):
        found = LogisticProbe(C, tol=tol).fit(features, labels)
        above = float((found.objective_ - best.objective_) / found.objective_)
        assert above <= float(found.gap_) + 1e-11
        scores = found.decision_function(torch.tensor(features))
        share = scores.sigmoid()[:, None] if classes == 2 else scores.softmax(-1)
        residual = np.eye(classes)[labels][:, -share.shape[1] :] - share.numpy()
        assert np.abs(residual.sum(0)).max() < 1e-4  # the intercept is at its minimum


def test_the_intercept_is_not_regularised():
    features, labels = clusters(width=3)
    a, b = (LogisticProbe(2.0, tol=1e-11).fit(moved, labels) for moved in (features, features + 5.0))
    assert torch.allclose(a.coef_, b.coef_, atol=1e-4)
    rare = torch.tensor([0] * 99 + [1])
    model = LogisticProbe(1e-3, tol=1e-9).fit(1e-3 * torch.randn(100, 2), rare)
    assert float(model.intercept_) == pytest.approx(np.log(1 / 99), rel=1e-3)


@pytest.mark.slow
def test_the_search_finds_the_accuracies_of_grid_search():
    features, labels = digits()
    features, labels = features[:500], labels[:500]
    scaled = features / mean_norm(torch.from_numpy(features))
    found = search_probe(features, labels, (0.1, 10, 1000), seed=1)
    grid = GridSearchCV(
        LogisticRegression(max_iter=10_000, tol=1e-6),
        {"C": (0.1, 10, 1000)},
        cv=StratifiedKFold(5, shuffle=True, random_state=1),
    ).fit(scaled, labels)
    theirs = np.stack([grid.cv_results_[f"split{fold}_test_score"] for fold in range(5)], 1)
    assert np.abs(found.accuracies.numpy() - theirs).max() <= 0.01 + 1e-9  # one sample of a hundred
    assert found.chosen == grid.best_params_["C"]
    assert np.mean(found.model.predict(features) == grid.predict(scaled)) >= 0.998


def test_separable_classes_with_little_regularisation_stay_finite():
    features, labels = clusters(spread=0.01)
    model = LogisticProbe(1e6).fit(features, labels)
    assert model.coef_.isfinite().all()
    assert model.score(features, labels) == 1.0
    assert float(model.gap_) <= 1e-4


def test_constant_features_give_the_frequencies_of_the_classes():
    labels = torch.tensor([0] * 30 + [1] * 20 + [2] * 10)
    model = LogisticProbe(1.0, tol=1e-10).fit(torch.zeros(60, 4), labels)
    probability = model.decision_function(torch.zeros(1, 4)).softmax(-1)[0]
    assert torch.allclose(probability, torch.tensor([3, 2, 1]) / 6, atol=1e-4)
