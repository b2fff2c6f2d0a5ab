"""The paper's figures in the package: complete, as printed, and listed beside the recipes."""

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from grassy import paper
from grassy.cli import main
from grassy.recipes import table as listing
from grassy.recipes.changes import with_changes
from grassy.recipes.files import load_recipe, recipe_names
from grassy.train.model import build_model

NAMES = recipe_names()
ROWS = paper.rows()
PAPER = Path(__file__).parents[1] / "fixtures" / "paper_tables.json"


def both(*architectures):
    return [f"{architecture}-{head}" for architecture in architectures for head in ("linear", "grassmann")]


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


def numbers_in(figures):
    """The numbers in nested figures, in their order."""
    if isinstance(figures, dict | list):
        values = figures.values() if isinstance(figures, dict) else figures
        return [number for value in values for number in numbers_in(value)]
    return [figures]


def test_the_figures_are_those_of_the_papers_tables_and_text():
    """The fixture was read from the LaTeX source of the paper, table by table: all their rows, and their numbers."""
    found = {}
    for key in ROWS:
        row = paper.figures(key)
        for source, names in row["from"].items():
            found.setdefault(source, {})[key] = numbers_in([row[name] for name in names])
    assert found == json.loads(PAPER.read_text(encoding="utf-8"))


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
    assert note.startswith("The paper reports top-1")
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


def test_a_recipe_is_shown_with_all_that_the_paper_says_of_it(capsys):
    assert main(["recipes", "resnet50d-grassmann", "--show"]) == 0
    comments = [line for line in capsys.readouterr().out.splitlines() if line.startswith("#")]
    for words in ("top1 79.26", "variability 63.49", "r2 0.43", "svm cifar10 90.13", "svm C cifar10 1", "knn cifar10"):
        assert any(words in line for line in comments), words
    assert main(["recipes", "resnet50d-rsb-a3-grassmann", "--show"]) == 0
    assert "(79.64 on the authors' page)" in capsys.readouterr().out
    assert main(["recipes", "digits-grassmann", "--show"]) == 0
    assert "#" not in capsys.readouterr().out


def test_an_unknown_recipe_to_show_is_one_line_and_exit_code_2(capsys):
    assert main(["recipes", "swin-t-liner", "--show"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "did you mean 'swin-t-linear'?" in error


def test_showing_no_recipe_in_particular_is_one_clear_line(capsys):
    assert main(["recipes", "--show"]) == 2
    assert capsys.readouterr().err.startswith("grassy: error: which recipe? give its name")


def test_milestones_follow_the_number_of_epochs_unless_they_are_given(tmp_path):
    assert load_recipe("resnet50-grassmann").decay_milestones == (30, 60, 90)
    assert load_recipe("resnet50-grassmann", ["epochs=10"]).decay_milestones == (3, 6, 9)
    assert load_recipe("resnet50-grassmann", [], {"epochs": 10}).decay_milestones == (3, 6, 9)
    assert with_changes(load_recipe("resnet50-grassmann"), {"epochs": 200}).decay_milestones == (60, 120, 180)
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
