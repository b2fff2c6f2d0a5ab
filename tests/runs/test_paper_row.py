"""The paper's figures stand beside a run of that row, unchanged and on that data set, and beside no other."""

import dataclasses

import pytest

from grassy.inference.feature_models import open_model
from grassy.recipes.changes import with_changes
from grassy.recipes.files import load_recipe
from grassy.report.page import open_run
from grassy.runs.paper_row import paper_row
from grassy.runs.weights import BEST, Description, read_description, read_weights, save_weights
from grassy.transfer import protocol
from training_cases import tiny_run

IMAGENET = ["n01440764", *(f"n{number:08d}" for number in range(1, 1000))]


def described(*overrides, names=IMAGENET, recipe="resnet50-grassmann", **fields):
    settings = load_recipe(recipe, overrides, fields).to_dict()
    return Description("resnet50", len(names), settings["head"], class_names=names, recipe=settings)


def test_a_run_of_a_row_as_it_is_on_imagenet_has_that_row():
    assert paper_row(described()) == "resnet50-grassmann"
    assert paper_row(described("workers=8", "seed=3", "amp=off", "dataset=hfds/imagenet-1k")) == "resnet50-grassmann"
    assert paper_row(described(names=["tench, Tinca tinca", *IMAGENET[1:]])) == "resnet50-grassmann"


def test_weights_to_start_from_belong_to_a_row_that_is_fine_tuned_and_to_no_other():
    given = {"initial_checkpoint": "softmax.safetensors"}
    row = "resnet50d-finetune-all-grassmann"
    assert paper_row(described(recipe=row, **given)) == row
    assert paper_row(described(**given)) == ""


@pytest.mark.parametrize("override", ["epochs=10", "head.k=4", "model=resnet18", "lr=0.05", "img_size=64"])
def test_a_changed_recipe_has_neither_the_papers_row_nor_its_description(override):
    recipe = load_recipe("resnet50-grassmann", [override])
    assert (recipe.paper, recipe.description) == ("", "")
    assert paper_row(described(override)) == ""


def test_what_only_says_how_a_recipe_runs_keeps_its_description():
    original = load_recipe("resnet50-grassmann")
    for changed in (load_recipe("resnet50-grassmann", ["workers=2", "lr=0.1"]), with_changes(original, {"seed": 5})):
        assert (changed.paper, changed.description) == (original.paper, original.description)
    assert with_changes(original, {"epochs": 3, "description": "mine"}).description == "mine"


def test_an_unchanged_recipe_on_other_classes_has_no_row():
    assert paper_row(described(names=["cat", "dog"])) == ""
    assert paper_row(described(names=[f"pet {number}" for number in range(1000)])) == ""


def test_weights_of_an_earlier_version_that_kept_the_row_of_a_changed_recipe_do_not_have_it():
    about = described("epochs=10")
    assert paper_row(dataclasses.replace(about, recipe={**about.recipe, "paper": "resnet50-grassmann"})) == ""
    assert paper_row(dataclasses.replace(about, recipe={**about.recipe, "lr": "much"})) == ""


def test_neither_report_nor_transfer_has_figures_of_the_paper_for_a_foreign_run(tmp_path):
    run = tiny_run(tmp_path)
    about = read_description(run / BEST)
    foreign = dataclasses.replace(about, recipe={**about.recipe, "paper": "resnet50-grassmann"})
    save_weights(read_weights(run), foreign, run / BEST)
    assert open_run(run, "run", None, None, "cpu").paper == {}
    assert protocol._figure(open_model(str(run)).recipe, "svm", "pets") is None
