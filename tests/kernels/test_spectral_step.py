"""The spectral step: against an SVD in float64, its invariances, its angles, and the hazards of the design."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import grassy
from grassy import geometry as g
from grassy import kernels
from grassy.kernels.reference import _largest_eigenvalue
from grassy.kernels.spectral import SOFTENING, whitening
from grassy.optim import RiemannianSGD
from grassy.optim.joint import SPECTRAL_LR
from grassy.train.diagnostics import largest_turn

F64 = torch.float64
TOP = (1 + SOFTENING) ** -0.5  # the largest singular value of the direction


def direction_by_svd(w, d):
    """The same by an SVD of the tangent vector."""
    u, s, vt = torch.linalg.svd(g.project(w, d), full_matrices=False)
    softened = s / (s.square() + SOFTENING * s[..., :1].square()).sqrt()
    return (u * softened.unsqueeze(-2)) @ vt


def gradients(w, decades=0.0):
    """Random ones, of different sizes for different classes and of very different sizes along their rows."""
    c, k, _ = w.shape
    sizes = (
        torch.logspace(-7, 4, c, dtype=w.dtype)[:, None, None] * torch.logspace(0, -decades, k, dtype=w.dtype)[:, None]
    )
    return sizes * torch.randn_like(w)


def stepped(w, d, lr=0.05, **options):
    moved = w.clone()
    kernels.geodesic_step(moved, d, None, lr, direction="spectral", **options)
    return moved


shapes = st.tuples(st.integers(1, 9), st.integers(1, 9)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(shapes, st.floats(0, 3), st.floats(0.001, 1.5), st.integers(0, 2**31))
def test_it_is_the_geodesic_along_the_tangent_vector_with_equal_singular_values(shape, decades, lr, seed):
    torch.manual_seed(seed)
    w = g.random_subspace(6, *shape, dtype=F64)
    d = gradients(w, decades)
    expected = g.geodesic(w, -direction_by_svd(w, d), lr)
    # λ_max is estimated, too large by up to K**(1/512): with it ε, which is felt where σ_i is about √ε σ_max.
    assert g.distance(stepped(w, d, lr), expected).max() < 1e-3 * lr
    single = stepped(w.float(), d.float(), lr)
    assert g.distance(single.double(), stepped(w, d, lr)).max() < 1e-4 * max(lr, 0.05)
    assert g.orthonormality_error(single) < 1e-6


@given(shapes, st.integers(0, 2**31))
def test_a_change_of_basis_changes_nothing(shape, seed):
    torch.manual_seed(seed)
    w, rotation = g.random_subspace(5, *shape, dtype=F64), g.random_subspace(5, shape[0], shape[0], dtype=F64)
    one, other = w.clone(), rotation @ w
    momenta = torch.zeros_like(w), torch.zeros_like(w)
    for _ in range(5):
        d = gradients(w, 2)
        kernels.geodesic_step(one, d, momenta[0], 0.05, 0.9, direction="spectral")
        kernels.geodesic_step(other, rotation @ d, momenta[1], 0.05, 0.9, direction="spectral")
    assert torch.allclose(other, rotation @ one, atol=1e-8)
    assert g.distance(one, other).max() < 1e-8


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("lr", [0.01, 0.05, 0.5])
def test_every_principal_direction_turns_by_the_learning_rate_however_small_the_gradient(lr, dtype):
    w = g.random_subspace(12, 4, 40, dtype=dtype)
    angles = g.principal_angles(w, stepped(w, gradients(w), lr))
    assert (angles <= lr * TOP + 1e-6).all()
    assert (angles > 0.99 * lr).all()
    assert torch.allclose(angles[:, -1], torch.full((12,), lr * TOP, dtype=dtype), rtol=1e-4)


def test_only_as_many_directions_turn_as_the_gradient_has():
    w = g.random_subspace(6, 4, 20, dtype=F64)
    d = torch.randn(6, 4, 1, dtype=F64) * torch.randn(6, 1, 20, dtype=F64)  # of one sample
    angles = g.principal_angles(w, stepped(w, d, 0.05))
    assert (angles[:, :-1] < 1e-7).all()
    assert torch.allclose(angles[:, -1], torch.tensor(0.05 * TOP, dtype=F64), rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("k", [1, 2, 8, 32])
def test_newton_schulz_finds_the_inverse_square_root(k, dtype):
    h = gradients(g.random_subspace(20, k, 64, dtype=F64), 3)
    a = h @ h.mT
    largest = torch.linalg.eigvalsh(a)[..., -1:, None]
    values, vectors = torch.linalg.eigh(a + SOFTENING * largest * torch.eye(k, dtype=F64))
    exact = vectors @ torch.diag_embed(values.rsqrt()) @ vectors.mT
    single = a.to(dtype)
    found = whitening(single, _largest_eigenvalue(single), torch.zeros(20, 1, 1, dtype=dtype)).double()
    error = torch.linalg.matrix_norm((found - exact) @ h, 2)
    assert error.max() < (1e-4 if dtype == torch.float32 else 1e-5)  # the estimate of λ_max is good to 1e-5


@pytest.mark.parametrize("transport", ["projection", "parallel"])
def test_the_momentum_stays_that_of_the_gradient(transport):
    w, d = g.random_subspace(4, 3, 9, dtype=F64), torch.randn(4, 3, 9, dtype=F64)
    moved, buffer = w.clone(), torch.zeros_like(w)
    kernels.geodesic_step(moved, d, buffer, 0.3, 0.9, transport=transport, direction="spectral")
    h, o = g.project(w, d), direction_by_svd(w, d)
    expected = h if transport == "projection" else g.transport(w, -o, h, 0.3)
    assert torch.allclose(buffer, expected, atol=1e-6)
    if transport == "parallel":
        assert (buffer @ moved.mT).abs().max() < 1e-6
        assert torch.allclose(torch.linalg.svdvals(buffer), torch.linalg.svdvals(h), atol=1e-6)


@pytest.mark.parametrize("retraction", ["geodesic", "qf"])
def test_no_gradient_no_motion_to_the_bit_and_a_bad_one_is_skipped(retraction):
    w = g.random_subspace(6, 3, 9)
    d = torch.randn_like(w)
    d[2], d[4, 0, 0], d[5] = 0, float("nan"), float("inf")
    moved, buffer = w.clone(), torch.zeros_like(w)
    counts = kernels.geodesic_step(moved, d, buffer, 0.1, 0.9, retraction=retraction, direction="spectral")
    assert torch.equal(moved[[2, 4, 5]], w[[2, 4, 5]])
    assert (buffer[[2, 4, 5]] == 0).all()
    assert int(counts.skipped) == 2
    angles = g.principal_angles(w, moved)[[0, 1, 3]]
    expected = 0.1 if retraction == "geodesic" else torch.tensor(0.1).atan().item()
    assert torch.allclose(angles, torch.tensor(expected), rtol=0.02)
    still = w.clone()
    kernels.geodesic_step(still, torch.zeros_like(w), torch.zeros_like(w), 0.1, 0.9, direction="spectral")
    assert torch.equal(still, w)


def test_a_gradient_inside_the_subspace_is_rounding_outside_and_hardly_turns_it():
    w = g.random_subspace(20, 4, 64)
    moved = stepped(w, torch.randn(20, 4, 4) @ w, 0.05)
    assert g.principal_angles(w, moved).max() < 0.1 * 0.05
    whole = g.random_subspace(20, 6, 6)
    assert torch.allclose(stepped(whole, torch.randn_like(whole)), whole, atol=1e-6)
    assert g.orthonormality_error(moved) < 1e-6


def test_gradients_of_any_size_neither_overflow_nor_vanish():
    w = g.random_subspace(5, 3, 9)
    for size in (1e-16, 1e-8, 1e8, 1e17):
        angles = g.principal_angles(w, stepped(w, size * torch.randn_like(w), 0.02))
        assert torch.allclose(angles[:, -1], torch.tensor(0.02), rtol=0.01), size
    for size in torch.logspace(17, 21, 200).tolist():
        assert g.orthonormality_error(stepped(w, size * torch.randn_like(w), 0.02)) < 1e-6
    for size in (1e-30, 1e25):  # squares that vanish leave the class alone, squares that overflow skip it
        assert torch.equal(stepped(w, size * torch.randn_like(w)), w)


def test_absent_rows_stay_absent_and_the_others_turn_fully():
    head = grassy.GrassmannHead(10, 3, k=[1, 3, 4])
    before = head.weight.detach().clone()
    moved, buffer = before.clone(), torch.zeros_like(before)
    kernels.geodesic_step(moved, torch.randn_like(before), buffer, 0.05, 0.9, direction="spectral")
    for i, k in enumerate((1, 3, 4)):
        assert (moved[i, k:] == 0).all()
        assert (buffer[i, k:] == 0).all()
        angles = g.principal_angles(before[i, :k], moved[i, :k])
        assert ((angles > 0.95 * 0.05) & (angles < 0.0501)).all()


def test_max_angle_and_maximize():
    w, d = g.random_subspace(4, 3, 9, dtype=F64), torch.randn(4, 3, 9, dtype=F64)
    moved = w.clone()
    counts = kernels.geodesic_step(moved, d, None, 0.3, direction="spectral", max_angle=0.1)
    assert int(counts.capped) == 4
    assert torch.allclose(g.principal_angles(w, moved)[:, -1], torch.tensor(0.1, dtype=F64), rtol=0.01)
    assert torch.allclose(stepped(w, d, maximize=True), stepped(w, -d), atol=1e-12)


def test_float32_stays_orthonormal():
    w = g.random_subspace(20, 8, 64)
    buffer = torch.zeros_like(w)
    for _ in range(1000):
        kernels.geodesic_step(w, torch.randn_like(w), buffer, 0.05, 0.9, direction="spectral")
        assert g.orthonormality_error(w) < 1e-6


def test_the_path_that_asks_the_device_nothing_gives_the_same(monkeypatch):
    """On a GPU rare cases are not looked for but handled always, by masks."""
    w = g.random_subspace(30, 4, 33, dtype=F64)
    w[3, 1] = 0
    d = gradients(w)
    d[5], d[7, 2, 5] = 0, float("nan")
    expected = stepped(w, d, transport="parallel")
    small_functions = g.cosm1_sinc
    monkeypatch.setattr(kernels.reference, "_any", lambda mask: True)
    monkeypatch.setattr(g, "cosm1_sinc", lambda x, _: small_functions(x, kernels.reference.MAX_DOUBLINGS))
    assert torch.allclose(stepped(w, d, transport="parallel"), expected, atol=1e-12)


def test_only_the_reference_knows_it_and_unknown_directions_are_refused():
    w = g.random_subspace(300, 8, 512)  # for which auto would take another implementation
    d = torch.randn_like(w)
    assert torch.equal(stepped(w, d), stepped(w, d, impl="reference"))
    with pytest.raises(ValueError, match="direction='spectral' needs impl 'auto' or 'reference'"):
        stepped(w, d, impl="native")
    with pytest.raises(ValueError, match="direction must be one of"):
        kernels.geodesic_step(w, d, None, 0.1, direction="newton")
    with pytest.raises(ValueError, match="direction must be one of"):
        RiemannianSGD([nn.Parameter(w)], lr=0.1, direction="newton")


def test_the_optimizers_pass_it_on_and_older_states_descend_along_the_gradient():
    head, x = grassy.GrassmannHead(12, 5, k=3), torch.randn(40, 12)
    start, y = head.weight.detach().clone(), torch.randint(0, 5, (40,))
    optimizer = grassy.make_optimizer(head, "adamw", lr=1e-3, direction="spectral")
    assert optimizer.param_groups[0]["lr"] == SPECTRAL_LR
    assert optimizer.param_groups[0]["direction"] == "spectral"
    grassy.classification_loss(head, x, y).backward()
    expected = stepped(start, head.weight.grad, SPECTRAL_LR)
    optimizer.step()
    assert torch.allclose(head.weight, expected, atol=1e-6)
    assert largest_turn(optimizer) == pytest.approx(torch.tensor(SPECTRAL_LR).rad2deg().item(), rel=1e-3)
    optimizer.param_groups[0]["max_angle"] = 0.01
    assert largest_turn(optimizer) == pytest.approx(torch.tensor(0.01).rad2deg().item())
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        del group["direction"]
    optimizer.load_state_dict(state)
    assert optimizer.riemannian.param_groups[0]["direction"] == "gradient"
    optimizer.step()


def test_training_with_it_lowers_the_loss():
    head, x, y = grassy.GrassmannHead(12, 5, k=3), torch.randn(60, 12), torch.randint(0, 5, (60,))
    optimizer = grassy.make_optimizer(head, "sgd", lr=0.1, head_lr=0.03, direction="spectral")
    losses = []
    for _ in range(80):
        optimizer.zero_grad()
        loss = grassy.classification_loss(head, x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_the_experiment_measures_how_far_classes_turn(monkeypatch):
    from studies.spectral import run

    monkeypatch.setattr(run, "EPOCHS", 2)
    found = run.train("spectral", "constant", rare=True, seed=0)
    steps = -(-len(run.images(rare=True)[0]) // run.BATCH)
    assert found["path"] == pytest.approx(steps * math.degrees(0.02), rel=0.01)
    assert 0 < found["net"] <= found["path"] + 1e-6
    still = run.train("gradient", "constant", rare=True, seed=0)
    assert still["path"] != pytest.approx(found["path"], rel=0.01)
    assert (run.images(rare=True)[1] == run.RARE).sum() == run.FEW
