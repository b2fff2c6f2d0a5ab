"""Two processes under DDP (gloo, CPU) train one model."""

import copy

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import grassy
from grassy import geometry as g

WORLD = 2


def a_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), grassy.GrassmannHead(16, 4, k=3))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8 * WORLD, 6, generator=generator)
    return x, x[:, :4].argmax(-1)


def train(model, optimizer, share):
    for step in range(10):
        x, y = (t[share] for t in batch(step))
        optimizer.zero_grad()
        grassy.classification_loss(model, x, y).backward()
        grassy.clip_grad_norm_(model, 5.0)
        optimizer.step()


def worker(rank, folder, base):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    try:
        model = a_model()
        if rank:  # DDP makes the replicas equal at the start
            model[0].weight.data.add_(1.0)
        wrapped = DistributedDataParallel(model)
        optimizer = grassy.make_optimizer(wrapped, base, lr=0.05, head_lr=0.1)
        train(wrapped, optimizer, slice(8 * rank, 8 * rank + 8))
        torch.save(model.state_dict(), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_replicas_end_identical_and_equal_one_process_with_the_whole_batch(tmp_path):
    for base in ("sgd", "adamw"):
        folder = tmp_path / base
        folder.mkdir()
        mp.spawn(worker, (str(folder), base), nprocs=WORLD)
        replicas = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]
        for name in replicas[0]:
            assert torch.equal(replicas[0][name], replicas[1][name]), name
        alone = a_model()
        start = copy.deepcopy(alone[2].weight.detach())
        train(alone, grassy.make_optimizer(alone, base, lr=0.05, head_lr=0.1), slice(None))
        assert g.distance(replicas[0]["2.weight"], alone[2].weight.detach()).max() < 1e-3
        assert g.distance(start, alone[2].weight.detach()).min() > 0.05
