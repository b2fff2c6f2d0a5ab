"""Recipes against the authors' settings, and files against their bases."""

import math
import re
from importlib import resources

import pytest
import torch
import yaml
from torch import nn

import grassy
from grassy import paper
from grassy.heads import create_head
from grassy.models import import_timm
from grassy.recipes.files import load_recipe, read_settings, recipe_names
from grassy.recipes.values import CHOICES

FILES = sorted((resources.files("grassy.recipes") / "library").iterdir(), key=lambda file: file.name)
NAMES = recipe_names()
ROWS = paper.rows()


def both(*architectures):
    return [f"{architecture}-{head}" for architecture in architectures for head in ("linear", "grassmann")]


def rsb(*procedures, heads=("linear", "grassmann", "grassmann-fixres")):
    return [f"resnet50d-rsb-{procedure}-{head}" for procedure in procedures for head in heads]


# --- the table of settings: every line is a line of the authors' settings, or one of the protocol

SGD = {"opt": "sgd", "lr": 0.1, "opt_kwargs.momentum": 0.9, "weight_decay": 1e-4, "head_lr": 0.1}
PLAIN = {"batch_size": 256, "epochs": 100, "loss": "cross-entropy", "smoothing": 0.0, **SGD}
PLAIN |= {"img_size": 224, "crop": "resized", "hflip": 0.5, "aa": "", "mixup": 0.0, "cutmix": 0.0, "reprob": 0.0}
STEP = {"sched": "step", "decay_milestones": (30, 60, 90), "decay_rate": 0.1, "warmup_epochs": 0}
COSINE = {"sched": "cosine", "min_lr": 0.0, "warmup_epochs": 0}
RESNET50D = [f"resnet50d-grassmann{k}" for k in ("", "-k1", "-k4", "-k16", "-k32")]
FIXRES = rsb("a1", "a2", "a3", heads=["grassmann-fixres"])

