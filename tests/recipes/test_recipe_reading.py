"""Reading recipes: bases, overrides, and what is refused."""

import re

import pytest
import torch
import yaml

from grassy.cli import main
from grassy.recipes.files import load_recipe
from grassy.recipes.recipe import Recipe
from grassy.runs.folder import check_same_run


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


def test_a_warm_up_takes_at_most_a_quarter_of_a_run_that_is_shortened():
    recipe = load_recipe("cifar100-resnet18-linear")
    assert recipe.warmup_epochs == 1
    for epochs, warmup in ((1, 0.25), (2, 0.5), (4, 1), (20, 1), (recipe.epochs, 1)):
        assert load_recipe("cifar100-resnet18-linear", [f"epochs={epochs}"]).warmup_epochs == warmup
    assert load_recipe("swin-t-grassmann", ["epochs=25"]).warmup_epochs == 6.25
    with pytest.raises(ValueError, match="must be fewer than epochs 1"):
        load_recipe("cifar100-resnet18-linear", ["epochs=1", "warmup_epochs=1"])


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
        (["opt_kwargs.eps=1e-6", "opt=adamw"], "opt_kwargs", {"eps": 1e-6}),
        (["head.dropout=0.3", "head.name=cosine"], "head", {"name": "cosine", "dropout": 0.3}),
        (["head.dropout=0.3", "head={name: cosine}"], "head", {"name": "cosine", "dropout": 0.3}),
        (["model_kwargs.drop_rate=0.5", "model=resnet18"], "model_kwargs", {"drop_rate": 0.5}),
        (["head.name=cosine", "head.scale=4", "head.name=linear"], "head", {"name": "linear"}),
        (["head.k=4", "head={name: grassmann, k: 8}"], "head", {"name": "grassmann", "k": 8}),
        (["head={dropout: 0.1}", "head.name=cosine"], "head", {"name": "cosine", "dropout": 0.1}),
        (["opt=adamw", "opt_kwargs={eps: 1e-3}", "opt=sgd"], "opt_kwargs", {"momentum": 0.9}),
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
        ("bse: digits-grassmann", ValueError, "a recipe has no field 'bse', did you mean 'base'?"),
        ("head: {name: grasman}", ValueError, "unknown head 'grasman', did you mean 'grassmann'?"),
        ("head: {name: 3}", TypeError, "the name of a head must be a string, got 3"),
        ("head: {name: grassmann, gama: 3}", ValueError, "has no option 'gama', did you mean 'gamma'?"),
        ("head: {name: linear, k: 3}", ValueError, "head 'linear' has no option 'k'"),
        ("head: {name: grassmann, k: eight}", ValueError, "k must be a positive integer, got 'eight'"),
        ("head: {name: arcface, margin: 4}", ValueError, "margin must lie in"),
        ("head: {name: cosine, scale: big}", ValueError, "head 'cosine' with {'scale': 'big'}"),
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
        ("head: {name: grassmann, device: cuda}", ValueError, "head.device cannot be set"),
        ("layer_decay: 1.1", ValueError, "layer_decay must lie in (0, 1], got 1.1"),
        ("decay_rate: 0", ValueError, "decay_rate must lie in (0, 1], got 0.0"),
        ("crop_pct: 0", ValueError, "crop_pct must be at least 0.1, got 0.0"),
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


def test_the_folder_of_a_pretrained_run_is_a_recipe_if_the_user_says_pretrained_again(tmp_path):
    recipe = load_recipe("resnet50d-grassmann", ["model_kwargs.pretrained=true"])
    (tmp_path / "args.yaml").write_text(yaml.safe_dump(recipe.to_dict()))
    assert load_recipe(tmp_path, ["model_kwargs.pretrained=true"]) == recipe
    assert load_recipe(tmp_path, fields={"model_kwargs": {"pretrained": True}}) == recipe
    with pytest.raises(ValueError, match=r"give pretrained=true"):
        load_recipe(tmp_path)


def test_the_direction_of_older_recipes_loads_unless_it_is_spectral(write):
    recipe = load_recipe("digits-grassmann")
    assert load_recipe(write("base: digits-grassmann\ndirection: gradient")).to_dict() == recipe.to_dict() | {
        "description": ""
    }
    assert Recipe(**recipe.to_dict(), direction="gradient") == recipe
    assert "direction" not in recipe.to_dict()
    with pytest.raises(ValueError, match="direction must be 'gradient', since spectral steps were removed"):
        load_recipe(write("base: digits-grassmann\ndirection: spectral"))


def test_a_run_with_spectral_steps_is_not_resumed_without_them(tmp_path):
    recipe = load_recipe("digits-grassmann")
    check_same_run({"recipe": {"direction": "gradient"}}, recipe, 1, None, None, tmp_path)
    with pytest.raises(ValueError, match="belongs to a run with direction=spectral, not gradient"):
        check_same_run({"recipe": {"direction": "spectral"}}, recipe, 1, None, None, tmp_path)


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


@pytest.mark.parametrize("name", ["resnet50-grassmann", "swin-t-grassmann", "digits-grassmann"])
def test_a_recipe_shown_in_full_is_a_file_that_loads_as_the_same(name, write, capsys):
    assert main(["recipes", name, "--show"]) == 0
    text = capsys.readouterr().out
    assert set(yaml.safe_load(text)) == set(vars(Recipe()))
    assert load_recipe(write(text)) == load_recipe(name)
