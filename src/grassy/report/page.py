"""`grassy report`: one HTML file about one or several runs, which opens from disk, offline, with nothing fetched.

The page is web/page.html with the styles, the scripts and the data put in. Whatever comes from outside (class names,
paths, settings) is in the data, a JSON in which no "<" is left, and reaches the page as text, never as markup.
"""

import csv
import html
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from grassy import paper
from grassy._version import __version__
from grassy.data.images import TRAIN_NAMES, VALIDATION_NAMES
from grassy.inference.feature_models import file_digest
from grassy.report.analyze import ANALYSIS, analyze, open_split, read_analysis
from grassy.report.classes import SCALARS
from grassy.report.samples import BUDGET, sample_images
from grassy.runs.atomic import write_atomically
from grassy.runs.paper_row import paper_row
from grassy.runs.records import SUMMARY
from grassy.runs.schema import MOST_DESCRIPTION, read_text
from grassy.runs.weights import read_description, weights_file

STYLES = ("page.css",)
SCRIPTS = ("elements.js", "angles.js", "metrics.js", "curves.js", "colors.js", "matrix.js", "details.js", "page.js")

#: Of a run with its samples: the page of one run of 1,000 classes with 8 angles a pair stays under 12 MB.
MOST_CHARACTERS = 11_700_000


#: Scalars that the paper has, too, under its names.
IN_PAPER = {"top1": "top1", "top5": "top5", "variability": "variability", "class_separation": "r2"}


@dataclass(frozen=True)
class PageRun:
    """What a page shows of one run."""

    name: str
    analysis: dict[str, Any]
    """What `analyze` or `classes.describe` gives."""
    curves: dict[str, list[float | None]] = field(default_factory=dict)
    """Columns of summary.csv, one value an epoch."""
    samples: list[list[str]] | None = None
    """Data URIs of a few images of each class."""
    paper: dict[str, float] = field(default_factory=dict)
    """Scalars that the paper has for the row that the run's recipe is to reproduce."""


def report(
    runs: Sequence[Path],
    output: Path,
    data_dir: Path | None = None,
    split: str | None = None,
    device: str = "auto",
    title: str = "",
) -> Path:
    """Write the page of the folders of some runs; those not analyzed since their weights changed are analyzed first."""
    if not runs:
        raise ValueError("a report needs at least one run")
    if output.is_dir():
        raise ValueError(f"{output} is a folder: give the name of the page, such as {output / 'report.html'}")
    paths = list(dict.fromkeys(Path(run) for run in runs))
    names = run_names(paths)
    opened = []
    for run, name in zip(paths, names, strict=True):
        try:
            opened.append(open_run(run, name, data_dir, split, device))
        except ValueError as error:
            raise ValueError(f"{name}: {error}" if len(paths) > 1 else str(error)) from error
    return write_page(opened, output, title)


def measured_on(runs: Sequence[Path]) -> list[str]:
    """For each run the images that its analysis is of, if they are not the same for all."""
    paths = list(dict.fromkeys(Path(run) for run in runs))
    found = [read_analysis(weights_file(path).parent)["data"] for path in paths]
    if len({_images(data) for data in found}) == 1:
        return []
    words = ["weights alone" if data is None else f"{data['images']:,} images of {data['split']}" for data in found]
    folders = ["" if data is None or data["folder"] is None else f" in {data['folder']}" for data in found]
    return [f"{name}: {word}{folder}" for name, word, folder in zip(run_names(paths), words, folders, strict=True)]


def _images(data: dict[str, Any] | None) -> tuple[Any, ...] | None:
    """Of an analysis, what tells its images from others, however the split and the folder were written."""
    if data is None:
        return None
    kinds = (names for names in (TRAIN_NAMES, VALIDATION_NAMES) if data["split"] in names)
    folder = None if data["folder"] is None else Path(data["folder"]).resolve()
    return data["dataset"], folder, next(kinds, data["split"]), data["images"]


