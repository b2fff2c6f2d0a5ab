"""Runs without the training, and a browser, for the tests of analyze and report."""

import dataclasses

import numpy as np
import pytest
import torch
from benchmarks.browser import browser

import grassy
from grassy.models import create_model
from grassy.report.classes import describe
from grassy.report.page import PageRun, report, write_page
from grassy.runs.records import save_summary
from grassy.runs.weights import BEST, Description, save_weights

from .report_page_actions import NAMES

#: A transformer of a few thousand weights.
MODEL = "vit_tiny_patch16_224"
MODEL_KWARGS = {"img_size": 8, "patch_size": 4, "depth": 1, "embed_dim": 16, "num_heads": 2}
PICTURE = "data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAACAkQBADs="


@pytest.fixture(scope="session")
def tiny_images():
    """Writes test.npz of noise whose brightness and tint depend on the class."""

    def write(folder, images=60, classes=5, names=None):
        rng = np.random.default_rng(0)
        labels = np.arange(images) % classes
        pixels = rng.integers(0, 120, (images, 8, 8, 3)) + (labels * 130 // max(1, classes - 1))[:, None, None, None]
        names = np.array(names or [f"class {i}" for i in range(classes)])
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(folder / "test.npz", x=pixels.astype(np.uint8), y=labels, classes=names)
        return folder

    return write


@pytest.fixture(scope="session")
def make_run():
    """Makes the folder of a run: random weights, and a summary.csv of made-up curves."""

    def make(folder, head, classes=5, names=None, epochs=3, seed=0):
        torch.manual_seed(seed)
        model = create_model(MODEL, classes, head, MODEL_KWARGS)
        about = Description(
            model=MODEL,
            num_classes=classes,
            head=head,
            model_kwargs=MODEL_KWARGS,
            class_names=names,
            img_size=8,
            crop_pct=1.0,
            recipe={"workers": 0, "amp": "off"},
            epoch=epochs,
        )
        folder.mkdir(parents=True, exist_ok=True)
        save_weights(model, about, folder / BEST)
        rows = [
            {"epoch": e, "train_loss": 2 / (e + 1 + seed), "eval_top1": 50.0 + 10 * e, "lr": 0.1} for e in range(epochs)
        ]
        save_summary(folder, rows)
        return folder

    return make


@pytest.fixture(scope="session")
def random_run():
    """Makes what a page shows of a head that was never trained, with labelled features of noise."""

    def make(name, classes, k=8, width=64, names=None, head="grassmann", files=None, settings=None):
        made = grassy.create_head(head, width, classes, **({"k": k} if head == "grassmann" else {}))
        features, labels = torch.randn(4 * classes, width), torch.arange(4 * classes) % classes
        analysis = describe(made, names, features, labels)
        examples = analysis["examples"]
        examples["name"] = [files or f"a folder/{index:05d}.jpg" for index in examples["index"]]
        analysis["per_class"]["training_images"] = [10 + c for c in range(classes)]
        extra = {"model": "noise", "head": {"name": head}, "data": {"images": 4 * classes, "split": "test"}}
        curves = {"epoch": [0.0, 1.0, 2.0], "eval_top1": [10.0, 40.0, 60.0], "train_loss": [2.0, 1.0, None]}
        return PageRun(name, {**extra, **analysis}, curves, [PICTURE] * len(examples["index"]), settings=settings or {})

    return make


@pytest.fixture(scope="module")
def window():
    """A browser window of a desktop."""
    with browser() as opened:
        opened.emulate(1200, 1600)
        yield opened


@pytest.fixture(scope="module")
def runs(make_run, tiny_images, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    heads = {
        "subspaces": {"name": "grassmann", "k": 3},
        "others": {"name": "grassmann", "k": 3},
        "vectors": {"name": "linear"},
    }
    made = [make_run(folder / name, head, names=NAMES, seed=i) for i, (name, head) in enumerate(heads.items())]
    report(made, folder / "report.html", tiny_images(folder / "data", names=NAMES), device="cpu")
    return made


@pytest.fixture
def page(window, runs):
    """The page of three runs, freshly opened; at the end the console must not have complained."""
    window.open(runs[0].parent / "report.html")
    yield window
    assert window.errors() == []
    assert window.alert() is None


@pytest.fixture
def odd_page(random_run, window, tmp_path):
    """Runs with names that are hard to show, one run with other classes, and curves in a narrow range."""
    names = [
        "crane",
        "\u05d0\u05d1",
        "crane",
        "number one of a long row",
        "number two of a long row",
        "\U0001f989" * 40,
    ]
    runs = [random_run(f"run {k}", 6, k=k, width=16, names=names) for k in (2, 3)] + [random_run("other", 4, k=2)]
    accurate = {"epoch": [0.0, 1.0, 2.0], "eval_top1": [99.912, 99.953, 99.981]}
    runs = [dataclasses.replace(run, curves=accurate) for run in runs]
    write_page(runs, tmp_path / "odd.html")
    window.open(tmp_path / "odd.html")
    yield window
    assert window.errors() == []
