"""Predictions and validation where images, names or numbers are not what one would wish for."""

import csv
import json
import os

import numpy as np
import pytest
import torch
from PIL import Image

from grassy.cli import main
from grassy.distributed.processes import find_device
from grassy.inference.evaluate import Metrics
from grassy.inference.predict import Prediction, predict, write_predictions
from grassy.models import create_model
from grassy.runs.weights import BEST, Description, save_weights
from grassy.terminal import spreadsheet_safe


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path, head = tmp_path_factory.mktemp("run") / BEST, {"name": "grassmann", "k": 2}
    options = {"img_size": 16, "patch_size": 8, "depth": 1, "embed_dim": 32, "num_heads": 2}
    model = create_model("vit_tiny_patch16_224", 10, head, options)
    save_weights(model, Description("vit_tiny_patch16_224", 10, head, options, img_size=16), path)
    return path


def write_image(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (23, 31, 3), dtype=np.uint8)).save(path)
    return path


def test_a_dangling_link_a_fifo_and_postscript_do_not_stop_a_folder(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_: pytest.fail("Ghostscript was started"))
    folder = tmp_path / "images"
    write_image(folder / "good.png")
    (folder / "dangling.png").symlink_to(tmp_path / "nowhere")
    os.mkfifo(folder / "fifo.png")
    (folder / "script.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n{} loop\n")
    found = {prediction.path.name: prediction.error for prediction in predict(checkpoint, [folder], device="cpu")}
    assert found["good.png"] is None
    assert found["dangling.png"] == "No such file or directory"
    assert found["fifo.png"].endswith("fifo.png is not a regular file")
    assert found["script.jpg"] == "not an image that Pillow knows"


def test_nor_do_they_stop_the_command(checkpoint, tmp_path, capsys):
    folder = tmp_path / "images"
    write_image(folder / "good.png")
    (folder / "dangling.png").symlink_to(tmp_path / "nowhere")
    assert main(["predict", str(folder), "--checkpoint", str(checkpoint), "--output", str(tmp_path / "out.csv")]) == 1
    with open(tmp_path / "out.csv", newline="") as file:
        errors = {os.path.basename(row["path"]): row["error"] for row in csv.DictReader(file)}
    assert errors == {"good.png": "", "dangling.png": "No such file or directory"}


def test_cells_that_begin_as_a_formula_are_made_harmless(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ("=1+1", "+a", "-b", "@c", "-5", "cat")
    found = [Prediction(write_image(tmp_path / name).relative_to(tmp_path), ("=cmd()|x", "-5"), (0.6, 0.4)) for name in
             (f"{name}.png" for name in names)]  # fmt: skip
    found.append(Prediction(tmp_path / "x.png", error="=evil()"))
    write_predictions(iter(found), "out.csv")
    with open("out.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    cells = [cell for row in rows for cell in row.values()]
    assert not [cell for cell in cells if cell[:1] in ("=", "+", "@") or (cell[:1] == "-" and cell != "-5")]
    assert all(os.path.exists(row["path"]) for row in rows[:-1])  # a path still leads to its file
    assert (rows[0]["label_1"], rows[0]["label_2"], rows[-1]["error"]) == ("'=cmd()|x", "-5", "'=evil()")
    assert spreadsheet_safe("cat") == "cat"


def test_validate_prints_json_that_all_can_read(checkpoint, monkeypatch, capsys):
    lost = Metrics(float("nan"), 20.0, 100.0, 5)
    assert json.loads(json.dumps(lost.to_dict(), allow_nan=False))["loss"] is None
    monkeypatch.setattr("grassy.inference.validate.validate", lambda *_, **__: lost)
    assert main(["validate", "--checkpoint", str(checkpoint), "--json"]) == 0
    assert "NaN" not in capsys.readouterr().out


def test_validation_without_memory_is_one_line(checkpoint, monkeypatch, capsys):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory, and much more")

    monkeypatch.setattr("grassy.inference.validate.evaluate", full)
    words = ["validate", "--checkpoint", str(checkpoint), "--dataset", "digits", "--device", "cpu"]
    assert main(words) == 2
    assert (
        capsys.readouterr().err
        == "grassy: error: cpu ran out of memory with batches of this size: give a smaller --batch-size\n"
    )


@pytest.mark.parametrize("name", ["meta", "mps", "xpu", "vulkan"])
def test_a_device_that_is_not_there_is_refused(name, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ValueError, match=f"unknown device '{name}': give auto, cpu, cuda or cuda:N"):
        find_device(name)
