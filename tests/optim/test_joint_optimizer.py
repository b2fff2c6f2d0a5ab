"""make_optimizer: one ordinary optimizer, whatever the base, that every tool around it can drive."""

import copy

import pytest
import timm
import timm.optim
import torch
from timm.scheduler import CosineLRScheduler
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR

import grassy
from grassy import geometry as g

from .optimizer_cases import BASES, a_model, assert_identical, data, every_base, train, weights


def test_a_misspelt_option_of_either_part_gets_a_hint():
    for name, meant in (("bfloat16_momentun", "bfloat16_momentum"), ("nesterow", "nesterov")):
        with pytest.raises(TypeError, match=f"SGD has no option '{name}', did you mean '{meant}'"):
            grassy.make_optimizer(a_model(), "sgd", lr=0.1, **{name: True})


def test_a_rate_may_be_any_number_and_a_tensor_is_told_where_to_go():
    import numpy as np

    model = nn.Sequential(nn.Linear(4, 8), grassy.GrassmannHead(8, 3, k=2))
    for base in ("adamw", "sgd"):
        groups = grassy.make_optimizer(model, base, lr=np.float32(1e-3), head_lr=1).param_groups
        assert {type(group["lr"]) for group in groups} == {float}
    with pytest.raises(TypeError, match="lr must be a number; put tensors into the optimizer's param_groups"):
        grassy.make_optimizer(model, "adamw", lr=torch.tensor(1e-3))


def test_an_optimizer_that_calls_its_closure_several_times_is_refused():
    model = nn.Sequential(nn.Linear(4, 8), grassy.GrassmannHead(8, 3, k=2))
    with pytest.raises(ValueError, match="LBFGS evaluates its closure several times"):
        grassy.make_optimizer(model, torch.optim.LBFGS, lr=0.1)


def test_names_are_found_whatever_their_case():
    model = nn.Sequential(nn.Linear(4, 8), grassy.GrassmannHead(8, 3, k=2))
    with pytest.raises(ValueError, match="unknown optimizer 'AdamW', did you mean 'adamw'"):
        grassy.make_optimizer(model, "AdamW", lr=0.1)
    with pytest.raises(ValueError, match=r"got 'geodisic', did you mean 'geodesic'\?"):
        grassy.make_optimizer(model, "sgd", lr=0.1, retraction="geodisic")


def test_an_optimizer_that_needs_second_derivatives_is_refused():
    with pytest.raises(ValueError, match="'adahessian' needs second derivatives"):
        grassy.make_optimizer(a_model(), "adahessian", lr=1e-3)


@every_base
def test_training_lowers_the_loss_and_keeps_the_subspaces_on_the_manifold(base):
    model = a_model()
    optimizer = grassy.make_optimizer(model, base, **BASES[base])
    first = grassy.classification_loss(model, *data(0)).item()
    train(model, optimizer, [0] * 100)
    assert grassy.classification_loss(model, *data(0)).item() < 0.5 * first
    assert g.orthonormality_error(model[3].weight.detach()) < 1e-6


@every_base
def test_it_does_what_the_two_optimizers_would_do_apart(base):
    model, apart = a_model(), a_model()
    joint = grassy.make_optimizer(model, base, **BASES[base], head_lr=0.2, head_momentum=0.8)
    options = dict(BASES[base])
    decay = options.pop("weight_decay")
    base_class = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW, "lamb": timm.optim.Lamb}[base]
    vectors = [p for name, p in apart.named_parameters() if p.ndim == 1]
    euclidean = base_class(
        [{"params": vectors, "weight_decay": 0.0}, {"params": [apart[0].weight], "weight_decay": decay}], **options
    )
    riemannian = grassy.RiemannianSGD([apart[3].weight], lr=0.2, momentum=0.8)
    train(model, joint, range(10))
    for step in range(10):
        apart.zero_grad()
        grassy.classification_loss(apart, *data(step)).backward()
        euclidean.step()
        riemannian.step()
    assert_identical(weights(model), weights(apart))


@every_base
def test_saving_and_resuming_gives_the_same_weights_to_the_bit(base, tmp_path):
    straight = a_model()
    optimizer = grassy.make_optimizer(straight, base, **BASES[base])
    scheduler = StepLR(optimizer, 3, 0.5)
    train(straight, optimizer, range(10))
    scheduler.step()
    torch.save(
        {"model": straight.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()},
        tmp_path / "checkpoint.pt",
    )
    train(straight, optimizer, range(10, 20))

    resumed = a_model(seed=1)
    other = grassy.make_optimizer(resumed, base, **BASES[base])
    other_scheduler = StepLR(other, 3, 0.5)
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    resumed.load_state_dict(checkpoint["model"])
    other.load_state_dict(checkpoint["optimizer"])
    other_scheduler.load_state_dict(checkpoint["scheduler"])
    train(resumed, other, range(10, 20))
    assert_identical(weights(resumed), weights(straight))
    assert other.skipped_classes == 0


