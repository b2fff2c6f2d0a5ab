"""The sharded loss of subspaces in one process, by each implementation: for the tests of plain torch and of kernels."""

import itertools

import torch

from grassy import geometry
from grassy.kernels import cross_entropy
from grassy.kernels.sampling import Sampling, forget_gradient, gradient_of_some
from grassy.kernels.sharded_subspaces import sharded_subspace_cross_entropy
from grassy.mixed_labels import MixedLabels
from grassy.shards import Shard

#: The whole head, and a shard of it: some labels are elsewhere.
SHARDS = {"whole": Shard(0, 11, 11), "part": Shard(4, 9, 11), "empty": Shard(9, 9, 11)}
SIZES = ("WHOLE", "CHUNK", "BLOCK", "KEEP", "ROWS")


def set_sizes(*values):
    for name, value in zip(SIZES, values, strict=True):
        setattr(cross_entropy, name, value)


def example(shard, dtype=torch.float32, device="cpu"):
    torch.manual_seed(0)
    weight = geometry.random_subspace(11, 3, 7)
    weight[5, 1:] = 0
    rows = torch.nn.functional.normalize(torch.randn(13, 7), dim=-1)
    labels = torch.randint(0, 11, (13,))
    labels[3] = -100
    return rows.to(device, dtype), labels.to(device), weight[shard.offset : shard.stop].to(device, dtype)


def evaluated(impl, shard, dtype=torch.float32, small=False, sampling=None, mixed=False, device="cpu", **options):
    """Losses, and the gradients of their weighted sum; with a sample, of the classes in it."""
    rows, labels, weight = example(shard, dtype, device)
    if mixed:  # some rows have the same label twice, or one to ignore
        own = torch.linspace(0, 1, 13, dtype=dtype, device=device).unsqueeze(-1)
        labels = MixedLabels(torch.stack([labels, labels.roll(3)], -1), torch.cat([own, 1 - own], -1))
    rows.requires_grad_()
    weight.requires_grad_()
    before = [getattr(cross_entropy, name) for name in SIZES]
    if small:
        set_sizes(1, 80, 80, 80, 4)
    if sampling:
        options["sampling"] = Sampling(0.4, 5, torch.tensor(2, device=device), sampling == "corrected", weight)
    try:
        loss = sharded_subspace_cross_entropy(rows, labels, weight, 12.0, shard, reduction="none", impl=impl, **options)
        (loss * torch.linspace(1, 2, 13, dtype=dtype, device=device)).sum().backward()
    finally:
        set_sizes(*before)
    if sampling:
        places, grad = gradient_of_some(weight)
        forget_gradient(weight)
        dense = torch.zeros_like(weight)
        dense[places] = grad
        return loss.detach(), rows.grad, dense
    return loss.detach(), rows.grad, weight.grad


def differences(impl, shards=tuple(SHARDS), sizes=(False, True), device="cpu"):
    """How far an implementation is from the specification in float64, for each kind of loss."""
    kinds = [(0.0, None, False), (0.2, None, False), (0.0, "plain", False), (0.0, "corrected", False)]
    kinds += [(0.2, None, True), (0.2, "corrected", True)]
    found = {}
    for name, (smoothing, sampling, mixed), small in itertools.product(shards, kinds, sizes):
        options = {"label_smoothing": smoothing, "sampling": sampling, "mixed": mixed, "device": device}
        exact = evaluated("reference", SHARDS[name], torch.float64, **options)
        ours = evaluated(impl, SHARDS[name], small=small, **options)
        error = [float((a - b).abs().max()) if a.numel() else 0.0 for a, b in zip(ours, exact, strict=True)]
        found[f"{name} {smoothing} {sampling} {mixed} {small}"] = error
    return found
