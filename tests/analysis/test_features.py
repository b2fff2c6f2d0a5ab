import importlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grassy import geometry
from grassy.analysis import (
    class_effective_ranks,
    class_separation,
    class_spectra,
    effective_rank,
    neural_collapse,
    variability,
)


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
    monkeypatch.setattr(importlib.import_module("grassy.analysis.labelled"), "ROWS_AT_ONCE", 2)
    monkeypatch.setattr(importlib.import_module(variability.__module__), "SAMPLES_AT_ONCE", 5)


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


@pytest.mark.parametrize("measure", [variability, class_separation, neural_collapse])
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


@pytest.mark.parametrize("measure", [class_separation, neural_collapse])
def test_separation_and_collapse_need_two_classes(measure):
    with pytest.raises(ValueError, match="at least 2 classes, the labels hold only 7"):
        measure(torch.randn(4, 3), torch.full((4,), 7))


# --- neural collapse ----------------------------------------------------------------------------------------------


def naive_collapse(features, labels):
    """The definitions, with N x N matrices, all in float64."""
    features, labels = features.double().numpy(), labels.numpy()
    classes = [features[labels == label] for label in np.unique(labels)]
    means = np.stack([members.mean(0) for members in classes])
    centred = means - means.mean(0)
    within = np.mean([np.cov(members.T, bias=True) for members in classes], axis=0)
    between = centred.T @ centred / len(classes)
    norms = np.linalg.norm(centred, axis=1)
    cosines = np.array([cosine(x, y) for i, x in enumerate(centred) for j, y in enumerate(centred) if i != j])
    return (
        np.trace(within @ np.linalg.pinv(between, rcond=1e-12, hermitian=True)) / len(classes),
        norms.std() / norms.mean(),
        cosines.std(),
        np.abs(cosines + 1 / (len(classes) - 1)).mean(),
    )


@pytest.mark.parametrize("width", [3, 6])  # as many directions as the four means span, and more
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_collapse_agrees_with_its_definition(width, dtype):
    features, labels = clustered(width=width, dtype=dtype)
    assert neural_collapse(features, labels)[:4] == pytest.approx(naive_collapse(features, labels), rel=1e-6)


def test_collapse_in_blocks_is_the_same(tiny_blocks):
    features, labels = clustered()
    assert neural_collapse(features, labels)[:4] == pytest.approx(naive_collapse(features, labels), rel=1e-9)


def simplex(classes, width):
    """Class means at the corners of a regular simplex around a point that is not 0."""
    corners = torch.eye(classes, dtype=torch.float64) - 1 / classes
    return 3 * corners @ geometry.random_subspace(classes, width, dtype=torch.float64)


def test_all_measures_of_collapse_vanish_at_a_simplex_that_is_also_the_weight():
    means = simplex(5, 8)
    labels = torch.arange(5).repeat(4)
    result = neural_collapse(means[labels] + 1.0, labels, weight=0.1 * means)
    assert result == pytest.approx((0, 0, 0, 0, 0), abs=1e-12)


def test_collapse_of_known_spread():
    # Means ±3 along the first axis, so Σ_B = 9 there; samples at ±1 of them along it, and ±5 across it, which Σ_B⁺
    # does not see. tr(Σ_W Σ_B⁺)/C = (1/9)/2.
    offsets = torch.tensor([[1.0, 5.0], [-1.0, 5.0], [1.0, -5.0], [-1.0, -5.0]])
    features = torch.cat([offsets + torch.tensor([3.0, 0.0]), offsets - torch.tensor([3.0, 0.0])])
    result = neural_collapse(features, torch.arange(2).repeat_interleave(4), weight=torch.eye(2))
    assert result.within_over_between == pytest.approx(1 / 18, rel=1e-12)
    assert result[1:4] == pytest.approx((0, 0, 0), abs=1e-12)  # two means are always a simplex
    # W/‖W‖ = I/√2 against rows ±e_1/√2: (1 − 1)² + 0 in the first row, 1/2 + 1/2 in the second.
    assert result.self_duality == pytest.approx(1, rel=1e-12)