SETTINGS = [
    (both("resnet50"), {**PLAIN, **STEP}),
    (["resnet50d-linear", *RESNET50D, *both("resnet101d", "resnet152d", "resnext50")], {**PLAIN, **COSINE}),
    (both("vgg13bn"), {**PLAIN, **STEP, "model_kwargs.drop_rate": 0.5}),
    (["vgg13bn-linear"], {"drop_before_head": True}),
    (["vgg13bn-grassmann"], {"drop_before_head": False}),
    (both("swin-t"), {"batch_size": 1024, "epochs": 300, "opt": "adamw", "lr": 1e-3, "weight_decay": 0.05}),
    (both("swin-t"), {"opt_kwargs.betas": [0.9, 0.999], "sched": "cosine", "warmup_epochs": 20, "min_lr": 1e-5}),
    (both("swin-t"), {"loss": "cross-entropy", "smoothing": 0.1, "mixup": 0.8, "cutmix": 1.0, "reprob": 0.25}),
    (both("swin-t"), {"aa": "rand-m9-mstd0.5-inc1", "drop_path": 0.2, "clip_grad": 5.0, "aug_repeats": 1}),
    (["swin-t-grassmann"], {"head_lr": 0.1, "head_momentum": 0.9}),
    (both("deit3-s"), {"batch_size": 2048, "epochs": 800, "opt": "lamb", "lr": 4e-3, "weight_decay": 0.05}),
    (both("deit3-s"), {"clip_grad": 1.0, "sched": "cosine", "warmup_epochs": 5, "warmup_lr": 1e-6, "smoothing": 0.0}),
    (both("deit3-s"), {"mixup": 0.8, "cutmix": 1.0, "aa": "3a", "color_jitter": 0.3, "drop_path": 0.05}),
    (both("deit3-s"), {"aug_repeats": 3, "reprob": 0.0}),
    (["deit3-s-linear"], {"loss": "bce"}),
    (["deit3-s-grassmann"], {"loss": "cross-entropy", "head_lr": 0.3, "head_momentum": 0.9}),
    (rsb("a1", "a2", "a3"), {"model": "resnet50d", "batch_size": 2048, "opt": "lamb", "cutmix": 1.0}),
    (rsb("a1", "a2", "a3"), {"sched": "cosine", "warmup_epochs": 5, "warmup_lr": 1e-4, "min_lr": 1e-6}),
    (rsb("a1", "a2", "a3", heads=["linear"]), {"loss": "bce"}),
    (rsb("a1", "a2", "a3", heads=["grassmann", "grassmann-fixres"]), {"loss": "cross-entropy", "head_lr": 0.3}),
    (rsb("a1"), {"epochs": 600, "lr": 5e-3, "weight_decay": 0.01, "mixup": 0.2, "smoothing": 0.1}),
    (rsb("a2"), {"epochs": 300, "lr": 5e-3, "weight_decay": 0.02, "mixup": 0.1}),
    (rsb("a1", "a2"), {"aa": "rand-m7-mstd0.5-inc1", "aug_repeats": 3, "drop_path": 0.05}),
    (rsb("a3"), {"epochs": 100, "lr": 8e-3, "weight_decay": 0.02, "mixup": 0.1}),
    (rsb("a3"), {"aa": "rand-m6-mstd0.5-inc1", "aug_repeats": 1, "drop_path": 0.0}),
    (rsb("a2", "a3", heads=["linear", "grassmann"]), {"smoothing": 0.0, "img_size": 224}),
    (rsb("a1", "a2", "a3", heads=["linear", "grassmann"]), {"test resize": 236, "test crop": 224}),
    (FIXRES, {"img_size": 176, "test resize": 232, "test crop": 224, "smoothing": 0.1}),
    # Test: resize 256, crop 224; RSB 236, as in the authors' configurations; DeiT3 at 224.
    (both("resnet50", "resnet50d", "resnet101d", "resnet152d", "resnext50", "vgg13bn", "swin-t"), {"test resize": 256}),
    (both("resnet50", "resnet50d", "resnet101d", "resnet152d", "resnext50", "vgg13bn", "swin-t"), {"test crop": 224}),
    (both("deit3-s"), {"test resize": 224, "test crop": 224}),
    (both("swin-t", "deit3-s") + rsb("a1", "a2", "a3"), {"interpolation": "bicubic"}),
    # gamma 25, k 8 unless stated
    (
        [n for n in NAMES if "grassmann" in n and not re.search("gamma|digits|unnormalized|faces|imagenet21k", n)],
        {"head.gamma": 25},
    ),
    ([n for n in NAMES if "grassmann" in n and not re.search(r"-k\d|digits|faces", n)], {"head.k": 8}),
    *(([f"resnet50d-grassmann-k{k}", f"cifar100-resnet18-grassmann-k{k}"], {"head.k": k}) for k in (1, 4, 16, 32)),
    (["cifar100-resnet18-grassmann-k2"], {"head.k": 2}),
    *(([f"resnet50d-grassmann-gamma{gamma}"], {"head.gamma": gamma}) for gamma in (20, 30)),
    # the other class representations
    *(
        ([f"{network}-{head}" for network in ("resnet50d", "cifar100-resnet18")], {"head.name": head, **options})
        for head, options in {
            "linear": {},
            "cosine": {"head.scale": 25},
            "arcface": {"head.scale": 64, "head.margin": 0.5},
            "multi": {"head.layers": 8},
            "softtriple": {
                "head.centers": 8,
                "head.scale": 20,
                "head.gamma": 0.1,
                "head.tau": 0.2,
                "head.margin": 0.01,
            },
            "subcenter-arcface": {"head.scale": 64, "head.margin": 0.5, "head.centers": 8},
            "grassmann": {"head.k": 8, "head.gamma": 25},
        }.items()
    ),
    # Sections 5.2 and 5.3 and the appendix: one thing differs from the softmax baseline, or from the subspaces
    (["resnet50d-label-smoothing"], {**PLAIN, **COSINE, "head.name": "linear", "smoothing": 0.1}),
    (["resnet50d-dropout"], {**PLAIN, **COSINE, "head.name": "linear", "head.dropout": 0.3}),
    (["resnet50d-sigmoid"], {**PLAIN, **COSINE, "head.name": "linear", "loss": "bce-sum"}),
    (
        ["resnet50d-grassmann-unnormalized"],
        {**PLAIN, **COSINE, "head.k": 8, "head.normalize": False, "head.gamma": 1.0},
    ),
    (
        ["resnet50d-grassmann-k1-unnormalized"],
        {**PLAIN, **COSINE, "head.k": 1, "head.normalize": False, "head.gamma": 1.0},
    ),
    (["resnet50d-grassmann-plain-sgd"], {**PLAIN, **COSINE, "head.riemannian": False}),
    (["resnet50d-grassmann-qf"], {**PLAIN, **COSINE, "retraction": "qf"}),
    (["resnet50d-finetune-head-grassmann"], {**PLAIN, **COSINE, "freeze": True, "initial_checkpoint": ""}),
    (
        ["resnet50d-finetune-all-grassmann"],
        {**PLAIN, **COSINE, "freeze": False, "finetune": True, "initial_checkpoint": ""},
    ),
    # not in the paper: one budget for all heads on CIFAR-100
    ([n for n in NAMES if n.startswith("cifar100")], {"batch_size": 256, "epochs": 60, **SGD, "weight_decay": 1e-3}),
    ([n for n in NAMES if n.startswith("cifar100")], {**COSINE, "warmup_epochs": 1, "warmup_lr": 0.0, "hflip": 0.5}),
    (
        [n for n in NAMES if n.startswith("cifar100")],
        {"img_size": 32, "test resize": 32, "crop": "padded", "padding": 4},
    ),
    ([n for n in NAMES if n.startswith("cifar100")], {"model": "resnet18_cifar", "dataset": ""}),
    # not in the paper: more classes than a GPU should hold
    (["faces-resnet50-grassmann"], {"model": "resnet50", "img_size": 112, "test resize": 112, "crop": "none"}),
    (["imagenet21k-resnet50d-grassmann"], {"model": "resnet50d", "epochs": 30, "head.gamma": "auto", "test crop": 224}),
    # timm's names of the architectures
    (both("resnext50"), {"model": "resnext50_32x4d"}),
    (both("vgg13bn"), {"model": "vgg13_bn"}),
    (both("swin-t"), {"model": "swin_tiny_patch4_window7_224"}),
    (both("deit3-s"), {"model": "deit3_small_patch16_224"}),
    *((both(model), {"model": model}) for model in ("resnet50", "resnet50d", "resnet101d", "resnet152d")),
]


