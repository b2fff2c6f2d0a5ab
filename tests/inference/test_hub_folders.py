"""What a folder for the hub holds, and what stays of what was there before."""

import dataclasses
import errno
import functools
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import grassy
from grassy.heads import heads_of
from grassy.inference.export import export
from grassy.inference.predict import predict
from grassy.inference.save import publish
from grassy.inference.validate import validate
from grassy.report.analyze import analyze
from grassy.runs.hub import CARD, CONFIG, WEIGHTS
from grassy.runs.weights import read_description, read_weights, save_weights
from training_cases import tiny_arrays, tiny_folders

from .hub_models import RUN, TRANSFORMERS, of_timm, of_transformers


def test_commands_open_a_folder_that_was_published_from_a_run(tmp_path):
    data = tiny_arrays(tmp_path / "data")
    publish(RUN, tmp_path / "hub")
    expected = validate(RUN, data)
    assert validate(tmp_path / "hub", data) == expected
    assert analyze(tmp_path / "hub", data)["data"]["images"] == 20
    images = tiny_folders(tmp_path / "images") / "val"
    found, same = (list(predict(each, [images], topk=2)) for each in (tmp_path / "hub", RUN))
    assert [each.probabilities for each in found] == [each.probabilities for each in same]
    card = (tmp_path / "hub" / CARD).read_text()
    about = read_description(RUN / "model_best.safetensors")
    for name in ("eval_top1", "eval_loss", "train_loss"):
        assert f"| {name.replace('_', ' ')} | {about.metrics[name]:.4g} |" in card
    assert "| lr |" not in card
    assert f"after epoch {about.epoch + 1}" in card  # as training printed it
    assert f"- epochs: `{about.recipe['epochs']}`" in card
    assert "- hflip" not in card  # which is the default
    assert "library_name: timm" in card


def test_export_writes_a_folder_for_the_hub_and_says_so(tmp_path, capsys):
    assert export(RUN, tmp_path / "hub") == tmp_path / "hub"
    assert capsys.readouterr().out == f"Saved {tmp_path / 'hub'}, a folder for the Hugging Face Hub\n"
    assert (tmp_path / "hub" / CONFIG).is_file()
    assert torch.equal(grassy.load(tmp_path / "hub").head.weight, grassy.load(RUN).head.weight)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"full holds other files: give an \.onnx or \.pt2 file, or a new folder"):
        export(RUN, tmp_path / "full")


def test_a_card_that_was_written_by_hand_stays_and_a_new_one_tells_the_metrics(tmp_path):
    model = of_timm("test_resnet")
    grassy.save(model, tmp_path / "new", epoch=7, metrics={"eval_top1": 81.25})
    assert "after epoch 7" in (card := (tmp_path / "new" / CARD).read_text())
    assert "| eval top1 | 81.25 |" in card
    assert "subspace of 1 to 3 dimensions" in card
    (tmp_path / "new" / CARD).write_text("mine")
    with pytest.warns(UserWarning, match=r"new/README\.md was edited.*stays as it is: see whether it still fits"):
        grassy.save(model, tmp_path / "new")
    assert (tmp_path / "new" / CARD).read_text() == "mine"


@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_a_card_that_nobody_has_edited_is_renewed_with_its_model(library, tmp_path):
    builders = {"timm": (of_timm, "test_resnet"), "transformers": (of_transformers, "vit")}
    build = functools.partial(*builders[library])
    folder = tmp_path / "saved"
    grassy.save(build("unequal"), folder, metrics={"eval_top1": 81.25})
    (folder / CARD).write_bytes((folder / CARD).read_bytes().replace(b"\n", b"\r\n"))  # as git may check it out
    grassy.save(build("cosine"), folder)
    card = (folder / CARD).read_text()
    assert "head: cosine" in card
    assert "81.25" not in card
    assert "subspace of" not in card
    (folder / CARD).write_text(card.replace("head: cosine", "head: cosine, of course"))
    with pytest.warns(UserWarning, match="was edited"):
        grassy.save(build("unequal"), folder)
    assert "cosine, of course" in (folder / CARD).read_text()


def test_paths_of_the_machine_are_not_published(tmp_path):
    about = read_description(RUN / "model_best.safetensors")
    secret = {"initial_checkpoint": "/home/me/secret.safetensors", "dataset": "hfds//home/me/secret"}
    run = dataclasses.replace(about, recipe={**about.recipe, **secret}, metrics={"eval_top1": 1.0, "input_share": 0.25})
    save_weights(read_weights(RUN), run, tmp_path / "run.safetensors")
    publish(tmp_path / "run.safetensors", tmp_path / "hub")
    for file in (tmp_path / "hub").iterdir():
        assert b"secret" not in file.read_bytes(), file
    assert "input share" not in (tmp_path / "hub" / CARD).read_text()
    published = read_description(tmp_path / "hub" / WEIGHTS).recipe
    assert published["initial_checkpoint"]  # a run that began with other weights does not look like one that did not
    same = dataclasses.replace(run, recipe={**about.recipe, "initial_checkpoint": "hf-hub:me/public"})
    save_weights(read_weights(RUN), same, tmp_path / "run.safetensors")
    publish(tmp_path / "run.safetensors", tmp_path / "hub")
    assert read_description(tmp_path / "hub" / WEIGHTS).recipe["initial_checkpoint"] == "hf-hub:me/public"


