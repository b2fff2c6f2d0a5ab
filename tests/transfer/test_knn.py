import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.neighbors import KNeighborsClassifier

import grassy.transfer.solvers.folds as folds_module
import grassy.transfer.solvers.knn as knn_module
from grassy.transfer import KNN, search_knn
from grassy.transfer.solvers.folds import stratified_folds
from grassy.transfer.solvers.knn import nearest_neighbours, samples_outside_folds, vote


def noise(samples=80, width=7, classes=4, dtype=torch.float64, seed=0):
    """Features that hardly know their class: votes are close, and distances of continuous features distinct."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (samples,), generator=generator)
    features = torch.randn(samples, width, generator=generator, dtype=torch.float64)
    features[:, 0] += 0.5 * labels
    return features.to(dtype), 10 * labels - 15


@pytest.fixture(params=["one block", "tiny blocks"])
def _blocks(request, monkeypatch):
    """Also with blocks of fewer samples than there are neighbours."""
    if request.param == "tiny blocks":
        monkeypatch.setattr(folds_module, "ELEMENTS_AT_ONCE", 70)
        monkeypatch.setattr(knn_module, "QUERIES_AT_ONCE", 9)
        monkeypatch.setattr(knn_module, "VOTES_AT_ONCE", 50)


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("k", [1, 2, 3, 10, 80])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_it_predicts_exactly_as_scikit_learn(k, dtype):
    features, labels = noise(dtype=dtype)
    queries = noise(samples=50, dtype=dtype, seed=1)[0]
    theirs = KNeighborsClassifier(k, algorithm="brute").fit(features.numpy(), labels.numpy())
    ours = KNN(k).fit(features, labels)
    assert ours.predict(queries).tolist() == theirs.predict(queries.numpy()).tolist()
    assert (nearest_neighbours(queries, features, k).numpy() == theirs.kneighbors(queries.numpy())[1]).all()
    expected = noise(samples=50, dtype=dtype, seed=1)[1]
    assert ours.score(queries, expected) == theirs.score(queries.numpy(), expected.numpy())


def test_it_predicts_exactly_as_scikit_learn_on_features_that_nearly_coincide():
    """Differences of a hundredth of a percent, beside which the products of float32 would round too much."""
    generator = torch.Generator().manual_seed(0)
    features = (100 + 0.01 * torch.randn(300, 64, generator=generator)).float()
    labels = torch.randint(3, (300,), generator=generator)
    centred = features.double() - 100  # scikit-learn does not centre
    theirs = KNeighborsClassifier(7, algorithm="brute").fit(centred[:200].numpy(), labels[:200].numpy())
    ours = KNN(7).fit(features[:200], labels[:200])
    assert ours.predict(features[200:]).tolist() == theirs.predict(centred[200:].numpy()).tolist()


def test_half_precision_is_compared_as_the_numbers_it_holds():
    features, labels = noise(dtype=torch.bfloat16)
    queries = noise(samples=20, dtype=torch.bfloat16, seed=1)[0]
    assert torch.equal(
        nearest_neighbours(queries, features, 5), nearest_neighbours(queries.double(), features.double(), 5)
    )
    assert KNN(1).fit(features, labels).score(features, labels) == 1.0


@given(st.lists(st.lists(st.integers(0, 4), min_size=6, max_size=6), min_size=1, max_size=9))
def test_the_majority_wins_and_the_smallest_label_wins_ties(rows):
    neighbours = torch.tensor(rows)
    winners = vote(neighbours, [1, 2, 5, 6])
    for k, row in zip([1, 2, 5, 6], winners, strict=True):
        assert row.tolist() == [int(np.bincount(labels[:k]).argmax()) for labels in rows]


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize(("metric", "scoring"), [("top1", "accuracy"), ("mean_per_class", "balanced_accuracy")])
def test_one_search_for_neighbours_gives_the_accuracies_of_grid_search(metric, scoring):
    features, labels = noise(samples=120)
    ks = (1, 3, 4, 9, 31)
    grid = GridSearchCV(
        KNeighborsClassifier(algorithm="brute"),
        {"n_neighbors": ks},
        scoring=scoring,
        cv=StratifiedKFold(4, shuffle=True, random_state=2),
    ).fit(features.numpy(), labels.numpy())
    found = search_knn(features, labels, ks, folds=4, seed=2, metric=metric)
    theirs = np.stack([grid.cv_results_[f"split{fold}_test_score"] for fold in range(4)], 1)
    assert np.allclose(found.accuracies, theirs, atol=1e-12)
    assert found.chosen == grid.best_params_["n_neighbors"]
    assert found.model.predict(features.numpy()).tolist() == grid.predict(features.numpy()).tolist()


def test_the_search_of_the_protocol_on_digits():
    pixels, labels = load_digits(return_X_y=True)
    jitter = 1e-6 * np.random.default_rng(0).normal(size=pixels.shape)  # pixels are integers: distances would be equal
    pixels = pixels + jitter
    found = search_knn(pixels[:800], labels[:800])
    assert found.values == tuple(range(1, 50, 2))
    assert found.accuracies.shape == (25, 5)
    grid = GridSearchCV(
        KNeighborsClassifier(algorithm="brute"),
        {"n_neighbors": found.values},
        cv=StratifiedKFold(5, shuffle=True, random_state=0),
    ).fit(pixels[:800], labels[:800])
    assert np.allclose(found.accuracies.mean(1), grid.cv_results_["mean_test_score"], atol=1e-12)
    assert found.model.score(pixels[800:], labels[800:]) == grid.score(pixels[800:], labels[800:])


def test_fitting_keeps_the_features_without_a_copy():
    features, labels = noise()
    model = KNN(3).fit(features.numpy(), labels.numpy())
    assert model.features_.data_ptr() == features.data_ptr()


def test_constant_features_and_a_single_class_have_a_result():
    labels = torch.tensor([2, 2, 2, 7, 7])
    assert set(KNN(1).fit(torch.ones(5, 3), labels).predict(torch.ones(2, 3)).tolist()) <= {2, 7}
    assert KNN(5).fit(torch.ones(5, 3), labels).predict(torch.zeros(2, 3)).tolist() == [2, 2]
    assert KNN(2).fit(torch.randn(5, 3), torch.full((5,), 4)).predict(torch.randn(2, 3)).tolist() == [4, 4]


def test_k_is_between_1_and_the_number_of_samples():
    features, labels = noise()
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        KNN(0)
    with pytest.raises(ValueError, match="k must be at most the number of samples, 80, got 81"):
        KNN(81).fit(features, labels)
    with pytest.raises(ValueError, match="ks must be at most 64, the number of samples outside a fold, got 65"):
        search_knn(features, labels, [1, 65])
    with pytest.raises(ValueError, match="ks must be integers"):
        search_knn(features, labels, [1, 2.5])


def test_the_distances_held_at_once_are_few_however_narrow_the_features(monkeypatch):
    monkeypatch.setattr(knn_module, "DISTANCES_AT_ONCE", 2000)
    monkeypatch.setattr(knn_module, "QUERIES_AT_ONCE", 10)
    sizes = []
    original = torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda *a, **k: sizes.append((out := original(*a, **k)).numel()) or out)
    features, labels = noise(samples=1000, width=1)
    assert KNN(1).fit(features, labels).score(features, labels) == 1.0
    assert max(sizes) == 2000


@given(st.lists(st.integers(5, 12), min_size=1, max_size=6), st.integers(2, 5))
def test_the_samples_outside_of_the_largest_fold(counts, folds):
    index = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    largest = int(stratified_folds(index, folds, 0).bincount().max())
    assert samples_outside_folds(len(index), folds) == len(index) - largest
