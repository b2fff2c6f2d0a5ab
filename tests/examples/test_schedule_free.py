"""The published schedule-free optimizers, which no other test uses."""

import pytest
import torch
from torch import nn

import grassy


def test_a_schedule_free_optimizer_trains_the_rest_of_the_model():
    schedulefree = pytest.importorskip("schedulefree")
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    grassy.replace_head(model, "grassmann", k=2, gamma="auto")
    x = torch.randn(96, 6)
    y = x[:, :3].argmax(-1)
    optimizer = grassy.make_optimizer(model, schedulefree.AdamWScheduleFree, lr=0.02, head_lr=0.1)
    optimizer.train()
    for _ in range(60):
        optimizer.zero_grad()
        grassy.classification_loss(model, x, y).backward()
        optimizer.step()
    weights = model[0].weight.detach().clone()
    optimizer.eval()  # from the point of the gradients to the average
    assert not torch.equal(model[0].weight, weights)
    assert (model.eval()(x).argmax(-1) == y).float().mean() > 0.85
    assert grassy.geometry.orthonormality_error(model[-1].weight.detach()) < 1e-6
    optimizer.train()
    torch.testing.assert_close(model[0].weight.detach(), weights)
