"""A head that fuses its loss: the same loss, without logits."""

import functools
import tempfile

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import grassy

from ..kernels.cross_entropy_cases import example


def criteria():
    from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy

    return {
        "default": (None, False),
        "torch": (nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=2), False),
        "partial": (functools.partial(F.cross_entropy, label_smoothing=0.2, reduction="sum"), False),
        "soft": (F.cross_entropy, True),
        "timm": (LabelSmoothingCrossEntropy(0.1), False),
        "timm soft": (SoftTargetCrossEntropy(), True),
    }


@pytest.mark.parametrize("name", ["default", "torch", "partial", "soft", "timm", "timm soft"])
def test_a_head_that_fuses_its_loss_gives_that_loss_without_logits(name, monkeypatch):
    criterion, soft = criteria()[name]
    x, _, target = example(8, 5, 3, 7, soft)
    head = grassy.GrassmannHead(7, 5, k=3)
    expected = grassy.classification_loss(nn.Sequential(head), x, target, criterion)
    head.fuse_loss = True
    monkeypatch.setattr(head, "logits", None)
    loss = grassy.classification_loss(nn.Sequential(head), x, target, criterion)
    assert torch.allclose(loss, expected, atol=1e-6)


@pytest.mark.parametrize(
    "criterion",
    [
        nn.CrossEntropyLoss(weight=torch.arange(1.0, 6)),
        nn.MultiMarginLoss(),
        functools.partial(F.cross_entropy, weight=torch.arange(1.0, 6)),
        lambda logits, target: logits.square().mean(),
    ],
    ids=["weighted", "margin", "weighted partial", "function"],
)
def test_other_criteria_get_the_logits(criterion):
    x, _, target = example(8, 5, 3, 7)
    head = grassy.create_head("grassmann", 7, 5, k=3, fuse_loss=True)
    assert torch.equal(
        grassy.classification_loss(nn.Sequential(head), x, target, criterion), criterion(head(x), target)
    )


def test_it_trains_compiled_and_in_ddp():
    x, _, target = example(32, 5, 3, 7)
    model = nn.Sequential(nn.Linear(7, 16), nn.ReLU(), grassy.GrassmannHead(16, 5, k=3, fuse_loss=True))
    assert "fuse_loss=True" in repr(model)
    expected = grassy.classification_loss(model, x, target)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.allclose(grassy.classification_loss(compiled, x, target), expected)
    with tempfile.NamedTemporaryFile() as file:
        torch.distributed.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
        try:
            parallel = nn.parallel.DistributedDataParallel(model)
            optimizer = grassy.make_optimizer(model, "adamw", lr=1e-2)
            for _ in range(40):
                optimizer.zero_grad()
                loss = grassy.classification_loss(parallel, x, target)
                loss.backward()
                optimizer.step()
        finally:
            torch.distributed.destroy_process_group()
    assert loss < 0.5 * expected
    assert model(x).shape == (32, 5)


def test_in_evaluation_the_head_returns_logits_which_a_model_may_use():
    _, _, target = example(8, 5, 3, 7)
    head = grassy.GrassmannHead(7, 5, k=3, fuse_loss=True)
    request = grassy.heads.LossRequest(target, nn.functional.cross_entropy)
    assert head.answers_with_loss(request)
    assert not head.eval().answers_with_loss(request)


def test_a_subclass_may_still_have_a_loss_of_its_own():
    class Other(grassy.GrassmannHead):
        def loss(self, features, target, criterion):
            return features.square().sum()

    x, _, target = example(8, 5, 3, 7)
    assert not grassy.GrassmannHead(7, 5, k=3).has_own_loss()
    assert grassy.classification_loss(nn.Sequential(Other(7, 5, k=3)), x, target) == x.square().sum()


def test_a_run_with_it_trains_and_its_checkpoint_remembers(tmp_path):
    from grassy.train.loop import train
    from training_cases import tiny_arrays, tiny_recipe

    data = tiny_arrays(tmp_path / "data", images=60)
    recipe = tiny_recipe(head={"name": "grassmann", "k": 2, "gamma": 8.0, "fuse_loss": True}, epochs=1)
    train(recipe, data, tmp_path / "run", quiet=True)
    heads = [module for module in grassy.load(tmp_path / "run").modules() if isinstance(module, grassy.Head)]
    assert [head.fuse_loss for head in heads] == [True]
