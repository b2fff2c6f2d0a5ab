"""What the study of Tiny-ImageNet measures beside accuracy and transfer."""

import pytest
import torch
from studies.tiny_imagenet import users

from grassy.heads import create_head


def blobs(classes=6, each=30, width=8, noise=0.05, seed=0):
    rng = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, width, generator=rng)
    labels = torch.arange(classes * each) % classes
    return centres[labels] + noise * torch.randn(classes * each, width, generator=rng), labels


def test_retrieval_and_few_shot_tell_classes_from_noise():
    x, y = blobs()
    assert users.recall_at_1(x, y) == 100
    assert users.few_shot(x, y, 1, episodes=20) == 100
    noise, _ = blobs(noise=100.0)
    assert users.recall_at_1(noise, y) < 40
    assert 10 < users.few_shot(noise, y, 5, episodes=50) < 30  # one of five by chance
    assert users.recall_at_1(torch.eye(2)[[0, 0, 1]], torch.tensor([0, 0, 1])) == pytest.approx(200 / 3)


def test_auroc_and_fpr95():
    inside, outside = torch.tensor([0.0, 1, 2, 3]), torch.tensor([2.0, 5])
    assert users.auroc(inside, outside) == pytest.approx(100 * (2.5 / 4 + 1) / 2)
    assert users.fpr95(torch.arange(101.0), torch.tensor([94.0, 96, 200, 300])) == 25


def test_a_temperature_repairs_confidence():
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(4000, 5, generator=rng)
    labels = torch.multinomial(logits.softmax(-1), 1, generator=rng)[:, 0]
    found = users.calibration(4 * logits, labels)
    assert found["temperature"] == pytest.approx(4, rel=0.15)
    assert found["ece"] > 20 > 5 > found["ece_scaled"]
    assert found["loss_scaled"] < found["loss"]


def test_pruning_drops_directions_that_a_class_does_not_use():
    head = create_head("grassmann", 12, 3, k=4, gamma=10.0).eval()
    labels = torch.arange(90) % 3
    x = torch.einsum("bn,b->bn", head.weight.detach()[labels, 1], 1 + torch.rand(90))  # one direction of each class
    found = users.pruning(head, x, labels, x, labels)
    assert (found["k"], found["k at 0.01"]) == (4, 1)
    assert found["top1"] == found["top1 at 0.01"] == 100
    varied = torch.einsum("bkn,bk->bn", head.weight.detach()[labels], torch.randn(90, 4))
    found = users.pruning(head, varied, labels, varied, labels)
    assert found["k at 0.001"] == 4
    assert found["largest change of a logit at 0.001"] < 1e-4


def test_inside_and_residual_are_the_projection_and_the_rest():
    head = create_head("grassmann", 12, 3, k=4, gamma=10.0).eval()
    x = torch.randn(7, 12)
    inside, residual = users.inside_and_residual(head, x)
    torch.testing.assert_close(inside + residual, x)
    torch.testing.assert_close(inside.norm(dim=-1) / x.norm(dim=-1) * 10, head(x).amax(-1))
    linear = create_head("linear", 12, 3)
    inside, residual = users.inside_and_residual(linear, x)
    torch.testing.assert_close((inside * residual).sum(-1), torch.zeros(7), atol=1e-5, rtol=0)
