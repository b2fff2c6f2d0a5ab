"""Recipes against the authors' settings, files against their bases, figures against the paper, and the listing."""

import math
import re
from importlib import resources
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from torch import nn

import grassy
from grassy import paper
from grassy.cli import main
from grassy.heads import create_head
from grassy.training import listing
from grassy.training.checks import CHOICES
from grassy.training.models import build_model, import_timm
from grassy.training.recipe import Recipe, load_recipe, read_settings, recipe_names

FILES = sorted((resources.files("grassy") / "recipes").iterdir(), key=lambda file: file.name)
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
    (rsb("a2", "a3", heads=["linear", "grassmann"]), {"smoothing": 0.0, "img_size": 224, "test resize": 256}),
    (FIXRES, {"img_size": 176, "test resize": 232, "test crop": 224, "smoothing": 0.1}),
    # Test: resize 256, crop 224; DeiT3 at 224.
    (both("resnet50", "resnet50d", "resnet101d", "resnet152d", "resnext50", "vgg13bn", "swin-t"), {"test resize": 256}),
    (both("resnet50", "resnet50d", "resnet101d", "resnet152d", "resnext50", "vgg13bn", "swin-t"), {"test crop": 224}),
    (both("deit3-s"), {"test resize": 224, "test crop": 224}),
    (both("swin-t", "deit3-s") + rsb("a1", "a2", "a3"), {"interpolation": "bicubic"}),
    # gamma 25, k 8 unless stated
    ([n for n in NAMES if "grassmann" in n and not re.search("gamma|digits|unnormalized", n)], {"head.gamma": 25}),
    ([n for n in NAMES if "grassmann" in n and not re.search(r"-k\d|digits", n)], {"head.k": 8}),
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
    (["resnet50d-finetune-all-grassmann"], {**PLAIN, **COSINE, "freeze": False, "initial_checkpoint": ""}),
    # not in the paper: one budget for all heads on CIFAR-100
    ([n for n in NAMES if n.startswith("cifar100")], {"batch_size": 256, "epochs": 60, **SGD, "weight_decay": 1e-3}),
    ([n for n in NAMES if n.startswith("cifar100")], {**COSINE, "warmup_epochs": 1, "warmup_lr": 0.0, "hflip": 0.5}),
    (
        [n for n in NAMES if n.startswith("cifar100")],
        {"img_size": 32, "test resize": 32, "crop": "padded", "padding": 4},
    ),
    ([n for n in NAMES if n.startswith("cifar100")], {"model": "resnet18_cifar", "dataset": ""}),
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
    assert facts or name == "digits-grassmann"


def test_the_table_speaks_about_recipes_that_exist():
    assert {name for names, _ in SETTINGS for name in names} <= set(NAMES)


# --- the files


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_has_a_description_of_one_line_and_names_a_row_of_the_paper_or_none(name):
    recipe = load_recipe(name)
    assert recipe.description
    assert "\n" not in recipe.description
    assert recipe.paper == ("" if name.startswith(("cifar100", "digits")) else name)
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

    for name in CHOICES["interpolation"]:
        str_to_interp_mode(name), str_to_pil_interp(name)


def test_timm_knows_the_models_and_the_augmentations_of_all_recipes():
    timm = import_timm()
    from timm.data import create_transform

    recipes = [load_recipe(name) for name in NAMES]
    assert all(timm.is_model(model) for model in {recipe.model for recipe in recipes})
    for policy in {recipe.aa for recipe in recipes} - {""}:
        create_transform(224, is_training=True, auto_augment=policy)


def test_names_are_sorted_with_numbers_as_numbers():
    assert NAMES.index("resnet50d-grassmann-k4") < NAMES.index("resnet50d-grassmann-k16")


# --- reading


