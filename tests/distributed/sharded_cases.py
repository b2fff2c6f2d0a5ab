"""What several processes do with a sharded head, and one process with a whole one, to be compared."""

import functools
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

import grassy
from grassy.kernels import cross_entropy, sharded

CLASSES, WIDTH, ROWS = 9, 7, 24  # four processes hold 3, 3, 3 and no classes
UPDATES = 10


@dataclass(frozen=True)
class Case:
    """A head, and how it is trained for ten updates."""

    head: str = "grassmann"
    options: dict = field(default_factory=dict)
    base: str = "sgd"
    criterion: dict = field(default_factory=dict)
    clip: float | None = None
    parts: int = 1
    dtype: torch.dtype = torch.float64
    fsdp: bool = False
    ignore: bool = False
    mixed: bool = False  # labels, two of a row
    lr: float = 0.05
    chunk: int | None = None  # logits in a chunk, if they shall be few


GRASSMANN = {"k": [2, 1, 3, 2, 2, 2, 1, 2, 3]}
CASES = {
    "grassmann": Case(options=GRASSMANN),
    "grassmann float32": Case(options={**GRASSMANN, "fuse_loss": True}, dtype=torch.float32, lr=0.02),
    "grassmann float32 in chunks": Case(
        options={**GRASSMANN, "fuse_loss": True},
        criterion={"label_smoothing": 0.1},
        dtype=torch.float32,
        lr=0.02,
        chunk=60,
    ),
    "grassmann smoothed, clipped, accumulated": Case(
        options=GRASSMANN, criterion={"label_smoothing": 0.2}, clip=0.3, parts=2
    ),
    "grassmann with ignored labels and a sum": Case(
        options=GRASSMANN, criterion={"ignore_index": 3, "reduction": "sum"}, ignore=True
    ),
    "grassmann, gamma learned, standardized not": Case(options={"k": 2, "learnable_gamma": True}, base="adamw"),
    "grassmann in chunks": Case(options=GRASSMANN, criterion={"label_smoothing": 0.1}, chunk=60),
    "grassmann not normalized": Case(options={"k": 2, "normalize": False, "gamma": 3.0}, clip=1.0),
    "grassmann with FSDP2": Case(options={"k": 2}, base="adamw", fsdp=True, clip=0.3, parts=2),
    "grassmann with mixed labels": Case(options=GRASSMANN, criterion={"label_smoothing": 0.1}, mixed=True),
    "grassmann with mixed labels in chunks": Case(options=GRASSMANN, mixed=True, chunk=60, parts=2),
    "grassmann float32 with mixed labels in chunks": Case(
        options={**GRASSMANN, "fuse_loss": True, "gamma": 4.0},  # gradients of about one: rounding is 1e-7
        criterion={"label_smoothing": 0.1},
        dtype=torch.float32,
        lr=0.02,
        mixed=True,
        chunk=60,
    ),
    "linear with mixed labels": Case("linear", mixed=True),
    "linear": Case("linear", base="adamw", clip=0.5),
    "linear float32 with FSDP2": Case("linear", fsdp=True, dtype=torch.float32),
    "cosine, scale learned": Case(
        "cosine", {"learnable_scale": True, "scale": 9.0}, criterion={"label_smoothing": 0.1}
    ),
    "arcface in chunks": Case("arcface", {"scale": 9.0}, ignore=True, chunk=60),
    "arcface": Case("arcface", {"scale": 9.0}, base="adamw"),
    "subcenter-arcface": Case("subcenter-arcface", {"scale": 9.0, "centers": 2}),
}


def a_model(case):
    torch.manual_seed(0)
    head = grassy.create_head(case.head, WIDTH, CLASSES, **case.options)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, WIDTH), head).to(case.dtype)


def batch(step, case):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 5, generator=generator, dtype=torch.float64).to(case.dtype)
    y = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    if case.ignore:
        y[::2] = case.criterion.get("ignore_index", -100)
    if case.mixed:  # some with the same label twice; one weight is zero
        weight = torch.rand(ROWS, 1, generator=generator, dtype=torch.float64)
        weight[3] = 0
        return x, torch.stack([y, y.flip(0)], -1), torch.cat([weight, 1 - weight], -1)
    return x, y


def train(model, case, rank=0, world=1, divisor=1):
    """Losses and gradient norms of ten updates, and the gradients of the first."""
    optimizer = grassy.make_optimizer(model, case.base, lr=case.lr, weight_decay=0.01)
    criterion = functools.partial(F.cross_entropy, **case.criterion)
    losses = []
    for step in range(UPDATES):
        x, *target = (each.reshape(world, case.parts, -1, *each.shape[1:])[rank] for each in batch(step, case))
        optimizer.zero_grad()
        total = 0.0
        for part in range(case.parts):
            y = grassy.MixedLabels(*(each[part] for each in target)) if case.mixed else target[0][part]
            loss = grassy.classification_loss(model, x[part], y, criterion) / (case.parts * divisor)
            loss.backward()
            total += loss.detach()
        norm = grassy.clip_grad_norm_(model, case.clip) if case.clip else torch.zeros(())
        if step == 0:
            gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters()}
        optimizer.step()
        losses.append(torch.stack([total, norm.to(total)]))
    return torch.stack(losses), gradients


def trained_in_one_process(case, world):
    model = a_model(case)
    losses, gradients = train(model, case, divisor=world if case.criterion.get("reduction") == "sum" else 1)
    return {"losses": losses, "gradients": gradients, "weights": model.state_dict()}


def trained_by_several(case, mesh):
    modules = (sharded, cross_entropy)
    before = [(module.WHOLE, module.CHUNK) for module in modules]
    if case.chunk:
        for module in modules:
            module.WHOLE = module.CHUNK = case.chunk
    try:
        model = grassy.distributed.shard_head(a_model(case), mesh)
        wrapped = grassy.distributed.wrap(model, mesh, fsdp=case.fsdp)
        losses, gradients = train(wrapped, case, mesh.get_local_rank(), mesh.size())
    finally:
        for module, limits in zip(modules, before, strict=True):
            module.WHOLE, module.CHUNK = limits
    losses = losses.contiguous()
    dist.all_reduce(losses)
    losses /= mesh.size()
    gathered = {name.removeprefix("module."): grassy.distributed.whole(g) for name, g in gradients.items()}
    weights = {name: grassy.distributed.whole(p) for name, p in model.state_dict().items()}
    return {"losses": losses, "gradients": gathered, "weights": weights}


def spawn(work, world, folder, *arguments):
    """Run `work(mesh, *arguments)` in several processes; what each returned, by rank."""
    mp.spawn(_process, (work, world, str(folder), arguments), nprocs=world, join=True)
    return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(world)]


def _process(rank, work, world, folder, arguments):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    try:
        torch.save(work(grassy.distributed.mesh("cpu"), *arguments), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()
