"""Shards of more than 2^31 elements, where an offset of 32 bits would wrap around: for a GPU with 80 GB."""

import pytest
import torch

from grassy import geometry, kernels
from grassy.shards import Shard

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

K, N = 4, 512
CLASSES = 2**31 // (K * N) + 1000  # 2.15e9 elements, 8.6 GB in float32
LAST = 500  # classes at the end, beyond 2^31 elements


@pytest.fixture(scope="module")
def weight():
    """Subspaces of which the last ones differ from all others."""
    if torch.cuda.get_device_properties(0).total_memory < 70e9:
        pytest.skip("needs a GPU with 80 GB")
    torch.manual_seed(0)
    block = geometry.random_subspace(4096, K, N, device="cuda")
    result = torch.empty(CLASSES, K, N, device="cuda")
    for start in range(0, CLASSES, 4096):
        result[start : start + 4096] = block[: CLASSES - start]
    result[-LAST:] = geometry.random_subspace(LAST, K, N, device="cuda")
    return result


def test_loss_and_gradient_of_the_last_classes_are_right(weight):
    """The gradient of a class depends on the others by the sum of exponentials alone."""
    x = torch.nn.functional.normalize(torch.randn(8, N, device="cuda"), dim=-1).requires_grad_()
    y = torch.randint(CLASSES - LAST, CLASSES, (8,), device="cuda")
    w = weight.requires_grad_()
    loss = kernels.sharded_subspace_cross_entropy(x, y, w, 25.0, Shard(0, CLASSES, CLASSES), reduction="none")
    loss.sum().backward()
    logits = torch.cat([kernels.subspace_logits(x.detach(), part, 25.0) for part in w.detach().split(2**16)], -1)
    exact = torch.nn.functional.cross_entropy(logits.double(), y, reduction="none")
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-5)
    tail = w.detach()[-LAST:].double().requires_grad_()
    last = kernels.subspace_logits(x.detach().double(), tail, 25.0, impl="reference")
    others = logits[:, :-LAST].double().logsumexp(-1, keepdim=True)
    torch.nn.functional.cross_entropy(
        torch.cat([others, last], -1), y - (CLASSES - LAST) + 1, reduction="sum"
    ).backward()
    difference = (w.grad[-LAST:].double() - tail.grad).abs().max()
    weight.requires_grad_(False)
    assert difference < 1e-4 * tail.grad.abs().max()
    w.grad = None


@pytest.mark.parametrize("impl", ["cuda", "triton"])
def test_the_step_of_the_last_classes_is_right(weight, impl):
    grad = torch.zeros_like(weight)
    grad[-LAST:] = torch.randn(LAST, K, N, device="cuda") / N**0.5
    momentum = torch.zeros_like(weight, dtype=torch.bfloat16)
    expected = weight[-LAST:].clone()
    kernels.geodesic_step(expected, grad[-LAST:].clone(), momentum[-LAST:].clone(), 0.1, 0.9, impl="reference")
    before = weight[: CLASSES - LAST : 10_007].clone()
    kernels.geodesic_step(weight, grad, momentum, 0.1, 0.9, impl=impl)
    torch.testing.assert_close(weight[-LAST:], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weight[: CLASSES - LAST : 10_007], before, rtol=1e-4, atol=1e-5)
