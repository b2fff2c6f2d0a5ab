"""Folders of the hub that are refused: damaged, contradictory, hostile or not a model that can be saved."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import grassy
from grassy.inference.validate import validate
from grassy.runs.hub import CONFIG, HEAD, WEIGHTS

from .hub_models import TRANSFORMERS, of_timm, of_transformers, with_adapters


def test_loading_checks_that_the_weights_are_on_the_manifold(tmp_path):
    for name, model in (("timm", of_timm("test_resnet")), ("text", of_transformers("bert"))):
        grassy.save(model, tmp_path / name)
        file, metadata = tmp_path / name / WEIGHTS, {"format": "pt"}
        tensors = load_file(file)
        (key,) = [key for key in tensors if key.endswith(("fc.weight", "classifier.weight"))]
        good = tensors[key]
        save_file({**tensors, key: good * 1.01}, file, metadata)
        with pytest.warns(UserWarning, match="re-orthonormalised"):
            grassy.load(tmp_path / name)
        save_file({**tensors, key: good * 2}, file, metadata)
        with pytest.raises(ValueError, match="not a weight of subspaces"):
            grassy.load(tmp_path / name)


def test_a_config_that_contradicts_the_weights_is_refused(tmp_path):
    grassy.save(of_transformers("bert"), tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    for change, said in (
        ({"gamma": 12.0}, r"gamma is 25\.0 there and 12\.0 here"),
        ({"k": 2}, r"does not hold the weights that it describes: look at classifier\.weight"),
        ({"name": "grasman"}, "unknown head 'grasman', did you mean 'grassmann'"),
        ({"gama": 1.0}, "has no option 'gama'"),
        ({"name": 3}, r"head\.name must be a string"),
        ({"model": 1}, "has no option 'model'"),
        ({"num_classes": 7}, "has no option 'num_classes'"),
        ({"device": "meta"}, "a head must be described without device, got 'meta'"),
        ({"classifier": "nowhere"}, "classifier='nowhere' is not a module"),
    ):
        (tmp_path / CONFIG).write_text(json.dumps({**config, HEAD: {**config[HEAD], **change}}))
        with pytest.raises(ValueError, match=said) as caught:
            grassy.load(tmp_path)
        assert "\n" not in str(caught.value)
    (tmp_path / CONFIG).write_text(json.dumps({**config, "architectures": ["os"]}))
    with pytest.raises(ValueError, match="transformers has no model 'os'"):
        grassy.load(tmp_path)
    for names in (["BertModel", "BertForSequenceClassification"], "BertForSequenceClassification", [5], [], None):
        (tmp_path / CONFIG).write_text(json.dumps({**config, "architectures": names}))
        with pytest.raises(ValueError, match=r"config\.json: architectures must be a list of one name, got "):
            grassy.load(tmp_path)
    for change in ({"hidden_size": "wide"}, {"hidden_size": 15}, {"hidden_size": 32}, {"model_type": "nothing"}):
        (tmp_path / CONFIG).write_text(json.dumps({**config, **change}))
        with pytest.raises(ValueError, match="does not hold the weights that it describes") as caught:
            grassy.load(tmp_path)
        assert "\n" not in str(caught.value)
    (tmp_path / CONFIG).write_text("{")
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        grassy.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"label_names": ["v", "w", "x", "y", "z"]}, "label_names"),
        ({HEAD: {"name": "grassmann", "k": [1, 2, 3, 2, 1], "gamma": 3.0}}, HEAD),
        ({"architecture": "resnet18"}, "architecture"),
        ({"pretrained_cfg": {"crop_pct": 0.5}}, "crop_pct"),
    ],
)
def test_a_config_of_timm_that_was_changed_is_refused_and_not_passed_over(change, name, tmp_path):
    grassy.save(of_timm("test_resnet"), tmp_path, ["a", "b", "c", "d", "e"])
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps({**config, **change}))
    with pytest.raises(
        ValueError, match=rf"config\.json and the description in model\.safetensors have different values of {name}:"
    ):
        grassy.load(tmp_path)
    (tmp_path / CONFIG).write_text(json.dumps({**config, "num_classes": "five"}))
    with pytest.raises(ValueError, match=r"config\.json cannot be read: num_classes must be an integer"):
        grassy.load(tmp_path)


def test_a_description_of_a_timm_model_may_not_place_its_head(tmp_path):
    grassy.save(of_timm("test_resnet"), tmp_path)
    save_file(load_file(tmp_path / WEIGHTS), tmp_path / WEIGHTS)
    config = json.loads((tmp_path / CONFIG).read_text())
    for option, said in (("device", "without device, got 'meta'"), ("model", "has no option 'model'")):
        (tmp_path / CONFIG).write_text(json.dumps({**config, HEAD: {**config[HEAD], option: "meta"}}))
        with pytest.raises(ValueError, match=said):
            grassy.load(tmp_path)


def test_weights_in_pickles_are_never_opened(tmp_path):
    pytest.importorskip("peft")
    grassy.save(of_transformers("bert"), tmp_path / "base")
    with_adapters(grassy.load(tmp_path / "base")).save_pretrained(tmp_path / "adapters")
    for folder, safe, pickled, said in (
        ("adapters", "adapter_model.safetensors", "adapter_model.bin", r"adapters has no adapter_model\.safetensors"),
        ("base", WEIGHTS, "pytorch_model.bin", "does not hold the weights that it describes: .*safetensors"),
    ):
        file = tmp_path / folder / safe
        torch.save(load_file(file), file.with_name(pickled))
        file.unlink()
        with pytest.raises(ValueError, match=said) as caught:
            grassy.load(tmp_path / folder)
        assert "\n" not in str(caught.value)
        if folder == "adapters":
            file.with_name(pickled).unlink()


def test_weights_that_are_missing_are_not_made_up(tmp_path):
    grassy.save(of_transformers("bert"), tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    (key,) = [key for key in tensors if key.endswith("classifier.weight")]
    save_file({name: tensor for name, tensor in tensors.items() if name != key}, tmp_path / WEIGHTS, {"format": "pt"})
    with pytest.raises(ValueError, match=r"does not hold the weights that it describes: look at classifier\.weight"):
        grassy.load(tmp_path)


def test_what_cannot_be_saved_is_refused_by_name(tmp_path):
    model = of_transformers("bert")
    with pytest.raises(ValueError, match=r"path must be a folder or end in \.safetensors, got .*model\.pt"):
        grassy.save(model, tmp_path / "model.pt")
    for path, options in (("model.safetensors", {}), ("folder", {"img_size": 32})):
        with pytest.raises(ValueError, match="is a transformers model: give a folder, and only class_names"):
            grassy.save(model, tmp_path / path, **options)
    with pytest.raises(ValueError, match="class_names has 1 names, but the head has 5 classes"):
        grassy.save(model, tmp_path / "folder", ["a"])
    with pytest.raises(ValueError, match=r"has no head of grassy's: call grassy\.replace_head"):
        grassy.save(TRANSFORMERS["bert"](), tmp_path / "folder")
    (tmp_path / "file").write_text("")
    for each in (model, of_timm("test_resnet")):
        with pytest.raises(ValueError, match="file is a file: give a folder"):
            grassy.save(each, tmp_path / "file")
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    grassy.save(model, tmp_path / "text")
    with pytest.raises(
        ValueError, match=r"holds a transformers model: use grassy\.load; the commands accept timm models"
    ):
        validate(tmp_path / "text", None)