@pytest.mark.parametrize("change", [{"head": {"gamma": "auto"}}, {"model": "test_resnet.r160_in1k"}])
def test_a_published_folder_agrees_with_itself(change, tmp_path):
    grassy.save(of_timm("test_resnet", "standardised"), tmp_path / "saved.safetensors")
    about = read_description(tmp_path / "saved.safetensors")
    changed = {"model": about.model, **change, "head": {**about.head, **change.get("head", {})}}
    weights = read_weights(tmp_path / "saved.safetensors")
    save_weights(weights, dataclasses.replace(about, **changed), tmp_path / "run.safetensors")
    publish(tmp_path / "run.safetensors", tmp_path / "hub")
    assert torch.equal(grassy.load(tmp_path / "hub").fc.weight, weights["fc.weight"])


def in_parts(model: nn.Module) -> nn.Module:
    model.save_pretrained = functools.partial(model.save_pretrained, max_shard_size="8KB")
    return model


@pytest.mark.parametrize("order", ["whole, parts", "parts, whole", "parts, timm", "timm, parts"])
def test_a_second_save_leaves_nothing_of_the_first_to_load(order, tmp_path):
    for kind in order.split(", "):
        model = of_timm("test_resnet") if kind == "timm" else of_transformers("bert", "cosine")
        with torch.no_grad():
            next(model.parameters()).normal_()
        grassy.save(in_parts(model) if kind == "parts" else model, tmp_path / "saved")
        again = grassy.load(tmp_path / "saved").state_dict()
        assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())
        files = [file.name for file in (tmp_path / "saved").iterdir()]
        assert (WEIGHTS in files) == (kind != "parts")
        assert any(name.startswith("model-00001") for name in files) == (kind == "parts")
        assert ("model.safetensors.index.json" in files) == (kind == "parts")


@pytest.mark.parametrize("kind", ["timm", "transformers"])
def test_nothing_is_written_over_a_run_or_over_files_of_others(kind, tmp_path):
    model = of_timm("test_resnet") if kind == "timm" else of_transformers("bert")
    shutil.copytree(RUN, tmp_path / "run")
    TRANSFORMERS["bert"]().save_pretrained(tmp_path / "foreign")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.txt").touch()
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    for folder, said in (
        ("run", r"run is the folder of a run, with model_best\.safetensors: give another folder"),
        ("foreign", r"foreign holds other files: give a new folder, or one that grassy\.save wrote"),
        ("notes", "notes holds other files"),
    ):
        with pytest.raises(ValueError, match=said):
            grassy.save(model, tmp_path / folder)
        with pytest.raises(ValueError, match=said):
            publish(RUN, tmp_path / folder)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_a_folder_that_holds_all_but_a_model_gets_one(tmp_path):
    for name in (".gitattributes", CARD, "tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text("{}")
    grassy.save(of_transformers("bert"), tmp_path)
    assert heads_of(grassy.load(tmp_path))


def test_a_model_that_its_library_does_not_give_back_is_not_saved(tmp_path):
    model = of_transformers("bert")
    own = model.save_pretrained

    def rounded(folder):
        own(
            folder, state_dict={name: tensor.bfloat16().to(tensor.dtype) for name, tensor in model.state_dict().items()}
        )

    model.save_pretrained = rounded
    with pytest.raises(ValueError, match=r"BertForSequenceClassification does not load as it was saved: .* differs"):
        grassy.save(model, tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_leaves_no_part_of_it(tmp_path, monkeypatch):
    def full(source, target):
        if Path(target).name == CONFIG:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    replace = os.replace
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="could not be written: No space left on device"):
        grassy.save(of_transformers("bert"), tmp_path / "saved")
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [CARD, WEIGHTS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_keeps_its_precision_on_a_backbone_of_less(dtype, tmp_path):
    model = TRANSFORMERS["vit"]().to(torch.bfloat16)
    head = grassy.replace_head(model, "grassmann", k=2, standardize=True, dtype=dtype)
    head.prepare(torch.rand(9, head.in_features, dtype=dtype))  # statistics that bfloat16 cannot hold
    grassy.save(model.eval(), tmp_path / "model")
    again = grassy.load(tmp_path / "model")
    for kind in ("named_parameters", "named_buffers"):
        assert {name: tensor.dtype for name, tensor in getattr(again, kind)()} == {
            name: tensor.dtype for name, tensor in getattr(model, kind)()
        }
    x = torch.randn(2, 3, 32, 32, dtype=torch.bfloat16)
    assert torch.equal(again(x).logits, model(x).logits)
