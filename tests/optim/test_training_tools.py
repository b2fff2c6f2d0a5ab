"""make_optimizer under AMP, clipping, Lightning and Accelerate."""

import copy

import numpy
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import grassy
from grassy import geometry as g
from grassy.optim import clipping

from .optimizer_cases import BASES, a_model, assert_identical, data, every_base, train, weights


@every_base
def test_a_step_that_the_grad_scaler_skips_changes_nothing_to_the_bit(base):
    model = a_model()
    optimizer = grassy.make_optimizer(model, base, **BASES[base])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(index, poison=False):
        optimizer.zero_grad()
        scaler.scale(grassy.classification_loss(model, *data(index))).backward()
        if poison:
            model[0].weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()

    step(0)
    before = [{k: v.clone() for k, v in s.items() if torch.is_tensor(v)} for s in optimizer.state.values()]
    parameters = [p.detach().clone() for p in model.parameters()]
    step(1, poison=True)
    assert scaler.get_scale() == 2.0
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), parameters, strict=True))
    for state, old in zip(optimizer.state.values(), before, strict=True):
        assert all(torch.equal(state[key], old[key]) for key in old)
    step(2)
    assert not torch.equal(model[3].weight, parameters[-1])


def test_scaled_gradients_give_the_same_steps():
    plain, scaled = a_model(), a_model()
    train(plain, grassy.make_optimizer(plain, "sgd", lr=0.1), range(5))
    optimizer, scaler = grassy.make_optimizer(scaled, "sgd", lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(grassy.classification_loss(scaled, *data(step))).backward()
        scaler.step(optimizer)
        scaler.update()
    assert torch.allclose(plain[3].weight, scaled[3].weight, atol=1e-6)


@pytest.mark.parametrize("unscale", [False, True])
def test_with_a_fused_base_the_grad_scaler_hands_over_its_scale_and_flag(unscale):
    plain, scaled = a_model(), a_model()
    options = {"base": "adamw", "lr": 0.01, "fused": True}
    train(plain, grassy.make_optimizer(plain, **options), range(3))
    optimizer, scaler = grassy.make_optimizer(scaled, **options), torch.amp.GradScaler("cpu", init_scale=1024.0)
    assert optimizer._step_supports_amp_scaling
    assert not grassy.make_optimizer(a_model(), "sgd", lr=0.1)._step_supports_amp_scaling
    assert not grassy.make_optimizer(
        a_model()[3], "adamw", lr=0.1, fused=True
    )._step_supports_amp_scaling  # no other part
    assert not hasattr(
        optimizer.riemannian, "_step_supports_amp_scaling"
    )  # who does not ask for it clips what is unscaled
    for step in (0, 1, 1, 2):
        optimizer.zero_grad()
        scaler.scale(grassy.classification_loss(scaled, *data(step))).backward()
        before = [p.detach().clone() for p in scaled.parameters()]
        if poisoned := step == 1 and scaler.get_scale() == 1024.0:
            scaled[3].weight.grad[0, 0, 0] = float("inf")
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        same = [torch.equal(p, q) for p, q in zip(scaled.parameters(), before, strict=True)]
        assert same == [poisoned] * len(same)
    assert scaler.get_scale() == 512.0
    assert not hasattr(optimizer.riemannian, "found_inf")
    assert optimizer.skipped_classes == 0
    for p, q in zip(plain.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=0)


def test_a_grad_scaler_may_find_nothing_to_step():
    model = a_model()
    before = weights(model)
    optimizer = grassy.make_optimizer(model, "adamw", lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)  # asks for nothing: there are no gradients
    assert_identical(weights(model), before)
    train(model, optimizer, range(1))  # and the next step is an ordinary one
    assert not torch.equal(model[3].weight, before["3.weight"])


def test_clipping_uses_the_riemannian_norm_of_subspaces():
    model = a_model().double()
    grassy.classification_loss(model, data(0)[0].double(), data(0)[1]).backward()
    weight = model[3].weight
    weight.grad += 5 * weight.detach()  # within the subspace: it moves nothing, and must not count
    tangent = g.project(weight.detach(), weight.grad)
    rest = [p.grad for p in model.parameters() if p is not weight]
    expected = torch.stack([tangent.norm(), *(grad.norm() for grad in rest)]).norm()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    total = grassy.clip_grad_norm_(model, 0.1)
    assert torch.allclose(total, expected)
    for name, p in model.named_parameters():
        assert torch.allclose(p.grad, before[name] * 0.1 / expected, rtol=1e-4)
    assert torch.allclose(grassy.clip_grad_norm_(model, 0.1), torch.tensor(0.1, dtype=torch.float64), rtol=1e-4)
    unclipped = {name: p.grad.clone() for name, p in model.named_parameters()}
    grassy.clip_grad_norm_(model, 1e9)
    assert all(torch.equal(p.grad, unclipped[name]) for name, p in model.named_parameters())


def test_the_riemannian_norm_does_not_cancel_when_the_gradient_lies_in_the_subspace():
    model = nn.Sequential(grassy.GrassmannHead(64, 3, k=4))
    weight = model[0].weight
    tiny = 1e-3 * g.project(weight.detach(), torch.randn(3, 4, 64))
    weight.grad = 100 * weight.detach() + tiny
    assert torch.allclose(grassy.clip_grad_norm_(model, 1e9), tiny.norm(), rtol=1e-2)


@pytest.mark.parametrize("size", [1e18, 2e19, 1e25, 1e37])
def test_a_gradient_whose_square_overflows_is_clipped_like_any_other(size):
    """It used not to count, was scaled down all the same, and then moved its class by a large angle."""
    head = grassy.GrassmannHead(16, 3, k=2)
    gradient = torch.randn_like(head.weight)
    gradient[1] *= size
    head.weight.grad = gradient.clone()
    exact = torch.linalg.vector_norm(g.project(head.weight.detach().double(), gradient.double()))
    norm = grassy.clip_grad_norm_(head, 0.5)
    assert norm.double() == pytest.approx(float(exact), rel=1e-5)
    clipped = g.project(head.weight.detach().double(), head.weight.grad.double())
    assert torch.linalg.vector_norm(clipped) == pytest.approx(0.5, rel=1e-5)


def test_two_steps_on_one_scaled_gradient_are_those_on_the_gradient():
    """The scale that a GradScaler hands over is not divided into p.grad."""
    heads = [nn.Parameter(g.random_subspace(3, 2, 8, generator=torch.Generator().manual_seed(0))) for _ in range(2)]
    plain, scaled = (grassy.RiemannianSGD([p], lr=0.1) for p in heads)
    heads[0].grad = torch.randn(3, 2, 8)
    heads[1].grad = 1024 * heads[0].grad
    scaled.grad_scale, scaled.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
    for _ in range(2):
        plain.step()
        scaled.step()
    assert torch.equal(heads[1].grad, 1024 * heads[0].grad)
    assert torch.equal(*heads)


def test_a_class_with_a_non_finite_gradient_does_not_poison_the_clipping_of_the_rest():
    model = a_model()
    grassy.classification_loss(model, *data(0)).backward()
    model[3].weight.grad[1] = float("nan")
    norm = grassy.clip_grad_norm_(model, 0.1)
    assert norm.isfinite()
    assert model[0].weight.grad.isfinite().all()
    with pytest.raises(RuntimeError, match="holds a NaN or an Inf"):
        grassy.clip_grad_norm_(model, 0.1, error_if_nonfinite=True)
    for bad in (-1.0, "1", float("nan")):
        with pytest.raises(ValueError, match="max_norm"):
            grassy.clip_grad_norm_(model, bad)
    assert grassy.clip_grad_norm_(a_model(), 1.0) == 0


def test_all_processes_take_part_in_each_check_for_nan_whatever_they_found_before(monkeypatch):
    """A process that stopped at its own NaN would leave the others waiting."""
    model, checked = a_model(), []
    grassy.classification_loss(model, *data(0)).backward()
    monkeypatch.setattr(clipping.shards, "groups_of", lambda p: ["dp"] if p is model[3].weight else [])
    monkeypatch.setattr(clipping, "_holds_nonfinite", lambda params, groups: checked.append(groups) or True)
    with pytest.raises(RuntimeError, match="holds a NaN or an Inf"):
        grassy.clip_grad_norm_(model, 0.1, error_if_nonfinite=True)
    assert sorted(checked) == [(), ("dp",)]


def test_the_model_is_asked_for_not_its_parameters():
    model = a_model()
    with pytest.raises(TypeError, match="make_optimizer takes the model, which knows its subspaces, got generator"):
        grassy.make_optimizer(model.parameters(), "sgd", lr=0.1)
    with pytest.raises(TypeError, match="clip_grad_norm_ takes the model, which knows its subspaces, got generator"):
        grassy.clip_grad_norm_(model.parameters(), 1.0)


def test_the_state_of_another_kind_of_optimizer_is_refused():
    model = a_model()
    saved = {name: grassy.make_optimizer(model, name, lr=0.1).state_dict() for name in ("sgd", "adamw", "lion")}
    for name in saved:
        optimizer = grassy.make_optimizer(model, name, lr=0.1)
        optimizer.load_state_dict(saved[name])
        for other in saved.keys() - {name}:
            with pytest.raises(ValueError, match="the saved optimizer is of another kind"):
                optimizer.load_state_dict(saved[other])
    older = copy.deepcopy(saved["sgd"])
    for group in older["param_groups"]:
        if group["manifold"] == "grassmann":
            group["direction"] = "gradient"  # of before spectral steps were removed
            del group["bfloat16_momentum"]  # and of before there was that
    optimizer = grassy.make_optimizer(model, "sgd", lr=0.1)
    optimizer.load_state_dict(older)
    assert not any("direction" in group for group in optimizer.param_groups)
    for group in older["param_groups"]:
        group["direction"] = "spectral"
    with pytest.raises(ValueError, match=r"made spectral steps .*, which were removed"):
        optimizer.load_state_dict(older)
    with pytest.raises(ValueError, match="same weight_decay and layer_decay"):
        grassy.make_optimizer(model, "sgd", lr=0.1, weight_decay=0.1).load_state_dict(saved["sgd"])


@pytest.mark.slow
def test_lightning_trains_it_like_any_other_optimizer(tmp_path):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = a_model()

        def training_step(self, batch, _):
            return grassy.classification_loss(self.model, *batch)

        def configure_optimizers(self):
            optimizer = grassy.make_optimizer(self.model, "adamw", lr=1e-3)
            return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, 1, 0.5)}

    module = Module()
    start = module.model[3].weight.detach().clone()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data(0)), batch_size=5)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"accelerator": "cpu", "default_root_dir": tmp_path, **quiet}
    trainer = lightning.Trainer(max_epochs=2, gradient_clip_val=1.0, **options)
    trainer.fit(module, loader)
    assert g.distance(module.model[3].weight.detach(), start).min() > 1e-3
    assert g.orthonormality_error(module.model[3].weight.detach()) < 1e-6
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    resumed = Module()
    again = lightning.Trainer(max_epochs=3, **options)
    again.fit(resumed, loader, ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    assert again.optimizers[0].param_groups[-1]["lr"] == pytest.approx(0.1 * 0.5**3)


def test_accelerate_prepares_it_like_any_other_optimizer():
    model = a_model()
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, grassy.make_optimizer(model, "adamw", lr=1e-3))
    start = model[3].weight.detach().clone()
    for step in range(3):
        optimizer.zero_grad()
        accelerator.backward(grassy.classification_loss(model, *data(step)))
        optimizer.step()
    assert g.distance(model[3].weight.detach(), start).min() > 1e-3


