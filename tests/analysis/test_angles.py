import importlib
import math

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st

from grassy import geometry
from grassy.analysis import class_vector_angles, cluster_order, pairwise_principal_angles


@pytest.fixture
def tiny_blocks(monkeypatch):
    """Two rows of pairs at a time for 7 classes, the last block partly filled."""
    monkeypatch.setattr(importlib.import_module("grassy.analysis.class_angles"), "PAIRS_AT_ONCE", 15)


def rotated(weight, angles):
    """Each row of the weight (K, N) turned by its angle towards a direction of its own, outside of the subspace."""
    k = len(weight)
    rest = torch.linalg.svd(weight).Vh[k : 2 * k]
    angles = torch.as_tensor(angles, dtype=weight.dtype).unsqueeze(-1)
    return angles.cos() * weight + angles.sin() * rest


def by_scipy(a, b):
    """Ascending, in float64, of rows without the zero ones."""
    a, b = (x[geometry.present_rows(x)].double().numpy().T for x in (a, b))
    return scipy.linalg.subspace_angles(a, b)[::-1]


def by_definition(a, b, dims):
    """A loop over the angles, each from an SVD of the products in the complement of the vectors found before."""
    a, b = a.double().numpy()[: dims[0]], b.double().numpy()[: dims[1]]
    found = []
    for _ in range(min(dims)):
        u, _, vt = np.linalg.svd(a @ b.T)
        s, r = u[:, 0] @ a, vt[0] @ b
        found.append(2 * math.atan2(np.linalg.norm(s - r), np.linalg.norm(s + r)))
        a, b = u[:, 1:].T @ a, vt[1:] @ b
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("k", "n"), [(1, 5), (3, 8), (4, 64), (5, 7), (4, 4)])
def test_all_pairs_agree_with_scipy_and_the_definition(k, n, dtype, tiny_blocks):
    weight = geometry.random_subspace(7, k, n, dtype=dtype)
    angles = pairwise_principal_angles(weight)
    assert angles.shape == (7, 7, k)
    assert angles.dtype == dtype
    for i in range(7):
        for j in range(7):
            assert angles[i, j].numpy() == pytest.approx(by_scipy(weight[i], weight[j]), abs=1e-6)
            assert angles[i, j].numpy() == pytest.approx(by_definition(weight[i], weight[j], (k, k)), abs=1e-6)


def test_unequal_dimensions_have_as_many_angles_as_the_smaller_and_then_nan(tiny_blocks):
    weight = geometry.random_subspace(7, 4, 9)
    dims = [4, 1, 3, 4, 0, 2, 3]
    for label, dim in enumerate(dims):
        weight[label, dim:] = 0
    angles = pairwise_principal_angles(weight)
    for i in range(7):
        for j in range(7):
            count = min(dims[i], dims[j])
            assert bool(angles[i, j, count:].isnan().all())
            if count:
                assert angles[i, j, :count].numpy() == pytest.approx(by_scipy(weight[i], weight[j]), abs=1e-6)
                expected = by_definition(weight[i], weight[j], (dims[i], dims[j]))
                assert angles[i, j, :count].numpy() == pytest.approx(expected, abs=1e-6)
    pair = geometry.principal_angles(weight[2].double(), weight[5].double())
    assert torch.allclose(angles[2, 5].double(), pair, atol=1e-6, equal_nan=True)


def test_absent_rows_may_be_anywhere():
    weight = geometry.random_subspace(3, 3, 6, dtype=torch.float64)
    weight[1, 0] = 0
    moved = weight.clone()
    moved[1] = weight[1, [1, 0, 2]]
    expected = pairwise_principal_angles(weight)
    assert torch.allclose(pairwise_principal_angles(moved), expected, atol=2e-7, equal_nan=True)
    assert bool(expected[0, 1, 2].isnan())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-3, 1e-4, 1e-5, 1e-6])
def test_a_known_small_rotation_comes_out_beside_large_ones(size, dtype):
    weight = geometry.random_subspace(8, 2048, dtype=torch.float64)
    known = torch.tensor([0.0, size, 2 * size, 0.1, 0.7, 0.8, 1.5, math.pi / 2], dtype=torch.float64)
    mixed = geometry.random_subspace(8, 8, dtype=torch.float64) @ rotated(weight, known)
    angles = pairwise_principal_angles(torch.stack([weight, mixed]).to(dtype))
    tolerance = 1e-6 if dtype == torch.float32 else 2e-7
    assert angles[0, 1].tolist() == pytest.approx(known.tolist(), abs=tolerance)
    if dtype == torch.float64:
        assert angles[0, 1, 1:3].tolist() == pytest.approx([size, 2 * size], abs=1e-14 / size)


