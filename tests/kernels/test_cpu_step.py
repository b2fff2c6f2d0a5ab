"""The step in C++ agrees with the reference, on awkward shapes and in all rare cases."""

import subprocess
import sys

import pytest
import torch

from grassy import geometry as g
from grassy import kernels
from grassy.kernels.cpu import step as native

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=f"no native step: {native.unavailable()}")

F64 = torch.float64


def steps(weight, gradients, impl, dtype, *, momentum=None, lr=0.1, **options):
    moved = weight.to(dtype, copy=True)
    buffer = torch.zeros_like(moved) if momentum is None else momentum.to(dtype, copy=True)
    for gradient in gradients:
        counts = kernels.geodesic_step(moved, gradient.to(dtype), buffer, lr, 0.9, impl=impl, **options)
    return moved, buffer, counts


def tangents(weight, *lengths):
    """Tangent vectors of the given Frobenius norms, one for each class."""
    h = g.project(weight, torch.randn_like(weight))
    return h * (torch.tensor(lengths, dtype=h.dtype) / torch.linalg.matrix_norm(h))[:, None, None]


@pytest.mark.parametrize("n", [1, 5, 7, 16, 64, 129, 2047])
@pytest.mark.parametrize("k", [1, 2, 3, 5, 8, 16, 17, 33])
@pytest.mark.parametrize("classes", [1, 5])
@pytest.mark.parametrize("transport", kernels.TRANSPORTS)
def test_it_agrees_with_the_float64_reference_on_awkward_shapes(classes, k, n, transport):
    k = min(k, n)
    w = g.random_subspace(classes, k, n, dtype=F64)
    gradients = 0.3 * torch.randn(3, classes, k, n, dtype=F64) / n**0.5
    exact, momentum, _ = steps(w, gradients, "reference", F64, transport=transport)
    moved, buffer, _ = steps(w, gradients, "native", torch.float32, transport=transport)
    assert torch.allclose(moved.double(), exact, atol=2e-6)
    assert torch.allclose(buffer.double(), momentum, atol=2e-6)
    assert g.orthonormality_error(moved.double()) < 1e-6


@pytest.mark.parametrize(
    "options",
    [{}, {"transport": "parallel"}, {"maximize": True}],
    ids=str,
)
@pytest.mark.parametrize("k", [3, 4, 5])
def test_it_agrees_with_the_reference_in_all_rare_cases(options, k):
    w = g.random_subspace(40, k, 33)
    w[3, 1], w[6, 0] = 0, 0  # directions that are absent, of a gradient that is not
    gradients = torch.randn(3, 40, k, 33) * torch.logspace(-3, 1.5, 40)[:, None, None]
    gradients[:, 5], gradients[1, 7, 2, 5], gradients[2, 9] = 0, float("nan"), float("inf")
    a, m, counts = steps(w, gradients, "reference", torch.float32, **options)
    b, n, other_counts = steps(w, gradients, "native", torch.float32, **options)
    assert counts == other_counts
    assert int(counts.skipped) == 1
    sane = slice(0, 30)  # beyond, an angle of many turns is known only to its rounding
    assert torch.allclose(a[sane], b[sane], atol=1e-4)
    assert torch.allclose(m[sane], n[sane], atol=1e-3)
    assert g.orthonormality_error(b.double()) < 1e-6
    assert torch.equal(b[5], w[5])
    assert (b[3, 1] == 0).all()
    assert (n[3, 1] == 0).all()
    assert b.isfinite().all()
    assert n.isfinite().all()


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e25])  # the square of the last overflows
def test_classes_that_are_not_finite_stay_as_they_are_and_disturb_no_other(k, bad):
    w = g.random_subspace(9, k, 70)
    m, d = g.project(w, torch.randn_like(w)), torch.randn_like(w)
    d[2, -1, 69], m[4, 0, 0] = bad, bad
    w[6, -1, 3] = float("nan")
    d[7], m[7], w[7, 0, 0] = 0, 0, float("nan")  # the gradient says nothing, but the weight does
    moved, buffer, counts = steps(w, d[None], "native", torch.float32, momentum=m)
    assert counts == (4, 0)
    for before, after in ((w, moved), (m, buffer)):
        for c in (2, 4, 6, 7):
            assert torch.equal(after[c].view(torch.int32), before[c].view(torch.int32))  # to the bit, NaN or not
    well = [0, 1, 3, 5, 8]
    exact, momentum, _ = steps(w[well], d[None, well], "reference", F64, momentum=m[well])
    assert torch.allclose(moved[well].double(), exact, atol=2e-6)
    assert torch.allclose(buffer[well].double(), momentum, atol=1e-5)