def test_collapse_leaves_out_the_self_duality_of_subspaces():
    features, labels = torch.randn(12, 6), torch.arange(12) % 3
    assert neural_collapse(features, labels).self_duality is None
    assert neural_collapse(features, labels, geometry.random_subspace(3, 2, 6)).self_duality is None


def test_collapse_without_distinct_means_is_undefined():
    result = neural_collapse(torch.full((30, 4), 0.1), torch.arange(30) % 3, torch.randn(3, 4))
    assert all(math.isnan(value) for value in result)


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        (torch.randn(3, 5), ValueError, "features have width 6, but the weight has width 5"),
        (torch.randn(2, 6), ValueError, r"labels must lie between 0 and 1.*got 2"),
        (torch.randn(6), ValueError, r"shape \(classes, width\).*got \(6,\)"),
        (torch.ones(3, 6).long(), TypeError, "weight must be floating point"),
        (torch.full((3, 6), math.nan), ValueError, "NaN or Inf, first in class 0"),
    ],
)
def test_collapse_refuses_a_weight_that_does_not_fit(weight, error, message):
    with pytest.raises(error, match=message):
        neural_collapse(torch.randn(12, 6), torch.arange(12) % 3, weight)


# --- how features use the subspace of their class -----------------------------------------------------------------


def test_effective_rank_of_an_even_spread_is_the_number_of_directions():
    for m in (1, 3, 5):
        coordinates = torch.zeros(10, 6)
        coordinates[torch.arange(2 * m), torch.arange(m).repeat(2)] = 7.0
        assert float(effective_rank(coordinates)) == pytest.approx(m, abs=1e-12)
    assert float(effective_rank(torch.zeros(4, 3))) == 0


def test_effective_rank_is_the_exponential_of_the_entropy_of_energies():
    coordinates = torch.diag(torch.tensor([3.0, 1.0]))  # shares of energy 0.9 and 0.1
    expected = math.exp(-0.9 * math.log(0.9) - 0.1 * math.log(0.1))
    assert float(effective_rank(coordinates)) == pytest.approx(expected, rel=1e-12)


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 1000), st.sampled_from([1e-30, 1.0, 1e30]))
def test_effective_rank_ignores_basis_scale_and_order(samples, k, seed, scale):
    generator = torch.Generator().manual_seed(seed)
    coordinates = torch.randn(samples, k, generator=generator, dtype=torch.float64)
    rotation = geometry.random_subspace(k, k, generator=generator, dtype=torch.float64)
    rank = float(effective_rank(coordinates))
    assert 1 - 1e-9 <= rank <= min(samples, k) + 1e-9
    assert float(effective_rank(scale * coordinates.flip(0) @ rotation)) == pytest.approx(rank, rel=1e-9)


def test_effective_ranks_of_a_batch_are_those_of_its_members():
    batch = torch.randn(4, 9, 3)
    assert torch.allclose(effective_rank(batch), torch.stack([effective_rank(one) for one in batch]), rtol=1e-12)


