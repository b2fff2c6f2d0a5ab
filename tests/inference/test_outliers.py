"""A threshold for outliers is chosen on validation images and kept with the model; predictions are flagged by it."""

import csv
import json

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image

import grassy
from grassy.cli import main
from grassy.data.images import open_images
from grassy.heads import heads_of
from grassy.inference.export import export
from grassy.inference.outliers import FEWEST, RATE, OutlierScores, threshold_of
from grassy.inference.predict import predict
from grassy.inference.validate import validate
from grassy.models import create_model
from grassy.runs.weights import BEST, read_description
from grassy.train.loop import train
from training_cases import TINY, tiny_folders, tiny_recipe


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return tiny_folders(tmp_path_factory.mktemp("photos"), images=60)


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    train(tiny_recipe(epochs=1), photos, folder, quiet=True)
    return folder


def test_the_threshold_flags_the_stated_share_of_the_images_it_was_chosen_on():
    scores = np.random.default_rng(0).random(1000)
    assert 0.9 * RATE <= (scores > threshold_of(scores)).mean() <= RATE
    assert threshold_of(scores[: FEWEST - 1]) is None
    assert threshold_of([*scores, float("nan")]) is None


def test_weights_hold_the_threshold_of_their_validation_images(run, photos):
    about = read_description(run / BEST)
    assert about.outlier_rate == RATE
    assert "outlier_threshold" not in about.metrics
    assert validate(run / BEST, photos, device="cpu").outlier_threshold == pytest.approx(about.outlier_threshold)
    found = list(predict(run, [photos / "val"], device="cpu"))
    assert sum(prediction.outlier for prediction in found) <= RATE * len(found)
    assert all(p.outlier == (p.outlier_score > about.outlier_threshold) for p in found)


def test_predict_flags_outliers_on_the_terminal_and_in_files(run, photos, tmp_path, capsys):
    words = ["predict", str(run), str(photos / "val"), "--device", "cpu"]
    assert main([*words, "--outlier-threshold", "0"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("FLAGGED") == 90
    assert "90 of 90 images are above the outlier threshold 0.000: they look like none of the classes" in captured.err
    assert main([*words, "--outlier-threshold", "1"]) == 0
    captured = capsys.readouterr()
    assert "FLAGGED" not in captured.out
    assert captured.err.splitlines() == ["0 of 90 images are above the outlier threshold 1.000"]
    assert main(words) == 0
    assert f"the outlier threshold {read_description(run / BEST).outlier_threshold:.3f}" in capsys.readouterr().err
    assert main([*words, "--output", str(tmp_path / "out.csv"), "--outlier-threshold", "0"]) == 0
    assert {row["outlier"] for row in csv.DictReader((tmp_path / "out.csv").open())} == {"True"}
    assert main([*words, "--output", str(tmp_path / "out.jsonl"), "--outlier-threshold", "1"]) == 0
    assert {json.loads(line)["outlier"] for line in (tmp_path / "out.jsonl").open()} == {False}
    assert main([*words, "--outlier-threshold", "2"]) == 2
    assert "outlier_threshold must lie in [0, 1], got 2.0" in capsys.readouterr().err


def test_weights_without_a_threshold_have_scores_and_no_flags(tmp_path, capsys):
    model = create_model(TINY["model"], 2, {"name": "grassmann", "k": 2}, TINY["model_kwargs"])
    grassy.save(model, tmp_path / "m.safetensors", ["a", "b"], img_size=8, model_kwargs=TINY["model_kwargs"])
    Image.new("RGB", (9, 9)).save(tmp_path / "x.png")
    (found,) = predict(tmp_path / "m.safetensors", [tmp_path / "x.png"], device="cpu")
    assert 0 <= found.outlier_score <= 1
    assert found.outlier is None
    assert main(["predict", str(tmp_path / "m.safetensors"), str(tmp_path / "x.png"), "--device", "cpu"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("this model has no outlier threshold, so no image is flagged: `grassy validate RUN --json`")


@pytest.mark.slow
def test_the_onnx_file_gives_the_scores_of_the_head_and_says_the_threshold(run, photos, tmp_path):
    export(run, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    about = json.loads(session.get_modelmeta().custom_metadata_map["grassy"])
    assert about["outlier_threshold"] == read_description(run / BEST).outlier_threshold
    assert about["outlier_rate"] == RATE
    images = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    logits, scores = session.run(["logits", "outlier_score"], {"images": images.numpy()})
    model = grassy.load(run)
    with torch.no_grad(), OutlierScores(model) as kept:
        expected = model(images)
    assert np.allclose(logits, expected, atol=1e-4)
    assert np.allclose(scores, kept.of_last(), atol=1e-5)


def test_a_model_is_left_without_hooks(run, photos):
    model = grassy.load(run)
    with OutlierScores(model):
        pass
    assert not heads_of(model)[0]._forward_pre_hooks
    assert len(open_images("", photos, "val")) == 90
