"""Checkpoints of the paper's authors are imported with the logits that they have where they come from."""

import re
import sys
import types

import pytest
import torch
from torch import nn

import grassy
from grassy import paper
from grassy.cli import main
from grassy.inference.authors_checkpoints import CLASSES, convert, import_checkpoint
from grassy.inference.validate import paper_figures
from grassy.models import import_timm
from grassy.runs.inert_pickle import read_tensors
from grassy.runs.paper_row import paper_row
from grassy.runs.weights import read_description
from grassy.surgery import replace_head

from .mmpretrain_networks import VGG, Classifier, DeiT3, ResNetV1d, Swin, randomised

timm = import_timm()
C = 5


def small(kind, k):
    classes = C if k is None else None
    return {
        "resnet": lambda: ResNetV1d((1, 2, 1, 2), 8),
        "vgg": lambda: VGG((4, 4, 8, 8, 8), 12, classes),
        "swin": lambda: Swin(8, (2, 2), (2, 4), 4),
        "deit3": lambda: DeiT3(16, 2, 2, 8, 32),
        "deit3, both norms": lambda: DeiT3(16, 2, 2, 8, 32, first_norm_twice=False),
    }[kind]()


def timm_twin(kind):
    from timm.models.resnet import Bottleneck as TimmBottleneck
    from timm.models.resnet import ResNet
    from timm.models.swin_transformer import SwinTransformer
    from timm.models.vgg import VGG as TimmVGG

    if kind == "resnet":
        options = {"stem_width": 4, "stem_type": "deep", "avg_down": True, "channels": (8, 16, 32, 64)}
        return ResNet(TimmBottleneck, (1, 2, 1, 2), num_classes=C, **options)
    if kind == "vgg":
        model = TimmVGG([4, 4, "M", 4, 4, "M", 8, 8, "M", 8, 8, "M", 8, 8, "M"], C, norm_layer=nn.BatchNorm2d)
        model.pre_logits.fc1, model.pre_logits.fc2 = nn.Conv2d(8, 12, 7), nn.Conv2d(12, 12, 1)
        model.head.fc = nn.Linear(12, C)
        return model
    if kind == "swin":
        sizes = {"embed_dim": 8, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4}
        return SwinTransformer(img_size=64, num_classes=C, **sizes)
    sizes = {"embed_dim": 16, "depth": 2, "num_heads": 2, "patch_size": 8, "img_size": 32}
    return timm.create_model("deit3_small_patch16_224", num_classes=C, **sizes)


SIZES = {"resnet": 64, "vgg": 224, "swin": 64, "deit3": 32, "deit3, both norms": 32}


@pytest.mark.parametrize("k", [None, 1, 3])
@pytest.mark.parametrize("kind", SIZES)
def test_an_imported_network_has_the_logits_of_the_original(kind, k):
    original = randomised(Classifier(small(kind, k), C, k))
    state = {**original.state_dict(), "data_preprocessor.mean": torch.zeros(3)}
    if kind == "swin":  # a buffer of an earlier version, and the norm after the last of two stages
        state["backbone.stages.0.blocks.1.attn.attn_mask"] = torch.zeros(1)
        state = {name.replace("backbone.norm3.", "backbone.norm1."): each for name, each in state.items()}
    found = convert(state, C)
    assert found.k == k
    model = timm_twin(kind)
    if k is not None:
        replace_head(model, "grassmann", k=k)
    model.load_state_dict(found.weights)
    images = torch.randn(2, 3, SIZES[kind], SIZES[kind])
    with torch.no_grad():
        expected, logits = original(images), model.eval()(images)
    assert expected.std() > 1e-3
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