def test_counts_of_skipped_classes_survive_resuming():
    model = a_model()
    optimizer = grassy.make_optimizer(model, "adamw", lr=1e-3)
    train(model, optimizer, range(1))
    model[3].weight.grad[1] = float("nan")
    optimizer.step()
    other = grassy.make_optimizer(model, "adamw", lr=1e-3)
    other.load_state_dict(optimizer.state_dict())
    assert optimizer.skipped_classes == other.skipped_classes == 1
    other.step()
    assert other.skipped_classes == 2


def test_there_is_one_list_of_groups_and_one_state_dict():
    model = a_model()
    optimizer = grassy.make_optimizer(model, "adamw", lr=1e-3, weight_decay=0.05)
    assert isinstance(optimizer, torch.optim.Optimizer)
    train(model, optimizer, range(2))
    in_groups = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in in_groups} == {id(p) for p in model.parameters()}
    state = optimizer.state_dict()
    assert len(state["state"]) == len(in_groups)
    assert [group["manifold"] for group in state["param_groups"]] == ["euclidean", "euclidean", "grassmann"]
    assert "momentum_buffer" in optimizer.state[model[3].weight]
    assert "exp_avg" in optimizer.state[model[0].weight]


def test_a_copy_of_the_optimizer_is_whole():
    model = a_model()
    optimizer = grassy.make_optimizer(model, "adamw", lr=1e-3)
    train(model, optimizer, range(2))
    clone, clone_optimizer = copy.deepcopy((model, optimizer))
    train(model, optimizer, range(2, 5))
    train(clone, clone_optimizer, range(2, 5))
    assert_identical(weights(clone), weights(model))


# --- learning rates, decay, names -------------------------------------------------------------------------------


def rates(optimizer):
    return {group["manifold"]: group["lr"] for group in optimizer.param_groups}


def test_head_lr_defaults_to_lr_for_sgd_and_to_a_tenth_for_any_other_base():
    model = a_model()
    assert rates(grassy.make_optimizer(model, "sgd", lr=0.3))["grassmann"] == 0.3
    assert rates(grassy.make_optimizer(model, torch.optim.SGD, lr=0.3))["grassmann"] == 0.3
    for base in ("adamw", "lamb", "adam", torch.optim.RMSprop):
        assert rates(grassy.make_optimizer(model, base, lr=0.3))["grassmann"] == 0.1
    assert rates(grassy.make_optimizer(model, "sgd", lr=0.3, head_lr=0.7))["grassmann"] == 0.7
    with pytest.raises(ValueError, match="no subspaces"):
        grassy.make_optimizer(nn.Linear(2, 3), "sgd", lr=0.1, head_lr=0.1)


def test_a_model_without_subspaces_gets_its_base_alone():
    model = nn.Linear(2, 3)
    optimizer = grassy.make_optimizer(model, "sgd", lr=0.1)
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    assert optimizer.skipped_classes == 0


def test_subspaces_biases_norms_and_what_timm_says_are_not_decayed():
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=5)
    grassy.replace_head(model, "grassmann", k=2)
    names = {id(p): name for name, p in model.named_parameters()}
    for wrapped in (model, nn.Sequential(model)):  # names are then prefixed
        optimizer = grassy.make_optimizer(wrapped, "adamw", lr=1e-3, weight_decay=0.05)
        decayed = {names[id(p)] for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
        assert "blocks.0.attn.qkv.weight" in decayed
        assert not decayed & {"pos_embed", "cls_token", "head.weight", "norm.weight", "blocks.0.attn.qkv.bias"}
        assert len(decayed) == sum(name.endswith("weight") and p.ndim > 1 for name, p in model.named_parameters()) - 1


def test_layer_decay_lowers_the_rate_of_earlier_layers_and_not_of_the_head():
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=3, num_classes=5)
    grassy.replace_head(model, "grassmann", k=2)
    optimizer = grassy.make_optimizer(model, "adamw", lr=1.0, weight_decay=0.05, layer_decay=0.5, head_lr=0.1)
    rate = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    expected = timm.optim.param_groups_layer_decay(model, 0.05, model.no_weight_decay(), layer_decay=0.5)
    for group in expected:
        for p in group["params"]:
            assert rate[id(p)] == (0.1 if p is model.head.weight else pytest.approx(group["lr_scale"]))
    assert len({round(r, 6) for r in rate.values()}) > 3
    with pytest.raises(ValueError, match="layer_decay needs a timm model"):
        grassy.make_optimizer(a_model(), "adamw", lr=1.0, layer_decay=0.5)


