"""The demo's models on the page that `grassy report` writes."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from grassy.data.images import ArrayImages
from grassy.report.analyze import name_examples
from grassy.report.classes import describe
from grassy.report.page import PageRun, write_page
from grassy.report.thumbnails import thumbnails

TITLE = "Digits: a vector or a subspace for each class"


def page_run(
    label: str,
    head: tuple[str, dict[str, Any]],
    model: nn.Sequential,
    test: tuple[Tensor, Tensor],
    names: list[str],
    losses: list[float],
) -> PageRun:
    """A trained model as the page shows it: its classes, described by test images, and its training loss."""
    images, labels = test
    pixels = (255 * images.squeeze(1)).round().to(torch.uint8).numpy()
    with torch.no_grad():
        features = model.eval()[0](images)
    facts = {
        "model": "a small convolutional network",
        "head": {"name": head[0], **head[1]},
        "data": {"images": len(labels), "split": "test"},
    }
    data = ArrayImages(pixels, labels.numpy(), names, "digits")
    analysis = {**facts, **describe(model[-1], names, features, labels)}
    name_examples(analysis, data, [], labels)
    curves: dict[str, list[float | None]] = {"epoch": [float(i) for i in range(len(losses))], "train_loss": [*losses]}
    settings = {"head.name": head[0], **{f"head.{key}": str(value) for key, value in head[1].items()}}
    return PageRun(label, analysis, curves, thumbnails(data, analysis["examples"]), settings=settings)


def write_demo_page(runs: list[PageRun], path: Path) -> None:
    """The page, with the largest subspaces first: what is first is shown first."""
    write_page(runs[::-1], path, title=TITLE)
