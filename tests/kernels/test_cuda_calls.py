"""How the kernels of the step are called: several heads, graphs, torch.compile, layouts. Skipped without a GPU."""

import pytest
import torch

from grassy import geometry as g
from grassy import kernels
from grassy.kernels.cuda import nvrtc
from grassy.kernels.cuda import step as cuda_step
from grassy.kernels.cuda import stream as cuda_stream

from .test_cuda_step import BF16, case, compare

pytestmark = pytest.mark.gpu


def test_a_kernel_that_cannot_be_compiled_leaves_the_work_to_others(monkeypatch):
    def fail(*_):
        raise RuntimeError("NVRTC: no such thing")

    monkeypatch.setattr(cuda_step, "_kernel", fail)
    w = g.random_subspace(5, 16, 64, device="cuda")
    cuda_step._failure.cache_clear()
    try:
        assert "no such thing" in kernels.explain(w)["cuda"]
        assert kernels.choose("auto", w) == "triton"
        assert kernels.choose("auto", g.random_subspace(5, 65, 128, device="cuda")) == "reference"
    finally:
        cuda_step._failure.cache_clear()


@pytest.mark.parametrize("lr", [1e-3, 0.1])
@pytest.mark.parametrize(("k", "n"), [(2, 70), (8, 70), (32, 70), (8, 2048), (16, 1024), (32, 1024)])
def test_many_heads_are_few_launches_and_the_same_steps(k, n, lr, monkeypatch):
    monkeypatch.setattr(cuda_stream, "AT_ONCE", 7)
    sizes = [i % 5 for i in range(50)]  # the first of them without a class, and more than 32 with some
    weights = [g.random_subspace(c, k, n, device="cuda") for c in sizes]
    grads = [torch.randn_like(w) for w in weights]
    grads[3][0, 0, 0] = float("inf")
    together, alone = ([[w.clone() for w in weights], [torch.zeros_like(w) for w in weights]] for _ in range(2))
    launched = []
    launch = nvrtc.Kernel.launch
    monkeypatch.setattr(nvrtc.Kernel, "launch", lambda self, *a: (launched.append(a[0]), launch(self, *a))[1])
    counts = kernels.geodesic_steps(together[0], grads, together[1], lr, 0.9, max_angle=0.5)
    chosen = cuda_step.plan(k, n, torch.cuda.get_device_capability())
    present = [size for size in sizes if size]  # heads without a class are not launched for
    clusters = [chosen.cluster * -(-size // chosen.classes) for size in present]
    if (k, n) == (32, 1024):  # streamed, seven at a time, before that
        assert len(launched) == 3 * (-(-sum(present[:32]) // 7) + -(-sum(present[32:]) // 7)) + 2
    else:
        assert launched == [sum(clusters[:32]), sum(clusters[32:])]
    for w, d, m in zip(alone[0], grads, alone[1], strict=True):
        if len(w):
            kernels.geodesic_step(w, d, m, lr, 0.9, max_angle=0.5, impl="cuda")
    for a, b in zip(together[0] + together[1], alone[0] + alone[1], strict=True):
        assert torch.equal(a, b)
    assert [int(c.skipped) for c in counts] == [int(i == 3) for i in range(50)]
    before = [w.clone() for w in weights]
    halves = [[d.to(BF16) for d in grads], [torch.zeros_like(w, dtype=BF16) for w in weights]]
    kernels.geodesic_steps(weights, *halves, lr, 0.9, skip=torch.ones((), device="cuda"))
    assert all(torch.equal(w, b) for w, b in zip(weights, before, strict=True))
    kernels.geodesic_steps(weights, *halves, lr, 0.9)
    assert not torch.equal(weights[1], before[1])
    assert max(float(g.orthonormality_error(w)) for w in weights if len(w)) < 1e-6


@pytest.mark.parametrize("lr", [1e-3, 0.1])
@pytest.mark.parametrize(("k", "n"), [(8, 96), (32, 2048), (40, 128)])
def test_heads_that_step_together_can_live_in_a_graph(k, n, lr):
    weights = [g.random_subspace(c, k, n, device="cuda") for c in (3, 10)]
    grads, momenta = [torch.randn_like(w) for w in weights], [torch.zeros_like(w) for w in weights]
    expected = [w.clone() for w in weights]
    kernels.geodesic_steps(expected, grads, [torch.zeros_like(w) for w in weights], lr, 0.9)
    kernels.geodesic_steps([w.clone() for w in weights], grads, [m.clone() for m in momenta], lr, 0.9)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.geodesic_steps(weights, grads, momenta, lr, 0.9)
    graph.replay()
    for a, b in zip(weights, expected, strict=True):
        assert torch.equal(a, b)


def test_heads_are_captured_together_of_which_only_one_has_ever_stepped():
    weights = [g.random_subspace(c, 7, 88, device="cuda") for c in (3, 10)]  # as no other test has them
    grads, expected = [torch.randn_like(w) for w in weights], [w.clone() for w in weights]
    for w, d in zip(expected, grads, strict=True):
        kernels.geodesic_step(w, d, None, 1e-3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.geodesic_steps(weights, grads, [None, None], 1e-3)
    graph.replay()
    for a, b in zip(weights, expected, strict=True):
        assert torch.equal(a, b)


def test_a_graph_that_is_captured_before_the_first_step_gets_plain_torch():
    w, d, m = case((3, 40, 72))  # as no other test has it
    expected, buffer = w.clone(), m.clone()
    kernels.geodesic_step(expected, d, buffer, 5e-3, 0.9, impl="reference")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="cannot be compiled while a CUDA graph is captured"):
            kernels.geodesic_step(w, d, m, 5e-3, 0.9, impl="triton")
        with pytest.warns(UserWarning, match="plain torch"):
            kernels.geodesic_step(w, d, m, 5e-3, 0.9)
    graph.replay()
    assert (w - expected).abs().max() < 1e-6
    assert (m - buffer).abs().max() < 1e-6


@pytest.mark.parametrize(("impl", "k"), [("triton", 2), ("cuda", 8), ("cuda", 32), ("triton", 40), ("reference", 8)])
def test_autograd_notices_that_the_weight_has_changed(impl, k):
    w, d, m = case((3, k, 128))
    x = torch.randn(3, 128, 2, device="cuda", requires_grad=True)
    loss = (w @ x).sum()
    kernels.geodesic_step(w, d, m, 5e-3, 0.9, impl=impl)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("options", [{}, {"retraction": "qf"}], ids=str)
def test_plain_torch_takes_exact_products_where_others_are_reduced_to_tf32(options):
    w, d, m = case((4, 40, 256), scale=0.03)
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        distance, momentum, error = compare(w, d, m, "reference", **options)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert distance < 3e-6
    assert momentum < 3e-6
    assert error < 1e-6


@pytest.mark.parametrize("k", [2, 8, 32, 40])
def test_a_compiled_step_is_the_step(k):
    w, d, m = case((7, k, 1024))
    moved, buffer = w.clone(), m.clone()
    kernels.geodesic_step(moved, d, buffer, 5e-3, 0.9)
    torch.compile(kernels.geodesic_step, fullgraph=True)(w, d, m, 5e-3, 0.9)
    assert torch.equal(w, moved)
    assert torch.equal(m, buffer)


@pytest.mark.parametrize("k", [2, 8, 32, 40])
def test_a_gradient_and_a_momentum_that_are_not_contiguous(k):
    w, d, m = case((6, k, 200))
    turned, buffer, moved = d.mT.contiguous().mT, m.mT.contiguous().mT, w.clone()
    kernels.geodesic_step(moved, turned, m.clone(), 5e-3, 0.9)
    expected = w.clone()
    kernels.geodesic_step(expected, d, m.clone(), 5e-3, 0.9)
    assert torch.equal(moved, expected)
    kernels.geodesic_step(w, d, buffer, 5e-3, 0.9)
    assert (w - expected).abs().max() < 1e-6


@pytest.mark.parametrize("k", [8, 32, 40])
def test_a_weight_that_is_not_contiguous(k):
    w, d, m = case((6, k, 1024))
    spread = torch.zeros(6, k, 2048, device="cuda")[..., ::2]
    spread.copy_(w)
    kernels.geodesic_step(spread, d, m.clone(), 5e-3, 0.9)
    kernels.geodesic_step(w, d, m, 5e-3, 0.9)
    a, b = (torch.linalg.qr(each.double().mT).Q.mT for each in (spread, w))
    assert g.distance(a, b).max() < (2e-6 if k <= 32 else 3e-6)


@pytest.mark.parametrize("k", [2, 8, 40])
@pytest.mark.parametrize("heads", [1, 3])
def test_counts_are_added_to_those_that_are_given(heads, k):
    weights = [g.random_subspace(4, k, 70, device="cuda") for _ in range(heads)]
    grads = [torch.randn_like(w) for w in weights]
    grads[0][1:3] = float("nan")
    totals = [torch.tensor([5, 7], device="cuda") for _ in weights]
    for _ in range(2):
        counts = kernels.geodesic_steps(weights, grads, [None] * heads, 0.1, counts=totals, max_angle=1e-4)
    assert totals[0].tolist() == [5 + 2 * 2, 7 + 2 * 2]
    assert all(total.tolist() == [5, 7 + 2 * 4] for total in totals[1:])
    assert int(counts[0].skipped) == 9
