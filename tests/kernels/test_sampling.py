"""Which classes take part in an update, and what becomes of them and of the others."""

import math

import pytest
import torch
from torch import nn

import grassy
from grassy.kernels.sampling import Sampling, add_gradient, drawn, gradient_of_some, hashed, places_of
from grassy.shards import Shard, bounds

CLASSES = 1000


def sampling(update=0, rate=0.3, seed=1):
    return Sampling(rate, seed, torch.tensor(update), False, torch.empty(0))


def classes_of(world, labels, update=0):
    """The union of what all processes draw."""
    shards = [Shard(*bounds(CLASSES, rank, world), CLASSES) for rank in range(world)]
    return sorted(c + s.offset for s in shards for c in drawn(labels, s, sampling(update)).places.tolist())


def a_model(**options):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), grassy.create_head("grassmann", 16, 200, k=3, **options))


def train(model, updates, parts=1):
    optimizer = grassy.make_optimizer(model, "sgd", lr=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(updates):
        optimizer.zero_grad()
        for _ in range(parts):
            x, y = torch.randn(8, 5, generator=generator), torch.randint(0, 200, (8,), generator=generator)
            grassy.classification_loss(model, x.to(model[0].weight), y).backward()
        optimizer.step()
    return optimizer


def test_the_draw_depends_on_seed_update_and_class_and_not_on_the_number_of_processes():
    labels = torch.tensor([3, 999, 3, -100, 500])
    alone = classes_of(1, labels)
    assert {3, 500, 999} <= set(alone)
    assert 0.25 * CLASSES < len(alone) < 0.35 * CLASSES
    assert all(classes_of(world, labels) == alone for world in (2, 3, 7))
    assert classes_of(1, labels, update=1) != alone
    assert drawn(labels, Shard(0, CLASSES, CLASSES), sampling(seed=2)).places.tolist() != alone


def test_draws_are_uniform_and_independent_between_classes_updates_and_seeds():
    classes = torch.arange(200_000)
    first = hashed(classes, 0, torch.tensor(0))
    assert int(first.min()) >= 0
    assert int(first.max()) < 2**32
    counts = torch.histc((first / 2**32).double(), 20, 0, 1)
    assert ((counts - 10_000).square() / 10_000).sum() < 45  # χ² of 19 degrees of freedom: 0.999 is at 43.8
    for other in (hashed(classes, 0, torch.tensor(1)), hashed(classes, 1, torch.tensor(0)), first.roll(1)):
        both = ((first < 2**31) & (other < 2**31)).double().mean()
        assert abs(both - 0.25) < 5 * (0.25 * 0.75 / 200_000) ** 0.5


def test_places_of_labels():
    shard = Shard(100, 300, CLASSES)
    labels = torch.tensor([100, 299, 5, -100, 300, 150])
    sample = drawn(labels, shard, sampling())
    places = places_of(labels, shard, sample)
    assert places[[2, 3, 4]].tolist() == [-1, -1, -1]
    assert (sample.places[places[[0, 1, 5]]] + 100).tolist() == [100, 299, 150]


def test_only_classes_that_take_part_move_and_the_momentum_of_the_others_waits():
    model = a_model(sample=0.1)
    optimizer = train(model, 3)
    weight, momentum = model[1].weight, optimizer.state[model[1].weight]["momentum_buffer"]
    before = weight.detach().clone(), momentum.clone()
    x, y = torch.randn(8, 5), torch.randint(0, 200, (8,))
    part = set(drawn(y, Shard(0, 200, 200), Sampling(0.1, 0, model[1].draws, False, weight)).places.tolist())
    grassy.classification_loss(model, x, y).backward()
    optimizer.step()
    for now, then in zip((weight.detach(), momentum), before, strict=True):
        moved = (now != then).flatten(1).any(-1).nonzero().flatten().tolist()
        assert set(moved) == part
    assert grassy.geometry.orthonormality_error(weight.detach()) < 1e-6


def test_a_sample_of_all_classes_is_no_sampling():
    weights = []
    for options in ({}, {"sample": 1.0}):
        model = a_model(fuse_loss=True, **options)
        train(model, 5)
        weights.append(model.state_dict())
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_with_the_whole_share_drawn_it_trains_as_without_sampling():
    """A share so near to one that all classes are drawn, by the compact step."""
    plain, drawn_all = a_model(), a_model(sample=1 - 1e-12)
    for model in (plain, drawn_all):
        train(model.double(), 5, parts=2)
    torch.testing.assert_close(drawn_all[1].weight, plain[1].weight, rtol=1e-12, atol=1e-12)


def test_the_corrected_partition_sum_is_right_on_average():
    """Of classes that are no label; e^loss is the sum over e to the logit of the label."""
    torch.manual_seed(0)
    head = grassy.create_head("grassmann", 16, 200, k=3, gamma=3.0, sample=0.3, sample_correct=True)
    x, y = torch.randn(4, 16), torch.tensor([1, 2, 3, 4])
    each = torch.stack([head.loss(x, y, nn.functional.cross_entropy).exp() for _ in range(400)]).detach()
    head.eval()
    full = nn.functional.cross_entropy(head(x), y, reduction="mean").exp().detach()
    assert abs(each.mean() - full) < 4 * each.std() / 20 + 0.01 * full


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])  # the specification, and the chunks of kernels
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("correct", [False, True])
def test_the_loss_is_the_smoothed_cross_entropy_over_the_classes_that_take_part(dtype, mixed, correct):
    """The specification: a softmax over the sample, with what smoothing takes from the labels spread evenly over it."""
    torch.manual_seed(0)
    options = {"sample": 0.3, "sample_correct": correct, "dtype": dtype}
    head = grassy.create_head("grassmann", 16, 200, k=3, gamma=3.0, **options)
    x, y = torch.randn(6, 16, dtype=dtype, requires_grad=True), torch.tensor([1, 2, 3, 1, 150, -100])
    both = grassy.MixedLabels(torch.stack([y, y.flip(0)], -1), torch.tensor([[0.3, 0.7]], dtype=dtype).expand(6, 2))
    labels = both.labels if mixed else y
    sample = drawn(labels, Shard(0, 200, 200), Sampling(0.3, 0, head.draws, correct, head.weight))
    logits = grassy.kernels.subspace_logits(x, head.weight[sample.places], 3.0, normalize=True, impl="reference")
    if correct:
        logits = logits + (torch.arange(len(sample.places)) >= sample.positives).to(dtype) * -math.log(0.3)
    places = places_of(labels, Shard(0, 200, 200), sample)
    target = grassy.MixedLabels(places, both.weights).dense(len(sample.places), -1) if mixed else places
    if mixed:  # torch smooths probabilities in the same way, but for the mass of labels that are ignored
        smoothed = 0.9 * target + 0.1 / len(sample.places)
        expected = -(smoothed * logits.log_softmax(-1)).sum(-1).sum() / 6
    else:
        expected = nn.functional.cross_entropy(logits, target, label_smoothing=0.1, ignore_index=-1)
    gradients = torch.autograd.grad(expected, [x, head.weight])
    loss = grassy.classification_loss(head, x, both if mixed else y, "label-smoothing")
    loss.backward()
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(loss, expected, **tolerance)
    torch.testing.assert_close(x.grad, gradients[0], **tolerance)
    where, found = gradient_of_some(head.weight)
    torch.testing.assert_close(found, gradients[1][where], **tolerance)


