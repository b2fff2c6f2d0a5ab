"""The kernels of the step against the reference in float64. Skipped without a GPU."""

import math

import pytest
import torch

from grassy import geometry as g
from grassy import kernels

pytest.importorskip("triton", reason="triton is not installed")

pytestmark = pytest.mark.gpu

F64, BF16 = torch.float64, torch.bfloat16
# One class, many classes, odd widths, slices over clusters of all sizes, all sizes of block.
SHAPES = [(1, 1, 1), (5, 1, 7), (1000, 3, 129), (5, 8, 2047), (5, 8, 2048), (3, 17, 129), (5, 16, 2048), (3, 32, 2048),
          (4, 33, 129), (3, 64, 256), (2, 8, 20_000), (3, 8, 1024), (3, 8, 4096), (2, 16, 1024), (2, 16, 4096),
          (3, 32, 512), (3, 32, 1024), (2, 32, 4096), (3, 20, 2047), (2, 16, 8192), (5, 1, 2048), (5, 2, 2048),
          (5, 2, 4096), (5, 2, 4097)]  # fmt: skip


def compare(w, d, m, impl, lr=0.05, **options):
    """Subspace distance, relative error of the momentum, orthonormality error, and both counts."""
    results = []
    for name, dtype in ((impl, None), ("reference", F64)):
        cast = lambda t, dtype=dtype: None if t is None else t.to(dtype or t.dtype, copy=True)
        moved, buffer = cast(w), cast(m)
        counts = kernels.geodesic_step(
            moved, cast(d), buffer, torch.tensor(lr, device="cuda"), 0.9, impl=name, **options
        )
        results.append((moved.double(), None if m is None else buffer.double(), tuple(map(int, counts))))
    (a, m1, counted), (b, m2, expected) = results
    assert counted == expected
    # With k = n there is no tangent vector: what is left is rounding of the gradient.
    size = (d if w.shape[1] == w.shape[2] else m2).abs().max().clamp_min(1e-3) if m is not None else 1.0
    momentum = 0.0 if m is None else float((m1 - m2).abs().max() / size)
    # Of bases that are orthonormal in float64: otherwise a class that stayed has some distance to itself.
    apart = g.distance(torch.linalg.qr(a.mT).Q.mT, torch.linalg.qr(b.mT).Q.mT)
    return float(apart.max()), momentum, float(g.orthonormality_error(a))


def case(shape, scale=0.3):
    w = g.random_subspace(*shape, device="cuda")
    d = scale * torch.randn_like(w)
    if shape[0] > 1:
        d[1, 0, -1] = float("nan")
    return w, d, g.project(w, scale * torch.randn_like(w))