@pytest.fixture
def write(tmp_path):
    def write(text, name="own.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_a_users_file_may_have_a_base_in_the_package_and_others_beside_it(write):
    write("base: resnet50d-grassmann\nepochs: 7\nhead: {k: 3}\n", "first.yaml")
    recipe = load_recipe(write("base: first.yaml\nlr: 0.5\n"))
    assert (recipe.model, recipe.epochs, recipe.lr) == ("resnet50d", 7, 0.5)
    assert recipe.head == {"name": "grassmann", "k": 3, "gamma": 25}
    assert recipe.description == recipe.paper == ""  # the base's would not be true of it


@pytest.mark.parametrize(
    ("overrides", "field", "value"),
    [
        (["head.k=16"], "head", {"name": "grassmann", "k": 16, "gamma": 25}),
        (["head.name=arcface"], "head", {"name": "arcface"}),
        (["head.name=grassmann"], "head", {"name": "grassmann", "k": 8, "gamma": 25}),
        (["head={k: 2, dropout: 0.1}"], "head", {"name": "grassmann", "k": 2, "gamma": 25, "dropout": 0.1}),
        (["lr=1e-3"], "lr", 1e-3),
        (["lr=1"], "lr", 1.0),
        (["head_lr=null"], "head_lr", None),
        (["mean=[0, 0.5, 1]"], "mean", (0.0, 0.5, 1.0)),
        (["opt_kwargs.nesterov=true"], "opt_kwargs", {"momentum": 0.9, "nesterov": True}),
        (["opt_kwargs.dampening=1e-3"], "opt_kwargs", {"momentum": 0.9, "dampening": 1e-3}),
        (["opt=adamw"], "opt_kwargs", {}),
        (["opt=adamw", "opt_kwargs.eps=1e-6"], "opt_kwargs", {"eps": 1e-6}),
        (["opt=sgd"], "opt_kwargs", {"momentum": 0.9}),
        (["aa="], "aa", ""),
        (["torchcompile=off"], "torchcompile", "off"),
        (["torchcompile=on"], "torchcompile", "on"),
        (["amp=off"], "amp", "off"),
        (["epochs=3", "epochs=4"], "epochs", 4),
    ],
)
def test_overrides_change_a_field_or_a_part_of_it(overrides, field, value):
    got = getattr(load_recipe("resnet50d-grassmann", overrides), field)
    assert (got, type(got)) == (value, type(value))


def test_a_file_that_changes_the_optimizer_and_its_options_keeps_none_of_the_base(write):
    recipe = load_recipe(write("base: _imagenet\nopt: adamw\nopt_kwargs: {eps: 1e-7}\n"))
    assert recipe.opt_kwargs == {"eps": 1e-7}


def test_a_number_without_a_point_is_a_number_wherever_it_stands(write):
    recipe = load_recipe(write("lr: 1e-3\nweight_decay: 5E-2\nhead: {name: softtriple, margin: 1e-2}\n"))
    assert (recipe.lr, recipe.weight_decay, recipe.head["margin"]) == (1e-3, 5e-2, 1e-2)
    assert load_recipe(write("description: 1e-3 is in this text\n")).description == "1e-3 is in this text"


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("epoch: 3", ValueError, "own.yaml: a recipe has no field 'epoch', did you mean 'epochs'?"),
        ("on: 3", ValueError, "a recipe has no field 'True'"),
        ("epochs: ten", TypeError, "epochs must be an integer, got 'ten'"),
        ("epochs: 1.5", TypeError, "epochs must be an integer, got 1.5"),
        ("epochs: true", TypeError, "epochs must be an integer, got True"),
        ("epochs: 0", ValueError, "epochs must be at least 1"),
        ("lr: fast", TypeError, "lr must be a number, got 'fast'"),
        ("lr: .nan", TypeError, "lr must be a number"),
        ("lr: yes", TypeError, "lr must be a number, got True"),
        ("lr: -1", ValueError, "lr must not be negative"),
        ("model: 50", TypeError, "model must be a string, got 50"),
        ("freeze: 1", TypeError, "freeze must be true or false, got 1"),
        ("mean: 0.5", TypeError, "mean must be a list of numbers, got 0.5"),
        ("mean: [a, b, c]", TypeError, "mean must be a number, got 'a'"),
        ("head: grassmann", TypeError, "head must be a mapping, got 'grassmann'"),
        ("loss: bec", ValueError, "one of cross-entropy, bce, bce-sum, got 'bec', did you mean 'bce'?"),
        ("head: {name: grasman}", ValueError, "unknown head 'grasman', did you mean 'grassmann'?"),
        ("head: {name: 3}", TypeError, "the name of a head must be a string, got 3"),
        ("head: {name: grassmann, gama: 3}", ValueError, "has no option 'gama', did you mean 'gamma'?"),
        ("head: {name: linear, k: 3}", ValueError, "head 'linear' has no option 'k'"),
        ("head: {name: grassmann, k: eight}", ValueError, "k must be a positive integer, got 'eight'"),
        ("head: {name: arcface, margin: 4}", ValueError, "margin must lie in"),
        ("head: {name: cosine, scale: big}", TypeError, "head 'cosine' with {'scale': 'big'}"),
        ("warmup_epochs: 100", ValueError, "must be fewer than epochs 100; warmup_epochs=0 does without"),
        ("mean: [0.5]", ValueError, "mean must be three numbers, of red, green and blue, got [0.5]"),
        ("std: [0.5, 0.5]", ValueError, "std must be three numbers, of red, green and blue, got [0.5, 0.5]"),
        ("std: [0.5, 0, 0.5]", ValueError, "std must be positive, got [0.5, 0.0, 0.5]"),
        ("interpolation: bicubik", ValueError, "got 'bicubik', did you mean 'bicubic'?"),
        ("interpolation: random", ValueError, "interpolation must be one of nearest, bilinear"),
        ("mixup: -0.1", ValueError, "mixup must not be negative, got -0.1"),
        ("cutmix: -1", ValueError, "cutmix must not be negative, got -1.0"),
        ("val_batch_size: 0", ValueError, "val_batch_size must be at least 1, got 0"),
        ("test_size: 0", ValueError, "test_size must be at least 1, got 0"),
        ("num_classes: -2", ValueError, "num_classes must be at least 1, got -2"),
        ("clip_grad: 0", ValueError, "clip_grad must be positive, got 0.0"),
        ("layer_decay: 1.1", ValueError, "layer_decay must lie in (0, 1], got 1.1"),
        ("decay_rate: 0", ValueError, "decay_rate must lie in (0, 1], got 0.0"),
        ("crop_pct: 0", ValueError, "crop_pct must lie in (0, 1], got 0.0"),
        ("scale: [0.5]", ValueError, "scale must be two positive numbers, the smaller first, got [0.5]"),
        ("scale: [1, 0.08]", ValueError, "scale must be two positive numbers, the smaller first, got [1.0, 0.08]"),
        ("ratio: [0, 1]", ValueError, "ratio must be two positive numbers"),
        ("seed: 9223372036854775808", ValueError, "seed must be less than 2**63, got 9223372036854775808"),
        ("model_ema_decay: 1", ValueError, "model_ema_decay must lie in [0, 1), got 1.0"),
        ("decay_milestones: [30]", ValueError, "decay_milestones are for sched step, not cosine"),
        ("- a list", ValueError, "own.yaml must hold keys and values, not a list"),
        ("lr: [1", ValueError, "own.yaml is not YAML"),
        ("base: resnet50d-grasmann", ValueError, "no recipe 'resnet50d-grasmann' .the base of .*did you mean"),
        ("base: 3", TypeError, "base must be the name or the file of a recipe, got 3"),
        ("base: own.yaml", ValueError, "a recipe is among its own bases"),
        ("base: ../{folder}/own.yaml", ValueError, "a recipe is among its own bases"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_when_it_is_read(write, tmp_path, text, error, message):
    pattern = message if ".*" in message else re.escape(message)
    with pytest.raises(error, match=pattern):
        load_recipe(write(text.replace("{folder}", tmp_path.name)))


def test_files_that_are_bases_of_each_other_are_named(write):
    first = write("base: second.yaml", "first.yaml")
    write("base: first.yaml", "second.yaml")
    with pytest.raises(ValueError, match=r"first\.yaml -> .*second\.yaml -> .*first\.yaml"):
        load_recipe(first)


def test_the_folder_of_a_run_is_taken_for_the_recipe_in_it(tmp_path, monkeypatch):
    run = tmp_path / "runs" / "digits-grassmann"
    run.mkdir(parents=True)
    with pytest.raises(ValueError, match=r"digits-grassmann is a folder without args\.yaml"):
        load_recipe(run)
    recipe = load_recipe("digits-grassmann", ["epochs=3"])
    (run / "args.yaml").write_text(yaml.safe_dump(recipe.to_dict()))
    assert load_recipe(run) == load_recipe(str(run)) == recipe
    assert load_recipe(run, ["epochs=4"]).epochs == 4
    monkeypatch.chdir(run.parent)
    assert load_recipe("digits-grassmann").epochs == 12  # the package's recipe, not what happens to lie here


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        load_recipe(tmp_path / "none.yaml")
    assert caught.value.filename == str(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["epochs"], ValueError, "key=value, got 'epochs'"),
        (["epcohs=3"], ValueError, "no field 'epcohs', did you mean 'epochs'?"),
        (["lr.k=3"], ValueError, "lr has no parts, got 'lr.k'"),
        (["lr="], TypeError, "lr must be a number, got None"),
        (["lr=[1"], ValueError, "lr=[1 is not YAML"),
        (["head.kk=3"], ValueError, "head 'grassmann' has no option 'kk'"),
    ],
)
def test_what_is_wrong_in_an_override_is_said(overrides, error, message):
    with pytest.raises(error, match=re.escape(message)):
        load_recipe("resnet50d-grassmann", overrides)


