"""A missing package is named together with the extra that brings it, from Python as at the command line."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
import timm
import torch
from torch import nn

import grassy
from grassy.extras import PACKAGES, needs, sentence

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def packages_of(extra):
    """The packages that an extra brings, by those that it names in turn."""
    found = set()
    for requirement in PROJECT["optional-dependencies"][extra]:
        if others := re.match(r"grassy\[(.*)\]", requirement):
            found |= set().union(*map(packages_of, others[1].split(",")))
        else:
            found.add(re.match(r"[\w-]+", requirement)[0].lower())
    return found


@pytest.fixture
def without(monkeypatch):
    """Makes a package look as if it were not installed."""

    def remove(name):
        for module in [name, *(m for m in sys.modules if m.startswith(f"{name}."))]:
            monkeypatch.setitem(sys.modules, module, None)

    return remove


def test_a_function_that_lacks_a_package_names_the_extra(without, tmp_path):
    saved = timm.create_model("test_resnet", num_classes=3)
    grassy.replace_head(saved, "grassmann", k=1)
    file = tmp_path / "model.safetensors"
    grassy.save(saved, file)
    without("timm")
    without("scipy")
    with pytest.raises(ModuleNotFoundError, match=r"grassy.load needs timm: pip install 'grassy\[train\]'"):
        grassy.load(file)
    with pytest.raises(ModuleNotFoundError, match=r"cluster_order needs scipy: pip install 'grassy\[report\]'"):
        grassy.analysis.cluster_order(torch.ones(4, 4))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    grassy.replace_head(model, "grassmann", k=1)
    with pytest.raises(ValueError, match=r"unknown optimizer 'lion'; .* of timm: pip install 'grassy\[train\]'"):
        grassy.make_optimizer(model, "lion", lr=0.1)


def test_the_name_of_the_missing_module_and_other_errors_stay():
    @needs("it", extra="train")
    def fails(error):
        raise error

    with pytest.raises(ModuleNotFoundError, match=r"it needs timm: pip install 'grassy\[train\]'") as caught:
        fails(ModuleNotFoundError("no", name="timm.layers"))
    assert caught.value.name == "timm.layers"
    for error in (ModuleNotFoundError("ours", name="grassy.misspelt"), ValueError("other"), ImportError("broken")):
        with pytest.raises(type(error), match=str(error)):
            fails(error)
    inner = ModuleNotFoundError(sentence("inner", "timm", "train"), name="timm")
    with pytest.raises(ModuleNotFoundError, match="inner needs timm"):
        fails(inner)


def test_packages_that_no_extra_brings_are_named_themselves():
    assert sentence("grassy.load", "transformers.models", "train") == (
        "grassy.load needs transformers: pip install transformers"
    )
    assert sentence("x", "PIL.Image", "train") == "x needs pillow: pip install 'grassy[train]'"


def test_every_extra_that_a_message_names_exists():
    sources = [path.read_text() for path in (ROOT / "src" / "grassy").rglob("*.py")]
    pages = [path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))]
    named = {extra for text in sources for extra in re.findall(r'extra="(\w+)"', text)}
    named |= {extra for text in sources + pages for extra in re.findall(r"'grassy\[(\w+)\]'", text)}
    assert {"demo", "export", "report", "sklearn", "train", "transfer"} <= named
    assert named <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize(
    ("extra", "modules"),
    [
        ("demo", ("PIL", "rich", "sklearn", "scipy")),
        ("train", ("timm", "torchvision", "yaml", "rich", "tensorboard")),
        ("export", ("onnx", "onnxscript", "timm")),
        ("transfer", ("timm", "torchvision", "sklearn")),
        ("report", ("matplotlib", "PIL", "scipy", "timm")),
        ("sklearn", ("sklearn",)),
    ],
)
def test_an_extra_brings_what_its_part_imports(extra, modules):
    assert {PACKAGES.get(module, module) for module in modules} <= packages_of(extra)
