"""A small model, its data and base optimizers for the tests of make_optimizer."""

import pytest
import torch
from torch import nn

import grassy

BASES = {
    "sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3},
    "adamw": {"lr": 1e-2, "weight_decay": 0.05},
    "lamb": {"lr": 5e-3, "weight_decay": 0.02},
}
every_base = pytest.mark.parametrize("base", sorted(BASES))


def a_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), grassy.GrassmannHead(16, 4, k=3))


def data(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(20, 6, generator=generator)
    return x, x[:, :4].argmax(-1)


def train(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        grassy.classification_loss(model, *data(step)).backward()
        optimizer.step()


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_identical(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name
