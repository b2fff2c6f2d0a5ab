import math
import sys

import numpy as np
import pytest
import torch

from grassy.analysis import class_separation, variability


def clustered(per_class=(7, 1, 12, 5), width=6, spread=1.0, dtype=torch.float64, seed=0):
    """Features around one random centre a class, in a random order, with labels that are not 0, 1, 2, ..."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.repeat_interleave(torch.tensor([3, -1, 40, 8])[: len(per_class)], torch.tensor(per_class))
    centers = torch.randn(50, width, generator=generator, dtype=torch.float64)
    features = centers[labels] + spread * torch.randn(len(labels), width, generator=generator, dtype=torch.float64)
    order = torch.randperm(len(labels), generator=generator)
    return features[order].to(dtype), labels[order]


def cosine(x, y):
    return float(np.dot(x, y) / (np.linalg.norm(x) * np.linalg.norm(y)))


def angle(x, y):
    """In degrees, by Kahan's formula, which is accurate everywhere."""
    x, y = x / np.linalg.norm(x), y / np.linalg.norm(y)
    return math.degrees(2 * math.atan2(np.linalg.norm(x - y), np.linalg.norm(x + y)))


def naive_variability(features, labels):
    features, labels = features.double().numpy(), labels.numpy()
    features = features - features.mean(0)
    per_class = []
    for label in np.unique(labels):
        members = features[labels == label]
        per_class.append(np.mean([angle(x, y) for x in members for y in members]))
    return float(np.mean(per_class))


def naive_separation(features, labels):
    features, labels = features.double().numpy(), labels.numpy()
    classes = [features[labels == label] for label in np.unique(labels)]

    def distance(a, b):
        return np.mean([1 - cosine(x, y) for x in a for y in b])

    within = np.mean([distance(a, a) for a in classes])
    return float(1 - within / np.mean([distance(a, b) for a in classes for b in classes]))


@pytest.fixture
def tiny_blocks(monkeypatch):
    """Make blocks so small that every class spans several of them, the last one partly filled."""
    module = sys.modules[variability.__module__]  # by its name one would get the function
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 3)


@pytest.mark.parametrize("spread", [3.0, 1.0, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_both_measures_agree_with_a_loop_over_all_pairs(spread, dtype):
    features, labels = clustered(spread=spread, dtype=dtype)
    assert variability(features, labels) == pytest.approx(naive_variability(features, labels), abs=1e-6)
    assert class_separation(features, labels) == pytest.approx(naive_separation(features, labels), abs=1e-6)


def test_working_in_blocks_changes_nothing(tiny_blocks):
    features, labels = clustered()
    assert variability(features, labels) == pytest.approx(naive_variability(features, labels), abs=1e-9)
    assert class_separation(features, labels) == pytest.approx(naive_separation(features, labels), abs=1e-12)


def test_orthogonal_features_are_at_90_degrees_and_a_sample_is_at_0_to_itself():
    m = 5  # ±e_i for every axis: centred by construction; a class holds one sign, so its pairs are orthogonal
    features = torch.cat([torch.eye(m), -torch.eye(m)])
    labels = torch.arange(2).repeat_interleave(m)
    assert variability(features, labels) == pytest.approx(90 * (m - 1) / m, abs=1e-9)
    # Within: 1 − 1/m. Over all pairs: the means cancel, so 1.
    assert class_separation(features, labels) == pytest.approx(1 / m, abs=1e-12)


def test_opposite_features_are_at_180_degrees():
    features = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 2.0], [0.0, -2.0]])
    assert variability(features, torch.tensor([0, 0, 1, 1])) == pytest.approx(90, abs=1e-5)


def test_identical_features_in_each_class_have_no_variability_and_full_separation():
    features = torch.randn(3, 7).repeat_interleave(40, dim=0)
    labels = torch.arange(3).repeat_interleave(40)
    assert variability(features, labels) == pytest.approx(0, abs=1e-12)
    assert class_separation(features, labels) == pytest.approx(1, abs=1e-12)


def test_a_collapsed_class_keeps_its_small_angles():
    tiny = 1e-9  # radians; arccos of the cosine would give 0 or 1e-8
    features = torch.tensor([[1.0, tiny], [1.0, -tiny], [-1.0, tiny], [-1.0, -tiny]], dtype=torch.float64)
    expected = math.degrees(2 * tiny) / 2
    assert variability(features, torch.tensor([0, 0, 1, 1])) == pytest.approx(expected, rel=1e-6)


