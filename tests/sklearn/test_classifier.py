"""What `GrassmannClassifier` promises: scikit-learn's contract, and the mathematics of subspaces."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ortho_group
from sklearn.base import clone
from sklearn.datasets import load_digits, load_iris
from sklearn.decomposition import PCA
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from grassy import geometry
from grassy.sklearn import GrassmannClassifier
from grassy.sklearn.directions import fit_directions
from grassy.sklearn.objective import CrossEntropy
from grassy.sklearn.principal import principal_subspaces

ESTIMATORS = [
    GrassmannClassifier(),
    GrassmannClassifier(k=1, gamma=10, standardize=True, class_weight="balanced"),
]


@parametrize_with_checks(ESTIMATORS)
def test_it_passes_every_check_of_scikit_learn(estimator, check):
    check(estimator)


def some_data(seed=0, samples=120, width=10, classes=4):
    """Classes that are clouds around affine lines, in float64."""
    generator = np.random.default_rng(seed)
    y = generator.integers(classes, size=samples)
    y[:classes] = np.arange(classes)
    centres, lines = generator.normal(size=(2, classes, width))
    return centres[y] + generator.normal(size=(samples, 1)) * lines[y] + 0.4 * generator.normal(
        size=(samples, width)
    ), y


# --- the mathematics --------------------------------------------------------------------------------------------


@given(st.integers(0, 1000), st.sampled_from([True, False]))
def test_a_rotation_of_the_features_changes_nothing(seed, intercept):
    X, y = some_data(seed)
    rotation = ortho_group.rvs(X.shape[1], random_state=seed)
    options = {"k": 2, "fit_intercept": intercept, "max_iter": 5}
    plain, rotated = (GrassmannClassifier(**options).fit(x, y) for x in (X, X @ rotation))
    np.testing.assert_allclose(rotated.decision_function(X @ rotation), plain.decision_function(X), rtol=1e-6)


@given(
    st.integers(0, 1000), st.floats(1e-6, 1e6), st.sampled_from([{}, {"fit_intercept": False}, {"standardize": True}])
)
def test_a_change_of_scale_changes_nothing(seed, scale, options):
    X, y = some_data(seed)
    plain, scaled = (GrassmannClassifier(k=2, max_iter=5, **options).fit(x, y) for x in (X, scale * X))
    np.testing.assert_allclose(scaled.decision_function(scale * X), plain.decision_function(X), rtol=1e-6)


def test_with_an_intercept_a_shift_changes_nothing_and_standardised_features_may_have_any_units():
    X, y = some_data()
    units = np.logspace(-3, 3, X.shape[1])
    plain = GrassmannClassifier(k=2, max_iter=5).fit(X, y)
    np.testing.assert_allclose(
        GrassmannClassifier(k=2, max_iter=5).fit(X + 7, y).decision_function(X + 7),
        plain.decision_function(X),
        rtol=1e-6,
    )
    standardised = GrassmannClassifier(k=2, max_iter=5, standardize=True)
    np.testing.assert_allclose(
        clone(standardised).fit(X * units, y).predict_proba(X * units),
        standardised.fit(X, y).predict_proba(X),
        rtol=1e-6,
    )


def test_with_zero_steps_the_logits_are_those_of_the_principal_directions():
    X, y = some_data()
    fitted = GrassmannClassifier(k=3, gamma=10.0, fit_intercept=False, max_iter=0).fit(X, y)
    unit = X / np.linalg.norm(X, axis=1, keepdims=True)
    for c in range(4):
        _, _, directions = np.linalg.svd(unit[y == c], full_matrices=False)
        expected = 10 * np.linalg.norm(unit @ directions[:3].T, axis=1)
        np.testing.assert_allclose(fitted.decision_function(X)[:, c], expected, rtol=1e-9)
    assert fitted.n_iter_ == 0
    assert len(fitted.loss_curve_) == 1


def test_without_an_intercept_opposite_features_are_one():
    X, y = some_data()
    fitted = GrassmannClassifier(k=2, fit_intercept=False).fit(X, y)
    np.testing.assert_allclose(fitted.predict_proba(-X), fitted.predict_proba(X), rtol=1e-12)


def test_the_outlier_score_is_the_share_outside_of_every_subspace():
    X, y = some_data()
    fitted = GrassmannClassifier(k=2, fit_intercept=False).fit(X, y)
    inside = fitted.subspaces_[1].T @ np.array([3.0, -1.0])
    outside = np.linalg.svd(fitted.subspaces_.reshape(-1, 10))[2][-1]  # orthogonal to all 4 x 2 directions
    scores = fitted.outlier_score(np.stack([inside, outside, inside / np.linalg.norm(inside) + outside]))
    np.testing.assert_allclose(scores[:2], [0, 1], atol=1e-9)
    assert 0.4 < scores[2] <= 0.5 + 1e-9
    assert ((fitted.outlier_score(X) >= 0) & (fitted.outlier_score(X) <= 1)).all()


def test_a_class_with_fewer_samples_than_k_gets_as_many_directions_as_they_span():
    X, y = some_data(width=12)
    keep = np.concatenate([np.flatnonzero(y == 0)[:1], np.flatnonzero(y == 1)[:3], np.flatnonzero(y > 1)])
    for dtype in (np.float32, np.float64):
        for options in ({}, {"fit_intercept": False}):
            fitted = GrassmannClassifier(k=6, **options).fit(X[keep].astype(dtype), y[keep])
            assert fitted.dims_.tolist() == [1, 3, 6, 6]
            weight = torch.from_numpy(fitted.subspaces_)
            assert (weight[0, 1:] == 0).all()
            assert geometry.orthonormality_error(weight) < 1e-5
            assert np.isfinite(fitted.predict_proba(X.astype(dtype))).all()
    repeated = np.repeat(X[keep][:1], 20, axis=0)  # many samples may span one dimension, too
    fitted = GrassmannClassifier(k=6).fit(np.concatenate([repeated, X[y > 1]]), np.concatenate([[0] * 20, y[y > 1]]))
    assert fitted.dims_.tolist() == [1, 6, 6]


def test_every_step_lowers_the_loss_and_the_end_is_a_stationary_point():
    X, y = some_data()
    fitted = GrassmannClassifier(k=2, max_iter=500, tol=0).fit(X, y)
    assert (np.diff(fitted.loss_curve_) <= 0).all()
    directions = fit_directions(X, np.ones(len(X)), False, 4.0)
    loss = CrossEntropy(directions(X), torch.from_numpy(y), torch.ones(len(X)), fitted.gamma_)
    weight = torch.from_numpy(fitted.subspaces_)
    value, gradient = loss(weight)
    assert value == pytest.approx(fitted.loss_curve_[-1])
    assert geometry.project(weight, gradient).norm() < 1e-5


def test_the_loss_is_the_weighted_mean_and_does_not_depend_on_the_blocks(monkeypatch):
    X, y = some_data()
    rows, labels = torch.from_numpy(X / np.linalg.norm(X, axis=1, keepdims=True)), torch.from_numpy(y)
    weights = torch.rand(len(X), dtype=torch.float64)
    subspaces = principal_subspaces(rows, labels, weights, 2)
    whole = CrossEntropy(rows, labels, weights, 5.0)(subspaces)
    logits = 5 * torch.einsum("bn,ckn->bck", rows, subspaces).norm(dim=-1)
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    assert whole[0] == pytest.approx(float((weights * losses).sum() / weights.sum()))
    monkeypatch.setattr("grassy.sklearn.objective.COORDINATES", 8 * 7)
    blocks = CrossEntropy(rows, labels, weights, 5.0)(subspaces)
    assert blocks[0] == pytest.approx(whole[0])
    torch.testing.assert_close(blocks[1], whole[1])


def test_weights_count_as_repetitions_and_balanced_classes_as_weights():
    X, y = some_data(classes=3)
    times = np.random.default_rng(1).integers(0, 4, size=len(X))
    weighted = GrassmannClassifier(k=2).fit(X, y, sample_weight=times)
    repeated = GrassmannClassifier(k=2).fit(np.repeat(X, times, axis=0), np.repeat(y, times))
    np.testing.assert_allclose(weighted.predict_proba(X), repeated.predict_proba(X), rtol=1e-5)
    balanced = GrassmannClassifier(k=2, class_weight="balanced").fit(X, y)
    own = (len(y) / (3 * np.bincount(y)))[y]
    np.testing.assert_allclose(
        balanced.predict_proba(X), GrassmannClassifier(k=2).fit(X, y, sample_weight=own).predict_proba(X), rtol=1e-5
    )


# --- users ------------------------------------------------------------------------------------------------------


def test_ten_steps_from_the_principal_directions_are_enough_for_digits():
    X, y = load_digits(return_X_y=True)
    train, test, labels, answers = train_test_split(X.astype(np.float32), y, random_state=0, stratify=y)
    assert GrassmannClassifier(max_iter=0).fit(train, labels).score(test, answers) > 0.95
    assert GrassmannClassifier(max_iter=10).fit(train, labels).score(test, answers) > 0.97


def test_pipelines_searches_clones_pickles_and_names_of_classes_work():
    X, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    pipeline = make_pipeline(StandardScaler(), PCA(3), GrassmannClassifier())
    search = GridSearchCV(
        pipeline,
        {"grassmannclassifier__k": [1, 2], "grassmannclassifier__gamma": [5.0, "auto"]},
        cv=3,
        error_score="raise",
    ).fit(X, names)
    assert search.best_score_ > 0.93
    assert set(search.predict(X)) == set(names)
    again = pickle.loads(pickle.dumps(search.best_estimator_))
    np.testing.assert_array_equal(again.predict_proba(X), search.predict_proba(X))
    copy = clone(search.best_estimator_[-1])
    assert not hasattr(copy, "classes_")
    assert cross_val_score(GrassmannClassifier(), X, names, cv=5).mean() > 0.93


def test_float32_stays_float32_and_agrees_with_float64():
    X, y = some_data(samples=400)
    single, double = (GrassmannClassifier(k=2, max_iter=10).fit(X.astype(d), y) for d in (np.float32, np.float64))
    assert single.subspaces_.dtype == single.predict_proba(X.astype(np.float32)).dtype == np.float32
    assert double.decision_function(X).dtype == np.float64
    np.testing.assert_allclose(single.predict_proba(X), double.predict_proba(X), atol=0.01)


def test_many_rows_are_predicted_in_blocks(monkeypatch):
    X, y = some_data()
    fitted = GrassmannClassifier(k=2).fit(X, y)
    whole = fitted.predict_proba(X)
    monkeypatch.setattr("grassy.sklearn.objective.COORDINATES", 8 * 7)
    np.testing.assert_allclose(fitted.predict_proba(X), whole, rtol=1e-12)


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_features_whose_squares_overflow_or_vanish_are_like_others(size):
    X, y = some_data()
    plain, extreme = (GrassmannClassifier(k=2, max_iter=5).fit(x, y) for x in (X, size * X))
    np.testing.assert_allclose(extreme.predict_proba(size * X), plain.predict_proba(X), rtol=1e-6)


def test_constant_features_and_a_sample_at_the_mean_do_no_harm():
    X, y = some_data()
    X = np.concatenate([X, np.full((len(X), 2), 3.3)], axis=1)
    for standardize in (False, True):
        fitted = GrassmannClassifier(k=2, standardize=standardize, fit_intercept=False).fit(X, y)
        assert np.isfinite(fitted.predict_proba(X.mean(axis=0, keepdims=True))).all()
        assert fitted.outlier_score(np.zeros((1, 12)) + fitted.mean_)[0] == pytest.approx(1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"k": 0}, "k must be a positive integer, got 0"),
        (
            {"k": 11},
            "k must be 'auto' or lie between 1 and 10, below the 11 dimensions of the features and the constant",
        ),
        ({"k": 10, "fit_intercept": False}, "lie between 1 and 9, below the 10 dimensions of the features, got 10"),
        ({"k": "many"}, "k must be 'auto' or lie between 1 and 10"),
        ({"gamma": -1}, "gamma must be positive or 'auto', got -1"),
        ({"gamma": "big"}, "gamma must be positive or 'auto', got 'big'"),
        ({"intercept_scaling": 0}, "intercept_scaling must be positive, got 0"),
        ({"max_iter": -1}, "max_iter must be a positive integer, got -1"),
        ({"tol": "no"}, "tol must be a finite number of at least 0, got 'no'"),
        ({"class_weight": "equal"}, "class_weight must be None, 'balanced' or a dictionary, got 'equal'"),
        ({"standardize": "no"}, "standardize must be True or False, got 'no'"),
    ],
)
def test_bad_options_are_refused_by_their_names(options, said):
    with pytest.raises((ValueError, TypeError), match=said):
        GrassmannClassifier(**options).fit(*some_data())


def test_two_classes_are_needed_and_samples_of_weight_zero_do_not_count():
    X, y = some_data()
    with pytest.raises(ValueError, match="at least two classes, got 1 class"):
        GrassmannClassifier().fit(X, np.zeros(len(X)))
    with pytest.raises(ValueError, match="at least two classes, got 1 class"):
        GrassmannClassifier().fit(X, y, sample_weight=(y == 2).astype(float))


def test_without_scikit_learn_the_message_names_the_extra():
    code = (
        "import sys; sys.modules['sklearn'] = None\n"
        "try:\n    import grassy.sklearn\nexcept ImportError as error:\n    print(error)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "grassy.sklearn needs scikit-learn: pip install 'grassy[sklearn]'\n"
