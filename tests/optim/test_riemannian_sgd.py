"""Algorithm 1: the optimizer against a literal transcription, its invariances, and the hazards of the design."""

import pytest
import torch
from torch import nn

import grassy
from grassy import geometry as g
from grassy import kernels
from grassy.optim import RiemannianSGD

F64 = torch.float64


def algorithm_1(s, m, d, tau, mu, variant=False):
    """The paper's Algorithm 1, descending, in its columns (C, n, k), by thin SVD; the variant of its appendix by QR."""
    grad = d - s @ (s.mT @ d)  # step 1
    m = m - s @ (s.mT @ m)  # step 2
    m = mu * m + grad  # step 3
    if variant:
        q, r = torch.linalg.qr(s - tau * m)
        return q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2), m
    u, sigma, vt = torch.linalg.svd(-m, full_matrices=False)  # step 4, against the momentum
    cos, sin = (tau * sigma).cos().unsqueeze(-2), (tau * sigma).sin().unsqueeze(-2)
    return (s @ vt.mT * cos + u * sin) @ vt, m


def a_problem(c, k, n, dtype=F64):
    """A smooth function on the product of Grassmannians, so that gradients follow the subspaces."""
    matrix = torch.randn(c, n, n, dtype=dtype)
    return lambda w: (w @ matrix).square().sum() / 10 + (w @ matrix @ w.mT).sum()


def train(w, function, steps, **options):
    p = nn.Parameter(w.clone())
    optimizer = RiemannianSGD([p], **options)
    for _ in range(steps):
        optimizer.zero_grad()
        function(p).backward()
        optimizer.step()
    return p.detach(), optimizer


@pytest.mark.parametrize("variant", [False, True], ids=["geodesic", "qf"])
@pytest.mark.parametrize(("c", "k", "n"), [(5, 3, 10), (1, 1, 4), (3, 8, 64), (4, 2, 2)])
def test_200_steps_agree_with_the_literal_algorithm(variant, c, k, n):
    w = g.random_subspace(c, k, n, dtype=F64)
    function = a_problem(c, k, n)
    s, m = w.mT.clone(), torch.zeros(c, n, k, dtype=F64)
    for _ in range(200):
        leaf = s.clone().requires_grad_()
        (d,) = torch.autograd.grad(function(leaf.mT), leaf)
        s, m = algorithm_1(s, m, d, tau=1e-3, mu=0.9, variant=variant)
    result, optimizer = train(w, function, 200, lr=1e-3, retraction="qf" if variant else "geodesic")
    assert torch.allclose(result, s.mT, atol=1e-9)
    assert torch.allclose(optimizer.state_dict()["state"][0]["momentum_buffer"], m.mT, atol=1e-8)
    if k < n:
        assert g.distance(result, w).min() > 0.05  # it did move


def test_the_momentum_is_a_tangent_vector_and_parallel_transport_takes_it_along():
    w = g.random_subspace(4, 3, 9, dtype=F64)
    d = torch.randn(2, 4, 3, 9, dtype=F64)
    buffer, moved = torch.zeros_like(w), w.clone()
    kernels.geodesic_step(moved, d[0], buffer, 0.3, 0.9, transport="parallel")
    h = g.project(w, d[0])
    assert torch.allclose(moved, g.geodesic(w, -h, 0.3), atol=1e-12)
    assert torch.allclose(buffer, g.transport(w, -h, h, 0.3), atol=1e-12)
    assert (buffer @ moved.mT).abs().max() < 1e-12
    projected = torch.zeros_like(w)
    kernels.geodesic_step(w.clone(), d[0], projected, 0.3, 0.9)
    assert torch.allclose(projected, h, atol=1e-12)


def test_the_tangent_is_orthogonal_to_a_weight_that_is_orthonormal_only_to_rounding():
    w = g.random_subspace(20, 4, 16, dtype=F64)
    w += 1e-5 * torch.randn_like(w)
    buffer = torch.zeros_like(w)
    kernels.geodesic_step(w.clone(), torch.randn_like(w), buffer, 1e-3, 0.9)
    assert (buffer @ w.mT).abs().max() < 1e-8  # a plain projection would leave 1e-5


