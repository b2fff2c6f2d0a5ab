"""What several processes find out about a sharded head in one go, since starting them takes long."""

import copy
import functools
import warnings

import torch
import torch.distributed as dist
from benchmarks.traffic import Traffic
from torch import nn
from torch.nn import functional as F

import grassy
from grassy.kernels import sharded_scores

from .sharded_cases import CLASSES, WIDTH, Case, a_model

F64 = torch.float64
HEADS = {
    "grassmann": {"k": [2, 1, 3, 2, 2, 2, 1, 2, 3]},
    "linear": {},
    "cosine": {"scale": 5.0},
    "arcface": {"scale": 5.0},
}


def features(rows=12, seed=0, dtype=F64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=generator, dtype=F64).to(dtype)


def labels(rows=12, classes=CLASSES, seed=1):
    return torch.randint(0, classes, (rows,), generator=torch.Generator().manual_seed(seed))


def mixed(rows=12, classes=CLASSES, seed=1):
    """Two labels for each row."""
    y, weight = labels(rows, classes, seed), torch.rand(rows, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return grassy.MixedLabels(torch.stack([y, y.flip(0)], -1), torch.stack([weight, 1 - weight], -1))


def a_head(name, dtype=F64, **more):
    torch.manual_seed(0)
    return grassy.create_head(name, WIDTH, CLASSES, dtype=dtype, **HEADS[name], **more)


def evaluation(head, x):
    """What evaluation asks of a head, also of one process."""
    head.eval()
    values, places = head.top(x, 3)
    return {"logits": head(x).detach(), "top": values, "places": places, "outlier": head.outlier_score(x)}


def logits_with_gradient(head, x, y):
    """A criterion that needs all logits: BCE; a head that is gathered is as good as a whole one."""
    x = x.clone().requires_grad_()
    head.train()
    loss = grassy.classification_loss(head, x, y, "bce")
    loss.backward()
    return {"loss": loss.detach(), "x": x.grad, "weight": grassy.distributed.whole(head.weight.grad)}


def of_each_head(mesh):
    mine = slice_of(mesh)
    found = {}
    for name in HEADS:
        head = grassy.distributed.shard_head(a_head(name), mesh)
        found[name] = {
            **evaluation(head, features()[mine]),
            "bce": logits_with_gradient(head, features()[mine], labels()[mine]),
        }
    return found


def slice_of(mesh, rows=12):
    each = rows // mesh.size()
    return slice(mesh.get_local_rank() * each, (mesh.get_local_rank() + 1) * each)


def unreduced(mesh):
    """reduction="none": the losses of the rows of this process, one of which is ignored."""
    head, y = grassy.distributed.shard_head(a_head("grassmann"), mesh), labels()
    y[0] = -100
    mine = slice_of(mesh)
    return head.loss(features()[mine], y[mine], functools.partial(F.cross_entropy, reduction="none")).detach()


def created_on_meta(mesh):
    """Parameters and buffers of heads that were created shard by shard: two blocks of classes, a part of a third."""
    found = {}
    for name, options in {"grassmann": {"k": 2, "learnable_gamma": True, "standardize": True}, "linear": {}}.items():
        head = grassy.create_head(name, 3, 2 * 4096 + 5, device="meta", **options)
        grassy.distributed.shard_head(head, mesh, seed=7)
        assert not any(t.is_meta for t in (*head.parameters(), *head.buffers()))
        found |= {f"{name} {key}": grassy.distributed.whole(t) for key, t in head.named_parameters()}
        found |= {f"{name} {key}": t.clone() for key, t in head.named_buffers()}
    return found


def traffic(mesh):
    """Collectives and bytes of an update, in bfloat16, for two numbers of classes and dimensions; and of the step."""
    found = {}
    for classes, k, target in ((9, 2, labels(8)), (90, 5, labels(8)), (9, 3, mixed(8))):
        head = grassy.create_head("grassmann", 64, classes, k=k)
        grassy.distributed.shard_head(head, mesh)
        optimizer = grassy.make_optimizer(head, "sgd", lr=0.1)
        x = torch.randn(8, 64, requires_grad=True)
        with Traffic(mesh.size()) as update, torch.autocast("cpu", torch.bfloat16):
            grassy.classification_loss(head, x, target).backward()
        with Traffic(mesh.size()) as step:
            optimizer.step()
        found[classes, k] = {"calls": update.calls, "sent": update.sent, "step": step.calls}
    return found


def overflow_on_one_rank(mesh):
    """A step that one process cannot make is made by none; the next one is."""
    model = grassy.distributed.shard_head(a_model(Case(options={"k": 2}, dtype=torch.float32)), mesh)
    wrapped = grassy.distributed.wrap(model, mesh)
    optimizer = grassy.make_optimizer(wrapped, "adamw", lr=0.1)
    scaler = grassy.distributed.GradScaler("cpu", init_scale=2.0)
    before = {name: grassy.distributed.whole(p).clone() for name, p in model.named_parameters()}
    x = torch.randn(4, 5)
    moved = []
    for bad in (True, False):
        optimizer.zero_grad()
        scaler.scale(grassy.classification_loss(wrapped, x, labels(4))).backward()
        if bad and mesh.get_local_rank() == 0:
            model[3].weight.grad.to_local()[0, 0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        after = {name: grassy.distributed.whole(p) for name, p in model.named_parameters()}
        moved.append([name for name in before if not torch.equal(before[name], after[name])])
    return {"moved": moved, "scale": scaler.get_scale()}


def a_nan_in_one_class(mesh):
    """It keeps that class from moving, in the process that has it, and no other class."""
    head = grassy.distributed.shard_head(a_head("grassmann"), mesh)
    optimizer = grassy.make_optimizer(head, "sgd", lr=0.1)
    before = grassy.distributed.whole(head.weight).clone()
    grassy.classification_loss(head, features(), labels()).backward()
    if mesh.get_local_rank() == 0:
        head.weight.grad.to_local()[1] = torch.nan
    optimizer.step()
    moved = (grassy.distributed.whole(head.weight) != before).flatten(1).any(-1)
    return {"moved": moved, "skipped": optimizer.skipped_classes}


def averaged(mesh=None):
    """The moving average of a model after some updates, as one process has it, too."""
    model = a_model(Case(options={"k": 2}))
    if mesh is not None:
        grassy.distributed.shard_head(model, mesh)
    ema = grassy.AveragedModel(model, decay=0.5)
    with torch.no_grad():
        for step in range(3):
            torch.manual_seed(step)
            moved = grassy.geometry.random_subspace(CLASSES, 2, WIDTH, dtype=F64)
            model.load_state_dict({**copy.deepcopy(model.state_dict()), "3.weight": moved})
            model[0].weight += 1
            ema.update(model)
    return {name: grassy.distributed.whole(p) for name, p in ema.module.state_dict().items()}


def refused(mesh):
    """Messages of what cannot be done."""
    head = grassy.distributed.shard_head(a_head("grassmann"), mesh)
    limit, sharded_scores.GATHER_AT_MOST = sharded_scores.GATHER_AT_MOST, 10
    attempts = {
        "all logits": lambda: head.eval()(features()),
        "soft targets": lambda: grassy.classification_loss(head, features(), torch.rand(12, CLASSES, dtype=F64)),
        "a head of another kind": lambda: grassy.distributed.shard_head(grassy.create_head("multi", 4, 3), mesh),
        "a sample without shards": lambda: grassy.classification_loss(
            a_head("grassmann", sample=0.5), features(), labels()
        ),
        "mixed labels for a margin": lambda: grassy.classification_loss(
            grassy.distributed.shard_head(a_head("arcface"), mesh), features(), mixed()
        ),
    }
    messages = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except ValueError as error:
            messages[name] = str(error)
    sharded_scores.GATHER_AT_MOST = limit
    return messages


def half_precision(mesh):
    """The loss under autocast, and how far gradients are from those of float64, relative to the largest."""
    mine, found = slice_of(mesh), {}
    for name in HEADS:
        for dtype in (torch.bfloat16, torch.float16):
            head = grassy.distributed.shard_head(a_head(name).float(), mesh)
            with torch.autocast("cpu", dtype):
                loss = grassy.classification_loss(head, features(dtype=torch.float32)[mine], labels()[mine])
            loss.backward()
            found[name, dtype] = {"loss": loss.detach(), "weight": grassy.distributed.whole(head.weight.grad)}
    return found


def sampled(mesh=None, correct=False, clip=None, smoothing=0.0):
    """Ten updates with a share of the classes, of 40; which of them have ever moved; their momentum.

    With smoothing, the labels are mixed as well.
    """
    criterion = functools.partial(F.cross_entropy, label_smoothing=smoothing)
    torch.manual_seed(0)
    head = grassy.create_head("grassmann", WIDTH, 40, k=2, dtype=F64, sample=0.2, sample_seed=3, sample_correct=correct)
    model = nn.Sequential(nn.Linear(5, WIDTH, dtype=F64), head)
    wrapped, mine = model, slice(None)
    if mesh is not None:
        wrapped = grassy.distributed.wrap(grassy.distributed.shard_head(model, mesh), mesh)
        mine = slice_of(mesh, 24)
    optimizer = grassy.make_optimizer(wrapped, "sgd", lr=0.05)
    losses = []
    for step in range(10):
        optimizer.zero_grad()
        for part in range(2):
            x = torch.randn(24, 5, generator=torch.Generator().manual_seed(step), dtype=F64)[mine] + part
            target = labels(24, 5, step + part)[mine]
            if smoothing:
                both = mixed(24, 5, step + part)
                target = grassy.MixedLabels(both.labels[mine], both.weights[mine])
            loss = grassy.classification_loss(wrapped, x, target, criterion) / 2
            loss.backward()
        losses.append(grassy.clip_grad_norm_(wrapped, clip) if clip else loss.detach())
        optimizer.step()
    if mesh is not None and not clip:
        dist.all_reduce(total := torch.stack(losses))
        losses = list(total / mesh.size())
    momentum = optimizer.state[head.weight]["momentum_buffer"]
    weights = {name: grassy.distributed.whole(p) for name, p in model.state_dict().items() if "extra" not in name}
    return {"losses": torch.stack(losses), "momentum": grassy.distributed.whole(momentum), **weights}


def compiled(mesh):
    """Loss and gradient, plain and compiled: of a head without a graph break, and of a model under DDP."""
    found = {"head": [], "DDP": []}
    for is_compiled in (False, True):
        head = grassy.distributed.shard_head(a_head("grassmann", torch.float32), mesh)
        head = torch.compile(head, backend="aot_eager", fullgraph=True) if is_compiled else head
        found["head"].append(loss_and_gradient(head, features()))
        model = grassy.distributed.shard_head(a_model(Case(options={"k": 2}, dtype=torch.float32)), mesh)
        model = grassy.distributed.wrap(model, mesh)
        model = torch.compile(model, backend="aot_eager") if is_compiled else model
        found["DDP"].append(loss_and_gradient(model, features()[:, :5]))
    return found


def loss_and_gradient(model, x):
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = grassy.classification_loss(model, x.float(), labels())
        loss.backward()
    return [loss.detach(), *(grassy.distributed.whole(p.grad) for p in model.parameters())]
