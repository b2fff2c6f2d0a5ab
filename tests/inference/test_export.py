"""Exported files give the logits of the model without it, and a file that does not is not left behind."""

import copy
import json
import os
import resource
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch

import grassy
from grassy.heads import HEADS
from grassy.inference import export as exporting
from grassy.inference.export import export
from grassy.inference.load import load
from grassy.models import create_model
from grassy.runs.weights import BEST, Description, save_weights

SIZE = 16
VIT = ("vit_tiny_patch16_224", {"img_size": SIZE, "patch_size": 8, "depth": 1, "embed_dim": 32, "num_heads": 2})
RESNET = ("resnet18_cifar", {"channels": [16, 16, 16, 16]})
NAMES = ["cat", "dog", "tench, Tinca tinca", "Ärger", "e"]


def write_checkpoint(path, head="grassmann", model=VIT):
    name, options = model
    built = create_model(name, 5, {"name": head}, options)
    for module in built.modules():
        if isinstance(module, torch.nn.BatchNorm2d):  # fresh statistics would make it the identity
            torch.nn.init.uniform_(module.running_mean, -1, 1)
            torch.nn.init.uniform_(module.running_var, 0.5, 2)
    description = Description(name, 5, {"name": head}, options, NAMES, SIZE, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.1))
    save_weights(built, description, path)
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("run") / BEST)


def onnx_logits(file, images):
    session = onnxruntime.InferenceSession(file)
    return torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def pt2_logits(file, images):
    return torch.export.load(file).module()(images)


def logits_of_model(checkpoint, images):
    with torch.no_grad():
        return load(checkpoint)(images)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "model", "suffix"),
    [
        *((head, VIT, ".onnx") for head in HEADS),
        *((head, VIT, ".pt2") for head in ("linear", "softtriple", "grassmann")),
        ("grassmann", RESNET, ".onnx"),
        ("grassmann", RESNET, ".pt2"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else value,
)
def test_the_file_gives_the_models_logits_for_a_batch_of_another_size(tmp_path, head, model, suffix):
    checkpoint = write_checkpoint(tmp_path / "model.safetensors", head, model)
    file = export(checkpoint, tmp_path / f"model{suffix}")
    read = onnx_logits if suffix == ".onnx" else pt2_logits
    for batch in (1, 2, 7):
        images = torch.randn(batch, 3, SIZE, SIZE)
        torch.testing.assert_close(read(file, images), logits_of_model(checkpoint, images), atol=1e-4, rtol=1e-4)
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors", file.name}


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
def test_a_fixed_batch_size_is_the_only_one_that_the_file_takes(checkpoint, tmp_path, suffix):
    file = export(checkpoint, tmp_path / f"model{suffix}", batch=4)
    read = onnx_logits if suffix == ".onnx" else pt2_logits
    images = torch.randn(4, 3, SIZE, SIZE)
    torch.testing.assert_close(read(file, images), logits_of_model(checkpoint, images), atol=1e-4, rtol=1e-4)
    with pytest.raises(Exception, match=r"4"):
        read(file, torch.randn(3, 3, SIZE, SIZE))


@pytest.mark.slow
def test_an_onnx_file_is_valid_named_and_says_how_its_images_are_prepared(checkpoint, tmp_path, capfd):
    file = export(checkpoint, tmp_path / "new/folder/model.ONNX", opset=18)
    captured = capfd.readouterr()
    assert captured.err == ""
    (line,) = captured.out.splitlines()
    assert line.startswith(f"Saved {file}; its logits (up to ")
    model = onnx.load(file)
    onnx.checker.check_model(model, full_check=True)
    assert model.opset_import[0].version == 18
    assert [value.name for value in model.graph.output] == ["logits", "outlier_score"]
    (images,) = model.graph.input
    shape = [dim.dim_param or dim.dim_value for dim in images.type.tensor_type.shape.dim]
    assert (images.name, shape) == ("images", ["batch", 3, SIZE, SIZE])
    check_description(onnxruntime.InferenceSession(file).get_modelmeta().custom_metadata_map["grassy"])
    assert os.fsencode(os.path.dirname(exporting.__file__)) not in file.read_bytes()


def test_a_pt2_file_says_how_its_images_are_prepared(checkpoint, tmp_path, capfd):
    file = export(checkpoint, tmp_path / "model.pt2")
    captured = capfd.readouterr()
    assert (captured.err, captured.out.count("\n")) == ("", 1)
    extra = {"grassy.json": ""}
    torch.export.load(file, extra_files=extra)
    check_description(extra["grassy.json"])
    assert os.fsencode(os.path.dirname(exporting.__file__)) not in file.read_bytes()


def check_description(text):
    described = json.loads(text)
    assert described["class_names"] == NAMES
    assert (described["img_size"], described["crop_pct"], described["interpolation"]) == (SIZE, 0.875, "bilinear")
    assert (described["mean"], described["std"]) == ([0.5, 0.4, 0.3], [0.2, 0.3, 0.1])
    assert described["head"] == {"name": "grassmann"}


@pytest.mark.slow
def test_large_weights_lie_beside_the_onnx_file(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.onnx._internal.exporter._onnx_program._LARGE_MODEL_THRESHOLD", 0)
    file = export(checkpoint, tmp_path / "model.onnx")
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx", "model.onnx.data"}
    images = torch.randn(5, 3, SIZE, SIZE)
    torch.testing.assert_close(onnx_logits(file, images), logits_of_model(checkpoint, images), atol=1e-4, rtol=1e-4)


# ------------------------------------------------------------------------------------------------ what may go wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("model.pt", {}, r"must be an .onnx or .pt2 file, or a folder, got '.*model.pt'"),
        ("model.onx", {}, r"did you mean '.onnx'\?"),
        ("model", {"opset": 18}, "opset is for .onnx files"),  # without it, a folder for the hub
        ("model.onnx", {"batch": 0}, "batch must be 'dynamic' or a positive integer, got 0"),
        ("model.onnx", {"batch": "many"}, "batch must be 'dynamic' or a positive integer, got 'many'"),
        ("model.pt2", {"opset": 18}, "opset is for .onnx files"),
        ("model.onnx", {"opset": 99}, "opset must be \\d+ for this model, got 99"),
        ("folder.onnx", {}, "folder.onnx is a folder"),
    ],
)
def test_a_wrong_argument_is_named_and_nothing_is_written(checkpoint, tmp_path, name, options, message):
    (tmp_path / "folder.onnx").mkdir()
    with pytest.raises(ValueError, match=message):
        export(checkpoint, tmp_path / name, **options)
    assert [path.name for path in tmp_path.rglob("*")] == ["folder.onnx"]


