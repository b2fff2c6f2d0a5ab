"""What the study of Tiny-ImageNet adds to grassy: heads, probes, networks and mixing on the device."""

import numpy as np
import pytest
import torch
from studies.tiny_imagenet import heads, plan, probes
from studies.tiny_imagenet.mixing import DeviceMixing

from grassy import make_optimizer
from grassy.heads import create_head, heads_of
from grassy.models import create_model
from grassy.recipes.changes import with_changes


def test_the_decay_of_a_classifier_is_its_own():
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), create_head(heads.SOFTMAX, 5, 3, decay=0.0, beta=0.5))
    optimizer = make_optimizer(model, "sgd", lr=0.1, weight_decay=0.5, decay_all=True, momentum=0.9)
    optimizer = heads.set_classifier_decay(optimizer, model)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays == {id(p): 0.5 for p in model[0].parameters()} | {id(p): 0.0 for p in model[1].parameters()}
    before = model[1].weight.detach().clone()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    norm = model[0].weight.norm()
    optimizer.step()
    torch.testing.assert_close(model[1].weight.detach(), before)
    assert model[0].weight.norm() < 0.96 * norm


def test_temperature_multiplies_logits():
    x = torch.randn(4, 5)
    torch.manual_seed(0)
    one = create_head(heads.SOFTMAX, 5, 3)
    torch.manual_seed(0)
    other = create_head(heads.SOFTMAX, 5, 3, beta=0.3)
    torch.testing.assert_close(other(x), 0.3 * one(x))


def test_signed_vectors_are_subspaces_of_dimension_one_with_a_sign():
    head = create_head(heads.SIGNED, 8, 3, gamma=2.0).eval()
    x = torch.randn(5, 8)
    subspaces = create_head("grassmann", 8, 3, k=1, gamma=2.0, normalize=False, standardize=True).eval()
    subspaces.weight.data.copy_(head.weight.data)  # of the same batch statistics, which are those of the beginning
    torch.testing.assert_close(head(x).abs(), subspaces(x))
    torch.testing.assert_close(head(-x), -head(x))
    optimizer = make_optimizer(head, "sgd", lr=0.1)
    head.train()
    torch.nn.functional.cross_entropy(head(x), torch.tensor([0, 1, 2, 0, 1])).backward()
    optimizer.step()
    torch.testing.assert_close(head.weight.norm(dim=-1), torch.ones(3, 1))


def test_mean_plus_subspace_contains_softmax_and_subspaces():
    head = create_head(heads.MEAN, 8, 3, k=2, gamma=1.5, normalize=False, beta=0.7)
    x = torch.randn(5, 8)
    subspaces = create_head("grassmann", 8, 3, k=2, gamma=1.5, normalize=False)
    with torch.no_grad():
        subspaces.weight.copy_(head.weight)
        head.bias.normal_()
        softmax = 0.7 * x @ head.mean.mT + head.bias
        for c, m in enumerate(torch.nn.functional.normalize(head.mean)):
            without_mean = x - (x @ m)[:, None] * m
            torch.testing.assert_close(head(x)[:, c], softmax[:, c] + subspaces(without_mean)[:, c])
        head.gamma = 0.0
        torch.testing.assert_close(head(x), softmax)
        head.gamma = 1.5
        head.mean.zero_()
        torch.testing.assert_close(head(x), subspaces(x) + head.bias)


@pytest.mark.parametrize("option", ["used", "contrast"])
def test_a_reward_for_variety_leaves_the_own_logit_alone(option):
    head = create_head(heads.VARIETY, 8, 3, k=3, normalize=False, gamma=1.0, **{option: 1.0}).train()
    target = torch.tensor([0, 0, 1, 1, 0, 0])
    criterion = torch.nn.CrossEntropyLoss()
    for _ in range(3):
        head.loss(torch.randn(6, 8), target, criterion)
    x = torch.randn(6, 8, requires_grad=True)
    extra = head.loss(x, target, criterion) - criterion(head.logits(x), target)
    (direction,) = torch.autograd.grad(extra, x)
    assert direction.norm() > 1e-3
    x2 = x.detach().clone().requires_grad_()
    own = head.logits(x2)[range(6), target]
    (up,) = torch.autograd.grad(own.sum(), x2)
    torch.testing.assert_close((up * direction).sum(-1), torch.zeros(6), atol=1e-5, rtol=0)


