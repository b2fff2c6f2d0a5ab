"""Riemannian SGD as an optimizer of torch: options, dtypes, states, closures, and what is refused."""

import io

import pytest
import torch
from torch import nn

import grassy
from grassy import geometry as g
from grassy import kernels
from grassy.optim import RiemannianSGD

F64 = torch.float64


def test_the_optimizer_passes_its_options_to_the_step():
    w, d = g.random_subspace(4, 3, 9, dtype=F64), torch.randn(2, 4, 3, 9, dtype=F64)
    for options in (
        {"transport": "parallel"},
        {"max_angle": 0.05},
        {"retraction": "qf"},
        {"maximize": True},
        {"momentum": 0.5},
        {"momentum": 0.0},
    ):
        p = nn.Parameter(w.clone())
        optimizer = RiemannianSGD([p], **{"lr": 0.3, "momentum": 0.9, **options})
        expected = w.clone()
        momentum = options.get("momentum", 0.9)
        buffer = torch.zeros_like(w) if momentum else None
        others = {name: value for name, value in options.items() if name != "momentum"}
        for gradient in d:
            p.grad = gradient
            optimizer.step()
            kernels.geodesic_step(expected, gradient, buffer, 0.3, momentum, **others)
        assert torch.equal(p, expected), options
        assert ("momentum_buffer" in optimizer.state[p]) == bool(momentum)


def test_momentum_may_be_switched_on_later_and_an_older_state_loaded():
    p = nn.Parameter(g.random_subspace(4, 3, 9))
    optimizer = RiemannianSGD([p], lr=0.1, momentum=0.0)
    assert optimizer.skipped_classes == 0
    assert optimizer.state_dict()["state"] == {}  # asking leaves no trace
    p.grad = torch.randn_like(p)
    optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.9
    optimizer.step()
    assert optimizer.state[p]["momentum_buffer"].abs().sum() > 0
    state = optimizer.state_dict()
    state["state"][0] = {"momentum_buffer": state["state"][0]["momentum_buffer"]}
    optimizer.load_state_dict(state)
    optimizer.step()
    assert optimizer.capped_classes == 0


def test_gradients_and_momentum_may_be_bfloat16():
    w, d = g.random_subspace(5, 4, 64), torch.randn(5, 4, 64)
    exact, rough = w.clone(), w.clone()
    buffer = torch.zeros_like(w, dtype=torch.bfloat16)
    kernels.geodesic_step(exact, d, None, 0.1, 0.0)
    kernels.geodesic_step(rough, d.bfloat16(), buffer, 0.1, 0.9)
    assert buffer.dtype == torch.bfloat16
    assert g.distance(exact, rough).max() < 0.02
    assert g.orthonormality_error(rough) < 1e-6


def test_the_optimizer_keeps_its_momentum_in_bfloat16_if_asked_to():
    w = g.random_subspace(5, 3, 40)
    parameters = [torch.nn.Parameter(w.clone()) for _ in range(3)]
    optimizers = [grassy.RiemannianSGD([p], lr=0.05, bfloat16_momentum=i > 0) for i, p in enumerate(parameters)]
    for step in range(20):
        if step == 10:  # the third goes on from a checkpoint
            saved = io.BytesIO()
            torch.save(optimizers[1].state_dict(), saved)
            saved.seek(0)
            parameters[2].data.copy_(parameters[1].data)
            optimizers[2].load_state_dict(torch.load(saved, weights_only=True))
        grad = torch.randn_like(w)
        for p, optimizer in zip(parameters, optimizers, strict=True):
            p.grad = grad.clone()
            optimizer.step()
    state = optimizers[1].state_dict()
    for group in state["param_groups"]:
        del group["bfloat16_momentum"]  # of before there was a choice: that of the optimizer counts
    optimizers[1].load_state_dict(state)
    buffers = [o.state[p]["momentum_buffer"] for p, o in zip(parameters, optimizers, strict=True)]
    assert [buffer.dtype for buffer in buffers] == [torch.float32, torch.bfloat16, torch.bfloat16]
    assert torch.equal(parameters[1], parameters[2])
    assert torch.equal(buffers[1], buffers[2])
    assert 0 < float(g.distance(parameters[0].detach(), parameters[1].detach()).max()) < 0.05
    assert g.orthonormality_error(parameters[1].detach()) < 1e-6


def test_learning_rate_and_momentum_may_be_tensors():
    w, d = g.random_subspace(5, 4, 16), torch.randn(5, 4, 16)
    results = []
    for lr, momentum in ((0.1, 0.9), (torch.tensor(0.1), torch.tensor(0.9))):
        moved, buffer = w.clone(), torch.ones_like(w)
        kernels.geodesic_step(moved, d, buffer, lr, momentum)
        results.append(moved)
    assert torch.allclose(*results, atol=1e-6)


def test_non_contiguous_weights_and_gradients_are_updated_in_place():
    base = g.random_subspace(4, 3, 8, dtype=F64)
    strided = base.mT.contiguous().mT
    d = torch.randn(4, 8, 3, dtype=F64).mT
    kernels.geodesic_step(strided, d, torch.zeros_like(strided), 0.1, 0.9)
    kernels.geodesic_step(base, d.contiguous(), torch.zeros_like(base), 0.1, 0.9)
    assert torch.allclose(strided, base, atol=1e-13)