def test_separation_keeps_its_digits_when_all_directions_are_close():
    features = torch.tensor([[1.0, 1e-7], [1.0, 3e-7], [1.0, -1e-7], [1.0, -3e-7]], dtype=torch.float64)
    # Variance within a class 1e-14, of the two class means 4e-14.
    assert class_separation(features, torch.tensor([0, 0, 1, 1])) == pytest.approx(0.8, rel=1e-6)


def test_a_feature_without_direction_is_at_a_right_angle_to_all_that_have_one():
    features = torch.tensor([[0.0, 0.0], [1.0, 1.0], [-1.0, -1.0], [0.0, 0.0]])  # the mean is 0
    # Class 0: one zero feature and one other, 90° apart; class 1 alike.
    assert variability(features, torch.tensor([0, 0, 1, 1])) == pytest.approx(45, abs=1e-9)
    # Class 0: the two zero features, equal; class 1: two opposite ones.
    assert variability(features, torch.tensor([0, 1, 1, 0])) == pytest.approx((0 + 90) / 2, abs=1e-5)
    # Cosine distances: within class 0 0, within class 1 (0 + 2)/2 = 1, between the two 1.
    assert class_separation(features, torch.tensor([0, 1, 1, 0])) == pytest.approx(1 - 0.5 / 0.75, abs=1e-12)


def test_a_network_that_maps_everything_to_one_point_has_no_variability_and_no_separation():
    features = torch.full((30, 4), 0.1)  # not a binary fraction, so that centring leaves rounding
    labels = torch.arange(30) % 3
    assert variability(features, labels) == 0
    assert math.isnan(class_separation(features, labels))


def test_variability_ignores_a_shift_and_both_ignore_scale_and_rotation():
    features, labels = clustered()
    moved = 1e-3 * features @ torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64)).Q
    assert variability(moved + 5, labels) == pytest.approx(variability(features, labels), abs=1e-8)
    assert class_separation(moved, labels) == pytest.approx(class_separation(features, labels), abs=1e-10)


def test_every_class_weighs_the_same_whatever_its_size():
    features, labels = clustered(per_class=(6, 6))
    repeated = torch.cat([features, features[labels == 3]])  # pairs of one class, four times as many, same angles
    repeated_labels = torch.cat([labels, labels[labels == 3]])
    assert class_separation(repeated, repeated_labels) == pytest.approx(class_separation(features, labels), abs=1e-12)


def test_numpy_arrays_are_welcome_and_parameters_are_not_tracked():
    features, labels = clustered()
    assert variability(features.numpy(), labels.numpy()) == variability(features.requires_grad_(), labels)


@pytest.mark.parametrize("measure", [variability, class_separation])
@pytest.mark.parametrize(
    ("features", "labels", "error", "message"),
    [
        (torch.randn(4), torch.arange(4), ValueError, r"shape \(samples, width\).*got \(4,\)"),
        (torch.randn(0, 3), torch.arange(0), ValueError, r"got \(0, 3\)"),
        (torch.randn(4, 3), torch.arange(5), ValueError, r"labels must have shape \(4,\).*got \(5,\)"),
        (torch.randn(4, 3), torch.eye(4).long(), ValueError, r"labels must have shape \(4,\)"),
        (torch.randn(4, 3), torch.randn(4), TypeError, "labels must be integers, got torch.float32"),
        (torch.ones(4, 3, dtype=torch.int64), torch.arange(4), TypeError, "floating point, got torch.int64"),
        (torch.tensor([[1.0], [math.nan]]), torch.arange(2), ValueError, "NaN or Inf, first in row 1"),
        (torch.tensor([[math.inf], [1.0]]), torch.arange(2), ValueError, "NaN or Inf, first in row 0"),
    ],
)
def test_bad_input_is_refused_by_name(measure, features, labels, error, message):
    with pytest.raises(error, match=message):
        measure(features, labels)


def test_separation_needs_two_classes():
    with pytest.raises(ValueError, match="at least 2 classes, the labels hold only 7"):
        class_separation(torch.randn(4, 3), torch.full((4,), 7))