def test_an_unknown_recipe_gets_the_nearest_name():
    with pytest.raises(ValueError, match="no recipe 'resnet50d-grasmann', did you mean 'resnet50d-grassmann'"):
        load_recipe("resnet50d-grasmann")


def test_reading_a_recipe_draws_no_random_numbers():
    state = torch.get_rng_state()
    load_recipe("resnet50d-grassmann")
    assert torch.equal(torch.get_rng_state(), state)


# --- the figures


def test_an_unknown_row_gets_the_nearest_name():
    with pytest.raises(ValueError, match="no row 'resnet50d-grasmann', did you mean 'resnet50d-grassmann'"):
        paper.figures("resnet50d-grasmann")


def test_figures_are_the_callers_own_and_say_where_they_are_from():
    row = paper.figures("resnet50d-grassmann")
    row["svm"]["pets"] = 0
    assert paper.figures("resnet50d-grassmann")["svm"]["pets"] == 91.85
    for key in ROWS:
        row = paper.figures(key)
        numbers = set(row) - {"name", "from", "corrections"}
        assert row["name"]
        assert numbers == {name for names in row["from"].values() for name in names}
        assert set(row.get("corrections", {})) <= numbers


def test_every_accuracy_of_the_paper_has_a_recipe():
    assert {key for key in ROWS if "top1" in paper.figures(key)} == {load_recipe(name).paper for name in NAMES} - {""}