def test_a_name_of_timms_stands_for_what_it_stands_for_in_timm():
    """ "cadamw" is AdamW with caution, "nesterov" SGD with momentum 0.9: not their classes alone."""
    seen = 0
    for name in timm.optim.list_optimizers():
        if name in ("sgd", "adam", "adamw", "adahessian") or name.startswith(("bnb", "fused")):
            continue  # torch's own, one that is refused, and those that need a GPU
        model = nn.Linear(3, 4)
        try:
            expected = timm.optim.create_optimizer_v2(model, name, lr=1e-3, weight_decay=0.05)
        except (AssertionError, ImportError, RuntimeError):
            continue
        group = grassy.make_optimizer(model, name, lr=1e-3, weight_decay=0.05).param_groups[-1]
        theirs = next(g for g in expected.param_groups if g["weight_decay"])
        assert {k: v for k, v in group.items() if k not in ("params", "manifold")} == {
            k: v for k, v in theirs.items() if k != "params"
        }, name
        seen += 1
    assert seen > 30


def test_options_of_the_geometric_step_reach_it():
    model = a_model()
    optimizer = grassy.make_optimizer(
        model,
        "adam",
        lr=0.1,
        head_lr=3.0,
        head_momentum=0.5,
        retraction="geodesic",
        transport="parallel",
        max_angle=0.01,
        maximize=True,
    )
    (group,) = [group for group in optimizer.param_groups if group["manifold"] == "grassmann"]
    assert (group["momentum"], group["transport"], group["max_angle"], group["maximize"]) == (
        0.5,
        "parallel",
        0.01,
        True,
    )
    before = model[3].weight.detach().clone()
    loss = grassy.classification_loss(model, *data(0))
    loss.backward()
    optimizer.step()
    assert g.principal_angles(before, model[3].weight.detach()).max() == pytest.approx(0.01, rel=0.01)
    assert grassy.classification_loss(model, *data(0)) > loss  # it ascends
    assert grassy.make_optimizer(model, "sgd", lr=0.1, retraction="qf").param_groups[-1]["retraction"] == "qf"


def test_a_weight_that_two_heads_share_is_stepped_once():
    a, b = grassy.GrassmannHead(16, 4, k=3), grassy.GrassmannHead(16, 4, k=3)
    b.weight = a.weight
    optimizer = grassy.make_optimizer(nn.ModuleList([a, b]), "sgd", lr=0.1)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 1


def test_norms_of_any_shape_and_biases_of_any_name_are_not_decayed():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(2, 3))
            self.norm = nn.LayerNorm([3, 4, 4])
            self.fc = nn.Linear(3, 4)

    model = Model()
    optimizer = grassy.make_optimizer(model, "adamw", lr=0.1, weight_decay=0.1)
    (decayed,) = [group["params"] for group in optimizer.param_groups if group["weight_decay"]]
    assert len(decayed) == 1
    assert decayed[0] is model.fc.weight
    with pytest.raises(ValueError, match="Rprop has no weight_decay"):
        grassy.make_optimizer(model, torch.optim.Rprop, lr=0.1, weight_decay=0.1)


def test_a_step_inside_autocast_is_the_same_step():
    plain, autocast = a_model(), a_model()
    for model, enabled in ((plain, False), (autocast, True)):
        optimizer = grassy.make_optimizer(model, "sgd", lr=0.1)
        grassy.classification_loss(model, *data(0)).backward()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            grassy.clip_grad_norm_(model, 1.0)
            optimizer.step()
    assert_identical(weights(plain), weights(autocast))


def test_frozen_parameters_are_left_out_and_may_be_added_later():
    model = a_model()
    model[0].requires_grad_(False)
    optimizer = grassy.make_optimizer(model, "adamw", lr=1e-2)
    before = weights(model)
    train(model, optimizer, range(3))
    assert torch.equal(model[0].weight, before["0.weight"])
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 1e-2})
    train(model, optimizer, range(3))
    assert not torch.equal(model[0].weight, before["0.weight"])
    extra = nn.Parameter(g.random_subspace(2, 2, 5))
    optimizer.add_param_group({"params": [extra], "manifold": "grassmann", "lr": 0.1})
    extra.grad = torch.randn_like(extra)
    optimizer.step()
    assert g.orthonormality_error(extra.detach()) < 1e-6
    with pytest.raises(ValueError, match="off the manifold"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.randn(2, 2, 5))], "manifold": "grassmann"})
    with pytest.raises(ValueError, match="'sphere'"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.randn(2))], "manifold": "sphere"})


