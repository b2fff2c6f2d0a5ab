"""The rule for gamma: where it comes from, what it promises, and gamma="auto"."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import grassy
from grassy.heads import recommended_gamma
from grassy.heads.gamma import CONFIDENT, paper_share

classes = st.integers(2, 10**7)
dims = st.integers(1, 64)
widths = st.integers(64, 4096)


def test_it_gives_the_papers_value_where_the_paper_has_one_and_the_range_that_served_cifar_100():
    assert recommended_gamma(1000, 8) == 25.0
    assert recommended_gamma(1000, 8, 2048) == 25.0
    assert 16 <= recommended_gamma(100, 8, 512) <= 20
    assert 23 < recommended_gamma(1000, 1) < 25 < recommended_gamma(1000, 32) < 27  # the paper has 25 for all of them


@given(classes, classes, dims, dims, widths)
def test_it_grows_with_the_number_of_classes_and_with_their_dimension(c, more, k, larger, n):
    (c, more), (k, larger) = sorted((c, more)), sorted((k, larger))
    assert recommended_gamma(c, k, n) <= recommended_gamma(more, k, n)
    assert recommended_gamma(c, k, n) <= recommended_gamma(c, larger, n)
    assert recommended_gamma(c, k, n) >= recommended_gamma(c, k, n + 100)


@given(st.integers(2, 20_000), dims, widths)
def test_the_probability_it_promises_is_that_of_the_softmax(c, k, n):
    gamma = recommended_gamma(c, k, n)
    random = min(math.sqrt(k / n), 0.5)
    logits = torch.full((c,), gamma * random, dtype=torch.float64)
    logits[0] = gamma * (random + paper_share() * (1 - random))
    assert logits.softmax(0)[0].item() == pytest.approx(CONFIDENT, abs=1e-3)
    logits[0] = gamma  # a feature that lies wholly in the subspace of its class
    assert logits.softmax(0)[0] > 0.99


@given(classes, dims, widths)
def test_it_is_above_the_bound_that_cosface_gives_for_directions(c, k, n):
    bound = (c - 1) / c * math.log((c - 1) * CONFIDENT / (1 - CONFIDENT))
    assert recommended_gamma(c, k, n) >= bound


def test_a_random_feature_has_the_logit_that_the_rule_assumes():
    head = grassy.GrassmannHead(256, 40, k=8, gamma="auto")
    logits = head(torch.randn(200, 256))
    assert logits.mean().item() == pytest.approx(head.gamma * math.sqrt(8 / 256), rel=0.05)


def test_auto_is_resolved_when_the_head_is_made():
    head = grassy.GrassmannHead(64, 10, k=4, gamma="auto")
    assert head.gamma == head.initial_gamma == recommended_gamma(10, 4, 64)
    assert isinstance(head.gamma, float)
    learnable = grassy.GrassmannHead(64, 10, k=4, gamma="auto", learnable_gamma=True)
    assert learnable.gamma.item() == pytest.approx(head.gamma)
    uneven = grassy.GrassmannHead(64, 3, k=[1, 4, 16], gamma="auto")
    assert (
        recommended_gamma(3, 1, 64)
        < uneven.gamma
        == recommended_gamma(3, [1, 4, 16], 64)
        < recommended_gamma(3, 16, 64)
    )
    assert grassy.GrassmannHead(4, 1, k=4, gamma="auto").gamma == recommended_gamma(2, 4, 4)


def test_auto_without_normalisation_takes_the_length_of_standardised_features_into_account():
    options = {"k": 4, "gamma": "auto", "standardize": True}
    head = grassy.GrassmannHead(64, 10, normalize=False, **options)
    usual = grassy.GrassmannHead(64, 10, **options)
    assert head.gamma == pytest.approx(usual.gamma / 8, rel=1e-3)
    x = 3 + 5 * torch.rand(4096, 64)  # whose length before standardising says nothing
    long, scaled = (float(each(x).square().mean().sqrt()) for each in (head, usual))
    assert long == pytest.approx(scaled, rel=0.2)  # logits of the same size
    with pytest.raises(ValueError, match="known length: normalize or standardize them, or pass gamma"):
        grassy.GrassmannHead(64, 10, k=4, gamma="auto", normalize=False)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="gamma must be positive or 'auto', got 'large'"):
        grassy.GrassmannHead(8, 3, k=2, gamma="large")
    for arguments in ((0, 8), (10, 0), (10, 8, 0), (10, [2, 0])):
        with pytest.raises(ValueError, match="must be a positive integer, got 0"):
            recommended_gamma(*arguments)
