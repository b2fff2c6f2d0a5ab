"""The step of classes that are out of the ordinary: smaller ones, lost ones, those that must not move."""

import pytest
import torch
from torch import nn

import grassy
from grassy import geometry as g
from grassy import kernels
from grassy.kernels.cpu import step as native
from grassy.optim import RiemannianSGD

F64 = torch.float64


def test_unequal_dimensions_equal_the_heads_of_each_dimension_alone():
    dims = [1, 3, 8, 2]
    head = grassy.GrassmannHead(10, 4, k=dims, gamma=7.0, dtype=F64)
    assert head.dims.tolist() == dims
    alone = [grassy.GrassmannHead(10, 1, k=k, gamma=7.0, dtype=F64) for k in dims]
    with torch.no_grad():
        for i, single in enumerate(alone):
            single.weight.copy_(head.weight[i : i + 1, : dims[i]])
    x, labels = torch.randn(20, 10, dtype=F64), torch.randint(0, 4, (20,))
    together = RiemannianSGD([head.weight], lr=0.2)
    apart = RiemannianSGD([single.weight for single in alone], lr=0.2)
    for _ in range(10):
        logits = torch.cat([single(x) for single in alone], -1)
        assert torch.allclose(head(x), logits, atol=1e-10)
        for optimizer, output in ((together, head(x)), (apart, logits)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(output, labels).backward()
        for i, single in enumerate(alone):
            assert torch.allclose(head.weight.grad[i : i + 1, : dims[i]], single.weight.grad, atol=1e-10)
            assert (head.weight.grad[i, dims[i] :] == 0).all()
        together.step()
        apart.step()
    assert head.dims.tolist() == dims


@pytest.mark.parametrize("retraction", ["geodesic", "qf"])
def test_absent_rows_stay_zero_even_if_a_gradient_reaches_them(retraction):
    w = g.random_subspace(3, 4, 9)
    w[:, 1] = 0
    buffer = torch.zeros_like(w)
    for _ in range(5):
        kernels.geodesic_step(w, torch.randn_like(w), buffer, 0.1, 0.9, retraction=retraction)
    assert (w[:, 1] == 0).all()
    assert (buffer[:, 1] == 0).all()
    assert g.orthonormality_error(w) < 1e-6


IMPLS = [
    "reference",
    pytest.param("native", marks=pytest.mark.skipif(native.unavailable() is not None, reason="no C++")),
]


@pytest.mark.parametrize("impl", IMPLS)
def test_a_class_that_is_lost_already_is_left_as_it_is_and_counted(impl):
    w = g.random_subspace(4, 3, 16)
    w[1, 2, 5] = float("nan")
    w[2, 1:] = 0
    d, m = torch.randn_like(w), torch.zeros_like(w)
    d[2, 2, 3] = float("nan")  # in a row that is absent
    before = w.clone()
    counts = kernels.geodesic_step(w, d, m, 0.1, 0.9, impl=impl)
    assert int(counts.skipped) == 2
    assert torch.equal(w[1:3].nan_to_num(9), before[1:3].nan_to_num(9))
    assert not m[1:3].any()
    assert not torch.equal(w[0], before[0])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("lr", [float("nan"), float("inf"), torch.tensor(float("nan"))])
def test_a_rate_that_is_not_finite_moves_nothing(impl, lr):
    w = g.random_subspace(4, 3, 16)
    m, before = torch.zeros_like(w), w.clone()
    counts = kernels.geodesic_step(w, torch.randn_like(w), m, lr, 0.9, impl=impl)
    assert tuple(map(int, counts)) == (4, 0)
    assert torch.equal(w, before)
    assert not m.any()


@pytest.mark.parametrize("max_angle", [0.0, -1.0, float("nan")])
def test_a_largest_angle_that_is_none_is_refused(max_angle):
    w = g.random_subspace(4, 3, 16)
    with pytest.raises(ValueError, match="max_angle must be None or positive"):
        kernels.geodesic_step(w, w.clone(), None, 0.1, max_angle=max_angle)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("retraction", ["geodesic", "qf"])
def test_classes_with_a_non_finite_gradient_stay_and_are_counted(bad, retraction):
    p = nn.Parameter(g.random_subspace(6, 3, 9))
    optimizer = RiemannianSGD([p], lr=0.1, retraction=retraction)
    p.grad = torch.randn_like(p)
    optimizer.step()
    before, momentum = p.detach().clone(), optimizer.state[p]["momentum_buffer"].clone()
    p.grad = torch.randn_like(p)
    p.grad[2, 0, 4] = bad
    p.grad[5, :, :] = bad
    optimizer.step()
    buffer = optimizer.state[p]["momentum_buffer"]
    for skipped in (2, 5):
        assert torch.equal(p[skipped], before[skipped])
        assert torch.equal(buffer[skipped], momentum[skipped])
    moved = [0, 1, 3, 4]
    assert (p[moved] != before[moved]).flatten(1).any(1).all()
    assert p.isfinite().all()
    assert optimizer.skipped_classes == 2
    optimizer.step()
    assert optimizer.skipped_classes == 4


def test_zero_gradients_and_zero_momentum_leave_the_weight_as_it_is_to_the_bit():
    w = g.random_subspace(5, 3, 9)
    moved, buffer = w.clone(), torch.zeros_like(w)
    kernels.geodesic_step(moved, torch.zeros_like(w), buffer, 0.1, 0.9)
    assert torch.equal(moved, w)
    assert (buffer == 0).all()


@pytest.mark.parametrize("retraction", ["geodesic", "qf"])
def test_a_class_without_a_gradient_stays_to_the_bit_beside_classes_that_turn_far(retraction):
    w = g.random_subspace(6, 3, 9)
    d = 100 * torch.randn_like(w)
    d[2] = 0
    d[4, 0, 0] = float("nan")
    moved = w.clone()
    kernels.geodesic_step(moved, d, torch.zeros_like(w), 0.1, 0.9, retraction=retraction)
    assert torch.equal(moved[[2, 4]], w[[2, 4]])
    assert not torch.equal(moved[0], w[0])


@pytest.mark.parametrize("options", [{}, {"retraction": "qf"}, {"transport": "parallel"}, {"max_angle": 0.3}], ids=str)
def test_the_path_that_asks_the_device_nothing_gives_the_same(monkeypatch, options):
    """On a GPU rare cases are not looked for but handled always, by masks."""
    w = g.random_subspace(30, 4, 33, dtype=F64)
    w[3, 1] = 0
    d = torch.randn_like(w) * torch.logspace(-3, 3, 30, dtype=F64)[:, None, None]
    d[5], d[7, 2, 5] = 0, float("nan")
    results, small_functions = [], g.cosm1_sinc
    for asks in (True, False):
        if not asks:
            monkeypatch.setattr(kernels.reference, "_any", lambda mask: True)
            monkeypatch.setattr(g, "cosm1_sinc", lambda x, _: small_functions(x, kernels.reference.MAX_DOUBLINGS))
        moved, buffer = w.clone(), torch.zeros_like(w)
        for _ in range(3):
            counts = kernels.geodesic_step(moved, d, buffer, 0.1, 0.9, **options)
        results.append((moved, buffer, counts))
    (a, m, counts), (b, n, other_counts) = results
    assert counts == other_counts
    assert int(counts.capped) > 0
    assert torch.allclose(a, b, atol=1e-10)
    assert torch.allclose(m, n, atol=1e-10)
    assert torch.equal(b[[5, 7]], w[[5, 7]])
    assert (b[3, 1] == 0).all()


def test_a_subspace_that_fills_the_space_does_not_move():
    w = g.random_subspace(3, 5, 5)
    moved, buffer = w.clone(), torch.zeros_like(w)
    for _ in range(20):
        kernels.geodesic_step(moved, torch.randn_like(w), buffer, 0.1, 0.9)
    assert torch.allclose(moved, w, atol=1e-5)


def test_rank_one_momentum_and_one_class_of_one_dimension_are_no_special_cases():
    w = g.random_subspace(1, 4, 8, dtype=F64)
    d = torch.randn(1, 4, 1, dtype=F64) * torch.randn(1, 1, 8, dtype=F64)
    moved = w.clone()
    kernels.geodesic_step(moved, d, None, 0.2, 0.0)
    assert torch.allclose(moved, g.geodesic(w, -g.project(w, d), 0.2), atol=1e-12)
    line = g.random_subspace(1, 1, 2, dtype=F64)
    angle = 0.3
    turn = torch.stack([-line[0, 0, 1], line[0, 0, 0]])
    moved = line.clone()
    kernels.geodesic_step(moved, -turn.reshape(1, 1, 2), None, angle, 0.0)
    assert torch.allclose(moved[0, 0], torch.tensor(angle).cos() * line[0, 0] + torch.tensor(angle).sin() * turn)