def open_run(run: Path, name: str, data_dir: Path | None, split: str | None, device: str) -> PageRun:
    file = weights_file(run)
    about = read_description(file)
    images, recipe = open_split(about, data_dir, split)
    analysis = _current_analysis(file, data_dir, split, wants_data=images is not None)
    if analysis is None:
        analysis = analyze(run, data_dir, split, device)
    samples = None
    if images is not None:
        measured = analysis["data"]["split"]
        if measured != recipe.val_split:  # an analysis from before: samples are to be of the images that it measured
            images = open_split(about, data_dir, measured)[0] or images
        room = MOST_CHARACTERS - len(json.dumps(analysis))
        samples = sample_images(images, about.num_classes, budget=min(BUDGET, room))
    return PageRun(name, analysis, read_curves(file.parent / SUMMARY), samples, of_paper({"paper": paper_row(about)}))


def of_paper(recipe: Mapping[str, Any]) -> dict[str, float]:
    """Those of SCALARS that the paper has, for a recipe that names a row of it."""
    if recipe.get("paper") not in paper.rows():
        return {}
    figures = paper.figures(recipe["paper"])
    return {key: figures[name] for key, name in IN_PAPER.items() if name in figures}


def _current_analysis(file: Path, data_dir: Path | None, split: str | None, wants_data: bool) -> dict[str, Any] | None:
    """The analysis beside a file of weights, unless it is of other weights, of other images, or says too little."""
    if not (file.parent / ANALYSIS).is_file():
        return None
    try:
        analysis = read_analysis(file.parent)
    except ValueError:
        return None
    if analysis.get("weights_sha256") != file_digest(file):
        return None
    data = analysis["data"]
    if data is None:
        return None if wants_data else analysis
    other_folder = data_dir is not None and data["folder"] != str(data_dir)
    return None if other_folder or split not in (None, data["split"]) else analysis


def run_names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths of folders that tell them apart."""
    parts = [(path.parent if path.is_file() else path).absolute().parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def read_curves(path: Path) -> dict[str, list[float | None]]:
    """The columns of a summary.csv; none if the file is not there."""
    if not path.is_file():
        return {}
    try:
        rows = list(csv.DictReader(io.StringIO(read_text(path, MOST_DESCRIPTION), newline="")))
    except csv.Error as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    names = [key for key in (rows[0] if rows else {}) if key is not None]  # None: cells beyond the last name
    columns = {key: [_number(row[key]) for row in rows] for key in names}
    return {key: values for key, values in columns.items() if any(value is not None for value in values)}


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "nan")
    except ValueError:
        return None
    return float(f"{value:.6g}") if math.isfinite(value) else None


# ------------------------------------------------------------------------------------------------ the file


def write_page(runs: Sequence[PageRun], output: Path, title: str = "") -> Path:
    """One HTML file, written whole or not at all."""
    text = render_page(runs, title)
    write_atomically(output, lambda file: file.write(text.encode()))
    return output


def render_page(runs: Sequence[PageRun], title: str = "") -> str:
    data = {
        "title": title,
        "version": __version__,
        "scalars": [{"key": key, "title": t, "decimals": d, "about": a} for key, (t, d, a) in SCALARS.items()],
        "runs": [
            {"name": run.name, "analysis": run.analysis, "curves": run.curves, "samples": samples, "paper": run.paper}
            for run, samples in zip(runs, _once([run.samples for run in runs]), strict=True)
        ],
    }
    contents = {
        "title": html.escape(title or ", ".join(run.name for run in runs)),
        "styles": "\n".join(map(_file, STYLES)),
        "scripts": "\n".join(map(_file, SCRIPTS)),
        "data": script_safe_json(data),
    }
    # In one pass: what is put in is not searched for places to put things.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: contents[match[1]], _file("page.html"))


def _once(samples: list[list[list[str]] | None]) -> list[list[list[str]] | int | None]:
    """Samples that an earlier run has too are replaced by its number."""
    firsts = [samples.index(own) for own in samples]
    return [
        own if first == i or own is None else first for i, (own, first) in enumerate(zip(samples, firsts, strict=True))
    ]


def script_safe_json(value: Any) -> str:
    """JSON that can stand in a script element: with no "<" in it, nothing ends the element or opens a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _file(name: str) -> str:
    return (resources.files("grassy.report") / "web" / name).read_text(encoding="utf-8")