@pytest.mark.parametrize("key", [key for key in ROWS if "svm" in paper.figures(key)])
@pytest.mark.parametrize("method", ["svm", "knn"])
def test_averages_are_the_means_of_their_six_columns(key, method):
    figures = paper.figures(key)[method]
    average = figures.pop("average")
    decimals = 1 if method == "svm" and key.startswith(("swin", "deit3")) else 2
    assert list(figures) == ["cifar10", "cifar100", "food101", "pets", "cars", "flowers"]
    assert abs(sum(figures.values()) / 6 - average) <= 0.5 * 10**-decimals + 1e-9  # half a unit of the last digit


@pytest.mark.parametrize("key", [key for key in ROWS if "epochs" in paper.figures(key)])
def test_batch_and_epochs_of_a_recipe_are_those_of_the_papers_table(key):
    recipe, row = load_recipe(key), paper.figures(key)
    assert (recipe.batch_size, recipe.epochs) == (row["batch_size"], row["epochs"])


def test_known_mistakes_of_the_paper_are_corrected_beside_its_own_figures():
    corrected = {
        (key, name): (paper.figures(key)[name], correction["value"])
        for key in ROWS
        for name, correction in paper.figures(key).get("corrections", {}).items()
    }
    assert corrected == {
        ("resnet50d-rsb-a3-grassmann", "top1"): (79.88, 79.64),
        ("dataset-cifar100", "classes"): (10, 100),
        ("dataset-pets", "test"): (3369, 3669),
        ("dataset-flowers", "train"): (6552, 2040),
        ("dataset-flowers", "test"): (818, 6149),
    }


