import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.svm import LinearSVC
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import grassy.transfer.solvers.folds as folds_module
import grassy.transfer.solvers.svm as svm_module
from grassy.transfer import KNN, LinearSVM, LogisticProbe, search_knn, search_probe, search_svm
from grassy.transfer.solvers.folds import mean_norm, stratified_folds
from grassy.transfer.solvers.probe import Softmax
from grassy.transfer.solvers.svm import SquaredHinge

CS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 20)


def clusters(samples=90, width=6, classes=4, spread=1.0, seed=0, dtype=torch.float64):
    """Features around one random centre a class, with labels that are not 0, 1, 2, ..."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.arange(samples) % classes
    centers = torch.randn(classes, width, generator=generator, dtype=torch.float64)
    features = centers[index] + spread * torch.randn(samples, width, generator=generator, dtype=torch.float64)
    order = torch.randperm(samples, generator=generator)
    return features[order].to(dtype), (5 * index - 7)[order]


def digit_pixels():
    bunch = load_digits()
    return bunch.data / np.linalg.norm(bunch.data, axis=1).mean(), bunch.target


def network_features():
    """Penultimate ReLU activations on digits of a network that has learned the first five of them."""
    torch.manual_seed(0)
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = images.float() / 16
    body, head = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 96), nn.ReLU()), nn.Linear(96, 5)
    optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=3e-3)
    known = labels < 5
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(head(body(images[known])), labels[known]).backward()
        optimizer.step()
    features = body(images).detach().double()
    return (features / mean_norm(features)).numpy(), labels.numpy()


def objectives(features, labels, coef, intercept, C):
    """½‖w‖² + C Σ max(0, 1 − y f)² of each class against the rest, the intercept in w."""
    classes = np.unique(labels)
    signs = np.where(labels[:, None] == (classes if len(classes) > 2 else classes[1:]), 1, -1)
    excess = np.maximum(0, 1 - signs * (features @ np.asarray(coef).T + np.asarray(intercept)))
    norms = np.square(np.asarray(coef)).sum(1) + np.square(np.asarray(intercept))
    return norms / 2 + C * np.square(excess).sum(0)


@pytest.fixture
def tiny_blocks(monkeypatch):
    """Make every block of rows and group of problems so small that all loops run several times."""
    monkeypatch.setattr(folds_module, "ELEMENTS_AT_ONCE", 100)
    monkeypatch.setattr(svm_module, "SCORES_AT_ONCE", 200)


@pytest.mark.parametrize("make", [digit_pixels, network_features])
@pytest.mark.parametrize("C", [0.1, 1.0, 20.0])
def test_it_minimises_the_objective_of_linear_svc_and_labels_as_it_does(make, C):
    features, labels = make()
    train, test = slice(0, 1000), slice(1000, None)
    ours = LinearSVM(C).fit(features[train], labels[train])
    theirs = LinearSVC(C=C, tol=1e-6, max_iter=100_000).fit(features[train], labels[train])
    a = objectives(features[train], labels[train], ours.coef_, ours.intercept_, C)
    b = objectives(features[train], labels[train], theirs.coef_, theirs.intercept_, C)
    assert np.all(a <= np.minimum(a, b) * (1 + 1e-4))
    assert np.mean(ours.predict(features[test]) == theirs.predict(features[test])) >= 0.998
    assert ours.score(features[test], labels[test]) == pytest.approx(
        theirs.score(features[test], labels[test]), abs=2e-3
    )
    assert np.allclose(ours.objective_, a, rtol=1e-9)


@pytest.mark.parametrize("C", [0.3, 30.0])
def test_the_gap_bounds_the_distance_from_the_minimum(C):
    features, labels = clusters(samples=200, width=20, spread=2.0)
    best = LinearSVM(C, tol=1e-13).fit(features, labels)
    assert float(best.gap_.max()) <= 1e-13
    for tol in (1e-1, 1e-2, 1e-3, 1e-4, 1e-6):
        found = LinearSVM(C, tol=tol).fit(features, labels)
        above = (found.objective_ - best.objective_) / found.objective_
        assert (above <= found.gap_ + 1e-12).all()
        assert (found.gap_ <= tol).all()


def test_the_gap_at_any_weights_is_the_duality_gap():
    generator = np.random.default_rng(0)
    features, y, w, C = (
        generator.normal(size=(30, 4)),
        np.sign(generator.normal(size=30)),
        generator.normal(size=5),
        0.7,
    )
    x = np.c_[features, np.ones(30)]
    excess = np.maximum(0, 1 - y * (x @ w))
    alpha = 2 * C * excess
    primal = w @ w / 2 + C * excess @ excess
    dual = alpha.sum() - np.square(x.T @ (alpha * y)).sum() / 2 - alpha @ alpha / (4 * C)
    solver = LinearSVM(C)._solver(torch.from_numpy(features))
    found = solver.evaluate(SquaredHinge(torch.from_numpy(y)[:, None]), C, torch.from_numpy(w)[:, None, None])
    assert float(found.value) == pytest.approx(primal)
    assert float(found.gap) == pytest.approx(primal - dual)


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_slope_and_curvature_are_derivatives_of_the_value(classes):
    scores = torch.randn(7, 2, classes if classes > 2 else 1, dtype=torch.float64, requires_grad=True)
    index = torch.arange(7) % classes
    counted = torch.ones(7, 2)
    counted[3, 1] = counted[5, 0] = 0
    softmax = Softmax(nn.functional.one_hot(index, classes).float(), counted)
    signs = torch.where(torch.randn(7, 2) > 0, 1.0, -1.0) * counted
    for loss, z in ((softmax, scores), (SquaredHinge(signs), scores[..., :1])):
        (slope,) = torch.autograd.grad(loss.value(z).sum(), z, create_graph=True)
        direction = torch.randn_like(z)
        curve = torch.autograd.grad((slope * direction).sum(), z)[0]
        point = loss.at(z.detach())
        assert torch.allclose(point.slope, slope.detach())
        assert torch.allclose(point.curve(direction), curve)
        only = loss.select(torch.tensor([False, True]))
        assert torch.allclose(only.value(z[:, 1:]), loss.value(z)[1:])


@pytest.mark.parametrize("width", [1, 3, 200])  # 200: more features than samples, solved in their span
@pytest.mark.parametrize("classes", [2, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_awkward_shapes_and_dtypes(width, classes, dtype, tiny_blocks):
    features, labels = clusters(samples=35, width=width, classes=classes, dtype=dtype)
    found = LinearSVM(2.0).fit(features, labels)
    rows, numbers = features.double().numpy(), labels.numpy()
    theirs = LinearSVC(C=2.0, tol=1e-8, max_iter=200_000, dual=width > 35).fit(rows, numbers)
    a = objectives(rows, numbers, found.coef_, found.intercept_, 2.0)
    b = objectives(rows, numbers, theirs.coef_, theirs.intercept_, 2.0)
    assert np.all(a <= b * (1 + 1e-4))
    assert found.coef_.shape == theirs.coef_.shape
    assert found.decision_function(features).shape == theirs.decision_function(rows).shape
    assert set(found.predict(features).tolist()) <= set(labels.tolist())


@given(st.integers(2, 40), st.integers(1, 12), st.integers(2, 5), st.floats(-2, 2), st.integers(0, 10_000))
def test_any_small_problem_is_solved_to_its_tolerance(samples, width, classes, exponent, seed):
    classes = min(classes, samples)
    features, labels = clusters(samples, width, classes, seed=seed)
    model = LinearSVM(10**exponent).fit(features, labels)
    assert (model.gap_ <= 1e-4).all()
    assert model.coef_.isfinite().all()


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=30), st.integers(2, 4), st.integers(0, 100))
def test_the_folds_are_those_of_scikit_learn(labels, folds, seed):
    labels = np.repeat(labels, folds)[np.random.default_rng(seed).permutation(folds * len(labels))]
    held_out = stratified_folds(torch.from_numpy(labels).unique(return_inverse=True)[1], folds, seed)
    splits = StratifiedKFold(folds, shuffle=True, random_state=seed).split(labels, labels)
    for fold, (_, test) in enumerate(splits):
        assert (held_out == fold).nonzero().flatten().tolist() == test.tolist()


@pytest.mark.parametrize(("metric", "scoring"), [("top1", "accuracy"), ("mean_per_class", "balanced_accuracy")])
def test_the_search_finds_the_accuracies_of_grid_search(metric, scoring):
    features, labels = network_features()
    kept = (labels[:600] != 3) | (np.arange(600) < 200)  # one class is rarer than the others
    features, labels = features[:600][kept], labels[:600][kept]
    scaled = features / mean_norm(torch.from_numpy(features))
    folds = StratifiedKFold(5, shuffle=True, random_state=3)
    svc = LinearSVC(max_iter=10_000, tol=1e-5)
    grid = GridSearchCV(svc, {"C": CS[::2]}, scoring=scoring, cv=folds).fit(scaled, labels)
    theirs = np.stack([grid.cv_results_[f"split{i}_test_score"] for i in range(5)], 1)
    found = search_svm(features, labels, CS[::2], seed=3, metric=metric)
    assert found.accuracies.shape == (5, 5)
    assert np.abs(found.accuracies.numpy() - theirs).max() <= 0.03  # a sample near the boundary, of a small class
    assert np.abs(found.accuracies.numpy() - theirs).mean() <= 1e-3
    assert found.chosen == grid.best_params_["C"]
    alone = LinearSVM(found.chosen, normalize=True).fit(features, labels)
    assert torch.allclose(found.model.objective_, alone.objective_, rtol=2e-4)
    assert np.mean(found.model.predict(features) == grid.predict(scaled)) > 0.998


@pytest.mark.slow
def test_both_backends_agree_and_the_order_of_cs_does_not_matter():
    features, labels = clusters(samples=150, width=8, classes=3, spread=1.5)
    ours = search_svm(features, labels, (5, 0.1, 1))
    theirs = search_svm(features, labels, (5, 0.1, 1), backend="sklearn")
    assert ours.chosen == theirs.chosen
    assert torch.allclose(ours.accuracies, theirs.accuracies, atol=0.04)
    assert torch.allclose(ours.model.objective_, theirs.model.objective_, rtol=1e-3)
    assert torch.allclose(search_svm(features, labels, (0.1, 1, 5)).accuracies[[2, 0, 1]], ours.accuracies)
    svc = LinearSVM(1.0, normalize=True, backend="sklearn").fit(features, labels)
    mine = LinearSVM(1.0, normalize=True).fit(features, labels)
    assert torch.allclose(svc.coef_, mine.coef_, atol=1e-2)
    assert (svc.gap_ < 1e-2).all()


def test_normalizing_equals_dividing_by_the_mean_norm():
    features, labels = clusters()
    scale = float(features.norm(dim=1).mean())
    assert mean_norm(features) == pytest.approx(scale)
    a = LinearSVM(3.0, normalize=True, tol=1e-10).fit(features, labels)
    b = LinearSVM(3.0, tol=1e-10).fit(features / scale, labels)
    assert torch.allclose(a.coef_ * scale, b.coef_, atol=1e-4)
    assert torch.equal(a.predict(features), b.predict(features / scale))


def test_numpy_gives_numpy_and_tensors_give_tensors():
    features, labels = clusters()
    model = LinearSVM().fit(features.numpy(), labels.numpy())
    assert isinstance(model.predict(features.numpy()), np.ndarray)
    assert isinstance(model.decision_function(features.numpy()), np.ndarray)
    assert torch.equal(model.predict(features), torch.from_numpy(model.predict(features.numpy())))


def test_columns_of_every_size_and_a_large_offset_do_not_spoil_the_solution():
    features, labels = clusters(samples=120, width=5, classes=3)
    features = features * torch.tensor([1e-4, 1e-2, 1.0, 1e2, 1e4]) + torch.tensor([0.0, 0.0, 1e3, 0.0, 0.0])
    model = LinearSVM(1.0).fit(features, labels)
    assert (model.gap_ <= 1e-4).all()


def test_features_without_information_give_the_most_frequent_class():
    labels = torch.tensor([3] * 20 + [1] * 8 + [2] * 8)
    for features in (torch.zeros(36, 5), torch.full((36, 5), 2.5), torch.zeros(36, 50)):
        model = LinearSVM(10.0, normalize=True).fit(features, labels)
        assert (model.predict(features) == 3).all()
        assert float(search_svm(features, labels).accuracies.mean()) == pytest.approx(20 / 36, abs=0.01)


def test_every_sample_may_be_a_class_of_its_own():
    features = torch.randn(12, 30)
    model = LinearSVM(100.0).fit(features, torch.arange(12))
    assert model.score(features, torch.arange(12)) == 1.0


def test_too_few_steps_warn_and_say_how_far_they_got():
    features, labels = clusters(spread=2.0)
    with pytest.warns(UserWarning, match="did not reach tol=1e-08 in max_iter=1 Newton steps"):
        model = LinearSVM(10.0, tol=1e-8, max_iter=1).fit(features, labels)
    assert (model.gap_ > 1e-8).any()


class LargestTensor(TorchDispatchMode):
    """Remembers the size in bytes of the largest tensor that an operation allocated."""

    def __init__(self, *known):
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize(
    "run",
    [
        lambda x, y: LinearSVM(normalize=True).fit(x, y).score(x, y),
        lambda x, y: LogisticProbe(normalize=True).fit(x, y).score(x, y),
        lambda x, y: KNN(5).fit(x, y).score(x[:50], y[:50]),
        lambda x, y: search_svm(x, y, (0.1, 1)),
        lambda x, y: search_probe(x, y, (0.1, 1)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_features_are_neither_copied_nor_changed(run, dtype, monkeypatch):
    monkeypatch.setattr(folds_module, "ELEMENTS_AT_ONCE", 3000)
    features, labels = clusters(samples=1500, width=100, classes=3, dtype=dtype)
    before = features.clone()
    with LargestTensor(features) as largest:
        run(features, labels)
    assert 0 < largest.bytes < features.numel() * features.element_size() / 2
    assert torch.equal(features, before)


SEARCHES = [search_svm, search_knn, search_probe]
MODELS = [LinearSVM, KNN, LogisticProbe]


@pytest.mark.parametrize("search", SEARCHES)
def test_a_search_refuses_what_it_cannot_judge(search):
    features, labels = clusters()
    with pytest.raises(ValueError, match="every class needs at least folds=5 samples, the smallest has 1"):
        search(torch.cat([features, features[:1]]), torch.cat([labels, torch.tensor([99])]))
    with pytest.raises(ValueError, match="at least 2 classes, got only 4"):
        search(features, torch.full_like(labels, 4))
    with pytest.raises(ValueError, match="folds must be at least 2, got 1"):
        search(features, labels, folds=1)
    with pytest.raises(ValueError, match="metric must be one of top1, mean_per_class, got 'f1'"):
        search(features, labels, metric="f1")
    with pytest.raises(ValueError, match="must be one or more positive numbers"):
        search(features, labels, [])
    with pytest.raises(ValueError, match="must be one or more positive numbers"):
        search(features, labels, [1, -1])
    with pytest.raises(ValueError, match="features hold NaN or Inf, first in row 7"):
        search(features.index_fill(0, torch.tensor([7]), torch.inf), labels)


@pytest.mark.parametrize("model", MODELS)
def test_a_fit_refuses_bad_input_and_says_why(model):
    features, labels = clusters()
    cases = [
        ("features hold NaN or Inf, first in row 2", features.index_fill(0, torch.tensor([2]), torch.nan), labels),
        ("features must be floating point, got torch.int64", features.long(), labels),
        ("features must have shape", features[:, 0], labels),
        ("features must have shape", features[:, :0], labels),
        ("features must be a tensor or an array of numbers", np.array([["a"]]), labels),
        (r"labels must have shape \(90,\), one per sample, got \(89,\)", features, labels[1:]),
        ("labels must be integers, got torch.float64", features, labels.double()),
        ("labels must be integers", features, np.array(["cat"] * 90)),
    ]
    for message, bad_features, bad_labels in cases:
        with pytest.raises(ValueError, match=message):
            model().fit(bad_features, bad_labels)
    with pytest.raises(ValueError, match=f"this {model.__name__} is not fitted yet"):
        model().predict(features)
    with pytest.raises(ValueError, match="features must have width 6, as in fit, got 5"):
        model().fit(features, labels).predict(features[:, 1:])


@pytest.mark.parametrize("model", [LinearSVM, LogisticProbe])
def test_a_linear_model_needs_two_classes_and_sane_settings(model):
    features, labels = clusters()
    with pytest.raises(ValueError, match="at least 2 classes, got only 1"):
        model().fit(features, torch.ones_like(labels))
    for settings in ({"C": 0.0}, {"C": float("nan")}, {"tol": 0.0}, {"max_iter": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(settings))} must"):
            model(**settings)


def test_an_unknown_backend_raises_and_names_the_known():
    with pytest.raises(ValueError, match="backend must be one of torch, sklearn, got 'liblinear'"):
        LinearSVM(backend="liblinear")
    with pytest.raises(ValueError, match="backend must be one of torch, sklearn, got 'jax'"):
        search_svm(*clusters(), backend="jax")


@pytest.mark.slow
def test_importing_and_searching_do_not_import_scikit_learn():
    code = (
        "import sys, torch; from grassy.transfer import search_svm; "
        "search_svm(torch.randn(20, 3), torch.arange(20) % 2, (1,)); print('sklearn' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "False"


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("factor", [1e-20, 1e20])
@pytest.mark.parametrize("width", [6, 200])
def test_the_scale_of_the_features_does_not_matter(search, factor, width):
    """Squares of such numbers are beyond float32."""
    features, labels = clusters(samples=80, width=width, spread=2.0, dtype=torch.float32)
    plain, scaled = search(features, labels), search(features * factor, labels)
    assert (plain.accuracies - scaled.accuracies).abs().mean() < 0.01
    assert plain.chosen == scaled.chosen
    assert (plain.model.predict(features) == scaled.model.predict(features * factor)).double().mean() > 0.98


def test_features_too_large_or_small_to_compute_with_are_refused():
    features, labels = clusters()
    for factor in (1e60, 1e-60):
        with pytest.raises(ValueError, match=r"features have a mean norm of .*, too far from 1 to compute with"):
            search_svm(features * factor, labels)
    with pytest.raises(ValueError, match="or pass normalize=True"):
        LinearSVM().fit(features * 1e20, labels)
    for search in SEARCHES:
        with pytest.raises(ValueError, match=r"features hold values beyond 1e\+100"):
            search(features * 1e200, labels)
