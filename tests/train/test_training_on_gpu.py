"""CPU and GPU agree. Skipped without a GPU."""

import copy

import pytest
import torch
from torch import nn

import grassy
from grassy import geometry as g
from grassy import kernels
from grassy.recipes.changes import with_changes

pytestmark = pytest.mark.gpu

F64 = torch.float64


@pytest.mark.parametrize("retraction", ["geodesic", "qf"])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_steps_agree_large_turns_caps_absent_rows_and_nans_included(retraction, dtype):
    w = g.random_subspace(30, 4, 33, dtype=dtype)
    w[3, 1] = 0
    d = torch.randn_like(w) * torch.logspace(-3, 3, 30, dtype=dtype)[:, None, None]
    d[7, 2, 5] = float("nan")
    results = []
    for device in ("cpu", "cuda"):
        moved, buffer = w.clone().to(device), torch.zeros_like(w, device=device)
        for _ in range(3):
            counts = kernels.geodesic_step(moved, d.to(device), buffer, 0.1, 0.9, retraction=retraction)
        results.append((moved.cpu(), buffer.cpu(), int(counts.skipped), int(counts.capped)))
    (a, m, *a_counts), (b, n, *b_counts) = results
    assert a_counts == b_counts
    sane = slice(0, 20)  # beyond, the angle itself is known only to its rounding
    assert g.distance(a[sane], b[sane]).max() < (1e-9 if dtype == F64 else 1e-4)
    assert torch.allclose(m[sane], n[sane], atol=1e-9 if dtype == F64 else 1e-3)
    assert g.orthonormality_error(b) < (1e-12 if dtype == F64 else 1e-6)
    assert (b[3, 1] == 0).all()
    assert torch.equal(b[7], w[7])


def test_logits_and_gradients_agree_and_autocast_stays_close():
    head = grassy.GrassmannHead(65, 7, k=3)
    x = torch.randn(9, 65)
    other = grassy.GrassmannHead(65, 7, k=3).cuda()
    other.load_state_dict(head.state_dict())
    head(x).square().sum().backward()
    other(x.cuda()).square().sum().backward()
    assert torch.allclose(head(x), other(x.cuda()).cpu(), atol=1e-3)
    assert torch.allclose(head.weight.grad, other.weight.grad.cpu(), atol=1e-2 * head.weight.grad.abs().max())
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cuda", dtype=dtype):
            logits = other(x.cuda())
        assert logits.dtype == torch.float32
        assert torch.allclose(logits.cpu(), head(x), atol=0.3)


def test_the_geometry_agrees():
    a, b = g.random_subspace(2, 20, 3, 16, dtype=F64)
    for function in (g.principal_angles, g.distance, g.log):
        assert torch.allclose(function(a, b), function(a.cuda(), b.cuda()).cpu(), atol=1e-8)
    h = g.log(a, b)
    assert torch.allclose(g.geodesic(a, h), g.geodesic(a.cuda(), h.cuda()).cpu(), atol=1e-10)
    assert g.distance(g.mean(a), g.mean(a.cuda()).cpu()) < 1e-6


def test_a_step_the_scaler_skips_changes_nothing_and_training_works_in_half_precision():
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), grassy.GrassmannHead(16, 4, k=3)).cuda()
    optimizer = grassy.make_optimizer(model, "adamw", lr=1e-2)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**14)
    x = torch.randn(64, 6, device="cuda")
    y = x[:, :4].argmax(-1)
    losses = []
    for step in range(60):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = grassy.classification_loss(model, x, y)
        scaler.scale(loss).backward()
        before = model[2].weight.detach().clone()
        if step == 3:
            model[0].weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model[2].weight, before) == (step == 3)
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert g.orthonormality_error(model[2].weight.detach()) < 1e-6


