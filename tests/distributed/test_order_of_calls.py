"""Calls in the wrong order: what would train nothing, or compute with memory that nobody has filled, is refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import grassy


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield grassy.distributed.mesh("cpu")
    dist.destroy_process_group()


def model_with_head(name="grassmann", **options):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
    grassy.replace_head(model, name, **({"k": 2} if name == "grassmann" else {}), **options)
    return model


@pytest.mark.parametrize("name", ["grassmann", "linear"])
def test_an_optimizer_from_before_the_head_was_sharded_refuses_to_step(mesh, name):
    model = model_with_head(name)
    early = grassy.make_optimizer(model, "sgd", lr=0.1)
    grassy.distributed.shard_head(model, mesh)
    grassy.classification_loss(model, torch.randn(4, 8), torch.tensor([0, 1, 2, 3])).backward()
    with pytest.raises(RuntimeError, match=r"call grassy\.make_optimizer after grassy\.distributed\.shard_head"):
        early.step()
    before = grassy.distributed.whole(model[2].weight).clone()
    grassy.make_optimizer(model, "sgd", lr=0.1).step()
    assert not torch.equal(before, grassy.distributed.whole(model[2].weight))


@pytest.mark.parametrize("name", ["grassmann", "cosine", "arcface", "linear"])
def test_a_head_without_values_computes_nothing(name):
    model = model_with_head(name, device="meta")
    with pytest.raises(ValueError, match="is on the meta device, without values"):
        grassy.classification_loss(model, torch.randn(4, 8), torch.tensor([0, 1, 2, 3]))
    assert model.to("meta")(torch.randn(4, 8, device="meta")).shape == (4, 5)


def test_no_optimizer_is_made_for_subspaces_without_values():
    with pytest.raises(ValueError, match=r"on the meta device, without values: call grassy\.distributed\.shard_head"):
        grassy.make_optimizer(model_with_head(device="meta"), "sgd", lr=0.1)