TEX = Path(__file__).parents[2] / "shared" / "paper" / "gcr-iccv2023.tex"
needs_paper = pytest.mark.skipif(not TEX.exists(), reason=f"the source of the paper is not at {TEX}")

GCR = [f"resnet50d-grassmann{k}" for k in ("-k1", "-k4", "", "-k16", "-k32")]
LOSSES = [f"resnet50d-{loss}" for loss in ("linear", "cosine", "label-smoothing", "dropout", "sigmoid")]
HEADS = ("linear", "cosine", "arcface", "multi", "softtriple", "subcenter-arcface", "grassmann")
ARCHITECTURES = ("resnet50", "resnet50d", "resnet101d", "resnet152d", "resnext50", "vgg13bn", "swin-t", "deit3-s")
DATASETS = ("cifar10", "cifar100", "food101", "pets", "cars", "flowers")
UNNORMALIZED = [f"resnet50d-grassmann{k}" for k in ("-k1-unnormalized", "-k1", "-unnormalized", "")]


def accuracies(key):
    row = paper.figures(key)
    return [row["top1"], row["top5"]]


def analysis(key):
    row = paper.figures(key)
    return [row["variability"], row["r2"], *row["svm"].values()]


def sizes_and_accuracies(key):
    row = paper.figures(key)
    return [row["feature_dim"], row["batch_size"], row["epochs"], *accuracies(key)]


#: Label, rows, columns that hold the numbers, and the numbers of a row as paper.json has them.
TABLES = [
    ("tab:softtriple", [f"resnet50d-{head}" for head in HEADS], (1, 2), accuracies),
    ("tab:arch", [f"{name}-linear" for name in ARCHITECTURES], (1, 2, 3, 7, 8), sizes_and_accuracies),
    ("tab:arch", [f"{name}-grassmann" for name in ARCHITECTURES], (1, 2, 3, 11, 12), sizes_and_accuracies),
    ("tab:transfer", LOSSES + GCR, range(2, 13), lambda k: accuracies(k) + analysis(k)),
    ("tab:transfer2", both("swin-t", "deit3-s"), range(1, 10), analysis),
    ("tab:gamma", [f"resnet50d-grassmann{gamma}" for gamma in ("-gamma20", "", "-gamma30")], (3, 4), accuracies),
    ("tab:renormalize", UNNORMALIZED, (3, 4), accuracies),
    ("tab:alg1variant", ["resnet50d-grassmann", "resnet50d-grassmann-qf"], (3, 4), accuracies),
    ("tab:finetune", [f"resnet50d-finetune-{part}-grassmann" for part in ("head", "all")], (4, 5), accuracies),
    (
        "tab:svdtime",
        [f"time-k{k}" for k in (1, 2, 4, 8, 16, 32)],
        (1, 2, 3, 4),
        lambda k: [*paper.figures(k)["svd_ms"].values(), *paper.figures(k)["qr_ms"].values()],
    ),
    (
        "tab:trans_data",
        [f"dataset-{name}" for name in DATASETS],
        (1, 2),
        lambda k: [paper.figures(k)[name] for name in ("classes", "train", "test")],
    ),
    (
        "tab:svmhyper",
        LOSSES + GCR + both("swin-t", "deit3-s"),
        range(2, 8),
        lambda k: [*paper.figures(k)["svm_C"].values()],
    ),
    (
        "tab:knntransfer",
        LOSSES + GCR + both("swin-t", "deit3-s"),
        range(2, 9),
        lambda k: [*paper.figures(k)["knn"].values()],
    ),
]