def test_micro_batches_accumulate_to_one_big_batch():
    w = g.random_subspace(5, 2, 8, dtype=F64)
    x, labels = torch.randn(12, 8, dtype=F64), torch.randint(0, 5, (12,))
    results = []
    for pieces in (1, 3):
        p = nn.Parameter(w.clone())
        optimizer = RiemannianSGD([p], lr=0.3)
        for _ in range(4):
            optimizer.zero_grad()
            for xs, ys in zip(x.chunk(pieces), labels.chunk(pieces), strict=True):
                (nn.functional.cross_entropy(kernels.subspace_logits(xs, p, 9.0), ys) / pieces).backward()
            optimizer.step()
        results.append(p.detach())
    assert torch.allclose(*results, atol=1e-12)


def test_the_optimizer_never_writes_to_the_gradient():
    p = nn.Parameter(g.random_subspace(5, 2, 8))
    p.grad = torch.randn_like(p)
    before = p.grad.clone()
    RiemannianSGD([p], lr=0.1).step()
    assert torch.equal(p.grad, before)


def test_counts_go_on_after_a_state_was_loaded():
    w = torch.nn.Parameter(g.random_subspace(4, 2, 8))
    w.grad = torch.randn_like(w)
    w.grad[1] = torch.nan
    optimizer = RiemannianSGD([w], lr=0.1, max_angle=1e-3)
    for _ in range(2):
        optimizer.step()
    assert (optimizer.skipped_classes, optimizer.capped_classes) == (2, 6)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = RiemannianSGD([w], lr=0.1, max_angle=1e-3)
    other.load_state_dict(torch.load(file, weights_only=True))
    other.step()
    assert (other.skipped_classes, other.capped_classes) == (3, 9)
    assert (optimizer.skipped_classes, optimizer.capped_classes) == (2, 6)
    older = other.state_dict()  # as one was saved when the counts were two tensors
    skipped, capped = older["state"][0].pop("counts")
    older["state"][0] |= {"skipped_classes": skipped, "capped_classes": capped}
    other.load_state_dict(older)
    with torch.inference_mode():  # no views there that know of each other
        other.step()
    assert (other.skipped_classes, other.capped_classes) == (4, 12)


def test_step_takes_a_closure_and_skips_parameters_without_a_gradient():
    p, idle = nn.Parameter(g.random_subspace(2, 2, 8)), nn.Parameter(g.random_subspace(2, 2, 8))
    before = idle.detach().clone()
    optimizer = RiemannianSGD([p, idle], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum() + p[0, 0, 0]
        loss.backward()
        return loss

    assert torch.is_tensor(optimizer.step(closure))
    assert torch.equal(idle, before)


BAD_OPTIONS = [
    ({"lr": -0.1}, "lr must be"),
    ({"lr": float("nan")}, "lr must be"),
    ({"lr": 0.1, "momentum": 1.0}, "momentum must lie"),
    ({"lr": 0.1, "retraction": "svd"}, "retraction must be one of"),
    ({"lr": 0.1, "transport": "none"}, "transport must be one of"),
    ({"lr": 0.1, "retraction": "qf", "transport": "parallel"}, "follows a geodesic"),
    ({"lr": 0.1, "max_angle": 0.0}, "max_angle must be"),
    ({"lr": 0.1, "max_angle": "1"}, "max_angle must be"),
    ({"lr": 0.1, "max_angle": True}, "max_angle must be"),
    ({"lr": 0.1, "momentum": "0.9"}, "momentum must lie"),
    ({"lr": True}, "lr must be"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RiemannianSGD([nn.Parameter(g.random_subspace(2, 2, 8))], **options)


@pytest.mark.parametrize("name", ["maximize", "bfloat16_momentum"])
def test_a_word_is_no_boolean(name):
    with pytest.raises(TypeError, match=f"{name} must be True or False, got 'no'"):
        RiemannianSGD([nn.Parameter(g.random_subspace(2, 2, 8))], lr=0.1, **{name: "no"})


def test_bad_parameters_are_refused():
    with pytest.raises(ValueError, match="empty parameter list"):
        RiemannianSGD([], lr=0.1)
    with pytest.raises(ValueError, match="off the manifold"):
        RiemannianSGD([nn.Parameter(torch.randn(3, 2, 8))], lr=0.1)
    rounded = nn.Parameter(g.random_subspace(3, 2, 8).bfloat16().float())
    with pytest.warns(UserWarning, match="re-orthonormalised"):
        RiemannianSGD([rounded], lr=0.1)
    assert g.orthonormality_error(rounded.detach()) < 1e-6
    with pytest.raises(ValueError, match=r"\(C, K, N\)"):
        RiemannianSGD([nn.Parameter(torch.randn(3, 8))], lr=0.1)
    with pytest.raises(TypeError, match="autocast"):
        RiemannianSGD([nn.Parameter(g.random_subspace(2, 2, 8, dtype=torch.bfloat16))], lr=0.1)


def test_an_unknown_implementation_is_refused():
    w = g.random_subspace(2, 2, 8)
    with pytest.raises(ValueError, match="impl must be"):
        kernels.geodesic_step(w, w, None, 0.1, impl="fortran")
    with pytest.raises(ValueError, match="one shape"):
        kernels.geodesic_step(w, w[:1], None, 0.1)


def test_options_after_those_of_the_paper_are_given_by_name():
    with pytest.raises(TypeError, match="positional"):
        grassy.RiemannianSGD([torch.zeros(1, 1, 2)], 0.1, 0.9, "geodesic", "projection", None, False, True)