@pytest.mark.parametrize("transport", kernels.TRANSPORTS)
@pytest.mark.parametrize("k", [1, 3, 8])
def test_turns_of_any_size_agree_with_the_float64_reference_and_stay_orthonormal(k, transport):
    turns = [1e-4, 0.4, 0.6, 0.99, 1.01, 1.9, 2.1, 7.0, 30.0, 63.9, 64.1, 1e3, 1e9]
    w = g.random_subspace(len(turns), k, 40, dtype=F64)
    d = tangents(w, *turns)
    exact, momentum, counts = steps(w, d[None], "reference", F64, lr=1.0, transport=transport)
    moved, buffer, other_counts = steps(w, d[None], "native", torch.float32, lr=1.0, transport=transport)
    assert counts == other_counts == (0, 3)
    bound = 2e-6 * torch.tensor(turns).clamp(1, 64)[:, None, None]  # an angle is known to its relative rounding
    assert ((moved - exact).abs() < bound).all()
    assert ((buffer - momentum).abs() < bound * torch.tensor(turns)[:, None, None].clamp(1)).all()
    assert g.orthonormality_error(moved.double()) < 1e-6


@pytest.mark.parametrize("lr", [1e-3, 0.02, 0.03, 1.0])  # lr‖B‖ is below and above 1, where H must be formed first
def test_a_gradient_that_lies_almost_in_the_subspace_costs_no_accuracy(lr):
    w = g.random_subspace(5, 8, 129, dtype=F64)
    inside = torch.randn(5, 8, 8, dtype=F64)
    d = 40 * inside / torch.linalg.matrix_norm(inside, keepdim=True) @ w
    d = d.float().double() + tangents(w, 0.0, 1e-3, 0.1, 1.0, 10.0)
    exact, momentum, _ = steps(w, d[None], "reference", F64, lr=lr)
    moved, buffer, _ = steps(w, d[None], "native", torch.float32, lr=lr)
    assert g.distance(moved.double(), exact).max() < max(1e-6, 1e-5 * lr)  # the rounding of lr B
    assert torch.allclose(buffer.double(), momentum, atol=1e-5)
    assert g.orthonormality_error(moved.double()) < 1e-6


def test_a_basis_that_is_not_quite_orthonormal_is_mended_as_the_reference_does():
    w = g.random_subspace(5, 8, 129, dtype=F64)
    w = (torch.eye(8, dtype=F64) + 0.02 * torch.randn(5, 8, 8, dtype=F64)) @ w
    d = torch.randn(3, 5, 8, 129, dtype=F64) / 129**0.5
    exact, momentum, _ = steps(w, d, "reference", F64)
    moved, buffer, _ = steps(w, d, "native", torch.float32)
    assert torch.allclose(moved.double(), exact, atol=2e-6)
    assert torch.allclose(buffer.double(), momentum, atol=1e-5)


@pytest.mark.parametrize("size", [1e-3, 1.0])
def test_many_steps_leave_wide_bases_orthonormal(size):
    w, m = g.random_subspace(4, 8, 2048), torch.zeros(4, 8, 2048)
    for _ in range(300):
        kernels.geodesic_step(w, size * torch.randn_like(w), m, 0.01, 0.9, impl="native")
    assert g.orthonormality_error(w.double()) < 1e-6


def test_a_class_without_gradient_and_momentum_stays_to_the_bit_and_with_momentum_alone_it_moves_on():
    w = g.random_subspace(6, 5, 100)
    m = torch.zeros_like(w)
    m[3:] = g.project(w[3:], torch.randn(3, 5, 100))
    moved, buffer, _ = steps(w, torch.zeros_like(w)[None], "native", torch.float32, momentum=m)
    assert torch.equal(moved[:3], w[:3])
    assert torch.equal(buffer[:3], m[:3])
    assert (moved[3:] != w[3:]).flatten(1).any(1).all()
    assert torch.allclose(buffer[3:], 0.9 * m[3:], atol=1e-6)


def test_any_number_of_threads_gives_the_same_bits():
    w = g.random_subspace(200, 3, 500)
    gradients = torch.randn(2, 200, 3, 500)
    gradients[0, ::7, 0, 0] = float("nan")
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(steps(w, gradients, "native", torch.float32))
    finally:
        torch.set_num_threads(before)
    for moved, buffer, counts in results[1:]:
        assert torch.equal(moved, results[0][0])
        assert torch.equal(buffer, results[0][1])
        assert counts == results[0][2]


