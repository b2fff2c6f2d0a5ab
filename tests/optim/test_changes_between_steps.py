"""Whatever is changed between two steps holds from the next one on: nothing about a step is remembered."""

import copy

import pytest
import torch

from grassy import RiemannianSGD, geometry, kernels
from grassy.kernels import dispatch

CHANGES = [
    {"lr": 0.3},
    {"lr": torch.tensor(0.3)},
    {"lr_factor": 0.5},
    {"momentum": 0.5},
    {"max_angle": 0.01},
    {"maximize": True},
    {"transport": "parallel"},
    {"retraction": "qf"},
]


def begun(dtype=torch.float32):
    """An optimizer after its first step, and its weight."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(geometry.random_subspace(3, 2, 8, dtype=dtype))
    optimizer = RiemannianSGD([weight], lr=0.1)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    return optimizer, weight


def next_step(weight, buffer, lr=0.1, momentum=0.9, lr_factor=1, **options):
    """Weight and momentum after a step by the specification."""
    weight, buffer = weight.detach().clone(), buffer.clone()
    with torch.no_grad():
        kernels.geodesic_step(
            weight, weight_grad(weight), buffer, lr * lr_factor, momentum, impl="reference", **options
        )
    return weight, buffer


def weight_grad(weight):
    return torch.ones_like(weight).cumsum(2)


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_changed_option_of_a_group_is_seen(change):
    optimizer, weight = begun()
    before = next_step(weight, optimizer.state[weight]["momentum_buffer"])
    expected = next_step(weight, optimizer.state[weight]["momentum_buffer"], **change)
    weight.grad = weight_grad(weight)
    optimizer.param_groups[0].update(change)
    optimizer.step()
    assert torch.equal(weight, expected[0])
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], expected[1])
    assert not torch.equal(weight, before[0]) or change == {"transport": "parallel"}  # which moves the momentum alone


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_changed_option_reaches_the_kernel_of_a_gpu(change, monkeypatch):
    seen = []
    monkeypatch.setattr(dispatch, "choose", lambda *_: "cuda")
    monkeypatch.setattr(dispatch.cuda, "geodesic_steps", lambda w, d, m, *asked: seen.append(asked[:3]))
    optimizer, _ = begun()
    optimizer.param_groups[0].update(change)
    optimizer.step()
    (_, _, first), (lr, momentum, second) = seen
    changed = {"lr": 0.1, "momentum": 0.9, "lr_factor": 1} | change
    assert (lr, momentum) == (pytest.approx(float(changed["lr"]) * changed["lr_factor"]), changed["momentum"])
    options = {name: value for name, value in change.items() if hasattr(first, name)}
    assert (first != second) == bool(options)
    assert all(getattr(second, name) == value for name, value in options.items())


def test_an_option_that_became_wrong_is_refused_in_every_step():
    optimizer, _ = begun()
    optimizer.param_groups[0]["retraction"] = "polar"
    for _ in range(2):
        with pytest.raises(ValueError, match="retraction must be one of"):
            optimizer.step()
    optimizer.param_groups[0]["retraction"] = "geodesic"
    optimizer.step()


def test_a_loaded_state_is_what_the_next_step_begins_from():
    optimizer, weight = begun()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.7
    saved["state"][0]["momentum_buffer"].mul_(-3)
    expected = next_step(weight, saved["state"][0]["momentum_buffer"], lr=0.7)
    optimizer.load_state_dict(saved)
    weight.grad = weight_grad(weight)
    optimizer.step()
    assert torch.equal(weight, expected[0])


def test_a_weight_that_became_another_dtype_or_size_is_stepped_as_such():
    optimizer, weight = begun()
    buffer = optimizer.state[weight]["momentum_buffer"].double()
    weight.data, weight.grad = weight.data.double(), None
    optimizer.state[weight]["momentum_buffer"] = buffer
    expected = next_step(weight, buffer)
    weight.grad = weight_grad(weight)
    optimizer.step()
    assert weight.dtype == torch.float64
    assert torch.equal(weight, expected[0])
    optimizer.state[weight]["momentum_buffer"] = buffer[:1]
    with pytest.raises(ValueError, match="shape"):
        optimizer.step()


def test_groups_and_gradients_that_come_and_go_are_followed():
    optimizer, weight = begun()
    other = torch.nn.Parameter(geometry.random_subspace(4, 2, 8))
    optimizer.add_param_group({"params": [other], "lr": 0.2, "momentum": 0.0})
    still, kept = weight.detach().clone(), other.detach().clone()
    weight.grad, other.grad = None, torch.ones_like(other).cumsum(2)
    optimizer.step()
    assert torch.equal(weight, still)
    assert not torch.equal(other, kept)
    assert "momentum_buffer" not in optimizer.state[other]
    other.grad = other.grad.to_sparse()
    with pytest.raises(TypeError, match="sparse"):
        optimizer.step()


def test_an_option_that_cannot_be_hashed_is_named():
    optimizer, weight = begun()
    weight.grad = torch.ones_like(weight)
    optimizer.param_groups[0]["retraction"] = ["qf"]
    with pytest.raises((TypeError, ValueError), match="retraction"):
        optimizer.step()