def used_subspaces(dtype=torch.float32):
    """Features of 5 classes, of which one has no samples, with zero features among them; weights of unequal dims."""
    weight = geometry.random_subspace(5, 3, 8, dtype=dtype)
    weight[1, 2] = 0
    features, labels = torch.randn(40, 8, dtype=dtype), torch.tensor([0, 1, 2, 4]).repeat(10)
    features[3] = 0
    return features, labels, weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_spectra_and_ranks_agree_with_a_loop(dtype, tiny_blocks):
    features, labels, weight = used_subspaces(dtype)
    spectra, ranks = class_spectra(features, labels, weight), class_effective_ranks(features, labels, weight)
    assert spectra.shape == (5, 3)
    for label in (0, 1, 2, 4):
        rows = features[labels == label].double().numpy()
        rows = rows[np.linalg.norm(rows, axis=1) > 0]
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        coordinates = rows @ weight[label].double().numpy().T
        energies = np.linalg.svd(coordinates, compute_uv=False) ** 2 / len(rows)
        assert spectra[label].numpy() == pytest.approx(energies, abs=1e-6)
        outside = ((rows - coordinates @ weight[label].double().numpy()) ** 2).sum() / len(rows)
        assert 1 - float(spectra[label].sum()) == pytest.approx(outside, abs=1e-6)
        assert float(ranks[label]) == pytest.approx(float(effective_rank(torch.tensor(coordinates))), abs=1e-6)
    assert spectra[1, 2] == pytest.approx(0, abs=1e-12)  # an absent direction
    assert bool(spectra[3].isnan().all() and ranks[3].isnan())  # no samples


def test_features_within_and_across_their_subspace():
    eye = torch.eye(4)
    weight = torch.stack([eye[:2], eye[:2]])
    features = torch.stack([5 * eye[0], 2 * eye[1], eye[0] + eye[1], eye[2], eye[3]])
    spectra = class_spectra(features, torch.tensor([0, 0, 0, 1, 1]), weight)
    # Class 0: energies along e_0 + e_1 and e_0 − e_1 are (1/2 + 1/2 + 1)/3 and (1/2 + 1/2)/3.
    assert spectra.flatten().tolist() == pytest.approx([2 / 3, 1 / 3, 0, 0], abs=1e-12)
    assert class_effective_ranks(features, torch.tensor([0, 0, 0, 1, 1]), weight)[1] == 0


def test_spectra_do_not_depend_on_the_basis_nor_on_the_length_of_features():
    features, labels, weight = used_subspaces(torch.float64)
    weight[1] = geometry.random_subspace(3, 8, dtype=torch.float64)
    rotation, turn = geometry.random_subspace(3, 3, dtype=torch.float64), geometry.random_subspace(8, 8).double()
    turn = geometry.orthonormalize(turn)
    lengths = torch.rand(40, 1, dtype=torch.float64) + 0.1
    expected = class_spectra(features, labels, weight)
    moved = class_spectra(lengths * features @ turn, labels, rotation @ weight @ turn)
    assert torch.allclose(moved, expected, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize(
    ("labels", "weight", "error", "message"),
    [
        (torch.arange(4), geometry.random_subspace(3, 2, 6), ValueError, r"labels must lie between 0 and 2.*got 3"),
        (
            torch.arange(4) - 1,
            geometry.random_subspace(4, 2, 6),
            ValueError,
            r"labels must lie between 0 and 3.*got -1",
        ),
        (torch.arange(4), geometry.random_subspace(4, 2, 5), ValueError, "features have width 6.*width 5"),
        (torch.arange(4), torch.randn(4, 6), ValueError, r"shape \(classes, k, width\).*got \(4, 6\)"),
        (torch.arange(4).float(), geometry.random_subspace(4, 2, 6), TypeError, "labels must be integers"),
    ],
)
@pytest.mark.parametrize("measure", [class_spectra, class_effective_ranks])
def test_spectra_refuse_what_does_not_fit(measure, labels, weight, error, message):
    with pytest.raises(error, match=message):
        measure(torch.randn(4, 6), labels, weight)


@pytest.mark.parametrize(
    ("coordinates", "error", "message"),
    [
        (torch.randn(4), ValueError, r"shape \(samples, k\).*got \(4,\)"),
        (torch.randn(0, 3), ValueError, r"got \(0, 3\)"),
        (torch.ones(4, 3).int(), TypeError, "floating point, got torch.int32"),
        (torch.tensor([[1.0, math.inf]]), ValueError, "NaN or Inf"),
    ],
)
def test_effective_rank_refuses_bad_coordinates(coordinates, error, message):
    with pytest.raises(error, match=message):
        effective_rank(coordinates)
