"""The kernels of the head on a GPU: agreement, CUDA graphs, torch.compile and memory. Skipped without a GPU."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import grassy
from grassy import geometry, kernels

from .cross_entropy_cases import SHAPES, divide, errors, example, gradients, plain
from .sharded_kernels import differences

pytestmark = pytest.mark.gpu

LARGE = [(257, 1000, 8, 768), (64, 1000, 3, 384), (1024, 1000, 1, 512)]


def on_gpu(*shape, soft=False):
    return [tensor.cuda() for tensor in example(*shape, soft)]


def weighted_sum(x, weight, impl, normalize=True):
    """Some sum of the logits that does not cancel and gives every class a gradient."""
    logits = kernels.subspace_logits(x, weight, 25.0, normalize=normalize, impl=impl)
    return (logits * torch.arange(weight.shape[0], device=x.device).cos()).sum(-1)


def relative(ours, exact):
    return [float((a - b).abs().max() / b.abs().max().clamp_min(0.1)) for a, b in zip(ours, exact, strict=True)]


@pytest.fixture(autouse=True)
def _full_float32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(params=["kept", "chunked", "partly kept", "in blocks of rows"])
def either_way(request, monkeypatch):
    if request.param == "in blocks of rows":
        divide(monkeypatch, 2**14, 2**20, rows=48)
    elif request.param != "kept":
        divide(monkeypatch, 2**19, 2**20 if request.param == "partly kept" else 0)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("soft", [False, True], ids=["labels", "soft"])
@pytest.mark.parametrize("impl", ["triton", "chunks"])
@pytest.mark.parametrize("shape", SHAPES + LARGE, ids=str)
def test_loss_and_gradients_agree_with_float64(shape, impl, soft):
    x, weight, target = on_gpu(*shape, soft=soft)
    if not soft and len(target) > 1:
        target[1] = -100
    assert max(errors(x, weight, target, impl, label_smoothing=0.1)) < 5e-5
    assert max(errors(x, weight, target, impl, 2.0, normalize=False, reduction="sum")) < 5e-5


@pytest.mark.parametrize("impl", ["triton", "chunks"])
def test_the_loss_of_a_shard_agrees_with_the_specification(impl):
    found = differences(impl, device="cuda")
    assert len(found) == 36
    assert max(max(error) for error in found.values()) < 1e-4, found


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("shape", SHAPES + LARGE, ids=str)
def test_logits_and_gradients_agree_with_float64(shape, normalize):
    x, weight, _ = on_gpu(*shape)
    ours = gradients(lambda x, w: weighted_sum(x, w, "auto", normalize), x, weight)
    exact = gradients(lambda x, w: weighted_sum(x, w, "reference", normalize), x.double(), weight.double())
    assert max(relative(ours, exact)) < 5e-5


@pytest.mark.parametrize("shape", [(33, 50, 3, 70), (64, 100, 8, 128)], ids=str)
def test_features_and_weights_that_are_not_contiguous(shape):
    x, weight, target = on_gpu(*shape)
    striped = torch.zeros(len(x), 2 * x.shape[1], device="cuda")[:, ::2].copy_(x)
    turned = weight.mT.contiguous().mT
    assert not striped.is_contiguous()
    assert not turned.is_contiguous()
    assert max(errors(striped, turned, target, "triton")) < 5e-5
    ours = gradients(lambda x, w: weighted_sum(x, w, "auto"), striped, turned)
    exact = gradients(lambda x, w: weighted_sum(x, w, "reference"), x.double(), weight.double())
    assert max(relative(ours, exact)) < 5e-5


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_under_autocast_they_are_as_close_as_the_plain_composition(shape, x_dtype):
    x, weight, target = on_gpu(*shape)
    x = x.to(x_dtype)
    exact = (
        plain(x, weight, target),
        gradients(lambda x, w: weighted_sum(x, w, "reference"), x.double(), weight.double()),
    )
    with torch.autocast("cuda", dtype=torch.bfloat16):
        ours = (
            gradients(lambda x, w: kernels.subspace_cross_entropy(x, w, target), x, weight),
            gradients(lambda x, w: weighted_sum(x, w, "auto"), x, weight),
        )
        theirs = (
            plain(x.float(), weight, target, dtype=torch.float32),
            gradients(lambda x, w: weighted_sum(x, w, "reference"), x.float(), weight),
        )
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert a[1].dtype == x_dtype
        assert a[2].dtype == torch.float32
        # Up to the rounding of features that are bfloat16 themselves, whose gradients are, too.
        assert all(mine < 2 * other + 5e-3 for mine, other in zip(relative(a, c), relative(b, c), strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_precisions_are_left_to_plain_torch(dtype):
    x, weight, target = on_gpu(5, 7, 3, 20)
    expected = plain(x, weight, target)[0]
    if dtype == torch.float16:
        with torch.autocast("cuda", dtype=dtype):
            loss = kernels.subspace_cross_entropy(x, weight, target)
    else:
        loss = kernels.subspace_cross_entropy(x.to(dtype), weight.to(dtype), target)
    assert torch.allclose(loss.double(), expected, rtol=2e-2)


def test_hazards_zero_features_nans_absent_rows_and_labels_that_are_no_class():
    x, weight, target = on_gpu(5, 7, 3, 20)
    x[1], x[2, 3], target[3], target[4] = 0, torch.nan, 99, -100
    each = gradients(lambda x, w: kernels.subspace_cross_entropy(x, w, target, reduction="none"), x, weight)
    assert each[0].isnan().tolist() == [False, False, True, True, False]
    assert each[0][1].item() == pytest.approx(torch.tensor(7.0).log().item())
    assert (each[1][[1, 4]] == 0).all()
    good = torch.tensor([0, 1, 4])
    _, _, dweight = gradients(lambda x, w: kernels.subspace_cross_entropy(x[good], w, target[good]), x, weight)
    assert dweight.isfinite().all()
    assert (dweight[1, 1:] == 0).all()
    logits, dx, _ = gradients(lambda x, w: kernels.subspace_logits(x, w), x, weight)
    assert (logits[1] == 0).all()
    assert (dx[1] == 0).all()
    assert dx.isnan().any(-1).tolist() == [False, False, True, False, False]
    assert kernels.subspace_cross_entropy(x[:0], weight, target[:0], reduction="sum") == 0


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("fused", [True, False])
def test_forward_and_backward_live_in_a_cuda_graph(fused):
    x, weight, target = on_gpu(64, 1000, 8, 256)
    x.requires_grad_()
    weight.requires_grad_()

    def step():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            if fused:
                loss = kernels.subspace_cross_entropy(x, weight, target, label_smoothing=0.1)
            else:
                loss = F.cross_entropy(kernels.subspace_logits(x, weight), target, label_smoothing=0.1)
        loss.backward()
        return loss.detach()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            x.grad = weight.grad = None
            step()
    torch.cuda.current_stream().wait_stream(side)
    x.grad = weight.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    dx, dweight = x.grad, weight.grad
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        target.random_(0, 1000)
    graph.replay()
    replayed = captured.clone(), dx.clone(), dweight.clone()
    x.grad = weight.grad = None
    again = step(), x.grad, weight.grad
    assert max(relative(replayed, again)) < 1e-3


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("fuse_loss", [True, False])
def test_a_compiled_model_trains(fuse_loss, mode):
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), grassy.GrassmannHead(16, 4, k=3, fuse_loss=fuse_loss)).cuda()
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    x, y = torch.randn(64, 6, device="cuda"), torch.randint(0, 4, (64,), device="cuda")
    expected = grassy.classification_loss(model, x, y).item()
    optimizer = grassy.make_optimizer(model, "adamw", lr=1e-2)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = grassy.classification_loss(compiled, x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(expected, rel=1e-2)
    assert losses[-1] < 0.7 * losses[0]


def extra_memory(function, x, weight):
    """MiB at the peak of a forward and backward beyond what was there before and the gradient of the weight."""
    for _ in range(2):  # the first time compiles kernels and takes the workspace of the BLAS library
        x.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = function(x, weight)
        loss.backward()
        torch.cuda.synchronize()
        del loss
    return (torch.cuda.max_memory_allocated() - before - weight.nbytes) / 2**20


def test_the_loss_of_imagenet21k_takes_little_memory():
    x = torch.randn(1024, 768, device="cuda", requires_grad=True)
    weight = nn.Parameter(geometry.random_subspace(21841, 8, 768, device="cuda"))
    target = torch.randint(0, 21841, (1024,), device="cuda")
    fused = extra_memory(lambda x, w: kernels.subspace_cross_entropy(x, w, target), x, weight)
    soft = torch.rand(1024, 21841, device="cuda").softmax(-1)
    fused_soft = extra_memory(lambda x, w: kernels.subspace_cross_entropy(x, w, soft, label_smoothing=0.1), x, weight)
    logits = extra_memory(lambda x, w: F.cross_entropy(kernels.subspace_logits(x, w), target), x, weight)
    plainly = extra_memory(
        lambda x, w: F.cross_entropy(kernels.subspace_logits(x, w, impl="reference"), target), x, weight
    )
    print(f"MiB: fused {fused:.0f}, soft {fused_soft:.0f}, logits by kernels {logits:.0f}, plain {plainly:.0f}")
    assert fused <= 300
    assert fused_soft <= 300
    assert logits < plainly