def printed(label, columns):
    """The numbers of a table's rows in the source of the paper, without those of gains, headings and other columns."""
    text = TEX.read_text()
    body = text[text.index(f"\\label{{{label}}}") :].split("\\end{tabular}")[0].split("\\begin{tabular}")[1]
    body = re.sub(r"\{\\footnotesize[^&]*?\}(?=\s*[&\\])", "", body)  # (↑1.19)
    for line in body.split("\\\\"):
        cells = [re.findall(r"\d+(?:\.\d+)?", re.sub(r"\\c?midrule\S*", "", cell)) for cell in line.split("&")]
        if len(cells) > max(columns) and all(cells[column] for column in columns) and "Top" not in line:
            yield [float(number) for column in columns for number in cells[column]]


@needs_paper
@pytest.mark.parametrize(("label", "keys", "columns", "numbers"), TABLES, ids=[table[0] for table in TABLES])
def test_the_figures_are_those_of_the_papers_tables(label, keys, columns, numbers):
    assert [numbers(key) for key in keys] == list(printed(label, columns))


@needs_paper
def test_the_figures_of_the_papers_text_are_in_it():
    text = " ".join(TEX.read_text().split())
    strategies = [
        ", ".join(f"\\({paper.figures(f'resnet50d-rsb-{a}-{head}')['top1']:.2f}\\%\\)" for a in ("a3", "a2", "a1"))
        for head in ("linear", "grassmann", "grassmann-fixres")
    ]
    for numbers in strategies:
        assert numbers in text.replace(", and", ",").replace("\\) and", "\\),")
    top1, top5 = accuracies("resnet50d-grassmann-plain-sgd")
    assert f"top-1 \\({top1:.2f}\\%\\) and top-5 \\({top5:.2f}\\%\\)" in text
    drift = paper.figures("drift")
    assert list(drift["after_iterations"]) == ["100", "1000", "5000"]
    assert "is {:.1e}, {:.1e} and {:.1e}".format(*drift["after_iterations"].values()).replace("e-0", "e-") in text
    assert f"After 50 epochs, the error accumulates to {drift['after_epochs']['50']}" in text
    overhead = paper.figures("time-iteration")["overhead_percent"]
    assert f"\\({overhead['deit3-s']}\\%\\) (Deit3-S) to \\({overhead['resnet50d']}\\%\\) (ResNet50-D)" in text
    assert "{}ms to {}ms".format(*paper.figures("time-decomposition")["overhead_ms"]) in text


# --- the listing


def test_recipes_are_listed_by_part_of_a_name_or_by_wildcards():
    assert [row.name for row in listing.list_recipes()] == NAMES
    assert {row.name for row in listing.list_recipes("swin")} == set(both("swin-t"))
    assert [row.name for row in listing.list_recipes("*-k?")][-1] == "resnet50d-grassmann-k4"
    assert listing.list_recipes("Swin") == listing.list_recipes("SWIN-*") == listing.list_recipes("swin")
    with pytest.raises(ValueError, match="no recipe matches 'swin-t-liner', did you mean 'swin-t-linear'"):
        listing.list_recipes("swin-t-liner")


def test_a_row_has_the_papers_figures_where_there_are_any():
    (row,) = listing.list_recipes("swin-t-grassmann")
    assert row[:5] == ("swin-t-grassmann", "swin_tiny_patch4_window7_224", "grassmann k=8", 300, 1024)
    assert row[5:8] == (81.63, 95.77, 83.4)
    (row,) = listing.list_recipes("digits")
    assert row.cells()[5:8] == ("-", "-", "-")


def test_lines_are_aligned_where_there_is_no_terminal(capsys):
    assert main(["recipes", "rsb-a3"]) == 0
    *lines, note = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert "are the paper's" in note
    assert lines[0].startswith("recipe ")
    assert len({line.index(word) for line, word in zip(lines, ("model", *["resnet50d "] * 3), strict=True)}) == 1
    assert len({re.search(r"top-1|\d\d\.\d\d", line).end() for line in lines}) == 1


