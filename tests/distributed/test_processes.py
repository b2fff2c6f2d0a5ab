"""Two processes under DDP (gloo, CPU) train one model."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import grassy
from grassy.distributed import processes
from ranks import on_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

WORLD = 2


#: A subspace head, one that uses the target in its logits, and one with a loss of its own.
HEADS = {"grassmann": {"k": 3}, "arcface": {"scale": 8.0, "margin": 0.2}, "multi": {"layers": 3}}


def a_model(head):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), grassy.create_head(head, 16, 4, **HEADS[head]))


def optimizer_of(model, base, head):
    return grassy.make_optimizer(model, base, lr=0.05, head_lr=0.1 if head == "grassmann" else None)


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


def worker(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    try:
        for head in HEADS:
            for base in ("sgd", "adamw"):
                model = a_model(head)
                if rank:  # DDP makes the replicas equal at the start
                    model[0].weight.data.add_(1.0)
                wrapped = DistributedDataParallel(model)
                train(wrapped, optimizer_of(wrapped, base, head), slice(8 * rank, 8 * rank + 8))
                torch.save(model.state_dict(), f"{folder}/{head}-{base}-{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_replicas_end_identical_and_equal_one_process_with_the_whole_batch(tmp_path):
    mp.spawn(worker, (str(tmp_path),), nprocs=WORLD)
    for head in HEADS:
        for base in ("sgd", "adamw"):
            replicas = [torch.load(tmp_path / f"{head}-{base}-{rank}.pt", weights_only=True) for rank in range(WORLD)]
            for name in replicas[0]:
                assert torch.equal(replicas[0][name], replicas[1][name]), (head, base, name)
            alone = a_model(head)
            start = alone[2].weight.detach().clone()
            train(alone, optimizer_of(alone, base, head), slice(None))
            for name, value in alone.state_dict().items():
                assert torch.allclose(replicas[0][name], value, atol=1e-3), (head, base, name)
            assert (alone[2].weight - start).abs().max() > 0.01


def test_an_error_that_cannot_be_sent_still_stops_all_processes_with_its_sentence(tmp_path):
    class Local(ValueError):  # pickle does not find it by its name
        pass

    def work(rank):
        def read():
            if rank == 1:
                raise Local("the file is damaged")

        try:
            processes.everywhere(read)
        except ValueError as error:
            return str(error)

    assert on_ranks(2, tmp_path, work) == ["rank 1 of 2: the file is damaged"] * 2
