"""The manifold: identities that hold whatever the numbers, and pymanopt as an oracle. float64 unless said otherwise."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grassy import geometry as g

F64 = torch.float64


def point(*shape, dtype=F64):
    return g.random_subspace(*shape, dtype=dtype)


def tangent(w, length=1.0):
    if w.shape[-2] == w.shape[-1]:
        return torch.zeros_like(w)  # G(n, n) is a point
    h = g.project(w, torch.randn_like(w))
    return length * h / torch.linalg.matrix_norm(h)[..., None, None]


def rotation(*batch, k):
    return g.random_subspace(*batch, k, k, dtype=F64)


def same_subspace(a, b, tolerance=1e-9):
    return float(g.distance(a, b).max()) < tolerance


def without_rows(w, rows):
    w = w.clone()
    w[..., rows, :] = 0
    return w


shapes = st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(0, 8)).map(lambda s: (s[0], s[1], s[1] + s[2]))
seeds = st.integers(0, 2**31 - 1)


@given(shapes, seeds)
def test_random_subspaces_are_orthonormal_whatever_the_shape(shape, seed):
    torch.manual_seed(seed)
    assert g.orthonormality_error(point(*shape)) < 1e-13
    assert g.orthonormality_error(point(*shape, dtype=torch.float32)) < 1e-6


def test_random_subspace_takes_k_and_n_by_name_and_a_generator():
    one = g.random_subspace(3, k=2, n=5, generator=torch.Generator().manual_seed(1))
    two = g.random_subspace(3, 2, 5, generator=torch.Generator().manual_seed(1))
    assert torch.equal(one, two)
    assert one.is_contiguous()


def test_square_and_nearly_square_gaussians_are_orthonormalised_to_float32_precision():
    assert g.orthonormality_error(point(200, 200, dtype=torch.float32)) < 2e-6
    assert g.orthonormality_error(point(3, 63, 64, dtype=torch.float32)) < 1e-6


def test_random_subspaces_do_not_prefer_a_direction():
    w = point(4000, 2, 5)
    projector = (w.mT @ w).mean(0)
    assert torch.allclose(projector, 2 / 5 * torch.eye(5, dtype=F64), atol=0.03)


@given(shapes, seeds)
def test_projection_is_idempotent_and_lands_in_the_tangent_space(shape, seed):
    torch.manual_seed(seed)
    w, b = point(*shape), torch.randn(*shape, dtype=F64)
    h = g.project(w, b)
    assert (h @ w.mT).abs().max() < 1e-12
    assert torch.allclose(g.project(w, h), h, atol=1e-12)


@given(shapes, seeds, st.floats(1e-3, 200.0))
def test_the_geodesic_agrees_with_equation_3_by_thin_svd(shape, seed, length):
    torch.manual_seed(seed)
    w = point(*shape)
    h = tangent(w, length)
    u, s, vt = torch.linalg.svd(h.mT, full_matrices=False)  # the paper's columns
    literal = (w.mT @ vt.mT * s.cos().unsqueeze(-2) + u * s.sin().unsqueeze(-2)) @ vt
    # An angle of 200 rad is known only to 200 eps, and each of its eight doublings may lose as much again.
    assert torch.allclose(g.geodesic(w, h), literal.mT, atol=1e-13 * max(1.0, length) ** 2)


@given(shapes, seeds, st.floats(0.0, 3.0), st.floats(0.0, 3.0))
def test_a_geodesic_may_be_walked_in_two_pieces_by_transporting_its_own_velocity(shape, seed, s, t):
    torch.manual_seed(seed)
    w = point(*shape)
    h = tangent(w)
    halfway = g.geodesic(w, h, s)
    velocity = g.transport(w, h, h, s)
    assert torch.allclose(g.geodesic(halfway, velocity, t), g.geodesic(w, h, s + t), atol=1e-11)


@given(shapes, seeds, st.floats(1e-6, 1.4))
def test_log_inverts_the_geodesic_and_its_length_is_the_distance(shape, seed, length):
    torch.manual_seed(seed)
    w = point(*shape)
    h = tangent(w, length)  # no principal angle above 1.4 < π/2
    other = g.geodesic(w, h)
    assert torch.allclose(g.log(w, other), h, atol=1e-9)
    assert torch.allclose(g.distance(w, other), torch.linalg.matrix_norm(h), atol=1e-9)


@given(shapes, seeds)
def test_log_reaches_any_other_subspace_in_any_basis(shape, seed):
    torch.manual_seed(seed)
    w, other = point(*shape), point(*shape)
    rotated = rotation(shape[0], k=shape[1]) @ other
    assert same_subspace(g.geodesic(w, g.log(w, rotated)), other, 1e-7)
    assert torch.allclose(g.log(w, rotated), g.log(w, other), atol=1e-7)


@given(shapes, seeds, st.floats(0.0, 5.0))
def test_parallel_transport_is_an_isometry_between_tangent_spaces(shape, seed, t):
    torch.manual_seed(seed)
    w = point(*shape)
    direction, a, b = tangent(w), tangent(w), tangent(w)
    there = g.geodesic(w, direction, t)
    moved_a, moved_b = (g.transport(w, direction, x, t) for x in (a, b))
    assert (moved_a @ there.mT).abs().max() < 1e-11
    assert torch.allclose((moved_a * moved_b).sum((-1, -2)), (a * b).sum((-1, -2)), atol=1e-11)


@pytest.mark.parametrize("retract", [g.retract_qf, g.retract_polar])
def test_retractions_agree_with_the_geodesic_to_second_order(retract):
    w = point(5, 3, 9)
    h = tangent(w)
    errors = [float(g.distance(retract(w, t * h), g.geodesic(w, h, t)).max()) for t in (1e-1, 1e-2)]
    assert errors[1] < errors[0] * 2e-3  # third order: a tenth of the step, a thousandth of the error
    assert g.orthonormality_error(retract(w, 100 * h)) < 1e-12


def test_qf_is_householder_qr_with_a_positive_diagonal_so_that_no_row_flips():
    w = point(50, 4, 10)
    h = tangent(w, 3.0)
    q, r = torch.linalg.qr((w + h).mT)
    signs = r.diagonal(dim1=-2, dim2=-1).sign()
    assert (signs < 0).any()  # or the test would show nothing
    assert torch.allclose(g.retract_qf(w, h), (q * signs.unsqueeze(-2)).mT, atol=1e-12)


def test_the_polar_retraction_does_not_depend_on_the_basis():
    w = point(5, 3, 9)
    h, q = tangent(w), rotation(5, k=3)
    assert torch.allclose(g.retract_polar(q @ w, q @ h), q @ g.retract_polar(w, h), atol=1e-12)


@given(shapes, seeds)
def test_principal_angles_are_symmetric_ascending_and_basis_free(shape, seed):
    torch.manual_seed(seed)
    a, b = point(*shape), point(*shape)
    angles = g.principal_angles(a, b)
    assert (angles.diff(dim=-1) >= -1e-12).all()
    assert angles.min() >= 0
    assert angles.max() <= math.pi / 2 + 1e-12
    assert torch.allclose(angles, g.principal_angles(b, a), atol=1e-9)
    assert torch.allclose(angles, g.principal_angles(rotation(shape[0], k=shape[1]) @ a, b), atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("angle", [0.0, 1e-6, 1e-4, 1e-2, 0.7, math.pi / 4, 0.8, 1.5, math.pi / 2])
def test_a_known_rotation_gives_its_angle_small_or_large(dtype, angle):
    a = torch.eye(2, 4, dtype=dtype)
    b = a.clone()
    b[0, 0], b[0, 2] = math.cos(angle), math.sin(angle)
    expected = torch.tensor([0.0, angle], dtype=dtype)
    assert torch.allclose(g.principal_angles(a, b), expected, rtol=1e-6, atol=1e-12 if dtype == F64 else 1e-9)


def test_identical_subspaces_are_at_distance_zero_in_float32():
    w = point(100, 8, 256, dtype=torch.float32)
    assert g.distance(w, g.random_subspace(100, 8, 8) @ w).max() < 2e-6


def test_principal_angles_of_unequal_dimensions_are_those_of_the_smaller_and_then_nan():
    a = without_rows(point(5, 12), [1, 3])  # dimension 3
    b = without_rows(point(5, 12), [0])  # dimension 4
    angles = g.principal_angles(a, b)
    alone = torch.linalg.svdvals(a[[0, 2, 4]] @ b[1:].mT).arccos()
    assert torch.allclose(angles[:3], alone, atol=1e-10)
    assert angles[3:].isnan().all()
    assert torch.allclose(angles[:3], g.principal_angles(b, a)[:3], atol=1e-10)
    assert torch.allclose(g.distance(a, b), alone.norm())
    assert g.principal_angles(point(2, 12), point(5, 12)).shape == (2,)
    inside = a[[0, 2]]  # contained: all angles are zero
    assert g.distance(inside, a) < 1e-12


def test_zero_rows_stay_zero_and_the_rest_behaves_as_if_alone():
    w = without_rows(point(6, 4, 9), [2])
    h = g.project(w, torch.randn(6, 4, 9, dtype=F64))
    keep = [0, 1, 3]
    small_w, small_h = w[:, keep], h[:, keep]
    assert (h[:, 2] == 0).all()
    assert g.orthonormality_error(w) < 1e-12
    results = {
        "geodesic": (g.geodesic(w, h, 0.3), g.geodesic(small_w, small_h, 0.3)),
        "transport": (g.transport(w, h, h, 0.3), g.transport(small_w, small_h, small_h, 0.3)),
        "qf": (g.retract_qf(w, h), g.retract_qf(small_w, small_h)),
        "polar": (g.retract_polar(w, h), g.retract_polar(small_w, small_h)),
        "orthonormalize": (g.orthonormalize(w + 0.1 * h), g.orthonormalize(small_w + 0.1 * small_h)),
        "log": (g.log(w, g.geodesic(w, 0.2 * h)), g.log(small_w, g.geodesic(small_w, 0.2 * small_h))),
    }
    for name, (full, alone) in results.items():
        assert (full[:, 2] == 0).all(), name
        assert torch.allclose(full[:, keep], alone, atol=1e-9), name


def test_log_pairs_absent_rows_that_sit_in_different_places():
    a, b = point(4, 9), point(4, 9)
    a[1], b[3] = 0, 0
    assert same_subspace(g.geodesic(a, g.log(a, b)), b, 1e-8)
    assert (g.log(a, b)[1] == 0).all()
    with pytest.raises(ValueError, match="different dimensions"):
        g.log(a, point(4, 9))


def test_orthonormalize_keeps_the_subspace_and_moves_each_row_least():
    w = point(5, 3, 8)
    scrambled = (torch.eye(3, dtype=F64) + 0.2 * torch.randn(5, 3, 3, dtype=F64)) @ w
    result = g.orthonormalize(scrambled)
    assert g.orthonormality_error(result) < 1e-13
    assert same_subspace(result, w)
    other = rotation(5, k=3) @ result
    assert (torch.linalg.matrix_norm(scrambled - result) <= torch.linalg.matrix_norm(scrambled - other) + 1e-12).all()
    with pytest.raises(ValueError, match="linearly dependent"):
        g.orthonormalize(torch.ones(2, 5))


def test_orthonormality_error_is_the_largest_entry():
    w = torch.eye(3, 6, dtype=F64)
    w[2] = 0
    assert g.orthonormality_error(w) == 0
    w[0, 0] = 1.001
    assert abs(float(g.orthonormality_error(w)) - (1.001**2 - 1)) < 1e-12


def test_the_mean_is_where_the_logarithms_cancel():
    center = point(2, 3, 8)
    points = torch.stack([g.geodesic(center, tangent(center, 0.4)) for _ in range(5)], dim=-3)
    m = g.mean(points)
    assert m.shape == (2, 3, 8)
    assert g.log(m.unsqueeze(-3), points).mean(-3).abs().max() < 1e-12
    one_subspace_many_bases = rotation(7, k=3) @ center[0]
    assert same_subspace(g.mean(one_subspace_many_bases), center[0])


def test_the_mean_of_two_is_halfway():
    a = point(2, 6)
    h = tangent(a, 0.8)
    assert same_subspace(g.mean(torch.stack([a, g.geodesic(a, h)])), g.geodesic(a, h, 0.5), 1e-8)


def test_the_mean_respects_absent_rows():
    points = without_rows(point(5, 4, 9), [1])
    m = g.mean(points)
    assert (m[1] == 0).all()
    assert same_subspace(m[[0, 2, 3]], g.mean(points[:, [0, 2, 3]]), 1e-8)


def test_half_precision_is_computed_in_float32_and_given_back():
    w = point(3, 2, 7, dtype=torch.float32)
    h = 0.1 * tangent(w)
    for dtype in (torch.bfloat16, torch.float16):
        result = g.geodesic(w.to(dtype), h.to(dtype))
        assert result.dtype == dtype
        assert torch.allclose(result.float(), g.geodesic(w, h), atol=0.02)
        assert g.orthonormality_error(g.random_subspace(3, 2, 7, dtype=dtype)) < 0.02


def test_arguments_may_be_given_by_name_in_any_precision():
    w, b = point(2, 7, dtype=torch.float32), torch.randn(2, 7)
    assert torch.equal(g.project(weight=w, ambient=b), g.project(w, b))
    assert g.project(weight=w.half(), ambient=b.half()).dtype == torch.float16


def test_autocast_does_not_touch_the_geometry():
    w = point(5, 3, 64, dtype=torch.float32)
    h = 0.1 * tangent(w)
    other = g.geodesic(w, h)
    expected = [g.log(w, other), g.orthonormalize(w + h), g.retract_qf(w, h), g.principal_angles(w, other)]
    with torch.autocast("cpu", torch.bfloat16):
        assert g.orthonormality_error(g.random_subspace(5, 3, 64)) < 1e-6
        assert g.orthonormality_error(w) < 1e-6
        assert torch.equal(g.geodesic(w, h), other)
        actual = [g.log(w, other), g.orthonormalize(w + h), g.retract_qf(w, h), g.principal_angles(w, other)]
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def test_align_finds_the_nearest_basis_of_the_same_subspace():
    w, other = without_rows(point(6, 4, 9), [2]), without_rows(point(6, 4, 9), [0])
    aligned = g.align(w, other)
    assert same_subspace(aligned, w)
    assert (aligned[:, 0] == 0).all()  # absent where the other's is
    nearest = torch.linalg.matrix_norm(aligned - other)
    for _ in range(5):
        basis = aligned.clone()
        basis[:, 1:] = rotation(6, k=3) @ basis[:, 1:]
        assert (nearest <= torch.linalg.matrix_norm(basis - other) + 1e-12).all()


@pytest.mark.parametrize("shape", [(3,), (2, 4, 3), (2, 0, 3)])
def test_impossible_shapes_are_refused(shape):
    with pytest.raises(ValueError, match="1 <= k <= n"):
        g.random_subspace(*shape)


def test_integer_tensors_are_refused():
    with pytest.raises(TypeError, match="floating point"):
        g.project(torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3))


# --- pymanopt, whose points are n x k columns ---------------------------------------------------------------------


@pytest.mark.parametrize(("n", "k"), [(7, 1), (9, 3), (16, 8), (5, 5)])
def test_projection_exp_log_retraction_and_distance_agree_with_pymanopt(n, k):
    manifold = pytest.importorskip("pymanopt.manifolds").Grassmann(n, k)
    w = point(k, n)
    h = tangent(w, 0.9)
    x, v = w.mT.numpy(), h.mT.numpy()
    other = g.geodesic(w, h)
    y = manifold.exp(x, v)  # pymanopt ends with a QR factorisation: the same subspace in another basis
    assert same_subspace(torch.from_numpy(y).mT, other)
    assert np.allclose(manifold.log(x, y), g.log(w, other).mT.numpy(), atol=1e-9)
    assert np.allclose(manifold.retraction(x, v), g.retract_polar(w, h).mT.numpy(), atol=1e-9)
    if k < n:  # its arccos of a rounded 1 is worth 1e-8 only
        assert np.allclose(manifold.dist(x, y), float(g.distance(w, other)), atol=1e-9)
    ambient = torch.randn(k, n, dtype=F64)
    assert np.allclose(manifold.projection(x, ambient.mT.numpy()), g.project(w, ambient).mT.numpy(), atol=1e-12)


def test_transport_agrees_with_the_formula_by_thin_svd():
    """EAS Theorem 2.4, in its columns: (−X V sin Σt Uᵀ + U cos Σt Uᵀ + I − U Uᵀ) Δ."""
    w = point(6, 3, 8)
    h, delta = tangent(w, 2.5), tangent(w)
    x, (u, s, vt) = w.mT, torch.linalg.svd(h.mT, full_matrices=False)
    along = u.mT @ delta.mT
    literal = delta.mT - u @ along + (u * s.cos().unsqueeze(-2) - x @ vt.mT * s.sin().unsqueeze(-2)) @ along
    assert torch.allclose(g.transport(w, h, delta), literal.mT, atol=1e-12)


def test_transport_is_the_limit_of_pymanopts_transport_by_projection_in_many_small_steps():
    manifold = pytest.importorskip("pymanopt.manifolds").Grassmann(7, 2)
    w = point(2, 7)
    h, delta = tangent(w), tangent(w)

    def in_small_steps(count):
        moved = delta
        for i in range(1, count + 1):
            moved = torch.from_numpy(manifold.projection(g.geodesic(w, h, i / count).mT.numpy(), moved.mT.numpy())).mT
        return moved

    coarse, fine = in_small_steps(200), in_small_steps(400)
    extrapolated = 2 * fine - coarse  # the error is proportional to the step
    extrapolated_more = (4 * (2 * in_small_steps(800) - fine) - extrapolated) / 3
    assert torch.allclose(extrapolated_more, g.transport(w, h, delta), atol=1e-9)


MIXED = [
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.bfloat16),
    (torch.float32, torch.float64),
    (torch.float64, torch.float16),
]


@pytest.mark.parametrize("function", [g.project, g.geodesic, g.log, g.principal_angles, g.distance, g.align])
@pytest.mark.parametrize(("first", "second"), MIXED)
def test_two_precisions_give_what_torch_promotes_them_to(function, first, second):
    a, b = g.random_subspace(3, 2, 9, dtype=F64).to(first), g.random_subspace(3, 2, 9, dtype=F64).to(second)
    result = function(a, b)
    assert result.dtype == torch.promote_types(first, second)
    coarse = torch.finfo(result.dtype).eps
    torch.testing.assert_close(
        result.double(), function(a.double(), b.double()), rtol=4 * coarse, atol=4 * coarse + 1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_random_subspaces_follow_the_default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        weight = g.random_subspace(4, 3, 16)
    finally:
        torch.set_default_dtype(before)
    assert weight.dtype == dtype
    assert g.orthonormality_error(weight.double()) < 4 * torch.finfo(dtype).eps + 1e-15
