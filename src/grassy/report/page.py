"""`grassy report`: one HTML file about one or several runs, which opens from disk without a network.

The page is web/page.html with styles, scripts and data inserted. Untrusted text (class names, paths, settings) is part
of the data: JSON without any "<", which the scripts insert as text, never as markup.
"""

import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from grassy import paper
from grassy._version import __version__
from grassy.atomic import write_text_atomically
from grassy.data.layout import TRAIN_NAMES, VALIDATION_NAMES
from grassy.report.analyze import ANALYSIS, analyze, open_split, read_analysis, where_images_are
from grassy.report.classes import SCALARS
from grassy.report.curves import curves_of
from grassy.report.settings import settings_of
from grassy.report.thumbnails import BUDGET, thumbnails
from grassy.runs.paper_row import paper_row
from grassy.runs.weights import read_description, run_folder, weights_digest, weights_file

STYLES = ("page.css", "tables.css", "pictures.css")
#: Each script may use the ones before it.
SCRIPTS = (
    "elements.js",
    "runs.js",
    "colors.js",
    "gallery.js",
    "metrics.js",
    "overview.js",
    "class_table.js",
    "class_panel.js",
    "matrix.js",
    "matrix_view.js",
    "confusion.js",
    "notable.js",
    "curves.js",
    "recipes.js",
    "angles.js",
    "geometry_details.js",
    "explorer.js",
    "page.js",
)

#: Limit of the data of a run: a page with 1,000 classes and 8 angles per pair stays under 14 MB.
MOST_CHARACTERS = 13_000_000


#: Scalars that the paper reports too, under the paper's names.
IN_PAPER = {"top1": "top1", "top5": "top5", "variability": "variability", "class_separation": "r2"}


@dataclass(frozen=True)
class PageRun:
    """The data of one run on a page."""

    name: str
    analysis: dict[str, Any]
    """The result of `analyze` or `classes.describe`."""
    curves: dict[str, list[float | None]] = field(default_factory=dict)
    """Columns of equal length; `epoch` or `step` is the x-axis."""
    pictures: list[str | None] = field(default_factory=list)
    """Data URIs of the examples of the analysis, in their order."""
    paper: dict[str, float] = field(default_factory=dict)
    """The paper's scalars for the row that the run's recipe reproduces."""
    settings: dict[str, str] = field(default_factory=dict)
    """The recipe, flattened, for comparing runs."""


def report(
    runs: Sequence[Path],
    output: Path,
    data_dir: Path | None = None,
    split: str | None = None,
    device: str = "auto",
    title: str = "",
) -> Path:
    """Write a page about runs. Runs whose weights changed since their analysis are analyzed first.

    Args:
        runs: Folders of runs, or files of weights.
        output: The HTML file to write.
        data_dir: The images to measure on; None for those that each run was trained on.
        split: The split of the images; None for the validation split of each run.
        device: Where models run: "auto", "cpu" or "cuda".
        title: The title of the page; "" for the names of the runs.

    Returns:
        The file.

    Raises:
        ValueError: If there are no runs, if `output` is a folder, or if a run cannot be read.
    """
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


