"""What tools do to a model or an optimizer without a word, and what grassy makes of it."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

import grassy
from grassy import geometry as g
from grassy.models import import_timm

from .optimizer_cases import a_model, data, train

OFF = r"orthonormal only to .*make_optimizer and grassy.AveragedModel"


# ---------------------------------------------------------------------- one learning rate for all groups


def rates(optimizer) -> dict[str, float]:
    return {group["manifold"]: float(group["lr"]) for group in optimizer.param_groups}


def turned_by(model, optimizer) -> float:
    """The largest angle that one step turns a subspace by, for a gradient that is always the same."""
    before = model[3].weight.detach().clone()
    torch.manual_seed(0)
    for p in model.parameters():
        p.grad = 1e-3 * torch.randn_like(p)
    optimizer.step()
    return float(g.distance(before, model[3].weight.detach()).max())


@pytest.mark.parametrize("sample", [1.0, 0.5])
def test_a_factor_takes_the_same_steps_as_a_rate_of_its_own(sample):
    absolute, relative = a_model(), a_model()
    for model in (absolute, relative):
        torch.manual_seed(1)
        model[3] = grassy.GrassmannHead(16, 4, k=3, sample=sample)
    train(absolute, grassy.make_optimizer(absolute, "adamw", lr=1e-3, head_lr=0.1), range(5))
    optimizer = grassy.make_optimizer(relative, "adamw", lr=1e-3, head_lr_factor=100)
    assert rates(optimizer) == {"euclidean": 1e-3, "grassmann": 1e-3}
    train(relative, optimizer, range(5))
    for one, other in zip(absolute.parameters(), relative.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-6)


def one_cycle(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=10, cycle_momentum=False)


def swa(optimizer):
    return swa_utils.SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)


def timm_cosine(optimizer):
    import_timm()
    from timm.scheduler import CosineLRScheduler

    return CosineLRScheduler(optimizer, t_initial=6, lr_min=0.005, warmup_t=2, warmup_lr_init=1e-4)


@pytest.mark.parametrize("make", [one_cycle, swa, timm_cosine])
def test_schedulers_that_set_one_rate_for_all_groups_keep_the_factor(make):
    model = a_model()
    optimizer = grassy.make_optimizer(model, "sgd", lr=0.01, head_lr_factor=10, head_momentum=0.0)
    scheduler = make(optimizer)
    for step in range(6):
        rate = rates(optimizer)
        assert rate["grassmann"] == rate["euclidean"]
        one = grassy.make_optimizer(twin := copy.deepcopy(model), "sgd", lr=0.01, head_lr=10 * rate["euclidean"])
        one.param_groups[-1]["momentum"] = 0.0
        assert turned_by(model, optimizer) == pytest.approx(turned_by(twin, one), rel=1e-4)
        if make is timm_cosine:
            scheduler.step(step + 1)
        else:
            scheduler.step()


@pytest.mark.slow
def test_lightnings_learning_rate_finder_keeps_the_factor(tmp_path):
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import LearningRateFinder

    seen = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.lr = a_model(), 1e-3

        def training_step(self, batch, _):
            return grassy.classification_loss(self.model, *batch)

        def configure_optimizers(self):
            return grassy.make_optimizer(self.model, "adamw", lr=self.lr, head_lr_factor=30)

        def on_before_optimizer_step(self, optimizer):
            seen.append((rates(optimizer), optimizer.param_groups[-1]["lr_factor"]))

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data(0)), batch_size=4)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    finder = LearningRateFinder(num_training_steps=20)
    trainer = lightning.Trainer(
        max_steps=2,
        accelerator="cpu",
        default_root_dir=tmp_path,
        callbacks=[finder],
        enable_checkpointing=False,
        **quiet,
    )
    trainer.fit(Module(), loader)
    assert len({rate["euclidean"] for rate, _ in seen}) > 10  # it tried them
    assert all(rate["euclidean"] == rate["grassmann"] and factor == 30 for rate, factor in seen)


def test_a_factor_is_saved_and_a_state_without_one_goes_on_as_it_was(tmp_path):
    first, second, third = a_model(), a_model(), a_model()
    optimizer = grassy.make_optimizer(first, "adamw", lr=1e-3, head_lr_factor=100)
    train(first, optimizer, range(3))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    second.load_state_dict(first.state_dict())
    other = grassy.make_optimizer(second, "adamw", lr=5.0, head_lr_factor=3)
    other.load_state_dict(state)
    assert other.param_groups[-1]["lr_factor"] == 100
    for model, each in ((first, optimizer), (second, other)):
        train(model, each, range(3, 6))
    assert torch.equal(first[3].weight, second[3].weight)
    earlier = grassy.make_optimizer(third, "adamw", lr=1e-3, head_lr=0.1)
    assert "lr_factor" not in earlier.param_groups[-1]
    other.load_state_dict(earlier.state_dict())
    assert rates(other) == {"euclidean": 1e-3, "grassmann": 0.1}
    assert "lr_factor" not in other.param_groups[-1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"head_lr": 0.1, "head_lr_factor": 10}, "pass head_lr or head_lr_factor, not both"),
        ({"head_lr_factor": -1}, "head_lr_factor must be a finite number >= 0, got -1"),
        ({"head_lr_factor": float("nan")}, "head_lr_factor must be a finite number"),
        ({"head_lr_factor": "10"}, "head_lr_factor must be a finite number"),
    ],
)
def test_factors_that_make_no_sense_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        grassy.make_optimizer(a_model(), "sgd", lr=0.1, **options)


def test_a_factor_for_a_model_without_subspaces_is_refused():
    with pytest.raises(ValueError, match="head_lr_factor was given, but the model has no subspaces"):
        grassy.make_optimizer(nn.Linear(2, 2), "sgd", lr=0.1, head_lr_factor=10)


# ---------------------------------------------------------------------- bases with train() and eval()


class ScheduleFreeSGD(torch.optim.Optimizer):
    """The method of Defazio et al. 2024 in its simplest form, with the interface of their package.

    In training a parameter holds y = (1 − β) z + β x, in evaluation the average x.
    """

    def __init__(self, params, lr, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "train_mode": False, "k": 0})

    @torch.no_grad()
    def _move(self, train):
        for group in self.param_groups:
            if group["train_mode"] != train:
                beta = group["beta"]
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], (1 - beta) if train else (1 - 1 / beta))
                group["train_mode"] = train

    def train(self):
        self._move(True)

    def eval(self):
        self._move(False)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("Optimizer was not in train mode when step is called.")
            group["k"] += 1
            beta, weight = group["beta"], 1 / group["k"]
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                x = p.lerp(z, 1 - 1 / beta)
                z.sub_(p.grad, alpha=group["lr"])
                p.copy_(x.lerp_(z, weight).lerp_(z, 1 - beta))


def test_train_and_eval_reach_a_base_that_has_them():
    model, alone = a_model(), a_model()
    optimizer = grassy.make_optimizer(model, ScheduleFreeSGD, lr=0.1, head_lr=0.0)
    plain = ScheduleFreeSGD([p for n, p in alone.named_parameters() if n != "3.weight"], lr=0.1)
    with pytest.raises(RuntimeError, match="not in train mode"):
        train(model, optimizer, [0])
    for each in (optimizer, plain):
        each.train()
    for step in range(4):
        for net, each in ((model, optimizer), (alone, plain)):
            each.zero_grad()
            grassy.classification_loss(net, *data(step)).backward()
            each.step()
    training = [p.detach().clone() for p in model.parameters()]
    for each in (optimizer, plain):
        each.eval()
    assert not torch.equal(training[0], model[0].weight)
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    again = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(again)
    optimizer.train()
    assert torch.allclose(training[0], model[0].weight, atol=1e-6)


def test_train_and_eval_do_nothing_for_other_bases():
    model = a_model()
    optimizer = grassy.make_optimizer(model, "adamw", lr=0.1)
    optimizer.train()
    train(model, optimizer, [0])
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.eval()
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))


# ---------------------------------------------------------------------- off the manifold


def slightly_off(head: grassy.GrassmannHead, by: float = 2e-3) -> None:
    with torch.no_grad():
        head.weight.mul_(1 + by / 2)


@pytest.mark.parametrize("mode", ["eval", "no_grad"])
def test_weights_an_ordinary_optimizer_took_off_the_manifold_are_noticed_when_first_used(mode):
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            model(data(0)[0])
        train(model, optimizer, range(20))  # nobody is told in the middle of training
    assert 1e-3 < g.orthonormality_error(model[3].weight.detach()) < 0.1
    use = model.eval if mode == "eval" else lambda: model(data(0)[0])
    with pytest.warns(UserWarning, match=OFF), torch.no_grad():
        use()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        with torch.no_grad():
            model(data(0)[0])


def test_the_limit_lies_far_above_what_riemannian_steps_and_half_precision_do(recwarn):
    model = a_model()
    train(model, grassy.make_optimizer(model, "adamw", lr=1e-3, head_lr=1.0), range(50))
    with torch.no_grad():
        model(data(0)[0])
        model.eval()(data(0)[0])
        copy.deepcopy(model).bfloat16()(data(0)[0].bfloat16())
        copy.deepcopy(model).half()(data(0)[0].half())
    assert not recwarn
    head = model[3]
    slightly_off(head, 9e-4)
    head(torch.randn(2, head.in_features))
    assert not recwarn
    slightly_off(head, 2e-4)
    with pytest.warns(UserWarning, match=OFF):
        head(torch.randn(2, head.in_features))


def timms_average(model):
    import_timm()
    from timm.utils import ModelEmaV3

    return ModelEmaV3(model, decay=0.5)


def torchs_average(model):
    return swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))


@pytest.mark.parametrize("make", [timms_average, torchs_average])
def test_an_average_of_bases_is_noticed_where_it_is_used_and_where_it_is_loaded(make):
    model = a_model()
    optimizer = grassy.make_optimizer(model, "sgd", lr=0.1, head_lr=1.0)
    average, ours = make(model), grassy.AveragedModel(model, decay=0.5)
    for step in range(10):
        train(model, optimizer, [step])
        (average.update if hasattr(average, "update") else average.update_parameters)(model)
        ours.update_parameters(model)
    error = float(g.orthonormality_error(average.module[3].weight.detach()))
    assert error > 1e-3
    inputs = data(0)[0]
    with pytest.warns(UserWarning, match=OFF), torch.no_grad():
        average.module.eval()(inputs)
    state = average.module.state_dict()
    if error > 0.1:
        with pytest.raises(ValueError, match="not a weight of subspaces"):
            model.load_state_dict(state)
    else:
        with pytest.warns(UserWarning, match="re-orthonormalised"):
            model.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.module.eval()(inputs)


@pytest.mark.slow
def test_lightnings_average_is_noticed_where_it_is_validated(tmp_path):
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import EMAWeightAveraging

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = a_model()

        def training_step(self, batch, _):
            return grassy.classification_loss(self.model, *batch)

        def validation_step(self, batch, _):
            grassy.classification_loss(self.model, *batch)

        def configure_optimizers(self):
            return grassy.make_optimizer(self.model, "sgd", lr=0.1, head_lr=3.0)

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data(0)), batch_size=4)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        max_epochs=2,
        num_sanity_val_steps=0,
        accelerator="cpu",
        default_root_dir=tmp_path,
        callbacks=[EMAWeightAveraging(decay=0.7)],
        enable_checkpointing=False,
        **quiet,
    )
    with pytest.warns(UserWarning, match=OFF):
        trainer.fit(Module(), loader, loader)