def terminal(width):
    return Console(force_terminal=True, width=width, color_system=None)


@pytest.mark.parametrize("width", [60, 80, 100, 120, 250])
def test_a_table_fits_the_terminal_and_cuts_nothing_but_the_description(width):
    text = listing.table("", terminal(width))
    assert all(len(line) <= width for line in text.splitlines())
    assert all(line.rstrip().endswith("…") for line in text.splitlines() if "…" in line)
    for name in NAMES:
        assert f" {name} " in text
    assert "78.04" in text
    assert ("description" in text) == (width >= 80)
    assert ("top-5" in text) == (width != 80)  # it makes way for the description, where that is of use
    assert ("…" in text) == (80 <= width < 250)
    assert "data sets" not in text  # the command says below what the numbers are


def test_columns_without_a_number_go_before_those_that_say_something():
    text = listing.table("digits", terminal(80))
    assert "top-1" not in text
    assert "epochs" in text
    assert re.search("scikit-learn.{9,}", text)
    assert "top-1" in listing.table("digits", terminal(200))


@pytest.mark.parametrize("name", ["resnet50-grassmann", "swin-t-grassmann", "digits-grassmann"])
def test_a_recipe_shown_in_full_is_a_file_that_loads_as_the_same(name, write, capsys):
    assert main(["recipes", name, "--show"]) == 0
    text = capsys.readouterr().out
    assert set(yaml.safe_load(text)) == set(vars(Recipe()))
    assert load_recipe(write(text)) == load_recipe(name)


def test_an_unknown_recipe_to_show_is_one_line_and_exit_code_2(capsys):
    assert main(["recipes", "swin-t-liner", "--show"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "did you mean 'swin-t-linear'?" in error


def test_showing_no_recipe_in_particular_is_one_clear_line(capsys):
    assert main(["recipes", "--show"]) == 2
    assert capsys.readouterr().err.startswith("grassy: error: which recipe is to be shown? give its name")


def test_milestones_follow_the_number_of_epochs_unless_they_are_given(tmp_path):
    assert load_recipe("resnet50-grassmann").decay_milestones == (30, 60, 90)
    assert load_recipe("resnet50-grassmann", ["epochs=10"]).decay_milestones == (3, 6, 9)
    assert load_recipe("resnet50-grassmann", [], {"epochs": 10}).decay_milestones == (3, 6, 9)
    assert load_recipe("resnet50-grassmann").changed({"epochs": 200}).decay_milestones == (60, 120, 180)
    given = load_recipe("resnet50-grassmann", ["decay_milestones=[5]"], {"epochs": 10})
    assert (given.decay_milestones, given.epochs) == ((5,), 10)
    (tmp_path / "own.yaml").write_text("base: resnet50-grassmann\nepochs: 10\n")
    assert load_recipe(tmp_path / "own.yaml").decay_milestones == (3, 6, 9)
    assert load_recipe("resnet50-grassmann", ["sched=cosine"]).decay_milestones == ()
    with pytest.raises(ValueError, match="decay_milestones are for sched step"):
        load_recipe("resnet50-grassmann", ["sched=cosine", "decay_milestones=[5]"])
    with pytest.raises((ValueError, TypeError), match="epochs"):
        load_recipe("resnet50-grassmann", ["epochs=0"])


def test_a_transformer_for_images_of_another_size_is_refused_in_one_line():
    recipe = load_recipe("deit3-s-grassmann", ["img_size=32"])
    with pytest.raises(
        ValueError, match=r"takes images of 224 pixels, but img_size is 32: .*model_kwargs\.img_size=32"
    ):
        build_model(recipe, 3)
    recipe = load_recipe("deit3-s-grassmann", ["img_size=32", "model_kwargs.img_size=32", "test_size=48"])
    with pytest.raises(ValueError, match="takes images of 32 pixels, but test_size is 48"):
        build_model(recipe, 3)