def test_weight_decay_can_be_for_everything_but_the_subspaces():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), grassy.GrassmannHead(6, 3, k=2))
    optimizer = grassy.make_optimizer(model, "sgd", lr=0.1, weight_decay=0.01, decay_all=True)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert [decays[id(p)] for p in model.parameters()] == [0.01] * 4 + [0.0]


def test_the_state_of_a_head_with_another_k_is_refused_when_it_is_loaded():
    optimizers = []
    for k in (2, 3):
        head = grassy.GrassmannHead(8, 5, k=k)
        optimizers.append(grassy.make_optimizer(head, "sgd", lr=0.1))
        grassy.classification_loss(head, torch.randn(4, 8), torch.randint(5, (4,))).backward()
        optimizers[-1].step()
    before = copy.deepcopy(optimizers[1].state_dict())
    with pytest.raises(ValueError, match=r"momentum of shape \(5, 2, 8\) for subspaces of shape \(5, 3, 8\)"):
        optimizers[1].load_state_dict(optimizers[0].state_dict())
    after = optimizers[1].state_dict()["state"][0]["momentum_buffer"]
    assert torch.equal(after, before["state"][0]["momentum_buffer"])


def test_a_momentum_of_numpy_is_saved_as_a_plain_number(tmp_path):
    optimizer = grassy.make_optimizer(grassy.GrassmannHead(8, 5, k=2), "sgd", lr=0.1, head_momentum=numpy.float64(0.8))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True)["param_groups"][0]["momentum"] == 0.8


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"head_momentum": "0.9"}, r"head_momentum must lie in \[0, 1\), got '0.9'"),
        ({"head_momentum": 1.0}, r"head_momentum must lie in \[0, 1\), got 1.0"),
        ({"layer_decay": -1}, r"layer_decay must lie in \(0, 1\], got -1"),
        ({"layer_decay": "a"}, r"layer_decay must lie in \(0, 1\], got 'a'"),
    ],
)
def test_factors_that_make_no_sense_are_refused_by_their_names(options, said):
    with pytest.raises(ValueError, match=said):
        grassy.make_optimizer(grassy.GrassmannHead(8, 5, k=2), "sgd", lr=0.1, **options)