def test_only_the_head_or_only_the_body_may_be_trained():
    model = a_model()
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    train(model, grassy.make_optimizer(model, "adamw", lr=1e-2), range(3))
    frozen_head = a_model()
    frozen_head[3].requires_grad_(False)
    before = weights(frozen_head)
    train(frozen_head, grassy.make_optimizer(frozen_head, "adamw", lr=1e-2), range(3))
    assert torch.equal(frozen_head[3].weight, before["3.weight"])
    frozen_head.requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameters"):
        grassy.make_optimizer(frozen_head, "adamw", lr=1e-2)


def test_bad_arguments_are_refused():
    model = a_model()
    with pytest.raises(ValueError, match=r"unknown optimizer 'adamv'.*known: .*adamw.*lamb"):
        grassy.make_optimizer(model, "adamv", lr=0.1)
    with pytest.raises(TypeError, match="SGD has no option 'momentun', did you mean 'momentum'"):
        grassy.make_optimizer(model, "sgd", lr=0.1, momentun=0.8)
    with pytest.raises(TypeError, match="base must be the name or the class"):
        grassy.make_optimizer(model, 3, lr=0.1)
    with pytest.raises(ValueError, match="lr must be"):
        grassy.make_optimizer(model, "sgd", lr=-0.1)
    for bad in (float("inf"), float("nan"), "0.1"):
        with pytest.raises(ValueError, match="lr must be a finite number"):
            grassy.make_optimizer(model, "sgd", lr=bad)
    with pytest.raises(ValueError, match="head_lr must be"):
        grassy.make_optimizer(model, "sgd", lr=0.1, head_lr=-0.1)
    with pytest.raises(ValueError, match="weight_decay must be"):
        grassy.make_optimizer(model, "sgd", lr=0.1, weight_decay=-1)
    with pytest.raises(ValueError, match=r"saved by grassy.make_optimizer"):
        grassy.make_optimizer(model, "sgd", lr=0.1).load_state_dict(
            torch.optim.SGD(model.parameters(), lr=0.1).state_dict()
        )


# --- schedulers -------------------------------------------------------------------------------------------------


def test_a_step_schedule_multiplies_both_rates():
    model = a_model()
    optimizer = grassy.make_optimizer(model, "adamw", lr=1e-3, head_lr=0.1)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.1)
    train(model, optimizer, range(1))
    scheduler.step()
    assert rates(optimizer) == pytest.approx({"euclidean": 1e-4, "grassmann": 1e-2})
    before = weights(model)
    warm_down = LambdaLR(optimizer, lambda _: 0.0)
    warm_down.step()
    train(model, optimizer, range(1, 2))
    assert torch.equal(model[0].weight, before["0.weight"])
    assert g.distance(model[3].weight.detach(), before["3.weight"]).max() < 1e-5


@pytest.mark.parametrize("base", ["sgd", "adamw"])
def test_one_cycle_takes_one_maximum_a_group(base):
    model = a_model()
    optimizer = grassy.make_optimizer(model, base, **BASES[base])
    maxima = [0.5 if group["manifold"] == "grassmann" else 0.01 for group in optimizer.param_groups]
    scheduler = OneCycleLR(optimizer, max_lr=maxima, total_steps=10)
    seen = []
    for step in range(9):
        train(model, optimizer, [step])
        scheduler.step()
        seen.append(rates(optimizer))
    assert max(r["grassmann"] for r in seen) == pytest.approx(0.5)
    assert max(r["euclidean"] for r in seen) == pytest.approx(0.01)
    assert g.orthonormality_error(model[3].weight.detach()) < 1e-6


def test_timms_cosine_with_warm_up_from_zero_keeps_the_ratio_of_both_rates():
    model = a_model()
    optimizer = grassy.make_optimizer(model, "adamw", lr=1e-3, head_lr=0.1)
    scheduler = CosineLRScheduler(optimizer, t_initial=10, lr_min=0.0, warmup_t=3, warmup_lr_init=0.0)
    for epoch in (0, 2, 5, 10):
        scheduler.step(epoch)
        r = rates(optimizer)
        assert r["grassmann"] == pytest.approx(100 * r["euclidean"])
    assert r["grassmann"] == 0.0