def test_identical_subspaces_in_different_bases_are_at_angle_0():
    weight = geometry.random_subspace(4, 32)
    other = geometry.random_subspace(4, 4) @ weight
    angles = pairwise_principal_angles(torch.stack([weight, other, weight]))
    assert float(angles.max()) < 1e-6
    assert float(angles[1, 1].max()) == 0  # exactly, to itself


def test_orthogonal_subspaces_are_at_right_angles():
    weight = torch.eye(12).unflatten(0, (4, 3))
    expected = (math.pi / 2) * (1 - torch.eye(4)).unsqueeze(-1).expand(4, 4, 3)
    assert torch.allclose(pairwise_principal_angles(weight), expected, atol=2e-7, rtol=0)


def test_one_common_direction():
    eye = torch.eye(5)
    angles = pairwise_principal_angles(torch.stack([eye[[0, 1]], eye[[1, 2]]]))
    assert angles[0, 1].tolist() == pytest.approx([0, math.pi / 2], abs=1e-7)


@given(st.integers(2, 5), st.integers(1, 4), st.integers(0, 4), st.integers(0, 1000))
def test_angles_ignore_the_basis_and_a_rotation_of_space(classes, k, more, seed):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return geometry.random_subspace(*shape, generator=generator, dtype=torch.float64)

    weight = random(classes, k, k + more)
    angles = pairwise_principal_angles(weight)
    assert torch.equal(angles, angles.transpose(0, 1))
    assert bool((angles.diff(dim=-1) >= 0).all())
    assert float(angles.min()) >= 0
    assert float(angles.max()) <= math.pi / 2 + 1e-12
    moved = pairwise_principal_angles(random(classes, k, k) @ weight @ random(k + more, k + more))
    assert torch.allclose(moved, angles, atol=2e-7, rtol=0)
    # Nor on how long or how oblique the basis is.
    oblique = torch.randn(classes, k, k, generator=generator, dtype=torch.float64) + 5 * torch.eye(k)
    assert torch.allclose(pairwise_principal_angles(oblique @ weight), angles, atol=2e-7, rtol=0)


def test_the_length_of_the_angles_is_the_distance_on_the_manifold():
    weight = geometry.random_subspace(6, 3, 10, dtype=torch.float64)
    length = torch.linalg.vector_norm(pairwise_principal_angles(weight), dim=-1)
    assert torch.allclose(length, geometry.distance(weight[:, None], weight[None]), atol=2e-7)


def test_blocks_are_no_larger_for_subspaces_of_many_dimensions(monkeypatch):
    """Not by the number of pairs, which would take 64 times the memory at k = 64, but by that of their products."""
    monkeypatch.setattr(importlib.import_module("grassy.analysis.class_angles"), "PAIRS_AT_ONCE", 200)
    sizes, eigvalsh = {}, torch.linalg.eigvalsh
    for k in (8, 16, 32):
        sizes[k] = []
        monkeypatch.setattr(torch.linalg, "eigvalsh", lambda x, k=k: sizes[k].append(x.numel()) or eigvalsh(x))
        weight = geometry.random_subspace(10, k, 40, dtype=torch.float64)
        sizes[k].clear()  # of what making it took
        pairwise_principal_angles(weight)
    assert all(max(of_blocks) <= 200 * 8 * 8 for of_blocks in sizes.values())


def test_half_precision_and_one_class_and_parameters():
    weight = geometry.random_subspace(3, 2, 8)
    low = pairwise_principal_angles(weight.bfloat16())
    assert low.dtype == torch.float32
    assert torch.allclose(low, pairwise_principal_angles(weight), atol=0.02)
    assert pairwise_principal_angles(torch.nn.Parameter(weight[:1])).tolist() == [[[0.0, 0.0]]]


# --- class vectors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_vector_angles_agree_with_a_loop(dtype, tiny_blocks):
    weight = torch.randn(9, 6, dtype=dtype)
    weight[4] = 1e-4 * torch.randn(6) + weight[3]
    weight[5] = -2 * weight[3]
    angles = class_vector_angles(weight)
    rows = weight.double().numpy()
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    expected = [[2 * math.atan2(np.linalg.norm(x - y), np.linalg.norm(x + y)) for y in rows] for x in rows]
    assert angles.numpy() == pytest.approx(np.array(expected), abs=1e-6)
    assert angles.dtype == dtype
    assert torch.equal(angles, angles.mT)
    assert bool((angles.diagonal() == 0).all())


def test_vector_angles_go_up_to_a_half_turn_and_a_zero_vector_has_none():
    angles = class_vector_angles(torch.tensor([[1.0, 0.0], [0.0, 3.0], [-2.0, 0.0], [0.0, 0.0]]))
    half = math.pi / 2
    assert angles[0].tolist() == pytest.approx([0, half, math.pi, math.nan], abs=1e-7, nan_ok=True)
    assert bool(angles[3].isnan().all())
    assert bool(angles[:, 3].isnan().all())