def setting(recipe, field):
    """A field, a part of a field, or what follows from several of them."""
    size = recipe.test_size or recipe.img_size
    if field == "test crop":
        return size
    if field == "test resize":
        return math.floor(size / recipe.crop_pct)  # as timm has it
    if field == "head_lr" and recipe.head_lr is None:
        return recipe.lr if recipe.opt == "sgd" else 0.1
    name, _, part = field.partition(".")
    return getattr(recipe, name)[part] if part else getattr(recipe, name)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_has_the_settings_of_the_authors(name):
    recipe = load_recipe(name)
    facts = [(field, value) for names, facts in SETTINGS if name in names for field, value in facts.items()]
    assert [(field, setting(recipe, field)) for field, _ in facts] == facts
    assert facts or name in ("digits-grassmann", "finetune")


def test_the_table_speaks_about_recipes_that_exist():
    assert {name for names, _ in SETTINGS for name in names} <= set(NAMES)


# --- the files


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_has_a_description_of_one_line_and_names_a_row_of_the_paper_or_none(name):
    recipe = load_recipe(name)
    assert recipe.description
    assert "\n" not in recipe.description
    assert recipe.paper == ("" if name.startswith(("cifar100", "digits", "finetune", "faces", "imagenet21k")) else name)
    assert not recipe.paper or paper.figures(recipe.paper)["top1"] > 70


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_says_only_what_differs_from_its_base(file):
    own = yaml.safe_load(file.read_text())
    base = own.pop("base", None)
    if base is None:
        return
    inherited = read_settings(base)
    for key, value in own.items():
        if isinstance(value, dict) and value.get("name") in (None, inherited.get(key, {}).get("name")):
            same = [part for part, option in value.items() if inherited.get(key, {}).get(part) == option]
            assert not same, f"{file.name} repeats {key}.{same[0]} of {base}"
        else:
            assert key not in inherited or inherited[key] != value, f"{file.name} repeats {key} of {base}"


def test_a_file_that_is_only_a_base_is_not_listed_and_is_used():
    bases = {yaml.safe_load(file.read_text()).get("base") for file in FILES}
    hidden = {file.name.removesuffix(".yaml") for file in FILES if file.name.startswith("_")}
    assert hidden
    assert hidden <= bases
    assert not hidden & set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_optimizer_takes_what_a_recipe_gives_it_and_the_head_learns_by_it(name):
    recipe = load_recipe(name)
    options = {key: value for key, value in recipe.head.items() if key != "name"}
    model = nn.Sequential(nn.Linear(8, 64), create_head(recipe.head["name"], 64, 4, **options))
    optimizer = grassy.make_optimizer(
        model,
        recipe.opt,
        recipe.lr,
        recipe.head_lr,
        weight_decay=recipe.weight_decay,
        retraction=recipe.retraction,
        **recipe.opt_kwargs,
    )
    before = model[1].weight.detach().clone()
    grassy.classification_loss(model, torch.randn(6, 8), torch.arange(6) % 4).backward()
    optimizer.step()
    assert not torch.equal(model[1].weight, before)


def test_timm_knows_every_interpolation_that_a_recipe_may_name():
    import_timm()
    from timm.data.transforms import str_to_interp_mode, str_to_pil_interp

    names = list(CHOICES["interpolation"])
    assert [str_to_interp_mode(name).value for name in names] == names
    assert [str_to_pil_interp(name).name.lower() for name in names] == names


def test_timm_knows_the_models_and_the_augmentations_of_all_recipes():
    timm = import_timm()
    from timm.data import create_transform

    recipes = [load_recipe(name) for name in NAMES]
    assert all(timm.is_model(model) for model in {recipe.model for recipe in recipes})
    for policy in {recipe.aa for recipe in recipes} - {""}:
        create_transform(224, is_training=True, auto_augment=policy)


def test_names_are_sorted_with_numbers_as_numbers():
    assert NAMES.index("resnet50d-grassmann-k4") < NAMES.index("resnet50d-grassmann-k16")
