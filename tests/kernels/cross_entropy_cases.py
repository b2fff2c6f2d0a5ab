"""The fused loss against the plain composition in float64, for tests on all devices."""

import functools

import torch
from torch.nn import functional as F

from grassy import geometry, kernels
from grassy.kernels import cross_entropy

F64 = torch.float64
#: Shapes B x C x K x N that no block size divides.
SHAPES = [(1, 1, 1, 1), (3, 5, 3, 7), (257, 5, 8, 129), (3, 1000, 17, 129), (3, 5, 33, 2047), (1, 5, 64, 129)]


def example(batch, classes, k, n, soft=False):
    """Features, a weight and a target; the second class, if there is one, has but one direction."""
    weight = geometry.random_subspace(classes, k, n)
    weight[1:2, 1:] = 0
    target = torch.rand(batch, classes) if soft else torch.randint(0, classes, (batch,))
    return torch.randn(batch, n), weight, target


def gradients(loss_of, x, weight):
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    loss = loss_of(x, weight)
    loss.sum().backward()
    return loss.detach(), x.grad, weight.grad


def plain(x, weight, target, gamma=25.0, normalize=True, dtype=F64, **options):
    """Cross-entropy of reference logits by autograd: loss and gradients."""
    target = target.to(dtype) if target.is_floating_point() else target

    def loss_of(x, weight):
        logits = kernels.subspace_logits(x, weight, gamma, normalize=normalize, impl="reference")
        return F.cross_entropy(logits, target, **options)

    return gradients(loss_of, x.to(dtype), weight.to(dtype))


def errors(x, weight, target, impl, gamma=25.0, normalize=True, **options):
    """Of loss and gradients, relative to the largest number in each."""
    fused = functools.partial(
        kernels.subspace_cross_entropy, target=target, gamma=gamma, normalize=normalize, impl=impl
    )
    results = gradients(lambda x, weight: fused(x, weight, **options), x, weight)
    with torch.autocast(x.device.type, enabled=False):
        exact = plain(x, weight, target, gamma, normalize, **options)
    assert [a.dtype for a in results] == [torch.float32, x.dtype, weight.dtype]
    floors = (0.1, 1e-3, 1e-3)  # a loss of 0 is a difference of logits, and known to their rounding
    return [
        float((a - b).abs().max() / b.abs().max().clamp_min(f)) for a, b, f in zip(results, exact, floors, strict=True)
    ]


def divide(patch, chunk, keep=0, rows=4096):
    """Chunks of so many coordinates and rows whatever there is, and at most so many coordinates kept."""
    for name, value in (("WHOLE", 0), ("CHUNK", chunk), ("BLOCK", chunk), ("KEEP", keep), ("ROWS", rows)):
        patch.setattr(cross_entropy, name, value)