def test_for_one_dimension_the_smaller_of_an_angle_and_its_supplement_is_the_principal_one():
    weight = torch.randn(8, 5, dtype=torch.float64)
    vectors = class_vector_angles(weight)
    lines = pairwise_principal_angles(weight.unsqueeze(1)).squeeze(-1)
    assert torch.allclose(torch.minimum(vectors, math.pi - vectors), lines, atol=2e-7)


# --- bad weights --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", [pairwise_principal_angles, class_vector_angles])
@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        (torch.randn(4), ValueError, r"weight must have shape \(classes.*got \(4,\)"),
        (torch.randn(2, 2, 3, 3), ValueError, r"got \(2, 2, 3, 3\)"),
        (torch.randn(0, 2, 3), ValueError, r"got \(0, 2, 3\)"),
        (torch.ones(4, 3).long(), TypeError, "floating point, got torch.int64"),
    ],
)
def test_bad_weights_are_refused_by_name(measure, weight, error, message):
    with pytest.raises(error, match=message):
        measure(weight)


def test_what_is_no_subspace_is_refused():
    with pytest.raises(ValueError, match=r"k <= width, got \(2, 4, 3\)"):
        pairwise_principal_angles(torch.randn(2, 4, 3))
    with pytest.raises(ValueError, match="linearly dependent"):
        pairwise_principal_angles(torch.ones(2, 2, 3))
    weight = torch.randn(3, 2, 4)
    weight[1, 0, 0] = math.nan
    with pytest.raises(ValueError, match="NaN or Inf, first in class 1"):
        pairwise_principal_angles(weight)
    with pytest.raises(ValueError, match="NaN or Inf, first in class 1"):
        class_vector_angles(weight[:, 0])


# --- orders of classes --------------------------------------------------------------------------------------------


def test_classes_of_one_family_stand_together():
    family = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 0])
    centers = 10 * torch.eye(3, 5)
    vectors = centers[family] + torch.randn(10, 5)
    order = cluster_order(class_vector_angles(vectors))
    assert sorted(order.tolist()) == list(range(10))
    assert int((family[order].diff() != 0).sum()) == 2


@given(st.permutations(range(9)))
def test_points_on_a_line_come_out_in_their_order(positions):
    places = torch.tensor(positions, dtype=torch.float64) ** 1.1
    order = cluster_order((places[:, None] - places[None]).abs())
    ordered = [positions[i] for i in order]
    assert ordered in (list(range(9)), list(range(8, -1, -1)))
    assert order[0] < order[-1]


def test_many_classes_are_ordered_as_well_without_trying_all_orders(monkeypatch):
    """Beyond a number of classes the best order would take hours: then each join turns its groups as suits it best."""
    places = torch.rand(60, dtype=torch.float64).cumsum(0)[torch.randperm(60)]
    distance = (places[:, None] - places[None]).abs()
    best = cluster_order(distance)
    monkeypatch.setattr(importlib.import_module("grassy.analysis.cluster"), "MOST_FOR_BEST_ORDER", 2)
    assert cluster_order(distance).tolist() == best.tolist()  # on a line it is the best one
    family = torch.arange(40) % 4
    vectors = 10 * torch.eye(4, 6)[family] + torch.randn(40, 6)
    order = cluster_order(class_vector_angles(vectors))
    assert sorted(order.tolist()) == list(range(40))
    assert int((family[order].diff() != 0).sum()) == 3
    assert order[0] < order[-1]


def test_few_classes_need_no_clustering_and_the_diagonal_is_not_read():
    assert cluster_order(torch.zeros(1, 1)).tolist() == [0]
    assert cluster_order(torch.tensor([[math.nan, 1.0], [1.0, 5.0]])).tolist() == [0, 1]
    assert sorted(cluster_order(torch.zeros(4, 4)).tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("distance", "error", "message"),
    [
        (torch.randn(3), ValueError, r"shape \(classes, classes\), got \(3,\)"),
        (torch.rand(3, 4), ValueError, r"got \(3, 4\)"),
        (torch.zeros(0, 0), ValueError, r"got \(0, 0\)"),
        (torch.full((3, 3), math.nan), ValueError, "NaN or Inf"),
        (-torch.ones(3, 3), ValueError, "not be negative; for a similarity s pass"),
        (torch.arange(9.0).reshape(3, 3), ValueError, "must be symmetric"),
        (torch.ones(3, 3, dtype=torch.complex64), TypeError, "real numbers, got torch.complex64"),
    ],
)
def test_bad_distances_are_refused(distance, error, message):
    with pytest.raises(error, match=message):
        cluster_order(distance)