def test_the_standardised_svm_does_not_depend_on_the_scale_of_features():
    rng = torch.Generator().manual_seed(0)
    labels = torch.arange(90) % 3
    x = torch.randn(90, 6, generator=rng) + labels[:, None] * torch.tensor([1.0, 0, 0, 0, 0, 0])
    factors = torch.tensor([1e-3, 1, 10, 100, 1, 1])
    one, other = (probes.probe("svm-standardised", each, labels, "top1") for each in (x, x * factors + 5))
    assert one.cv == pytest.approx(other.cv, abs=1.2)
    assert one.chosen == other.chosen
    paper = [probes.probe("svm", each, labels, "top1").cv for each in (x, x * factors + 5)]
    assert abs(paper[0] - paper[1]) > 5
    with_constant = torch.cat([x, torch.full((90, 1), 3.0)], 1)
    assert probes.standardise(with_constant)[0].isfinite().all()


@pytest.mark.parametrize(
    ("peak", "chosen", "pieces"), [(1e-5, 1e-3, 1), (0.1, 0.1, 1), (10, 10, 2), (100, 100, 3), (1e5, 1e3, 3)]
)
def test_the_grid_of_the_standardised_svm_goes_on_while_its_end_is_best(monkeypatch, peak, chosen, pieces):
    seen = []

    def search(x, y, values, **_):
        seen.append(values)
        scores = [-abs(np.log10(value / peak)) for value in values]
        accuracies = torch.tensor(scores, dtype=torch.float64)[:, None].expand(-1, 5)
        return probes.Search(values, accuracies, values[int(np.argmax(scores))], None)

    monkeypatch.setattr(probes, "search_svm", search)
    found = probes.PROBES["svm-standardised"](None, None, "top1")
    assert (found.chosen, len(seen)) == (chosen, pieces)
    assert found.accuracies[found.values.index(found.chosen)].mean() == found.accuracies.mean(1).max()


def test_mixing_on_the_device_is_that_of_timm():
    recipe = with_changes(plan.plan({})[0].recipe, {"mixup": 0.8, "cutmix": 1.0, "smoothing": 0.1})
    labels = torch.tensor([0, 1, 2, 3])
    images = labels[:, None, None, None].expand(4, 3, 8, 8).float()  # the value of a pixel says whose it is
    mix = DeviceMixing(recipe, 5, torch.device("cpu"))
    cuts, kept = 0, []
    for _ in range(200):
        mixed, target = mix(images, labels)
        torch.testing.assert_close(target.sum(1), torch.ones(4))
        own = (mixed[1].mean() - 2) / (1 - 2)  # the share of image 1, whose partner is image 2
        smooth = torch.full((5,), 0.02)
        smooth[1] += 0.9 * own
        smooth[2] += 0.9 * (1 - own)
        torch.testing.assert_close(target[1], smooth)
        cuts += bool(((mixed[1] == 1) | (mixed[1] == 2)).all())
        kept.append(float(own))
    assert 60 < cuts < 140  # every second one
    assert 0.4 < np.mean(kept) < 0.7  # a box that is cut off at the border is smaller
    assert min(kept) < 0.1 < 0.9 < max(kept)


@pytest.mark.parametrize("network", [*plan.NETWORKS])
def test_the_networks_exist_and_have_the_widths_of_the_plan(network):
    facts = plan.NETWORKS[network]
    model = create_model(facts["model"], 200, {"name": "linear"}, facts["model_kwargs"])
    (head,) = heads_of(model)
    assert head.in_features == plan.WIDTHS[network]
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 200)


@pytest.mark.parametrize("name", [heads.SOFTMAX, heads.COSINE, heads.SIGNED, heads.VARIETY, heads.MEAN])
def test_an_update_asks_nothing_of_the_device(name):
    """A CUDA graph cannot hold what waits for a number, and a tensor without data has none to give."""
    options = {"k": 4} if name in (heads.VARIETY, heads.MEAN) else {}
    options |= {"used": 0.1, "contrast": 0.1} if name == heads.VARIETY else {}
    head = create_head(name, 16, 5, device="meta", standardize=True, **options).train()
    features = torch.empty(8, 16, device="meta", requires_grad=True)
    labels = torch.zeros(8, dtype=torch.int64, device="meta")
    head.loss(features, labels, torch.nn.CrossEntropyLoss()).backward()
    assert features.grad.shape == (8, 16)


def test_mixing_asks_nothing_of_the_device():
    recipe = with_changes(plan.plan({})[0].recipe, {"mixup": 0.8, "cutmix": 1.0})
    mix = DeviceMixing(recipe, 5, torch.device("meta"))
    images, labels = torch.empty(8, 3, 4, 4, device="meta"), torch.zeros(8, dtype=torch.int64, device="meta")
    assert mix(images, labels)[1].shape == (8, 5)
