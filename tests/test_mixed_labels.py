"""Targets that are mixtures of a few labels, against the probabilities that they stand for."""

import pytest
import torch
from torch import nn

import grassy
from grassy.data.batch_transforms import build_mixing
from grassy.train import opening
from grassy.train.objective import build_criterion
from grassy.train.training_step import seed_everything
from training_cases import tiny_recipe

MIXED = grassy.MixedLabels(
    torch.tensor([[0, 2], [1, 1], [2, -100]]), torch.tensor([[0.25, 0.75], [0.5, 0.5], [0.6, 0.4]])
)


def test_the_probabilities_of_a_mixture():
    expected = torch.tensor([[0.25, 0, 0.75, 0], [0, 1, 0, 0], [0, 0, 0.6, 0]])
    torch.testing.assert_close(MIXED.dense(4), expected)
    assert MIXED.counted().tolist() == [True, True, True]
    assert grassy.MixedLabels(torch.tensor([[-100, -100], [-100, 0]]), torch.ones(2, 2)).counted().tolist() == [
        False,
        True,
    ]


@pytest.mark.filterwarnings("ignore:the logits of GrassmannHead are never negative")
@pytest.mark.parametrize(("head", "options"), [("linear", {}), ("cosine", {}), ("grassmann", {"k": 2})])
@pytest.mark.parametrize("criterion", [None, "label-smoothing", "bce"])
def test_a_whole_head_takes_them_as_the_probabilities(head, options, criterion):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), grassy.create_head(head, 8, 4, **options))
    x = torch.randn(3, 3)
    losses = [grassy.classification_loss(model, x, target, criterion) for target in (MIXED, MIXED.dense(4))]
    assert torch.equal(*losses)
    assert losses[0] > 0


def test_a_whole_head_refuses_rows_to_ignore_and_labels_out_of_range():
    model = nn.Sequential(nn.Linear(3, 8), grassy.create_head("grassmann", 8, 4, k=2))
    x, weights = torch.randn(2, 3), torch.full((2, 2), 0.5)
    with pytest.raises(ValueError, match="all labels are to be ignored \\(-100\\)"):
        grassy.classification_loss(model, x, grassy.MixedLabels(torch.tensor([[0, 1], [-100, -100]]), weights))
    with pytest.raises(ValueError, match="labels must lie between 0 and 3, got 9"):
        grassy.classification_loss(model, x, grassy.MixedLabels(torch.tensor([[0, 1], [2, 9]]), weights))


@pytest.mark.parametrize("loss", ["cross-entropy", "bce"])
def test_a_recipe_smooths_mixed_targets_whatever_the_loss(loss):
    recipe = tiny_recipe(smoothing=0.1, mixup=0.4, loss=loss, head={"name": "grassmann", "k": 2, "sample": 0.5})
    found = opening.mixes_in_pairs(recipe, nn.Sequential(grassy.create_head("grassmann", 8, 4, k=2, sample=0.5)))
    assert found == (loss == "cross-entropy")  # only this criterion can smooth pairs


@pytest.mark.parametrize(
    "settings", [{"mixup": 0.4}, {"cutmix": 1.0}, {"mixup": 0.4, "cutmix": 1.0, "mixup_prob": 0.5}]
)
def test_mixing_makes_pairs_of_labels_that_are_timms_targets(settings):
    """Same images, and the same loss: timm smooths the probabilities, and the criterion smooths the pairs."""
    recipe = tiny_recipe(smoothing=0.1, **settings)
    labels, logits = torch.tensor([0, 3, 2, 2, 1, 4]), torch.randn(6, 5, dtype=torch.float64)
    for seed in range(5):
        results = []
        for as_labels in (False, True):
            seed_everything(seed)
            results.append(build_mixing(recipe, 5, as_labels)(torch.rand(6, 3, 8, 8), labels))
        (images, soft), (others, pairs) = results
        assert torch.equal(images, others)
        expected = build_criterion(recipe)(logits, soft.double())
        found = build_criterion(recipe, mixes_labels=True)(logits, pairs.dense(5).double())
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        assert pairs.labels.tolist() == [[0, 4], [3, 1], [2, 2], [2, 2], [1, 3], [4, 0]]


def test_what_is_no_mixture_is_refused():
    with pytest.raises(TypeError, match=r"takes integer labels and floating point weights, got torch.float32 and"):
        grassy.MixedLabels(torch.rand(2, 2), torch.rand(2, 2))
    with pytest.raises(ValueError, match=r"must have the same shape \(..., M\), got \(2, 2\) and \(2, 3\)"):
        grassy.MixedLabels(torch.zeros(2, 2, dtype=torch.int64), torch.rand(2, 3))
    with pytest.raises(TypeError, match="a tensor for a model without a grassy head, got MixedLabels"):
        grassy.classification_loss(nn.Linear(3, 4), torch.randn(3, 3), MIXED)
    with pytest.raises(ValueError, match="needs class indices for its margin"):
        grassy.classification_loss(grassy.create_head("arcface", 3, 4), torch.randn(3, 3), MIXED)
    sampled = grassy.create_head("grassmann", 3, 4, k=1, sample=0.5)
    with pytest.raises(ValueError, match="labels must lie between 0 and 1, got 2"):
        grassy.classification_loss(grassy.create_head("grassmann", 3, 2, k=1, sample=0.5), torch.randn(3, 3), MIXED)
    with pytest.raises(ValueError, match=r"mixtures of a few as grassy.MixedLabels.*shape \(3, 4\)"):
        grassy.classification_loss(sampled, torch.randn(3, 3), MIXED.dense(4))
    with pytest.raises(ValueError, match=r"need labels of shape \(4,\) for these features, got \(3,\)"):
        grassy.classification_loss(sampled, torch.randn(4, 3), MIXED)
