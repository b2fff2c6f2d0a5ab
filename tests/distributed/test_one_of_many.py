"""One process of many by torch's fake process group, whose collectives have the right sizes and the wrong values."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import BackendConfig
from torch.utils._python_dispatch import TorchDispatchMode

import grassy
from grassy import kernels
from grassy.distributed.processes import device_to_agree_on
from grassy.kernels import cross_entropy
from grassy.shards import Shard

WORLD, CLASSES, K, N, ROWS = 64, 640_000, 2, 8, 2


@pytest.fixture
def mesh():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=3, world_size=WORLD, store=FakeStore())
    yield grassy.distributed.mesh("cpu")
    dist.destroy_process_group()


class LargestTensor(TorchDispatchMode):
    """Within this, the number of elements of the largest tensor that exists on a device is kept."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, list | tuple) else [result]
        sizes = [
            t.untyped_storage().nbytes() // t.element_size() for t in made if type(t) is torch.Tensor and not t.is_meta
        ]
        self.largest = max([self.largest, *sizes])
        return result


@pytest.mark.parametrize("sample", [1.0, 0.1])
def test_no_process_ever_holds_the_whole_weight_or_the_logits_of_its_classes(mesh, sample, monkeypatch):
    monkeypatch.setattr(cross_entropy, "WHOLE", 2**14)
    monkeypatch.setattr(cross_entropy, "CHUNK", 2**14)
    monkeypatch.setattr(cross_entropy, "KEEP", 2**16)
    shard = CLASSES // WORLD * K * N
    with LargestTensor() as seen:
        head = grassy.create_head("grassmann", N, CLASSES, k=K, sample=sample, device="meta")
        grassy.distributed.shard_head(head, mesh)
        optimizer = grassy.make_optimizer(head, "sgd", lr=0.1)
        loss = grassy.classification_loss(head, torch.randn(ROWS, N), torch.tensor([30_000, 7]))
        loss.backward()
        grassy.clip_grad_norm_(head, 1.0)
        optimizer.step()
        head.eval()
    # In plain torch a step of few classes has room for two tensors of the size of their weight.
    assert shard <= seen.largest <= 2 * shard
    coordinates = WORLD * ROWS * (CLASSES // WORLD) * K
    assert 2 * shard < coordinates
    assert tuple(head.weight.shape) == (CLASSES, K, N)


def test_logits_of_too_many_classes_are_refused():
    with pytest.raises(ValueError, match=r"use head.top\(features, 5\)"):
        kernels.sharded_logits(torch.randn(3, N), None, kernels.subspace_logits, [], Shard(0, 1, 2**25))


@pytest.mark.parametrize("fsdp", [True, []], ids=["all blocks", "named blocks"])
@pytest.mark.parametrize("sharded", [True, False])
def test_a_scale_that_is_learned_is_refused_by_fsdp_in_one_sentence(mesh, sharded, fsdp):
    model = torch.nn.Sequential(torch.nn.Linear(4, N), grassy.create_head("grassmann", N, 9, k=K, learnable_gamma=True))
    if sharded:
        grassy.distributed.shard_head(model, mesh)
    with pytest.raises(ValueError, match=r"fsdp cannot shard 1\.gamma, which is a scalar: use fsdp=False, or .*gamma"):
        grassy.distributed.wrap(model, mesh, fsdp=fsdp)


@pytest.mark.parametrize(("backend", "place"), [("gloo", "cpu"), ("cpu:gloo,cuda:nccl", "cpu"), ("nccl", "cuda:1")])
def test_processes_that_only_gpus_connect_agree_on_their_gpus(mesh, monkeypatch, backend, place):
    config = str(BackendConfig(dist.Backend(backend)))
    monkeypatch.setattr(dist, "get_backend_config", lambda: config)
    assert device_to_agree_on(torch.device("cuda:1")) == torch.device(place)