def test_huge_gradients_turn_a_class_by_the_largest_angle_allowed():
    w = g.random_subspace(4, 3, 9)
    moved = w.clone()
    counts = kernels.geodesic_step(moved, 1e11 * torch.randn_like(w), None, 1.0, 0.0, max_angle=0.1)
    assert int(counts.capped) == 4
    assert torch.allclose(g.principal_angles(w, moved)[:, -1], torch.tensor(0.1), rtol=0.01)


@pytest.mark.slow
def test_float32_stays_orthonormal_over_10000_steps_with_random_gradients():
    w = g.random_subspace(20, 8, 64)
    buffer, worst = torch.zeros_like(w), 0.0
    for step in range(10_000):
        kernels.geodesic_step(w, torch.randn_like(w), buffer, 0.1, 0.9)
        if step % 10 == 0:
            worst = max(worst, float(g.orthonormality_error(w)))
    assert worst < 1e-6


@pytest.mark.parametrize("n", [768, 8192])
def test_wide_features_start_and_stay_orthonormal_too(n):
    w = g.random_subspace(20, 8, n)
    buffer = torch.zeros_like(w)
    for _ in range(20):
        assert g.orthonormality_error(w.double()) < 6e-7  # in float64: the measure itself has no rounding
        assert g.orthonormality_error(w) < 1e-6
        kernels.geodesic_step(w, 1e-2 * torch.randn_like(w), buffer, 0.1, 0.9)


@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0, 30.0, 1e4])
def test_one_float32_step_stays_near_the_float64_step_whatever_its_size(size):
    w = g.random_subspace(50, 8, 257, dtype=F64)
    d = torch.randn_like(w)
    d *= size / torch.linalg.matrix_norm(g.project(w, d), 2)[:, None, None]  # the largest turn, in radians
    exact, single = w.clone(), w.float()
    kernels.geodesic_step(exact, d, None, 1.0, 0.0)
    kernels.geodesic_step(single, d.float(), None, 1.0, 0.0)
    angle = min(size, 64.0)
    assert g.distance(single.double(), exact).max() < 1e-6 * max(1.0, angle)
    assert g.orthonormality_error(single) < 1e-6


@pytest.mark.parametrize("transport", ["projection", "parallel"])
def test_a_change_of_basis_changes_nothing(transport):
    w = g.random_subspace(6, 4, 12, dtype=F64)
    x = torch.randn(30, 12, dtype=F64)
    labels = torch.randint(0, 6, (30,))
    rotation = g.random_subspace(6, 4, 4, dtype=F64)

    def loss(weight):
        return nn.functional.cross_entropy(kernels.subspace_logits(x, weight, 10.0), labels)

    one, _ = train(w, loss, 50, lr=0.3, transport=transport)
    other, _ = train(rotation @ w, loss, 50, lr=0.3, transport=transport)
    assert torch.allclose(
        kernels.subspace_logits(x, rotation @ w, 10.0), kernels.subspace_logits(x, w, 10.0), atol=1e-12
    )
    assert torch.allclose(other, rotation @ one, atol=1e-9)
    assert g.distance(one, other).max() < 1e-9
    assert g.distance(one, w).min() > 0.1


def test_a_change_of_basis_changes_nothing_for_qf_without_momentum():
    w, rotation = g.random_subspace(6, 4, 12, dtype=F64), g.random_subspace(6, 4, 4, dtype=F64)
    d = torch.randn_like(w)
    one, other = w.clone(), rotation @ w
    kernels.geodesic_step(one, d, None, 0.3, 0.0, retraction="qf")
    kernels.geodesic_step(other, rotation @ d, None, 0.3, 0.0, retraction="qf")
    assert g.distance(one, other).max() < 1e-9


@pytest.mark.parametrize("size", [1e-6, 1e-2, 1.0, 60.0])
@pytest.mark.parametrize("rank", [1, 4])  # of one direction alone, W - D is far from orthonormal
@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-12), (torch.float32, 2e-6)], ids=["float64", "float32"])
def test_qf_by_gram_matrices_is_the_qf_of_a_qr(size, rank, dtype, tolerance):
    w = g.random_subspace(5, 4, 30, dtype=dtype)
    w[2, 1:] = 0
    d = g.project(w, torch.randn(5, 4, rank, dtype=dtype) @ torch.randn(5, rank, 30, dtype=dtype))
    d[2, 1:] = 0
    d[0] = 1e-3 * d[0]
    d *= size / torch.linalg.matrix_norm(d).amax()
    expected = g.retract_qf(w.double(), -d.double())
    kernels.geodesic_step(w, d, None, 1.0, retraction="qf", impl="reference")
    assert (w - expected).abs().max() < tolerance * max(1, size)  # so much does rounding in D turn the result
    assert g.orthonormality_error(w) < tolerance


