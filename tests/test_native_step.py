"""The step with its passes in C++ agrees with the reference, on awkward shapes and in all rare cases."""

import subprocess
import sys

import pytest
import torch

from grassy import geometry as g
from grassy import ops
from grassy.ops import native

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=f"no native step: {native.unavailable()}")

F64 = torch.float64


def steps(weight, gradients, impl, dtype, **options):
    moved, buffer = weight.to(dtype).clone(), torch.zeros_like(weight, dtype=dtype)
    for gradient in gradients:
        counts = ops.geodesic_step(moved, gradient.to(dtype), buffer, 0.1, 0.9, impl=impl, **options)
    return moved, buffer, counts


@pytest.mark.parametrize("n", [1, 7, 16, 129, 2047])
@pytest.mark.parametrize("k", [1, 3, 8, 17, 33])
@pytest.mark.parametrize("classes", [1, 5])
def test_it_agrees_with_the_float64_reference_on_awkward_shapes(classes, k, n):
    k = min(k, n)
    w = g.random_subspace(classes, k, n, dtype=F64)
    gradients = 0.3 * torch.randn(3, classes, k, n, dtype=F64) / n**0.5
    exact, momentum, _ = steps(w, gradients, "reference", F64)
    moved, buffer, _ = steps(w, gradients, "native", torch.float32)
    assert g.distance(moved.double(), exact).max() < 2e-6
    assert torch.allclose(buffer.double(), momentum, atol=2e-6)
    assert g.orthonormality_error(moved.double()) < 1e-6


@pytest.mark.parametrize(
    "options",
    [{}, {"transport": "parallel"}, {"retraction": "qf"}, {"max_angle": 0.05}, {"maximize": True}],
    ids=str,
)
def test_it_agrees_with_the_reference_in_all_rare_cases(options):
    w = g.random_subspace(40, 4, 33)
    w[3, 1] = 0
    gradients = torch.randn(3, 40, 4, 33) * torch.logspace(-3, 1.5, 40)[:, None, None]
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
    assert b.isfinite().all()


def test_without_momentum_and_for_other_precisions_and_layouts_it_does_what_the_reference_does():
    w, d = g.random_subspace(5, 3, 20), torch.randn(5, 3, 20)
    for prepare in (
        lambda x: x.clone(),
        lambda x: x.double(),
        lambda x: x.mT.contiguous().mT,
    ):
        results = []
        for impl in ("reference", "native"):
            moved = prepare(w)
            ops.geodesic_step(moved, prepare(d), None, 0.1, impl=impl)
            results.append(moved)
        assert torch.allclose(*results, atol=1e-6)


def test_it_is_chosen_for_large_float32_weights_on_a_cpu_alone():
    large = torch.empty(2**11, 8, 64)
    assert ops.choose("auto", large) == "native"
    assert ops.choose("auto", large[:10]) == "reference"
    assert ops.choose("auto", large.double()) == "reference"
    assert ops.choose("auto", large.to("meta")) == "reference"


def test_without_a_compiler_the_reference_is_chosen_and_asking_for_it_says_why(tmp_path):
    code = (
        "import torch; from grassy import ops, geometry as g; w = torch.empty(2**11, 8, 64)\n"
        "print(ops.choose('auto', w)); w = g.random_subspace(2, 2, 4)\n"
        "try: ops.geodesic_step(w, w.clone(), None, 0.1, impl='native')\n"
        "except RuntimeError as error: print(error)"
    )
    environment = {"PATH": str(tmp_path), "PYTHONPATH": ":".join(sys.path), "GRASSY_CACHE": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [
        "reference",
        "impl='native' cannot be used here: no C++ compiler was found",
    ]