def test_timms_minimum_and_start_of_the_warm_up_are_one_number_for_both():
    optimizer = grassy.make_optimizer(a_model(), "adamw", lr=1e-3, head_lr=0.1)
    scheduler = CosineLRScheduler(optimizer, t_initial=10, lr_min=1e-5, warmup_t=3, warmup_lr_init=1e-4)
    assert rates(optimizer) == {"euclidean": 1e-4, "grassmann": 1e-4}
    scheduler.step(10)
    assert rates(optimizer) == pytest.approx({"euclidean": 1e-5, "grassmann": 1e-5})


def test_a_group_that_is_added_later_gets_the_settings_of_make_optimizer():
    model = nn.Sequential(nn.Linear(4, 8), grassy.GrassmannHead(8, 3, k=2))
    options = {"lr": 1e-3, "weight_decay": 0.05, "head_lr_factor": 7.0}
    optimizer = grassy.make_optimizer(model, "adamw", **options)
    plain, head = nn.Linear(4, 4), grassy.GrassmannHead(8, 3, k=2)
    optimizer.add_param_group({"params": [plain.weight]})
    optimizer.add_param_group({"params": [head.weight], "manifold": "grassmann"})
    for added, own in ((optimizer.param_groups[-2], -4), (optimizer.param_groups[-1], -3)):
        first = optimizer.param_groups[own]
        assert {name: added[name] for name in added if name != "params"} == {
            name: first[name] for name in first if name != "params"
        }


def test_a_refused_group_leaves_the_optimizer_as_it_was():
    model = nn.Sequential(nn.Linear(4, 8), grassy.GrassmannHead(8, 3, k=2))
    optimizer = grassy.make_optimizer(model, "adamw", lr=1e-3)
    parts = (optimizer, optimizer.euclidean, optimizer.riemannian)
    before = [list(part.param_groups) for part in parts]
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": list(model.parameters())})
    assert [part.param_groups for part in parts] == before


def test_parameters_of_a_kind_that_was_frozen_need_a_new_optimizer():
    model = nn.Sequential(nn.Linear(4, 8).requires_grad_(False), grassy.GrassmannHead(8, 3, k=2))
    optimizer = grassy.make_optimizer(model, "adamw", lr=1e-3)
    with pytest.raises(ValueError, match=r"after unfreezing some, call grassy\.make_optimizer again"):
        optimizer.add_param_group({"params": list(model[0].requires_grad_().parameters())})


def test_layer_decay_is_the_same_for_a_compiled_model():
    model = timm.create_model("test_vit", num_classes=5)
    grassy.replace_head(model, "grassmann", k=2)
    plain = grassy.make_optimizer(model, "adamw", lr=1.0, layer_decay=0.5)
    compiled = grassy.make_optimizer(torch.compile(model, backend="eager"), "adamw", lr=1.0, layer_decay=0.5)
    rates = [[(group["lr"], len(group["params"])) for group in each.param_groups] for each in (plain, compiled)]
    assert rates[0] == rates[1]
    assert len({rate for rate, _ in rates[0]}) > 3


def test_what_schedulers_write_into_the_groups_does_not_make_a_state_foreign():
    def made():
        model = nn.Sequential(nn.Linear(4, 8), grassy.GrassmannHead(8, 3, k=2))
        return grassy.make_optimizer(model, "adamw", lr=1e-3)

    saved, other = made(), made()
    StepLR(saved, 1)  # writes initial_lr
    OneCycleLR(other, 0.1, total_steps=5)  # writes max_lr, min_lr and more
    other.load_state_dict(saved.state_dict())
    saved.load_state_dict(other.state_dict())
    sgd = grassy.make_optimizer(nn.Sequential(nn.Linear(4, 8), grassy.GrassmannHead(8, 3, k=2)), "sgd", lr=0.1)
    with pytest.raises(ValueError, match="the saved optimizer is of another kind"):
        sgd.load_state_dict(saved.state_dict())


@pytest.mark.parametrize("name", ["decay_all", "bfloat16_momentum"])
def test_a_word_is_no_boolean(name):
    with pytest.raises(TypeError, match=f"{name} must be True or False, got 'no'"):
        grassy.make_optimizer(a_model(), "sgd", lr=0.1, **{name: "no"})
    with pytest.raises(ValueError, match="lr must be a finite number >= 0, got True"):
        grassy.make_optimizer(a_model(), "sgd", lr=True)
