"""Runs and analyses that the tests of analyze and report share: folders of a run without the training."""

import numpy as np
import torch

import grassy
from grassy.models import create_model
from grassy.report.classes import describe
from grassy.report.page import PageRun
from grassy.runs.records import save_summary
from grassy.runs.weights import BEST, Description, save_weights
from training_cases import TINY


def tiny_images(folder, images=60, classes=5, names=None):
    """test.npz of noise whose brightness and tint depend on the class."""
    rng = np.random.default_rng(0)
    labels = np.arange(images) % classes
    pixels = rng.integers(0, 120, (images, 8, 8, 3)) + (labels * 130 // max(1, classes - 1))[:, None, None, None]
    names = np.array(names or [f"class {i}" for i in range(classes)])
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "test.npz", x=pixels.astype(np.uint8), y=labels, classes=names)
    return folder


def make_run(folder, head, classes=5, names=None, epochs=3, seed=0):
    """The folder of a run: random weights of a tiny transformer, and a summary.csv of made-up curves."""
    torch.manual_seed(seed)
    model = create_model(TINY["model"], classes, head, TINY["model_kwargs"])
    about = Description(
        model=TINY["model"],
        num_classes=classes,
        head=head,
        model_kwargs=TINY["model_kwargs"],
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


def random_run(name, classes, k=8, width=64, names=None, samples=None, head="grassmann"):
    """What a page shows of a head that was never trained, with labelled features of noise."""
    made = grassy.create_head(head, width, classes, **({"k": k} if head == "grassmann" else {}))
    features, labels = torch.randn(2 * classes, width), torch.arange(2 * classes) % classes
    analysis = describe(made, names, features, labels)
    extra = {"model": "noise", "head": {"name": head}, "data": {"images": 2 * classes, "split": "test"}}
    curves = {"epoch": [0.0, 1.0, 2.0], "eval_top1": [10.0, 40.0, 60.0], "train_loss": [2.0, 1.0, None]}
    return PageRun(name, {**extra, **analysis}, curves, samples)
