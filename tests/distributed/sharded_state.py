"""A model of which each rank has some rows, trained and saved, for the tests of saves."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from grassy.distributed.state import save_state
from ranks import on_ranks

CLASSES, K, N = 9, 2, 4  # of 4 ranks the last has no class, of 8 three have none


class Model(nn.Module):
    """A backbone that every rank has, with counters and batch statistics, and a weight of which each has some rows."""

    def __init__(self, sharded):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(3, N), nn.BatchNorm1d(N))
        self.convolution = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(1.5))
        weight = torch.randn(CLASSES, K, N)
        if sharded:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            rows = list(weight.split(-(-CLASSES // dist.get_world_size())))
            own = rows[dist.get_rank()] if dist.get_rank() < len(rows) else weight[:0]
            shape = {"shape": weight.shape, "stride": weight.stride()}
            weight = DTensor.from_local(own.clone(), mesh, [Shard(0)], run_check=False, **shape)
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        found = torch.einsum("bn,ckn->", self.backbone(x) + self.convolution(x.new_ones(1, 2, 3, 3)).sum(), weight)
        return self.scale * found


def build(sharded):
    model = Model(sharded)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.9), foreach=False)


def train(model, optimizer, updates):
    for update in updates:
        torch.manual_seed(update)
        optimizer.zero_grad()
        (model(torch.randn(5, 3)).sin() + update * model.scale).backward()
        if isinstance(model.weight, DTensor):  # as a sharded cross-entropy leaves the others
            for p in (p for p in model.parameters() if p is not model.weight):
                dist.all_reduce(p.grad)
        optimizer.step()


def whole(model, optimizer):
    """All values, as plain tensors."""
    full = lambda tensor: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    values = {name: full(value).detach().clone() for name, value in model.state_dict().items()}
    for name, p in model.named_parameters():
        for key, value in optimizer.state[p].items():
            values[f"{name}.{key}"] = full(value).detach().clone()
    return values


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


def saved_on_four(folder):
    """The whole state that four ranks save in `folder`, and the one that they come to after two further updates."""

    def work(rank):
        model, optimizer = build(sharded=True)
        train(model, optimizer, range(3))
        optimizer.state[model.weight]["exp_avg"] = optimizer.state[model.weight]["exp_avg"].bfloat16()
        optimizer.state[model.weight]["counts"] = torch.tensor([rank, 1])
        before = whole(model, optimizer)
        save_state(
            folder, model, optimizer, {"rows": [1.5, None], "best": -float("inf")}, own={"seen": torch.tensor(rank)}
        )
        optimizer.state[model.weight]["exp_avg"] = optimizer.state[model.weight]["exp_avg"].float()
        train(model, optimizer, range(3, 5))
        return before, whole(model, optimizer)

    states, ends = zip(*on_ranks(4, folder.parent, work), strict=True)
    states[0]["weight.counts"] = torch.tensor([0 + 1 + 2 + 3, 4])  # the sum over the shards
    return states[0], ends[0]


def shards(save):
    return sorted(save.glob("*.safetensors"))


def put(save, name, data):
    (save / name).write_bytes(data)
