"""The demo's page: the idea on the first screen, and below it the page that `grassy report` writes of the models."""

import html
import re
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from grassy.data.images import ArrayImages
from grassy.demo.spread import Spread
from grassy.report.analyze import name_examples
from grassy.report.classes import describe
from grassy.report.page import PageRun, write_page
from grassy.report.thumbnails import thumbnails

TITLE = "A class as a vector, or as a subspace"
#: The map that images are drawn on: how many degrees it reaches, its circles, and how large an image is there.
REACH, CIRCLES, SIZE = 75, (20, 40, 60), 12


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


def write_demo_page(
    runs: list[PageRun],
    vectors: list[Spread],
    subspaces: list[Spread],
    table: list[list[str]],
    sentences: list[str],
    path: Path,
) -> None:
    """The page, with the largest subspaces first: what is first is shown first.

    vectors, subspaces: the classes of the two models that are compared. table: its titles, then its rows. sentences:
    what was seen and what was not, and last how to read the table.
    """
    write_page(runs[::-1], path, title=TITLE, opening=opening(vectors, subspaces, table, sentences))


def opening(vectors: list[Spread], subspaces: list[Spread], table: list[list[str]], sentences: list[str]) -> str:
    """The first section of the page, as HTML."""
    *seen, reading = map(html.escape, sentences)
    contents = {
        "choices": "".join(_choice(i, spread.name) for i, spread in enumerate(vectors)),
        "rules": ", ".join(f"#digit-{i}:checked ~ .maps .digit-{i}" for i in range(len(vectors))),
        "vectors": "".join(_map(i, spread) for i, spread in enumerate(vectors)),
        "subspaces": "".join(_map(i, spread) for i, spread in enumerate(subspaces)),
        "sentences": "".join(f"<li>{sentence}</li>" for sentence in seen),
        "table": _table(table),
        "reading": reading,
    }
    text = (resources.files("grassy.demo") / "opening.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: contents[match[1]], text)


def _choice(number: int, name: str) -> str:
    checked = " checked" if number == 0 else ""
    return (
        f'<input type="radio" name="digit" id="digit-{number}"{checked}>'
        f'<label for="digit-{number}">{html.escape(name)}</label>'
    )


def _map(number: int, spread: Spread) -> str:
    """The images of a class around its strongest direction, farther out the larger their angle to it."""
    circles = "".join(f'<circle r="{r}"/>' for r in CIRCLES)
    degrees = "".join(f'<text y="{-r + 1.5}">{r}°</text>' for r in CIRCLES)
    images = "".join(
        f'<image href="{uri}" x="{x - SIZE / 2:.1f}" y="{-y - SIZE / 2:.1f}" width="{SIZE}" height="{SIZE}"/>'
        for (x, y), uri in zip(spread.places, spread.pictures, strict=True)
    )
    name = html.escape(spread.name)
    return (
        f'<figure class="digit-{number}"><svg viewBox="{-REACH} {-REACH} {2 * REACH} {2 * REACH}" role="img" '
        f'aria-label="Test images of the digit {name} by their angles">{circles}{images}{degrees}</svg>'
        f"<figcaption>On average {spread.mean_angle:.0f}° from the middle.</figcaption></figure>"
    )


def _table(rows: list[list[str]]) -> str:
    titles, *body = ([html.escape(cell) for cell in row] for row in rows)
    head = "".join(f"<th>{title}</th>" for title in titles)
    lines = "".join(f"<tr><th>{title}</th>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for title, *row in body)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