def test_what_is_not_a_checkpoint_is_named(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    for path in (tmp_path / "model.safetensors", tmp_path / "missing"):
        with pytest.raises(ValueError, match=str(path)):
            export(path, tmp_path / "model.onnx")


def test_a_file_that_disagrees_with_the_model_is_not_left_there(checkpoint, tmp_path, monkeypatch):
    output = tmp_path / "model.pt2"
    output.write_text("old")
    traced = exporting._traced

    def trace_another(model, *rest):
        other = copy.deepcopy(model)
        for p in other.parameters():
            torch.nn.init.normal_(p, std=0.1)
        return traced(other, *rest)

    monkeypatch.setattr(exporting, "_traced", trace_another)
    with pytest.raises(ValueError, match=r"has been deleted: its logits .* more than the relative tolerance 0.001"):
        export(checkpoint, output)
    assert output.read_text() == "old"
    assert list(tmp_path.iterdir()) == [output]


def test_not_a_number_is_no_agreement(checkpoint):
    model = lambda images: torch.full((len(images), 5), torch.nan)
    with pytest.raises(ValueError, match="has been deleted"):
        exporting._check(model, model, (1,), Description("m", 5, {}, img_size=8), "x.onnx")


@pytest.mark.slow
def test_without_onnxruntime_the_file_is_written_and_said_to_be_unchecked(checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    file = export(checkpoint, tmp_path / "model.onnx")
    assert capsys.readouterr().out == f"Saved {file}; to have it checked against the model, pip install onnxruntime\n"
    onnx.checker.check_model(onnx.load(file))


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(checkpoint, tmp_path, suffix):
    output = tmp_path / f"model{suffix}"
    output.write_text("old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match="could not be written") as caught:
            export(checkpoint, output)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.filename == str(output)
    assert output.read_text() == "old"
    assert list(tmp_path.iterdir()) == [output]


def test_a_target_that_cannot_be_written_is_named(checkpoint, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=str(tmp_path / "file")):
        export(checkpoint, tmp_path / "file/model.pt2")
    if os.geteuid() != 0:  # root may write anywhere
        tmp_path.chmod(0o500)
        with pytest.raises(PermissionError, match=str(tmp_path / "model.pt2")):
            export(checkpoint, tmp_path / "model.pt2")
        tmp_path.chmod(0o700)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


class Whimsical(torch.nn.Module):
    def forward(self, images):
        return images.mean((2, 3)) if images.sum() > 0 else images.amax((2, 3))


def test_a_model_that_cannot_be_traced_is_a_value_error(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "load", lambda path: Whimsical())
    with pytest.raises(ValueError, match=r"torch.export cannot trace this model: .*a fixed batch size may work"):
        export(checkpoint, tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


def test_the_callers_random_numbers_are_left_alone(checkpoint, tmp_path):
    torch.manual_seed(5)
    load(checkpoint)  # which makes a model before it loads its weights
    expected = torch.rand(3)
    torch.manual_seed(5)
    export(checkpoint, tmp_path / "model.pt2")
    np.testing.assert_array_equal(torch.rand(3), expected)


def test_options_of_a_head_may_be_numbers_of_numpy_and_ranges(tmp_path):
    model = timm.create_model("test_resnet", num_classes=3)
    options = {"k": range(1, 4), "gamma": np.float64(9.5)}
    grassy.replace_head(model, "grassmann", **options)
    description = Description("test_resnet", num_classes=3, head={"name": "grassmann", **options})
    save_weights(model, description, tmp_path / "model.safetensors")
    again = load(tmp_path / "model.safetensors").get_classifier()
    assert (again.gamma, again.dims.tolist()) == (9.5, [1, 2, 3])
    automatic = Description("test_resnet", num_classes=3, head={"name": "grassmann", "k": [1, 2, 3], "gamma": "auto"})
    save_weights(model, automatic, tmp_path / "model.safetensors")
    assert load(tmp_path / "model.safetensors").get_classifier().gamma == 9.5  # what it was trained with
    strange = Description("test_resnet", num_classes=3, head={"name": "grassmann", "k": {2}})
    with pytest.raises(TypeError, match=r"a description cannot hold \{2\}, a set"):
        save_weights(model, strange, tmp_path / "strange.safetensors")
    assert not (tmp_path / "strange.safetensors").exists()
