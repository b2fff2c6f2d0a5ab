"""torch.fx, which torchvision takes features with, sees a head as one operation."""

import pytest
import torch
import torchvision

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