@pytest.mark.parametrize("transport", ["projection", "parallel"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_step_that_is_chosen_agrees(shape, transport):
    w, d, m = case(shape)
    distance, momentum, error = compare(w, d, m, "auto", transport=transport)
    assert distance < (1e-6 if shape[2] <= 2048 and shape[1] <= 32 else 3e-6)
    assert momentum < 3e-6
    assert error < 1e-6


@pytest.mark.parametrize("shape", [(5, 3, 130), (5, 8, 2048), (3, 16, 384), (3, 32, 2048)], ids=str)
@pytest.mark.parametrize("lr", [5e-4, 5e-3, 0.05])  # the usual way, that of larger turns, and that with care
def test_the_kernel_in_cuda_takes_all_options(shape, lr):
    w, d, m = case(shape)
    assert kernels.choose("cuda", w) == "cuda"
    for options in ({"max_angle": 1e-3}, {"max_angle": 0.01}, {"max_angle": 0.5}, {"maximize": True}):
        distance, momentum, error = compare(w, d, m, "cuda", lr, **options)
        assert distance < 1.5e-6
        assert momentum < 3e-6
        assert error < 1e-6
    assert compare(w, d, None, "cuda", lr)[0] < 1.5e-6


@pytest.mark.parametrize("transport", ["projection", "parallel"])
@pytest.mark.parametrize("shape", [(5, 3, 129), (5, 8, 2048), (5, 16, 2048), (3, 17, 129), (3, 32, 2048)], ids=str)
@pytest.mark.parametrize(
    "lr", [5e-4, 5e-3]
)  # less than a tenth of a radian: polynomials of degree 2; and up to half a one
def test_small_turns_as_in_training(shape, transport, lr):
    w, d, m = case(shape)
    distance, momentum, error = compare(w, d, m, "cuda", lr, transport=transport)
    assert distance < 1e-6
    assert momentum < 3e-6
    assert error < 1e-6


@pytest.mark.parametrize("n", [129, 512, 1024, 2048, 4096])  # clusters of all sizes
@pytest.mark.parametrize("k", [1, 3, 4])
@pytest.mark.parametrize("momentum", [True, False])
def test_two_classes_that_are_taken_together_do_not_feel_each_other(k, n, momentum):
    """In every pair one class is as usual; the other one is what the name says, before it or after it."""
    cases = {"usual": 1.0, "lost": float("nan"), "still": 0.0, "faint": 1e-20, "steep": 100.0, "wide": 1000.0}
    names = [name for case in cases for name in (case, "usual", "usual", case)] + ["steep"]  # an odd number
    w = g.random_subspace(len(names), k, n, device="cuda")
    factors = torch.tensor([cases[name] for name in names], device="cuda").view(-1, 1, 1)
    d = g.project(w, torch.randn_like(w)) / n**0.5
    m = 0.1 * torch.randn_like(d) / n**0.5
    d, m = factors * d, torch.where(factors == 0, 0, m * factors.nan_to_num(1)) if momentum else None
    moved, buffer = w.clone(), None if m is None else m.clone()
    counts = kernels.geodesic_step(moved, d, buffer, 1e-3, 0.9, impl="cuda")
    assert int(counts.skipped) == 2
    for i, name in enumerate(names):  # each as if it were alone
        alone, own = w[i : i + 1].clone(), None if m is None else m[i : i + 1].clone()
        kernels.geodesic_step(alone, d[i : i + 1], own, 1e-3, 0.9, impl="cuda")
        assert (moved[i] - alone[0]).abs().max() < 3e-7, (i, name)
        assert m is None or (buffer[i] - own[0]).abs().max() <= 1e-6 * own.abs().max(), (i, name)
        if name in ("lost", "still"):
            assert torch.equal(moved[i], w[i])
        if name == "lost" and m is not None:
            assert torch.equal(buffer[i], m[i])
    usual = torch.tensor([name != "lost" for name in names], device="cuda")
    distance, _, error = compare(w[usual], d[usual], m[usual] if momentum else None, "cuda", lr=1e-3)
    assert distance < 1.5e-6
    assert error < 1e-6


@pytest.mark.parametrize("shape", [(5, 1, 64), (5, 8, 64), (3, 32, 2048)], ids=str)
def test_a_class_that_is_lost_already_is_left_alone_and_counted(shape):
    w, d, m = case(shape)
    w[2, 0, 0] = float("nan")
    buffer = m.clone()
    counts = kernels.geodesic_step(w, d, buffer, 5e-4, 0.9, impl="cuda")
    assert int(counts.skipped) == 2
    assert torch.equal(buffer[1:3], m[1:3])
    assert w[2].isnan().sum() == 1


@pytest.mark.parametrize("shape", [(5, 8, 256), (5, 16, 2048), (3, 32, 2048)], ids=str)
def test_large_turns_are_taken_with_care(shape):
    w, d, m = case(shape, scale=30.0)
    distance, _, error = compare(w, d, m, "cuda")  # up to 64 radians, known to their rounding
    assert distance < 1e-4
    assert error < 1e-6
    assert compare(w, d, m, "cuda", max_angle=0.3)[0] < 1.5e-6


STREAMED = [(5, 2, 64), (5, 3, 4100), (5, 5, 1000), (5, 8, 768), (5, 8, 2047), (5, 16, 2048), (4, 17, 129),
            (3, 32, 2048), (4, 33, 129), (3, 64, 256), (3, 64, 2048)]  # fmt: skip


@pytest.mark.parametrize("lr", [5e-4, 5e-3, 0.05])
@pytest.mark.parametrize("transport", ["projection", "parallel"])
@pytest.mark.parametrize("shape", STREAMED, ids=str)
def test_what_is_streamed_by_triton_agrees(shape, transport, lr):
    w, d, m = case(shape)
    for options in ({}, {"max_angle": 0.01}):
        distance, momentum, error = compare(w, d, m, "triton", lr, transport=transport, **options)
        assert distance < (1e-6 if shape[2] <= 2048 and shape[1] <= 32 else 3e-6)
        assert momentum < 3e-6
        assert error < 1e-6
    w[0, -1] = 0
    before = w.clone()
    d[2], m[2] = 0, 0
    kernels.geodesic_step(w, d.to(BF16), m, lr, 0.9, impl="triton", transport=transport)
    assert not w[0, -1].any()
    assert not m[0, -1].any()
    assert torch.equal(w[[1, 2]], before[[1, 2]])
    assert g.orthonormality_error(w.double()) < 1e-6


@pytest.mark.parametrize("lr", [5e-4, 5e-3, 0.05])
@pytest.mark.parametrize(("k", "n"), [(2, 2048), (4, 512), (8, 512), (16, 2048), (25, 1100), (40, 200)])
def test_bfloat16_gradients_and_momentum(k, n, lr):
    w, d, m = case((7, k, n))
    distance, momentum, error = compare(w, d.to(BF16), m.to(BF16), "auto", lr)
    assert distance < (1e-6 if k <= 32 else 3e-6)
    assert momentum < 2**-8
    assert error < 1e-6


@pytest.mark.parametrize(("impl", "k", "n"), [("cuda", 4, 300), ("cuda", 8, 300), ("cuda", 20, 1030),
                                              ("triton", 4, 300), ("triton", 8, 300)])  # fmt: skip
@pytest.mark.parametrize("transport", ["projection", "parallel"])
@pytest.mark.parametrize("lr", [5e-4, 5e-3, 0.05])
def test_absent_rows_stay_absent_and_still_classes_still(impl, k, n, lr, transport):
    w, d, m = case((50, k, n))
    w[3, k - 2 :] = 0
    d[4], m[4] = 0, 0
    before = w.clone()
    kernels.geodesic_step(w, d, m, lr, 0.9, impl=impl, transport=transport)
    assert (w[3, k - 2 :] == 0).all()
    assert (m[3, k - 2 :] == 0).all()
    assert torch.equal(w[[1, 4]], before[[1, 4]])
    assert g.orthonormality_error(w) < 1e-6


@pytest.mark.parametrize(
    ("impl", "k"), [(impl, k) for impl in ("cuda", "triton", "reference") for k in (3, 8)] + [("triton", 40)]
)
def test_huge_gradients_turn_a_class_by_the_largest_angle_allowed(impl, k):
    w = g.random_subspace(4, k, 64, device="cuda")
    moved = w.clone()
    counts = kernels.geodesic_step(moved, 1e11 * torch.randn_like(w), None, 1.0, 0.0, max_angle=0.1, impl=impl)
    assert int(counts.capped) == 4
    assert torch.allclose(g.principal_angles(w, moved)[:, -1], torch.tensor(0.1, device="cuda"), rtol=0.01)


def test_a_gradient_within_the_subspace_does_not_move_it():
    w = g.random_subspace(50, 8, 300, device="cuda")
    moved, m = w.clone(), torch.zeros_like(w)
    kernels.geodesic_step(moved, torch.randn(50, 8, 8, device="cuda") @ w, m, 0.05, 0.9, impl="cuda")
    assert g.distance(moved.double(), w.double()).max() < 2e-6


@pytest.mark.parametrize("impl", ["cuda", "triton"])
def test_a_gradient_that_lies_almost_within_the_subspace(impl):
    """Then H H' is a small difference of Gram matrices of B, as it becomes when features lie near their class."""
    w = g.random_subspace(50, 4, 300, device="cuda")
    inside = torch.randn(50, 4, 4, device="cuda") @ w
    d = inside + 1e-3 * g.project(w, torch.randn_like(w))
    for options in ({}, {"max_angle": 1e-4}):
        distance, momentum, error = compare(w, d, torch.zeros_like(w), impl, **options)
        assert distance < 1e-6
        assert momentum < 1e-2
        assert error < 1e-6


@pytest.mark.parametrize("radians", [0.02, 0.1, 1.0])  # by which a gradient alone would turn: momentum makes more of it
@pytest.mark.parametrize(
    "shape", [(40, 2, 2048), (40, 4, 64), (40, 8, 64), (10, 16, 2048), (10, 32, 1024), (5, 64, 256)], ids=str
)
def test_ten_thousand_steps_keep_it_orthonormal(shape, radians):
    w = g.random_subspace(*shape, device="cuda")
    m, lr = torch.zeros_like(w), torch.tensor(0.1, device="cuda")
    gradients = [10 * radians / math.sqrt(w[0].numel()) * torch.randn_like(w) for _ in range(10)]
    for d in gradients[:2]:
        kernels.geodesic_step(w, d, m, lr, 0.9)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # anything that asked the host would raise
        for d in gradients:
            kernels.geodesic_step(w, d, m, lr, 0.9)
    for _ in range(1000):
        graph.replay()
    assert g.orthonormality_error(w.double()) < 1e-6
    distance, _, error = compare(w, 0.02 / radians * gradients[0], torch.zeros_like(w), "auto")
    assert distance < (1e-6 if shape[1] <= 32 else 3e-6)  # one more step is as exact as the first
    assert error < 1e-6


@pytest.mark.parametrize("lr", [5e-3, 0.05])
@pytest.mark.parametrize(
    ("impl", "shape"),
    [("cuda", (20, 18, 1024)), ("reference", (20, 18, 1024)), ("triton", (20, 4, 64)), ("triton", (20, 40, 128))],
)
def test_a_flag_on_the_device_skips_the_step(impl, shape, lr):
    w, d, m = case(shape)
    before = w.clone(), m.clone()
    counts = kernels.geodesic_step(w, d, m, lr, 0.9, skip=torch.ones((), device="cuda"), impl=impl)
    assert torch.equal(w, before[0])
    assert torch.equal(m, before[1])
    assert int(counts.skipped) == 0
    kernels.geodesic_step(w, d, m, lr, 0.9, skip=torch.zeros((), device="cuda"), impl=impl)
    assert not torch.equal(w, before[0])


@pytest.mark.parametrize("shape", [(5, 8, 64), (5, 20, 1024)], ids=str)
@pytest.mark.parametrize("lr", [5e-4, 0.05])
def test_a_weight_that_is_not_aligned(shape, lr):
    storage = torch.empty(math.prod(shape) + 1, device="cuda")
    w = storage[1:].view(shape)
    w.copy_(g.random_subspace(*shape))
    aligned = w.clone()
    d = torch.randn_like(aligned)
    for weight in (w, aligned):
        kernels.geodesic_step(weight, d, None, lr, impl="cuda")
    assert torch.equal(w, aligned)
