"""Calls in the wrong order: what would train nothing, or compute with memory that nobody has filled, is refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import grassy
from grassy.distributed import sharding


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
    with pytest.raises(RuntimeError, match=r"call grassy\.make_optimizer after grassy\.distributed\.shard_head and"):
        early.step()
    before = grassy.distributed.whole(model[2].weight).clone()
    grassy.make_optimizer(model, "sgd", lr=0.1).step()
    assert not torch.equal(before, grassy.distributed.whole(model[2].weight))


def test_an_optimizer_from_before_fsdp_refuses_to_step(mesh):
    """FSDP2 replaces the parameters of the backbone too, which would never move."""
    model = model_with_head()
    grassy.distributed.shard_head(model, mesh)
    early = grassy.make_optimizer(model, "sgd", lr=0.1)
    trained = grassy.distributed.wrap(model, mesh, fsdp=True)
    grassy.classification_loss(trained, torch.randn(4, 8), torch.tensor([0, 1, 2, 3])).backward()
    with pytest.raises(RuntimeError, match="created before shard_head or wrap"):
        early.step()
    before = trained[0].weight.full_tensor().clone()
    grassy.make_optimizer(trained, "sgd", lr=0.1).step()
    assert not torch.equal(before, trained[0].weight.full_tensor())


@pytest.mark.parametrize(
    ("config", "device"), [("cpu:gloo,cuda:nccl", "cuda"), ("cuda:nccl", "cuda"), ("cpu:gloo,cuda:gloo", "cpu")]
)
def test_a_mesh_is_of_gpus_if_the_process_group_can_use_them(monkeypatch, config, device):
    """`init_process_group()` without arguments, as the page says, reports its backend as undefined."""
    monkeypatch.setattr(sharding.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(sharding.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(sharding.dist, "get_backend", lambda: "undefined")
    monkeypatch.setattr(sharding.dist, "get_backend_config", lambda: config)
    monkeypatch.setattr(sharding.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sharding, "init_device_mesh", lambda kind, *_, **__: kind)
    assert grassy.distributed.mesh() == device


@pytest.mark.parametrize("name", ["grassmann", "cosine", "arcface", "linear"])
def test_a_head_without_values_computes_nothing(name):
    model = model_with_head(name, device="meta")
    with pytest.raises(ValueError, match="is on the meta device, without values"):
        grassy.classification_loss(model, torch.randn(4, 8), torch.tensor([0, 1, 2, 3]))
    assert model.to("meta")(torch.randn(4, 8, device="meta")).shape == (4, 5)


def test_no_optimizer_is_made_for_subspaces_without_values():
    with pytest.raises(ValueError, match=r"on the meta device, without values: call grassy\.distributed\.shard_head"):
        grassy.make_optimizer(model_with_head(device="meta"), "sgd", lr=0.1)


def test_blocks_that_are_no_modules_are_refused(mesh):
    with pytest.raises(TypeError, match="fsdp must be True, False or a list of modules, got 'yes'"):
        grassy.distributed.wrap(model_with_head(), mesh, fsdp="yes")