def test_a_single_sample_turns_one_direction_towards_itself():
    """Paper, Eq. 9: only the vector of the subspace nearest to the feature moves."""
    head = grassy.GrassmannHead(16, 3, k=4, gamma=1.0, dtype=F64)
    x = torch.randn(1, 16, dtype=F64)
    (gradient,) = torch.autograd.grad(head(x)[0, 1], head.weight)
    h = g.project(head.weight, gradient)
    assert (h[[0, 2]] == 0).all()
    singular_values = torch.linalg.svdvals(h[1])
    assert singular_values[0] > 1e-3
    assert (singular_values[1:] < 1e-12).all()
    unit = (x / x.norm()).squeeze()
    w1 = head.weight[1]
    residual = unit - w1.mT @ (w1 @ unit)  # Proposition 1 and Eq. 8, with the basis the weight has
    assert torch.allclose(h[1], torch.outer(w1 @ unit, residual) / (w1 @ unit).norm(), atol=1e-12)


def test_maximize_ascends():
    w, d = g.random_subspace(3, 2, 7, dtype=F64), torch.randn(3, 2, 7, dtype=F64)
    up, down = w.clone(), w.clone()
    kernels.geodesic_step(up, d, torch.zeros_like(w), 0.1, 0.9, maximize=True)
    kernels.geodesic_step(down, -d, torch.zeros_like(w), 0.1, 0.9)
    assert torch.equal(up, down)
    toy = torch.tensor([[3.0, 4.0]])  # the toy of Section 4.2: the line that holds most of a vector is its own
    result, _ = train(
        torch.tensor([[[1.0, 0.0]]]), lambda p: kernels.subspace_logits(toy, p, 5.0).sum(), 200, lr=0.05, maximize=True
    )
    assert torch.allclose(result.abs(), torch.tensor([[[0.6, 0.8]]]), atol=1e-4)


@pytest.mark.parametrize("max_angle", [0.05, 0.5])
def test_max_angle_limits_the_turn_of_each_class_and_leaves_smaller_turns_alone(max_angle):
    w = g.random_subspace(40, 8, 20, dtype=F64)
    d = torch.randn_like(w) * torch.logspace(-4, 1, 40, dtype=F64)[:, None, None]
    free, limited = w.clone(), w.clone()
    free_counts = kernels.geodesic_step(free, d, None, 0.05, 0.0)
    counts = kernels.geodesic_step(limited, d, None, 0.05, 0.0, max_angle=max_angle)
    asked = 0.05 * torch.linalg.matrix_norm(g.project(w, d), 2)
    turned = g.principal_angles(w, limited)[:, -1]
    assert (turned <= max_angle + 1e-12).all()
    assert torch.allclose(turned[asked > max_angle * 1.01], torch.tensor(max_angle, dtype=F64), rtol=0.006)
    small = asked < max_angle * 0.99
    assert torch.equal(limited[small], free[small])
    assert int((asked > max_angle * 1.01).sum()) <= int(counts.capped) <= int((asked > max_angle * 0.99).sum())
    assert int(free_counts.capped) == 0


def test_an_insane_turn_is_scaled_down_and_counted():
    p = nn.Parameter(g.random_subspace(4, 3, 9))
    optimizer = RiemannianSGD([p], lr=1.0)
    p.grad = 1e6 * torch.randn_like(p)
    optimizer.step()
    assert optimizer.capped_classes == 4
    assert g.orthonormality_error(p.detach()) < 1e-6


def test_an_enormous_rate_is_capped_and_not_an_overflow():
    weight = g.random_subspace(2, 3, 8)
    moved = weight.clone()
    counts = kernels.geodesic_step(moved, torch.randn_like(weight), None, 1e30, impl="reference")
    assert int(counts.capped) == 2
    assert g.orthonormality_error(moved) < 1e-6
    still = weight.clone()
    counts = kernels.geodesic_step(still, torch.randn_like(weight), None, 1e200, impl="reference")
    assert int(counts.skipped) == 2  # infinite in float32
    assert torch.equal(still, weight)
