"""A run that is not there, not given or given in the wrong place: the one line says what to type instead."""

import pytest

from grassy.cli import main
from grassy.models import create_model
from grassy.runs.weights import BEST, Description, save_weights
from training_cases import TINY, tiny_folders


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder: photos, and two runs in runs/."""
    monkeypatch.chdir(tmp_path)
    tiny_folders(tmp_path / "split", images=2)
    (tmp_path / "split" / "train").rename(tmp_path / "photos")
    head, options = {"name": "linear"}, TINY["model_kwargs"]
    about = Description(model=TINY["model"], num_classes=2, head=head, model_kwargs=options, img_size=8)
    for name in ("finetune", "second"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        save_weights(create_model(TINY["model"], 2, head, options), about, tmp_path / "runs" / name / BEST)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "predict runs/finetune",
            "which images? give them after the run, as in: grassy predict runs/finetune holiday/",
        ),
        (
            "predict --checkpoint runs/finetune",
            "which images? give them after the run, as in: grassy predict runs/fine",
        ),
        (
            "predict photos runs/finetune",
            "photos is no run, but runs/finetune is: give it first, as in: grassy predict runs/finetune photos",
        ),
        ("predict photos", "photos is no run: give a run and images, as in: grassy predict runs/finetune photos"),
        (
            "predict runs/nope photos",
            "there is no run or file of weights runs/nope; runs found nearby: runs/finetune, runs/second",
        ),
        ("predict nope", "there is no run or file of weights nope"),
        ("validate runs/nope", "there is no run or file of weights runs/nope; runs found nearby: runs/finetune, runs/"),
        ("report runs/finetune runs/nope", "there is no run or file of weights runs/nope; runs found nearby:"),
        ("validate elsewhere/nope", "there is no run or file of weights elsewhere/nope"),
        ("export runs", "runs is a folder of runs, not a run: name one of them, such as runs/finetune"),
        ("train --resume photos", "photos is no run, for it holds no args.yaml: --resume takes the folder of a run"),
        ("train finetune photos", "photos is no setting key=value: for the images in it, give --data-dir photos"),
        ("train finetune --epochs 3 photos", "photos is no setting key=value: for the images in it, give --data-dir"),
        ("train finetune nonsense", "a setting is given as key=value, got 'nonsense'"),
        ("validate runs/finetune --device cpu runs/second", "one run is expected, got runs/finetune and runs/second"),
        (
            "predict timm/resnet18 photos",
            "there is no checkpoint timm/resnet18; for a Hugging Face Hub repository that grassy wrote, give "
            "hf-hub:timm/resnet18",
        ),
    ],
)
def test_the_one_line_says_what_to_type_instead(folder, capsys, words, message):
    assert main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"grassy: error: {message}")


def test_images_may_follow_an_option(folder, capsys):
    assert main(["predict", "--topk", "1", "--device", "cpu", "runs/finetune", "photos"]) == 0
    first = capsys.readouterr().out
    assert len(first.splitlines()) == 6
    for words in (
        "--checkpoint runs/finetune --device cpu --topk 1 photos",
        "runs/finetune --topk 1 --device cpu photos",
        "runs/finetune photos/cat --topk 1 photos/dog photos/owl --device cpu",
    ):
        assert main(["predict", *words.split()]) == 0
        assert capsys.readouterr().out == first


def test_a_run_may_follow_an_option(folder, capsys):
    assert main(["report", "runs/finetune", "--device", "cpu", "runs/second"]) == 0
    assert "Saved report.html" in capsys.readouterr().out
    assert main(["report", "runs/finetune", "--device", "cpu", "--badly", "runs/second"]) == 2
    assert "unrecognized arguments: --badly runs/second" in capsys.readouterr().err