def test_gradients_of_parts_of_a_batch_are_added_by_class():
    p = nn.Parameter(torch.zeros(5, 1, 2))
    add_gradient(p, torch.tensor([3, 0]), torch.ones(2, 1, 2))
    add_gradient(p, torch.tensor([4, 3]), 2 * torch.ones(2, 1, 2))
    places, values = gradient_of_some(p)
    assert places.tolist() == [0, 3, 4]
    assert values[:, 0, 0].tolist() == [1, 3, 2]


def test_the_draws_go_on_where_a_saved_state_ended():
    model = a_model(sample=0.1)
    train(model, 3)
    again = a_model(sample=0.1)
    again.load_state_dict(model.state_dict())
    assert int(again[1].draws) == 3


def test_zero_grad_forgets_the_gradient_of_a_sample():
    model = a_model(sample=0.1)
    optimizer = train(model, 1)
    grassy.classification_loss(model, torch.randn(8, 5), torch.arange(8)).backward()
    before = model[1].weight.detach().clone()
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(model[1].weight, before)


def test_a_scaled_loss_makes_the_same_step():
    weights = []
    for scale in (1.0, 1024.0):
        model = a_model(sample=0.1)
        optimizer = grassy.make_optimizer(model, "sgd", lr=0.1)
        scaler = grassy.distributed.GradScaler("cpu", init_scale=scale)
        loss = grassy.classification_loss(model, torch.ones(8, 5), torch.arange(8))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        weights.append(model[1].weight.detach())
    assert not torch.equal(weights[0], a_model()[1].weight)
    assert torch.equal(weights[1], weights[0])  # a power of two changes no digit


def test_gamma_follows_the_number_of_classes_that_the_softmax_sees():
    assert (
        grassy.create_head("grassmann", 64, 10_000, k=2, gamma="auto", sample=0.1).gamma
        == grassy.create_head("grassmann", 64, 1000, k=2, gamma="auto").gamma
    )


@pytest.mark.parametrize("options", [{"sample": 0}, {"sample": 1.5}, {"sample": "half"}, {"sample": True}])
def test_a_share_lies_between_0_and_1(options):
    with pytest.raises(ValueError, match=r"sample must lie in \(0, 1\]"):
        a_model(**options)


def test_an_ordinary_parameter_cannot_be_sampled():
    with pytest.raises(ValueError, match="sample needs riemannian=True"):
        a_model(sample=0.5, riemannian=False)