FULL = {
    "resnet50d-linear": lambda: (ResNetV1d((3, 4, 6, 3)), None),
    "resnet50d-grassmann-k32": lambda: (ResNetV1d((3, 4, 6, 3)), 32),
    "resnet101d-grassmann": lambda: (ResNetV1d((3, 4, 23, 3)), 8),
    "resnet152d-grassmann": lambda: (ResNetV1d((3, 8, 36, 3)), 8),
    "vgg13bn-linear": lambda: (VGG(classes=CLASSES), None),
    "vgg13bn-grassmann": lambda: (VGG(), 8),
    "swin-t-grassmann": lambda: (Swin(), 8),
}


@pytest.mark.parametrize("recipe", FULL)
def test_the_released_networks_are_told_apart_and_fit_timms(recipe):
    with torch.device("meta"):
        backbone, k = FULL[recipe]()
        found = convert(Classifier(backbone, CLASSES, k).state_dict())
        about = grassy.recipes.files.load_recipe(recipe)
        model = grassy.models.create_model(about.model, CLASSES, about.head, about.model_kwargs)
    assert recipe.startswith(found.architecture)
    assert found.k == k == about.head.get("k")
    own = {name: tensor.shape for name, tensor in model.state_dict().items() if not name.endswith("_extra_state")}
    assert {name: tensor.shape for name, tensor in found.weights.items()} == own


# ---------------------------------------------------------------------- files


def stranger(trap):
    """What mmengine keeps beside the weights: objects of its own, NumPy scalars, and here one that would run code."""
    import numpy

    module = types.ModuleType("mmengine_like")

    class HistoryBuffer:
        def __init__(self):
            self.values, self.methods = numpy.arange(3.0), {"max": numpy.max}

    class Intruder:
        def __reduce__(self):
            return exec, (f"open({str(trap)!r}, 'w').close()",)

    HistoryBuffer.__module__ = "mmengine_like"
    HistoryBuffer.__qualname__ = "HistoryBuffer"
    module.HistoryBuffer = HistoryBuffer
    sys.modules["mmengine_like"] = module
    return {"loss": HistoryBuffer(), "lr": numpy.float64(0.1), "trap": Intruder()}


@pytest.fixture
def checkpoint(tmp_path):
    def write(model: nn.Module):
        trap = tmp_path / "trap"
        content = {"meta": {"epoch": 100}, "state_dict": model.state_dict(), "message_hub": stranger(trap)}
        torch.save(content, tmp_path / "authors.pth")
        del sys.modules["mmengine_like"]  # whoever reads it does not have the package
        return tmp_path / "authors.pth"

    return write


def test_tensors_are_read_beside_objects_whose_code_is_not_run(checkpoint, tmp_path):
    model = nn.Linear(2, 3)
    file = checkpoint(model)
    with pytest.raises(Exception, match=r"mmengine_like|GLOBAL|Unsupported"):
        torch.load(file, weights_only=True)
    found = read_tensors(file)
    assert found.keys() == {"weight", "bias"}
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
    assert not (tmp_path / "trap").exists()


@pytest.mark.slow
def test_a_released_file_becomes_a_folder_that_every_command_opens(checkpoint, tmp_path, capsys):
    original = randomised(Classifier(DeiT3(), CLASSES, 8))
    file = checkpoint(original)
    assert main(["import", str(file), "--output", str(tmp_path / "deit3")]) == 0
    said = capsys.readouterr().out
    top1 = paper.figures("deit3-s-grassmann")["top1"]
    assert "deit3-s-grassmann" in said
    assert f"the paper reports top-1 {top1:.2f}" in said
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        logits = grassy.load(tmp_path / "deit3")(images)
        torch.testing.assert_close(logits, original(images), rtol=1e-4, atol=1e-4)
    about = read_description(tmp_path / "deit3" / "model.safetensors")
    assert (about.img_size, about.crop_pct, about.interpolation) == (224, 1.0, "bicubic")
    assert (about.class_names[0], len(about.class_names)) == ("n01440764", 1000)
    assert paper_row(about) == "deit3-s-grassmann"
    assert paper_figures(tmp_path / "deit3")["top1"] == top1
    assert not (tmp_path / "trap").exists()
    with pytest.raises(
        ValueError, match="deit3-s with k = 8, which is not what recipe 'resnet50d-grassmann' describes"
    ):
        import_checkpoint(file, tmp_path / "other", "resnet50d-grassmann")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(("k", "rows"), [pytest.param(8, 14, marks=pytest.mark.slow), (1, 2), (None, 7)])
