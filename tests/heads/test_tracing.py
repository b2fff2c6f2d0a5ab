"""torch.fx, which torchvision takes features with, sees a head as one operation."""

import pytest
import torch
import torchvision
import torchvision.models.feature_extraction
from torch import nn

import grassy
from grassy.heads import Head


@pytest.mark.parametrize("name", ["linear", "grassmann", "arcface"])
def test_a_model_with_a_new_head_can_still_be_traced(name):
    model = torchvision.models.resnet18(num_classes=5).eval()
    grassy.replace_head(model, name, standardize=True)
    x = torch.randn(2, 3, 64, 64)
    parts = torchvision.models.feature_extraction.create_feature_extractor(model, ["avgpool", "fc"])
    found = parts(x)
    assert torch.equal(found["fc"], model(x))
    assert found["avgpool"].shape == (2, 512, 1, 1)
    traced = torch.fx.symbolic_trace(model)
    assert torch.equal(traced(x), model(x))
    assert isinstance(traced.fc, Head)


@pytest.mark.parametrize("name", ["linear", "grassmann", "arcface"])
def test_torch_jit_can_trace_a_model_as_tensorboards_graph_does(name):
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
    grassy.replace_head(model, name)
    traced = torch.jit.trace(model.eval(), torch.randn(2, 6))
    x = torch.randn(3, 6)
    torch.testing.assert_close(traced(x), model(x))


class Margin(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = grassy.create_head("arcface", 8, 5, scale=30.0)

    def forward(self, x, target):
        return self.head(x, target)


def test_a_target_that_a_model_hands_on_is_not_lost():
    model, x, target = Margin(), torch.randn(6, 8), torch.randint(5, (6,))
    traced = torch.fx.symbolic_trace(model)
    assert torch.equal(traced(x, target), model(x, target))
    assert not torch.equal(model(x, target), model.head(x))


@pytest.mark.parametrize(("name", "options"), [("arcface", {}), ("multi", {}), ("grassmann", {"fuse_loss": True})])
def test_a_traced_model_has_the_same_loss(name, options):
    model = torchvision.models.squeezenet1_1(num_classes=5)  # with a convolution for a classifier
    grassy.replace_head(model, name, **options)
    x, y = torch.randn(2, 3, 32, 32), torch.randint(5, (2,))
    model.classifier[0].p = 0.0  # the same with and without dropout
    traced = torch.fx.symbolic_trace(model)
    for mode in (True, False):
        losses = [grassy.classification_loss(each.train(mode), x, y) for each in (model, traced)]
        assert torch.equal(*losses)


def test_a_head_alone_is_not_to_be_traced():
    with pytest.raises(torch.fx.proxy.TraceError):
        torch.fx.symbolic_trace(grassy.GrassmannHead(8, 5, k=2))
