"""The docstrings that the reference shows: they describe every argument, and their examples run."""

import doctest
import importlib
import inspect
import re

import pytest

#: Parts without an `__all__` make their own functions public.
PARTS = ("analysis", "distributed", "geometry", "heads", "kernels", "loss", "optim", "sklearn", "surgery", "transfer")
#: What the reference shows of other parts.
CHOSEN = {
    "criteria": ("create_criterion", "BinaryCrossEntropy"),
    "data.images": ("open_images", "ArrayImages", "ReaderImages", "Joined"),
    "inference.export": ("export",),
    "inference.features": ("extract",),
    "inference.load": ("load",),
    "inference.predict": ("predict", "Prediction"),
    "inference.save": ("save",),
    "inference.validate": ("validate",),
    "mixed_labels": ("MixedLabels",),
    "report.page": ("report", "write_page"),
    "report.pictures": (
        "angle_heatmap",
        "angle_heatmaps",
        "against_dimension",
        "points_of_runs",
        "points_of_paper",
        "strategy_bars",
        "iteration_time",
        "save_pictures",
    ),
    "recipes.files": ("load_recipe",),
    "torchvision_import": ("import_torchvision",),
}


def public_names():
    found = {}
    for part in (*PARTS, *CHOSEN):
        module = importlib.import_module(f"grassy.{part}")
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        public = getattr(module, "__all__", [name for name in own if not name.startswith("_")])
        for name in CHOSEN.get(part, public):
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                found[f"{value.__module__}.{name}"] = value
    return found


PUBLIC = public_names()


def described(docstring, section):
    """The names that a section in Google style describes."""
    text = re.search(rf"^{section}:\n((?:    .*\n|\n)*)", inspect.cleandoc(docstring) + "\n", re.MULTILINE)
    return set(re.findall(r"^    \*{0,2}(\w+): ", text[1], re.MULTILINE)) if text else set()


@pytest.mark.parametrize("name", PUBLIC)
def test_a_docstring_describes_every_argument_and_no_other(name):
    value = PUBLIC[name]
    assert value.__doc__
    if inspect.isclass(value) and "__init__" not in vars(value):
        return  # the fields of a tuple have docstrings of their own, and a parent describes its constructor
    assert described(value.__doc__, "Args") == set(inspect.signature(value).parameters)


MODULES = sorted({value.__module__ for value in PUBLIC.values() if ">>>" in value.__doc__})


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_of_a_module_run(module):
    assert doctest.testmod(importlib.import_module(module)).failed == 0


def test_there_are_examples():
    assert len(MODULES) > 10
