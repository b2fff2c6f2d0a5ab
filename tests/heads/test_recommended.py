"""The head "subspaces": a Grassmann head with the options that the studies recommend."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import grassy
from grassy.heads import HEADS, GrassmannHead, create_head, describe, recommended_gamma, recommended_options
from grassy.models import create_model
from grassy.recipes.files import load_recipe
from grassy.recipes.recipe import Recipe


def mlp(width=64, classes=10):
    return nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, classes))


def test_replace_head_without_further_words_uses_the_recommended_options():
    model = mlp(width=256)
    head = grassy.replace_head(model)
    assert type(head) is GrassmannHead
    assert model[-1] is head
    assert head.weight.shape == (10, 32, 256)
    assert head.batch_norm is not None
    assert not head.normalize
    assert head.gamma == pytest.approx(recommended_gamma(10, 32, 256) / 16, rel=1e-3)


def test_the_width_may_be_an_integer_of_numpy():
    assert describe(create_head("subspaces", np.int64(64), 10)) == describe(create_head("subspaces", 64, 10))


@pytest.mark.parametrize(("width", "k"), [(1, 1), (3, 1), (16, 4), (127, 31), (128, 32), (4096, 32)])
def test_k_is_at_most_a_quarter_of_the_features(width, k):
    assert recommended_options(width)["k"] == k
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # k = n = 1
        assert create_head("subspaces", width, 5).weight.shape == (5, k, width)


def test_given_options_replace_recommended_ones():
    head = grassy.replace_head(mlp(), k=[1] * 5 + [4] * 5, gamma=2.0, standardize=False, dropout=0.1)
    assert head.dims.tolist() == [1] * 5 + [4] * 5
    assert (head.gamma, head.batch_norm, head.dropout) == (2.0, None, 0.1)
    assert grassy.replace_head(mlp(), normalize=True).gamma == recommended_gamma(10, 16, 64)


def test_a_description_states_every_option_so_that_other_defaults_change_no_saved_model(tmp_path):
    head = create_head("subspaces", 64, 10)
    assert describe(head)["name"] == "grassmann"
    assert recommended_options(64).items() - {("gamma", "auto")} <= describe(head).items()
    again = create_head(in_features=64, num_classes=10, **describe(head))
    again.load_state_dict(head.state_dict())
    x = torch.randn(4, 64)
    assert torch.equal(again.eval()(x), head.eval()(x))


def test_the_paper_keeps_its_own_name():
    head = create_head("grassmann", 512, 1000)
    assert (head.weight.shape[1], head.gamma, head.normalize, head.batch_norm) == (8, 25.0, True, None)
    assert "subspaces" not in HEADS  # where every name has a class of its own


def test_unknown_names_and_options_list_it():
    with pytest.raises(ValueError, match=r"unknown head 'subspace', did you mean 'subspaces'\?.*subspaces"):
        create_head("subspace", 64, 10)
    with pytest.raises(ValueError, match=r"head 'subspaces' has no option 'gama', did you mean 'gamma'\?"):
        create_head("subspaces", 64, 10, gama=3)
    with pytest.raises((ValueError, TypeError), match="in_features"):
        create_head("subspaces", "64", 10)


def test_recipes_take_it_and_models_of_any_width():
    recipe = load_recipe("cifar100-resnet18-linear", ["head.name=subspaces", "head.k=16"])
    assert recipe.head == {"name": "subspaces", "k": 16}
    assert Recipe(head={"name": "subspaces"}).head == {"name": "subspaces"}
    narrow = {"channels": [4, 4, 8, 16]}
    assert create_model("resnet10t", 3, {"name": "subspaces"}, narrow).get_classifier().weight.shape == (3, 4, 16)
    with pytest.raises(ValueError, match="gamma must be positive"):
        Recipe(head={"name": "subspaces", "gamma": -1.0})


@pytest.mark.parametrize(("text", "option"), [(True, "normalize"), (False, "standardize")], ids=["text", "images"])
def test_models_that_read_tokens_get_normalised_features_and_others_standardised_ones(text, option):
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    if text:
        model = transformers.BertForSequenceClassification(transformers.BertConfig(**size, vocab_size=20, num_labels=4))
    else:
        model = transformers.ViTForImageClassification(transformers.ViTConfig(**size, image_size=32, num_labels=4))
    other = {"normalize": "standardize", "standardize": "normalize"}[option]
    found = describe(grassy.replace_head(model))
    assert (found[option], found[other]) == (True, False)
    assert found.items() >= {**recommended_options(16, text=text), "gamma": found["gamma"]}.items()
    assert describe(grassy.replace_head(model, **{option: False, other: True}))[option] is False
    with pytest.raises(ValueError, match="normalize or standardize them, or pass gamma"):
        grassy.replace_head(model, **{option: False})