@pytest.mark.parametrize("threads", [1, 2, 256])
@pytest.mark.parametrize("k", [1, 5, 8])
def test_the_room_that_threads_need_is_small_beside_a_large_weight(k, threads, monkeypatch):
    w = g.random_subspace(1000, k, 512)
    made, empty = [], torch.empty

    def recorded(*args, **kwargs):
        made.append(empty(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(torch, "empty", recorded)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    kernels.geodesic_step(w, torch.randn_like(w), torch.zeros_like(w), 0.1, 0.9, impl="native")
    assert 0 < sum(tensor.nbytes for tensor in made) < w.nbytes / 10


def test_autograd_notices_that_the_weight_has_changed():
    w = torch.nn.Parameter(g.random_subspace(3, 2, 8))
    loss = w.square().sum()
    kernels.geodesic_step(w, torch.randn(3, 2, 8), None, 0.1, impl="native")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_it_does_not_support_is_refused_and_left_to_the_reference_by_auto():
    w = g.random_subspace(5, 3, 20)
    turned = w.mT.contiguous().mT
    for weight, grad, momentum, options in (
        (w.double(), w.double(), None, {}),
        (turned, w, None, {}),
        (w, turned, None, {}),
        (w, w.bfloat16(), None, {}),
        (w, w, w.bfloat16(), {}),
        (w, w, None, {"retraction": "qf"}),
        (w, w, None, {"max_angle": 0.1}),
    ):
        assert kernels.explain(weight, grad, momentum, **options)["reference"] is None
        before = weight.clone()
        with pytest.raises(RuntimeError, match=r"impl='native' cannot be used here: it supports .+"):
            kernels.geodesic_step(weight, grad, momentum, 0.1, 0.9, impl="native", **options)
        assert torch.equal(weight, before)


@pytest.mark.parametrize("impl", ["native", "reference"])
@pytest.mark.parametrize("transport", kernels.TRANSPORTS)
@pytest.mark.parametrize(("k", "n"), [(4, 16), (3, 7), (8, 1040), (1, 1), (8, 8), (33, 33)])
def test_a_gradient_inside_the_subspace_of_any_size_leaves_the_class_on_the_manifold(k, n, transport, impl):
    """With k = n every gradient is inside."""
    w = g.random_subspace(3, k, n)
    inside = torch.randn(3, k, k) @ w
    for size in (0.2, 1.0, 10.0, 1e3, 1e6, 1e12):
        d = size * inside / torch.linalg.matrix_norm(inside, keepdim=True)
        moved, buffer, counts = steps(w, d[None], impl, torch.float32, lr=1.0, transport=transport)
        assert g.orthonormality_error(moved.double()) < 1e-6, size
        assert buffer.isfinite().all()
        assert counts.skipped == 0


DEFAULTS = """
import torch
from grassy import geometry, kernels
w = geometry.random_subspace(2**9, 8, 64)
d, m, counts = torch.randn_like(w), torch.zeros_like(w), torch.zeros(2, dtype=torch.int64)
expected = w.clone(), m.clone()
kernels.geodesic_step(expected[0], d, expected[1], 0.1, 0.9, impl="reference")
{change}
for impl in 3 * ("native", "reference"):
    moved, buffer = w.clone(), m.clone()
    kernels.geodesic_steps([moved], [d], [buffer], 0.1, 0.9, counts=[counts], impl=impl)
    kernels.geodesic_step(moved.clone(), d, buffer.clone(), 0.1, 0.9, impl=impl)
    assert (moved - expected[0]).abs().max() < 1e-5 and (buffer - expected[1]).abs().max() < 1e-4
print("fine")
"""


@pytest.mark.slow
@pytest.mark.parametrize("change", ["set_default_dtype(torch.bfloat16)", 'set_default_device("meta")'])
def test_the_default_dtype_and_device_of_torch_do_not_matter(change):
    """In a process of its own, which would end in memory corruption."""
    code = DEFAULTS.format(change=f"torch.{change}")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "fine\n", result.stderr[-2000:]


def test_it_is_chosen_for_large_float32_weights_on_a_cpu_alone():
    large = torch.empty(2**11, 8, 64)
    assert kernels.choose("auto", large) == "native"
    assert kernels.choose("auto", large[:10]) == "reference"
    assert kernels.choose("auto", large.double()) == "reference"
    assert kernels.choose("auto", large.to("meta")) == "reference"


def test_without_a_compiler_the_reference_is_chosen_and_asking_for_it_says_why(tmp_path):
    code = (
        "import torch; from grassy import kernels, geometry as g; w = torch.empty(2**11, 8, 64)\n"
        "print(kernels.choose('auto', w)); w = g.random_subspace(2, 2, 4)\n"
        "try: kernels.geodesic_step(w, w.clone(), None, 0.1, impl='native')\n"
        "except RuntimeError as error: print(error)"
    )
    environment = {"PATH": str(tmp_path), "PYTHONPATH": ":".join(sys.path), "GRASSY_CACHE": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [
        "reference",
        "impl='native' cannot be used here: no C++ compiler was found",
    ]
