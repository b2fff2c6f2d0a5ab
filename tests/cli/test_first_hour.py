"""From one folder of photos to predictions, as someone does it who has just installed grassy: nothing is said twice."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from grassy.cli import main
from grassy.data.run_data import open_data
from grassy.distributed.processes import Process
from grassy.inference.load import load
from grassy.recipes.files import FINETUNED, load_recipe
from grassy.runs.state import STATE, read_torch, write_torch
from grassy.runs.weights import BEST, read_description
from grassy.train import loop, pretrained
from grassy.train.pretrained import preparation_of_weights
from grassy.transfer.datasets import of_runs, open_transfer_set
from training_cases import TINY, assert_same_weights, tiny_folders, tiny_recipe

#: A small model with random weights, in place of what `finetune` would fetch.
SMALL = ["model=resnet10t", "model_kwargs.in_chans=3", "img_size=32", "workers=0", "batch_size=8", "--from-scratch"]


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """A folder of class folders, from within the folder that it is in."""
    monkeypatch.chdir(tmp_path)
    tiny_folders(tmp_path / "photos", images=12, classes=("cat", "dog"), size=40)
    (tmp_path / "photos" / "train").rename(tmp_path / "all")
    return tmp_path / "all"


def refused(capsys, *words):
    """The one line with which a command is refused."""
    assert main([str(word) for word in words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def no_network(*_):
    return False


@pytest.mark.slow
def test_a_folder_of_photos_leads_to_a_model_and_nothing_is_said_twice(photos, capsys):
    assert main(["train", "finetune", *SMALL, "--data-dir", "all", "--epochs", "1"]) == 0
    assert "holds out 4 of 24 images for validation" in capsys.readouterr().err
    about = read_description(photos.parent / "runs" / "finetune" / BEST)
    assert about.class_names == ["cat", "dog"]
    assert about.head["k"] == 32
    assert about.head["standardize"]
    assert main(["validate", "runs/finetune", "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["images"] == 4
    assert main(["predict", "runs/finetune", "all", "--topk", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 24
    assert main(["train", "--resume", "runs/finetune", "epochs=2"]) == 0
    assert "resumed after update 2" in capsys.readouterr().err
    assert main(["train", "--resume", "runs/finetune", "--epochs", "2"]) == 0
    assert "is finished: it has 2 epochs" in capsys.readouterr().err
    assert main(["transfer", "runs/finetune", "--methods", "knn", "--workers", "0", "--output", "transfer"]) == 0
    assert "all" in capsys.readouterr().out.splitlines()[0]


@pytest.mark.slow
def test_the_old_spellings_still_work(photos, capsys):
    assert main(["train", "finetune", *SMALL, "--data-dir", "all", "--epochs", "1"]) == 0
    assert main(["validate", "--checkpoint", "runs/finetune", "--data-dir", "all"]) == 0
    assert "(4 images)" in capsys.readouterr().out
    assert main(["predict", "all", "--checkpoint", "runs/finetune"]) == 0
    assert main(["export", "--checkpoint", "runs/finetune", "--output", "model.pt2"]) == 0
    assert main(["train", "finetune", *SMALL, "--data-dir", "all", "--epochs", "1", "--resume", "auto"]) == 0


def test_a_resumed_run_needs_nothing_but_its_folder_and_is_the_same_to_the_bit(photos, capsys):
    recipe = photos.parent / "mine.yaml"
    recipe.write_text(yaml.safe_dump(tiny_recipe(val_fraction=0.25, sched="constant").to_dict()))
    assert main(["train", str(recipe), "--data-dir", "all", "--output", "whole"]) == 0
    assert main(["train", str(recipe), "--data-dir", "all", "--output", "part", "--epochs", "1"]) == 0
    assert main(["train", "--resume", "part", "epochs=2"]) == 0
    assert_same_weights(photos.parent / "whole", photos.parent / "part")
    capsys.readouterr()
    assert refused(capsys, "train", "--resume", "part", "lr=3").startswith("grassy: error: part/resume.pt belongs to a")


def test_bare_grassy_prints_its_help(capsys):
    assert main([]) == 0
    assert "usage: grassy" in capsys.readouterr().out


def test_the_data_of_a_run_can_be_transferred_to_with_its_own_split(photos):
    assert main(["train", "finetune", *SMALL, "--data-dir", "all", "--epochs", "1"]) == 0
    (name,) = of_runs(["runs/finetune"])
    data = open_transfer_set(name, None)
    assert (data.name, len(data.train), len(data.test)) == ("all", 20, 4)
    again = open_transfer_set("mine=all", None)  # the same rule, without a run
    assert {again.test.name(i) for i in range(4)} == {data.test.name(i).split(f"{photos.parent}/")[1] for i in range(4)}
    with pytest.raises(ValueError, match="does not say what it was trained on: give --datasets"):
        of_runs(["timm/resnet18"])


# ------------------------------------------------------------------------------------------------ weights


def test_without_a_network_the_way_out_is_named_at_once(photos, capsys, monkeypatch):
    monkeypatch.setattr(pretrained, "answers", no_network)
    monkeypatch.setenv("HF_HOME", str(photos.parent / "empty"))
    begin = time.monotonic()
    line = refused(capsys, "train", "finetune", "--data-dir", "all")
    assert time.monotonic() - begin < 20  # huggingface_hub alone takes 46 s
    assert "no pretrained weights of convnext_nano (timm/convnext_nano.in12k_ft_in1k) in the cache" in line
    assert "cannot be reached: give --initial-checkpoint FILE, or --from-scratch" in line
    assert not (photos.parent / "runs").exists()


def test_a_model_without_pretrained_weights_says_so(photos, capsys):
    line = refused(capsys, "train", "finetune", "model=resnet18_cifar", "img_size=32", "--data-dir", "all")
    assert (
        "timm has no pretrained weights for resnet18_cifar: give --initial-checkpoint FILE, or --from-scratch" in line
    )


def test_a_run_that_began_with_pretrained_weights_goes_on_without_them(photos, monkeypatch):
    """Offline, and with the file that it began with gone."""
    recipe = tiny_recipe(val_fraction=0.25, sched="constant")
    first = photos.parent / "first.yaml"
    first.write_text(yaml.safe_dump(recipe.to_dict()))
    assert main(["train", str(first), "--data-dir", "all", "--output", "weights", "--epochs", "1"]) == 0
    given = ["--data-dir", "all", "--initial-checkpoint", "weights/last.safetensors", "--epochs", "1"]
    assert main(["train", str(first), *given, "--output", "tuned", "pretrained=true"]) == 0
    (photos.parent / "weights" / "last.safetensors").unlink()
    monkeypatch.setattr(pretrained, "answers", no_network)
    assert main(["train", "--resume", "tuned", "--epochs", "2"]) == 0


def test_a_place_that_does_not_answer_is_not_waited_for():
    begin = time.monotonic()
    assert not pretrained.answers(("nowhere.invalid", 443))
    assert time.monotonic() - begin < pretrained.PATIENCE + 1


def test_images_are_prepared_as_the_weights_want_them_unless_told_otherwise(tmp_path):
    def prepared(*overrides, **fields):
        recipe = load_recipe("finetune", overrides, fields, preparation_of_weights)
        return recipe.img_size, recipe.crop_pct, recipe.interpolation, recipe.mean[0]

    assert prepared() == (224, 0.95, "bicubic", 0.485)
    assert prepared("model=vit_small_patch16_224") == (224, 0.9, "bicubic", 0.5)
    assert prepared("model=vit_small_patch16_384", "crop_pct=0.8") == (384, 0.8, "bicubic", 0.5)
    assert prepared("model=resnet18_cifar", "img_size=32")[:2] == (32, 0.875)


def test_images_are_prepared_as_a_file_of_weights_says(photos):
    assert main(["train", "finetune", *SMALL, "mean=[0.1, 0.2, 0.3]", "--data-dir", "all", "--epochs", "1"]) == 0
    given = {"initial_checkpoint": "runs/finetune"}
    recipe = load_recipe("finetune", ["model=resnet10t"], given, preparation_of_weights)
    assert (recipe.img_size, recipe.mean) == (32, (0.1, 0.2, 0.3))


def test_weights_of_another_model_say_which(photos, capsys):
    assert main(["train", "finetune", *SMALL, "--data-dir", "all", "--epochs", "1"]) == 0
    capsys.readouterr()
    words = ["train", "finetune", "model=resnet18", "--data-dir", "all", "--initial-checkpoint", "runs/finetune"]
    assert refused(capsys, *words, "--output", "other").endswith("; it is of resnet10t: give model=resnet10t")


def test_a_recipe_of_the_user_keeps_its_learning_rate_from_scratch(photos, monkeypatch):
    recipes = []
    monkeypatch.setattr(loop, "train", lambda recipe, *_, **__: recipes.append(recipe) or SimpleNamespace(stopped_by=0))
    Path("own.yaml").write_text("base: finetune\nmodel: resnet10t\nopt: sgd\nlr: 0.01\n")
    main(["train", "own.yaml", "--data-dir", "all", "--from-scratch"])
    assert recipes[0].lr == 0.01


@pytest.mark.parametrize(
    ("words", "lr"),
    [
        (["--from-scratch"], 1e-3),
        (["--from-scratch", "lr=3e-4"], 3e-4),
        (["--from-scratch", "--lr", "3e-4"], 3e-4),
        (["--from-scratch", "lr =3e-4"], 3e-4),
        (["--from-scratch", "opt=sgd"], 2e-4),
        (["pretrained=false"], 2e-4),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_random_weights_get_a_higher_learning_rate_unless_the_user_gives_one(photos, monkeypatch, words, lr):
    recipes = []
    monkeypatch.setattr(loop, "train", lambda recipe, *_, **__: recipes.append(recipe) or SimpleNamespace(stopped_by=0))
    main(["train", "finetune", "model=resnet10t", "--data-dir", "all", *words])
    assert recipes[0].lr == lr
    assert not recipes[0].pretrained


def test_a_narrow_run_of_an_earlier_version_is_resumed_with_its_k_and_its_crop(photos):
    small = [f"model={TINY['model']}", *(f"model_kwargs.{key}={value}" for key, value in TINY["model_kwargs"].items())]
    words = ["train", "finetune", *small, "img_size=8", "workers=0", "--from-scratch", "--data-dir", "all"]
    assert main([*words, "--epochs", "1"]) == 0
    args = photos.parent / "runs" / "finetune" / "args.yaml"
    settings = yaml.safe_load(args.read_text())
    assert settings.pop("crop_mode") == "center"
    earlier = {**settings, "head": dict(FINETUNED), "k_share": 0.25}
    args.write_text(yaml.safe_dump(earlier))
    state = read_torch(args.parent / STATE)
    state["recipe"] = {name: value for name, value in {**state["recipe"], **earlier}.items() if name != "crop_mode"}
    write_torch(state, args.parent / STATE)
    assert main(["train", "--resume", "runs/finetune", "--epochs", "2"]) == 0
    assert load_recipe(args.parent).head == {"name": "subspaces"}


def test_a_narrow_model_has_a_smaller_k_unless_it_is_given(photos):
    small = [f"model={TINY['model']}", *(f"model_kwargs.{key}={value}" for key, value in TINY["model_kwargs"].items())]
    words = ["train", "finetune", *small, "img_size=8", "workers=0", "--from-scratch", "--data-dir", "all"]
    assert main([*words, "--epochs", "1"]) == 0
    about = read_description(photos.parent / "runs" / "finetune" / BEST)
    assert about.head["k"] == 4  # a quarter of 16 features
    assert load(photos.parent / "runs" / "finetune").head.weight.shape == (2, 4, 16)
    assert main(["train", "--resume", "runs/finetune", "--epochs", "2"]) == 0
    assert main([*words, "--epochs", "1", "head.k=6", "--output", "given"]) == 0
    assert read_description(photos.parent / "given" / BEST).head["k"] == 6


# ------------------------------------------------------------------------------------------------ folders


def test_a_data_folder_that_moved_is_said_to_be_gone(photos, capsys):
    assert main(["train", "finetune", *SMALL, "--data-dir", "all", "--epochs", "1"]) == 0
    capsys.readouterr()
    photos.rename(photos.parent / "moved")
    gone = f"the run's data folder {photos} is gone; if it moved, give --data-dir"
    assert refused(capsys, "validate", "runs/finetune", "--device", "cpu") == f"grassy: error: {gone}"
    assert refused(capsys, "train", "--resume", "runs/finetune", "epochs=2") == f"grassy: error: {gone}"
    assert main(["analyze", "runs/finetune", "--device", "cpu"]) == 0
    assert f"data folder {photos} is gone, so only the weights are measured; if it" in capsys.readouterr().err
    assert main(["report", "runs/finetune", "--device", "cpu"]) == 0
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        f"finetune: the run's data folder {photos} is gone, so the page shows none of its images; if it moved, give "
        "--data-dir"
    ]
    assert "top-1" not in said.out
    assert main(["validate", "runs/finetune", "--data-dir", "moved", "--json", "--device", "cpu"]) == 0
    top1 = json.loads(capsys.readouterr().out)["top1"]
    assert main(["report", "runs/finetune", "--data-dir", "moved", "--device", "cpu"]) == 0
    said = capsys.readouterr()
    assert "gone" not in said.err
    assert said.out.startswith(f"finetune: top-1 {top1:.2f} on 4 images of validation\nSaved report.html (")


def test_what_is_wrong_with_the_arguments_comes_before_a_folder_that_is_taken(photos, capsys):
    taken = photos.parent / "runs" / "finetune"
    taken.mkdir(parents=True)
    (taken / BEST).touch()
    words = ["train", "finetune", *SMALL]
    assert refused(capsys, *words) == "grassy: error: where are the images? give --data-dir"
    assert refused(capsys, *words, "--data-dir", "nope") == "grassy: error: --data-dir nope does not exist"
    line = refused(capsys, *words, "--data-dir", "all", "model=resnet10tt")
    assert line.startswith("grassy: error: timm has no model 'resnet10tt', did you mean 'resnet10t")
    assert "holds a run already" in refused(capsys, *words, "--data-dir", "all")


def test_a_folder_one_level_too_deep_or_too_shallow_is_noticed(photos, capsys):
    root = photos.parent
    tiny_folders(root / "split", classes=("cat", "dog"))
    wanted = ["train", "resnet50-grassmann", "--data-dir"]
    assert refused(capsys, *wanted, "split/train").endswith(f"give --data-dir {root / 'split'}")
    assert refused(capsys, *wanted, "all").endswith("to hold out a fifth of each class folder, give --val-fraction 0.2")
    assert refused(capsys, *wanted, "all/cat").endswith(f"if it is a class itself, give --data-dir {root / 'all'}")
    photos.rename(root / "photos" / "all")  # so that one folder here has the parts
    (root / "split").rename(root / "photos" / "split")
    assert refused(capsys, *wanted, "photos").endswith(f"did you mean --data-dir {root / 'photos' / 'split'}?")
    wanted = ["train", "finetune", *SMALL, "--data-dir"]
    assert refused(capsys, *wanted, "photos").endswith(f"did you mean --data-dir {root / 'photos' / 'split'}?")
    assert "holds no class folders; its images lie in no class folder" in refused(capsys, *wanted, "photos/all/cat")


def test_the_part_to_hold_out_is_a_part(photos, capsys):
    line = refused(capsys, "train", "finetune", *SMALL, "--data-dir", "all", "--val-fraction", "1.5")
    assert line.endswith("val_fraction must lie in [0, 1), got 1.5")
    data = open_data(tiny_recipe(val_fraction=0.5), photos, Process(torch.device("cpu")))
    assert len(data.held_out) == 12