def analyses_of(runs: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """The analysis of each run, by the run's name on the page."""
    paths = list(dict.fromkeys(Path(run) for run in runs))
    return {
        name: read_analysis(run_folder(weights_file(path))) for name, path in zip(run_names(paths), paths, strict=True)
    }


def top1_of(analyses: Mapping[str, dict[str, Any]]) -> list[str]:
    """One line per analysis of images: its accuracy and its images."""
    return [
        f"{name}: top-1 {analysis['scalars']['top1']:.2f} on {analysis['data']['images']:,} images of "
        f"{analysis['data']['split']}"
        for name, analysis in analyses.items()
        if analysis["data"] is not None and analysis["scalars"].get("top1") is not None
    ]


def measured_on(analyses: Mapping[str, dict[str, Any]]) -> list[str]:
    """The images that each run was measured on; empty if all runs share them."""
    found = [analysis["data"] for analysis in analyses.values()]
    if len({_images(data) for data in found}) == 1:
        return []
    words = ["weights alone" if data is None else f"{data['images']:,} images of {data['split']}" for data in found]
    folders = ["" if data is None or data["folder"] is None else f" in {data['folder']}" for data in found]
    return [f"{name}: {word}{folder}" for name, word, folder in zip(analyses, words, folders, strict=True)]


def _images(data: dict[str, Any] | None) -> tuple[Any, ...] | None:
    """A key that identifies the images of an analysis, independent of how split and folder are spelled."""
    if data is None:
        return None
    kinds = (names for names in (TRAIN_NAMES, VALIDATION_NAMES) if data["split"] in names)
    folder = None if data["folder"] is None else Path(data["folder"]).resolve()
    return data["dataset"], folder, next(kinds, data["split"]), data["images"]


def open_run(run: Path, name: str, data_dir: Path | None, split: str | None, device: str) -> PageRun:
    file = weights_file(run)
    about = read_description(file)
    data_dir = where_images_are(file, about, data_dir)
    images, recipe = open_split(about, data_dir, file, split)
    analysis = _current_analysis(file, data_dir, split, wants_data=images is not None)
    if analysis is None:
        analysis = analyze(run, data_dir, split, device)
    pictures: list[str | None] = []
    if images is not None and analysis.get("examples") is not None:
        measured = analysis["data"]["split"]
        if measured != recipe.val_split:  # an earlier analysis: show the images that it measured
            images = open_split(about, data_dir, file, measured)[0] or images
        room = MOST_CHARACTERS - len(json.dumps(analysis))
        pictures = thumbnails(images, analysis["examples"], budget=min(BUDGET, room))
    return PageRun(
        name,
        analysis,
        curves_of(run_folder(file)),
        pictures,
        of_paper(paper_row(about)),
        settings_of(about, analysis["width"]),
    )


def of_paper(row: str) -> dict[str, float]:
    """The paper's scalars for one of its rows; none for "" and for names of no row."""
    if row not in paper.rows():
        return {}
    figures = paper.figures(row)
    return {key: figures[name] for key, name in IN_PAPER.items() if name in figures}


def _current_analysis(file: Path, data_dir: Path | None, split: str | None, wants_data: bool) -> dict[str, Any] | None:
    """The analysis beside a file of weights; None if it is outdated, of other images or incomplete."""
    folder = run_folder(file)
    if not (folder / ANALYSIS).is_file():
        return None
    try:
        analysis = read_analysis(folder)
    except ValueError:
        return None
    if analysis.get("weights_sha256") != weights_digest(file):
        return None
    data = analysis["data"]
    if data is None:
        return None if wants_data else analysis
    if wants_data and "examples" not in analysis:
        return None  # written by an earlier version
    other_folder = data_dir is not None and data["folder"] != str(data_dir)
    return None if other_folder or split not in (None, data["split"]) else analysis


def run_names(paths: Sequence[Path]) -> list[str]:
    """The shortest distinct ends of the folders' paths."""
    parts = [(path.parent if path.is_file() else path).absolute().parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


# ------------------------------------------------------------------------------------------------ the file


def write_page(runs: Sequence[PageRun], output: Path, title: str = "", opening: str = "") -> Path:
    """Write one HTML file atomically.

    Args:
        runs: The data of the runs.
        output: The file to write.
        title: The title of the page; "" for the names of the runs.
        opening: A section of trusted HTML that comes first.

    Returns:
        The file.
    """
    text = render_page(runs, title, opening)
    write_text_atomically(output, text)
    return output


def render_page(runs: Sequence[PageRun], title: str = "", opening: str = "") -> str:
    shown = dict.fromkeys(uri for run in runs for uri in run.pictures if uri is not None)
    pictures = {uri: number for number, uri in enumerate(shown)}  # an image that two runs show is stored once
    data = {
        "title": title,
        "version": __version__,
        "scalars": [{"key": key, "title": t, "decimals": d, "about": a} for key, (t, d, a) in SCALARS.items()],
        "pictures": list(pictures),
        "runs": [
            {
                "name": run.name,
                "analysis": run.analysis,
                "curves": run.curves,
                "pictures": [None if uri is None else pictures[uri] for uri in run.pictures],
                "paper": run.paper,
                "settings": run.settings,
            }
            for run in runs
        ],
    }
    contents = {
        "title": html.escape(title or ", ".join(run.name for run in runs)),
        "styles": "\n".join(map(_file, STYLES)),
        "scripts": "\n".join(map(_file, SCRIPTS)),
        "data": _script_safe_json(data),
        "opening": opening,
    }
    # In one pass, so that inserted text is not searched for placeholders.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: contents[match[1]], _file("page.html"))


def _script_safe_json(value: Any) -> str:
    """JSON for a script element: without "<", nothing ends the element or opens a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _file(name: str) -> str:
    return (resources.files("grassy.report") / "web" / name).read_text(encoding="utf-8")
