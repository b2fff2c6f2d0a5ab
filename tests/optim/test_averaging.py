"""Averages of models whose subspaces stay subspaces."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel as TorchAveragedModel
from torch.optim.swa_utils import get_ema_multi_avg_fn

import grassy
from grassy import geometry as g


def a_model():
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), grassy.GrassmannHead(16, 4, k=[3, 3, 2, 1]))


def jiggle(model, size=0.05):
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim < 3:
                p.add_(size * torch.randn_like(p))
            else:
                p.copy_(g.geodesic(p, g.project(p, size * torch.randn_like(p))))
        model[1].running_mean.add_(size * torch.randn(16))
        model[1].num_batches_tracked.add_(1)


def change_basis(model):
    """The same subspaces in other bases: rows of the classes of full dimension rotated."""
    with torch.no_grad():
        weight = model[2].weight
        weight[:2] = g.random_subspace(2, 3, 3) @ weight[:2]
        weight[2] = weight[2][[1, 0, 2]]
        weight[3] = -weight[3]


def test_a_change_of_basis_does_not_change_the_average():
    model = a_model()
    ema, other = (grassy.AveragedModel(model, decay=0.5) for _ in range(2))
    for _ in range(10):
        jiggle(model)
        ema.update_parameters(model)
        rotated = copy.deepcopy(model)
        change_basis(rotated)
        other.update_parameters(rotated)
    one, two = ema.module[2].weight.detach(), other.module[2].weight.detach()
    assert g.distance(one, two).max() < 1e-5
    assert g.orthonormality_error(one) < 1e-6
    naive = TorchAveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    naive.update_parameters(model)
    naive.update_parameters(rotated)
    assert g.orthonormality_error(naive.module[2].weight.detach()) > 0.1  # what would happen otherwise


def test_one_subspace_in_many_bases_averages_to_itself():
    model = a_model()
    ema = grassy.AveragedModel(model, decay=0.9)
    for _ in range(5):
        change_basis(model)
        ema.update_parameters(model)
    assert g.distance(ema.module[2].weight.detach(), model[2].weight.detach()).max() < 1e-6
    assert ema.module[2].dims.tolist() == [3, 3, 2, 1]


def test_the_average_lies_on_the_geodesic_at_the_weight_of_the_new_point():
    model = nn.Sequential(grassy.GrassmannHead(16, 5, k=3, dtype=torch.float64))
    ema = grassy.AveragedModel(model, decay=0.9)
    ema.update_parameters(model)
    old = model[0].weight.detach().clone()
    h = g.project(old, torch.randn_like(old))
    h *= 0.02 / torch.linalg.matrix_norm(h)[:, None, None]
    with torch.no_grad():
        model[0].weight.copy_(g.random_subspace(5, 3, 3, dtype=torch.float64) @ g.geodesic(old, h))
    ema.update_parameters(model)
    assert g.distance(ema.module[0].weight.detach(), g.geodesic(old, h, 0.1)).max() < 1e-6  # second order in h


def test_everything_else_is_averaged_as_torch_does():
    model = a_model()
    ours = grassy.AveragedModel(model, decay=0.7, use_buffers=False)
    torchs = TorchAveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    for _ in range(5):
        jiggle(model)
        ours.update_parameters(model)
        torchs.update_parameters(model)
    for name in ("0.weight", "0.bias", "1.weight", "1.running_mean", "1.num_batches_tracked"):
        assert torch.allclose(ours.module.state_dict()[name], torchs.module.state_dict()[name]), name


def test_it_stands_in_for_timms_ema():
    from timm.utils import ModelEmaV3

    model = a_model()
    ours, timms = (
        grassy.AveragedModel(model, decay=0.99, use_warmup=True),
        ModelEmaV3(model, decay=0.99, use_warmup=True),
    )
    for step in range(1, 8):
        jiggle(model)
        ours.update(model, step=step)
        timms.update(model, step=step)
        assert ours.get_decay(step) == pytest.approx(timms.get_decay(step))
    for name in ("0.weight", "1.running_mean", "1.num_batches_tracked"):
        assert torch.allclose(ours.module.state_dict()[name], timms.module.state_dict()[name], atol=1e-6), name
    ours.set(model)
    assert torch.equal(ours.module[0].weight, model[0].weight)
    assert ours(torch.randn(3, 6)).shape == (3, 4)


def test_without_decay_it_is_the_plain_mean():
    model = a_model()
    swa = grassy.AveragedModel(model, decay=None)
    seen = []
    for _ in range(4):
        jiggle(model)
        swa.update_parameters(model)
        seen.append(model[0].weight.detach().clone())
    assert torch.allclose(swa.module[0].weight, torch.stack(seen).mean(0), atol=1e-6)
    for decay in (1.0, "0.9"):
        with pytest.raises(ValueError, match=f"decay must lie .* got {decay!r}"):
            grassy.AveragedModel(model, decay=decay)


def test_it_saves_and_resumes():
    model = a_model()
    ema = grassy.AveragedModel(model, decay=0.5)
    jiggle(model)
    ema.update_parameters(model)
    other = grassy.AveragedModel(a_model(), decay=0.5)
    other.load_state_dict(ema.state_dict())
    jiggle(model)
    ema.update_parameters(model)
    other.update_parameters(model)
    assert all(torch.equal(a, b) for a, b in zip(ema.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize("decay", [0.5, 0.9999])
def test_orthogonal_subspaces_still_average_to_a_subspace(decay):
    model = nn.Sequential(grassy.GrassmannHead(16, 5, k=3))
    ema = grassy.AveragedModel(model, decay=decay)
    ema.update_parameters(model)
    w = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.copy_(torch.linalg.svd(w).Vh[:, 3:6])  # orthogonal to what it was
    with torch.autocast("cpu", torch.bfloat16):
        ema.update_parameters(model)
    average = ema.module[0].weight.detach()
    assert g.orthonormality_error(average) < 1e-6
    angle = torch.tensor((1 - decay) / decay).arctan()  # of each of the three directions
    assert torch.allclose(g.principal_angles(w, average), angle.expand(5, 3), atol=1e-4)


def test_averaging_starts_after_the_given_step_and_anew_after_set():
    from timm.utils import ModelEmaV3

    model = a_model()
    ours = grassy.AveragedModel(model, decay=0.9, update_after_step=3)
    timms = ModelEmaV3(model, decay=0.9, update_after_step=3)
    for step in range(1, 8):
        jiggle(model)
        ours.update(model, step=step)
        timms.update(model, step=step)
        assert torch.allclose(ours.module[0].weight, timms.module[0].weight, atol=1e-6), step
    ours.set(model)
    jiggle(model)
    ours.update(model)
    assert torch.equal(ours.module[0].weight, model[0].weight)  # the first update copies


def test_another_model_is_refused():
    ema = grassy.AveragedModel(a_model())
    with pytest.raises(ValueError, match="differ in number or shape"):
        ema.update_parameters(nn.Sequential(nn.Linear(6, 16)))