def test_weights_that_fit_several_rows_of_the_paper_need_its_name(k, rows, checkpoint, tmp_path, capsys):
    """The authors' ResNet50-D by RSB-A1 has the tensors of that of 100 epochs, but other test images and figures."""
    file = checkpoint(randomised(Classifier(ResNetV1d((3, 4, 6, 3)), CLASSES, k)))
    folder = tmp_path / "out"
    assert main(["import", str(file), "--output", str(folder)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "give its row as --recipe, one of " in error
    names = error.split("as --recipe, one of ")[1].strip().split(", ")
    assert len(names) == rows
    if k == 8:
        assert {"resnet50d-grassmann", "resnet50d-rsb-a1-grassmann", "resnet50d-rsb-a3-grassmann-fixres"} < set(names)
    assert not folder.exists()
    with pytest.raises(ValueError, match="which is not what recipe 'resnet50d-cosine' describes"):
        import_checkpoint(file, folder, "resnet50d-cosine")
    row = next(name for name in names if "rsb-a1" in name or "unnormalized" in name)
    assert main(["import", str(file), "--output", str(folder), "--recipe", row]) == 0
    about, recipe = read_description(folder / "model.safetensors"), grassy.recipes.files.load_recipe(row)
    assert (about.crop_pct, about.interpolation, paper_row(about)) == (recipe.crop_pct, recipe.interpolation, row)


def test_an_import_does_not_write_over_other_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds other files: give a new folder"):
        import_checkpoint(tmp_path / "missing.pth", tmp_path)


def test_the_test_sizes_are_those_of_the_authors_configurations():
    recipes = {"resnet50d-grassmann": 256, "vgg13bn-grassmann": 256, "swin-t-grassmann": 256, "deit3-s-grassmann": 224}
    recipes |= {"resnet50d-rsb-a1-grassmann": 236, "resnet50d-rsb-a2-linear": 236}
    recipes |= {"resnet50d-rsb-a3-grassmann-fixres": 232}
    for name, resized in recipes.items():
        recipe = grassy.recipes.files.load_recipe(name)
        assert round((recipe.test_size or recipe.img_size) / recipe.crop_pct) == resized, name
        bicubic = "rsb" in name or name.startswith(("swin", "deit3"))
        assert recipe.interpolation == ("bicubic" if bicubic else "bilinear")


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"fc.weight": torch.zeros(2, 2)}, "does not have mmpretrain's names"),
        ({"backbone.blocks.0.weight": torch.zeros(2), "head.fc.weight": torch.zeros(2)}, "holds another network than"),
        (
            {"backbone.stem.0.conv.weight": torch.zeros(2), "head.fc.weight": torch.zeros(7, 2)},
            r"head\.fc\.weight must have 1000 times k rows, got shape \(7, 2\)",
        ),
    ],
)
def test_other_weights_are_refused_and_nothing_is_written(state, said, tmp_path, capsys):
    torch.save({"state_dict": state}, tmp_path / "file.pth")
    assert main(["import", str(tmp_path / "file.pth"), "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert re.search(said, error)
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"PK\x03\x04 half a zip"])
def test_files_that_are_none_are_refused(content, tmp_path, capsys):
    (tmp_path / "file.pth").write_bytes(content)
    for name in ("file.pth", "missing.pth"):
        assert main(["import", str(tmp_path / name), "--output", str(tmp_path / "out")]) == 2
        assert capsys.readouterr().err.count("\n") == 1
