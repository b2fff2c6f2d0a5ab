"""Features so long that the squares of their elements overflow have the logits of their direction."""

import pytest
import torch

from grassy import geometry as g
from grassy import kernels

from .triton_cases import interpreted


@pytest.mark.parametrize("length", [1.0, 1e15, 1e18, 2e19, 1e25, 1e37])
@pytest.mark.parametrize("impl", ["chunks", "reference"])
def test_logits_and_loss_do_not_depend_on_the_length_of_features(length, impl):
    generator = torch.Generator().manual_seed(0)
    w, x = g.random_subspace(3, 2, 8, generator=generator), torch.randn(5, 8, generator=generator)
    target = torch.tensor([0, 1, 2, 0, 1])
    found, exact = (length * x).requires_grad_(), (length * x).double().requires_grad_()
    torch.testing.assert_close(kernels.subspace_logits(found, w), kernels.subspace_logits(x, w), rtol=1e-5, atol=1e-5)
    loss = kernels.subspace_cross_entropy(found, w, target, impl=impl)
    expected = kernels.subspace_cross_entropy(exact, w.double(), target, impl="reference")
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    if length < 1e20:  # beyond, the gradient is no longer a normal number
        loss.backward()
        expected.backward()
        torch.testing.assert_close(length * found.grad, length * exact.grad.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_default_dtype_does_not_shorten_long_features(dtype):
    w, x = g.random_subspace(3, 2, 8), torch.randn(5, 8)
    expected = kernels.subspace_logits(x, w)
    torch.set_default_dtype(dtype)
    try:
        found = kernels.subspace_logits(1e20 * x, w)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_features_that_are_not_finite_have_no_finite_logits():
    w = g.random_subspace(3, 2, 8)
    for bad in (float("nan"), float("inf")):
        x = torch.randn(2, 8)
        x[0, 3] = bad
        logits = kernels.subspace_logits(x, w)
        assert logits[0].isnan().all()
        assert logits[1].isfinite().all()


SCRIPT = """
import json, torch
from grassy import geometry, kernels
w, x = geometry.random_subspace(3, 2, 8), torch.randn(5, 8)
x[4, 2] = float("inf")
errors = []
for length in (1e18, 2e19, 1e25, 1e37):
    found = kernels.subspace_logits(length * x, w, impl="triton")
    errors.append(float((found[:4] - kernels.subspace_logits(x, w, impl="triton")[:4]).abs().max()))
    errors.append(0.0 if found[4].isnan().all() else 1.0)
print(json.dumps(errors))
"""


@pytest.mark.slow
def test_the_kernels_do_so_too():
    pytest.importorskip("triton", reason="triton is not installed: pip install -e '.[dev]'")
    errors = interpreted(SCRIPT)
    assert len(errors) == 8
    assert max(errors) < 1e-4