def test_a_compiled_model_trains():
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), grassy.GrassmannHead(16, 4, k=3)).cuda()
    compiled = torch.compile(model, fullgraph=True)
    x, y = torch.randn(8, 6, device="cuda"), torch.randint(0, 4, (8,), device="cuda")
    before = grassy.classification_loss(model, x, y)
    assert torch.allclose(grassy.classification_loss(compiled, x, y), before, atol=1e-2)
    optimizer = grassy.make_optimizer(model, "sgd", lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        loss = grassy.classification_loss(compiled, x, y)
        loss.backward()
        optimizer.step()
    assert loss < 0.5 * before


@pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="torch has no NCCL here")
@pytest.mark.parametrize("fuse_loss", [False, True])
def test_one_process_of_ddp_trains_as_none(tmp_path, fuse_loss):
    """By the kernels of loss and step, in the buckets of DDP."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), grassy.GrassmannHead(64, 40, k=4, fuse_loss=fuse_loss)).cuda()
    wrapped = copy.deepcopy(plain)
    x, y = torch.randn(32, 6, device="cuda"), torch.randint(0, 40, (32,), device="cuda")
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    try:
        for model in (plain, nn.parallel.DistributedDataParallel(wrapped, device_ids=[0])):
            optimizer = grassy.make_optimizer(model, "sgd", lr=0.05, momentum=0.9)
            for _ in range(5):
                optimizer.zero_grad()
                grassy.classification_loss(model, x, y).backward()
                optimizer.step()
    finally:
        torch.distributed.destroy_process_group()
    for one, other in zip(plain.parameters(), wrapped.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("shape", [(37, 8, 1000), (5, 1, 7), (3, 4, 2048)])
@pytest.mark.parametrize("transport", ["projection", "parallel"])
def test_the_kernel_in_triton_agrees_with_the_reference_in_float64(shape, transport):
    w = g.random_subspace(*shape, device="cuda")
    assert kernels.choose("auto", w) == "cuda"
    d = 0.3 * torch.randn_like(w)
    m = g.project(w, 0.3 * torch.randn_like(w))
    d[1] = float("nan")
    results = []
    for impl, dtype in (("triton", torch.float32), ("reference", F64)):
        moved, buffer = w.to(dtype, copy=True), m.to(dtype, copy=True)
        lr = torch.tensor(0.05, device="cuda")
        counts = kernels.geodesic_step(moved, d.to(dtype), buffer, lr, 0.9, transport=transport, impl=impl)
        results.append((moved.double(), buffer.double(), int(counts.skipped)))
    (a, m1, skipped), (b, m2, expected) = results
    assert skipped == expected == 1
    assert g.distance(a, b).max() < 2e-6
    assert (m1 - m2).abs().max() < 1e-5
    assert g.orthonormality_error(a) < 1e-6


def test_the_kernel_keeps_subspaces_orthonormal_over_thousands_of_steps():
    w = g.random_subspace(20, 8, 64, device="cuda")
    m = torch.zeros_like(w)
    for _ in range(5000):
        kernels.geodesic_step(w, torch.randn_like(w), m, 0.1, 0.9, impl="triton")
    assert g.orthonormality_error(w) < 1e-6


@pytest.mark.parametrize(
    "head",
    [{"name": "linear"}, {"name": "grassmann", "k": 2, "gamma": 8.0}, {"name": "grassmann", "k": 12, "gamma": 8.0}],
    ids=["linear", "two rows", "twelve rows"],
)
@pytest.mark.parametrize("options", [{}, {"retraction": "qf"}, {"transport": "parallel"}], ids=str)
def test_a_captured_run_follows_one_that_is_not(tmp_path, head, options, monkeypatch):
    from grassy.train import opening
    from grassy.train.loop import train
    from grassy.train.training_step import CapturedSteps
    from training_cases import tiny_arrays, tiny_recipe

    data = tiny_arrays(tmp_path / "data", images=200)
    recipe = tiny_recipe(head=head, amp="off", torchcompile="off", epochs=3, lr=0.01, **options)
    with opening.opened_run(recipe, data, tmp_path / "probe", "", _process()) as (_, steps, *_):
        assert isinstance(steps, CapturedSteps)
    one = train(recipe, data, tmp_path / "captured", quiet=True)
    monkeypatch.setattr(opening, "can_be_captured", lambda *_: False)
    other = train(recipe, data, tmp_path / "eager", quiet=True)
    for captured, eager in zip(one.rows, other.rows, strict=True):
        assert captured["train_loss"] == pytest.approx(eager["train_loss"], rel=1e-3)
        assert captured["lr"] == pytest.approx(eager["lr"])


def test_a_captured_run_goes_on_after_an_interruption_and_stops_at_a_nan(tmp_path, monkeypatch):
    from grassy.train import loop
    from grassy.train.loop import TrainingStopped, train
    from training_cases import tiny_arrays, tiny_recipe

    data = tiny_arrays(tmp_path / "data", images=200)
    recipe = tiny_recipe(torchcompile="off", epochs=3, lr=0.01)
    whole = train(recipe, data, tmp_path / "whole", quiet=True)
    original = loop.stop_or_save

    def stop_or_save(run, *others):
        stop, save = original(run, *others)
        return stop or run.position.done == 40, save

    with monkeypatch.context() as patch:
        patch.setattr(loop, "stop_or_save", stop_or_save)
        train(recipe, data, tmp_path / "parts", quiet=True)
    parts = train(recipe, data, tmp_path / "parts", resume="auto", quiet=True)
    assert [row["epoch"] for row in parts.rows] == [0, 1, 2]
    assert parts.rows[-1]["train_loss"] == pytest.approx(whole.rows[-1]["train_loss"], rel=0.02)
    with pytest.raises(TrainingStopped, match="not finite at update"):
        train(with_changes(recipe, {"lr": 1e30, "head": {"name": "linear"}}), data, tmp_path / "nan", quiet=True)


def _process():
    from grassy.distributed.processes import Process

    return Process(torch.device("cuda", 0))


def test_standardised_features_agree_with_the_cpu_and_take_their_statistics_in_float32_under_autocast():
    head = grassy.GrassmannHead(64, 7, k=3, standardize=True)
    other = grassy.GrassmannHead(64, 7, k=3, standardize=True).cuda()
    other.load_state_dict(head.state_dict())
    x = (3 + torch.randn(50, 64)).bfloat16()
    head(x)
    with torch.autocast("cuda", torch.bfloat16):
        other(x.cuda()).sum().backward()
    assert torch.allclose(other.batch_norm.running_var.cpu(), head.batch_norm.running_var, atol=1e-5)
    assert torch.allclose(other.scores(x.cuda()).cpu(), head.scores(x), atol=1e-3)
