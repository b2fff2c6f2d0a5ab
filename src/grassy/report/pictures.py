"""Matplotlib figures like those of the paper: heatmaps of angles, measures against k, strategies, iteration time.

Every function returns a `Figure`; `figure.savefig("name.pdf")` writes vector graphics. Colours are those of Okabe and
Ito, or perceptually uniform maps, so that they work in grey and for all kinds of colour vision.
"""

import json
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from grassy import paper
from grassy.report.packing import unpack_angles

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "0.75"
ORDERS = ("index", "name", "cluster")
SMALLEST_PRINT = 5  # points; names that would be smaller are left out
LONGEST_NAME = 16  # letters; of longer names the middle is left out

#: The measures drawn against k: key and title.
MEASURES = (
    ("accuracy", "Accuracy (%)"),
    ("variability", "Variability (°)"),
    ("class_separation", "Class separation R²"),
    ("transfer", "Transfer, linear SVM (%)"),
)
PAPER_BY_DIMENSION = {1: "resnet50d-grassmann-k1", 4: "resnet50d-grassmann-k4", 8: "resnet50d-grassmann",
                      16: "resnet50d-grassmann-k16", 32: "resnet50d-grassmann-k32"}  # fmt: skip


# ------------------------------------------------------------------------------------------------ heatmaps


def angle_heatmap(analysis: Mapping[str, Any], angle: int = 1, order: str | Sequence[int] = "cluster") -> Figure:
    """Heatmap of one principal angle between all classes, or of the angle between class vectors.

    Args:
        analysis: The result of `analyze` or `describe`.
        angle: Which principal angle, from 1 (smallest) to k.
        order: "index", "name", "cluster", or a list of all classes.

    Returns:
        The figure.

    Raises:
        ValueError: If there is no such angle, or if the order is unknown or incomplete.
    """
    return angle_heatmaps(analysis, [angle], order)


def angle_heatmaps(
    analysis: Mapping[str, Any], angles: Sequence[int] | None = None, order: str | Sequence[int] = "cluster"
) -> Figure:
    """Heatmaps of several principal angles side by side, each with its own scale.

    Args:
        analysis: The result of `analyze` or `describe`.
        angles: Which principal angles, from 1 (smallest) to k; None for all.
        order: "index", "name", "cluster", or a list of all classes.

    Returns:
        The figure.

    Raises:
        ValueError: If there is no such angle, or if the order is unknown or incomplete.
    """
    degrees = unpack_angles(analysis["angles"])
    k = degrees.shape[-1]
    chosen = list(range(1, k + 1)) if angles is None else list(angles)
    for angle in chosen:
        if not 1 <= angle <= k:
            raise ValueError(f"angle must lie between 1 and {k}, the number of angles per pair, got {angle}")
    places = _order(analysis, order)
    rows = -(-len(chosen) // 4)
    columns = -(-len(chosen) // rows)  # five become rows of three and two, not of four and one
    size = 5.2 if len(chosen) == 1 else 3.4
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)
    figure = Figure(figsize=(size * columns + 0.4, size * 0.9 * rows + 0.3), layout=layout)
    for axes, angle in zip(figure.subplots(rows, columns, squeeze=False).flat, chosen, strict=False):
        _heatmap(figure, axes, analysis, degrees[..., angle - 1], angle, places, size)
    for axes in figure.axes[len(chosen) : rows * columns] if len(chosen) < rows * columns else []:
        axes.set_visible(False)
    return figure


def _heatmap(
    figure: Figure,
    axes: Axes,
    analysis: Mapping[str, Any],
    degrees: np.ndarray,
    angle: int,
    places: list[int],
    inches: float,
) -> None:
    shown = degrees[np.ix_(places, places)].astype(float)
    np.fill_diagonal(shown, np.nan)
    # Small angles, which matter most, are dark. Rasterised, because a PDF of a million cells is unusable. Cells smaller
    # than a pixel are averaged as colours: "nearest" would drop some classes and show others twice.
    many = len(places) > 64
    how = "antialiased" if many else "nearest"
    image = axes.imshow(shown, cmap="YlGnBu_r", rasterized=many, interpolation=how, interpolation_stage="rgba")
    axes.set_facecolor("0.85")
    if np.isfinite(shown).any():  # a single class has no angle
        beside = axes.inset_axes((1.03, 0.05, 0.04, 0.9))  # as tall as the matrix, independent of its labels
        bar = figure.colorbar(image, cax=beside, format="%g°")
        bar.outline.set_visible(False)
    vectors = analysis["representation"] == "vectors"
    title = "Angle between class vectors" if vectors else f"Principal angle {angle} of {analysis['k']}"
    axes.set_title(title, loc="left", fontsize=11)
    names = analysis["per_class"]["name"]
    labels = [shorten(names[c]) for c in places]
    longest = max(map(len, labels))
    # In points, 72 an inch: a line a class, 1.2 of its size, and the names beside them, 0.6 a letter, share the room
    # that the title or the bar of colours leaves.
    size = min(9, 72 * (0.9 * inches - 0.45) / (1.2 * len(places) + 0.6 * longest))
    if size >= SMALLEST_PRINT:
        turn = 90 if longest > 2 or (longest == 2 and len(places) > 16) else 0
        axes.set_xticks(range(len(places)), labels, rotation=turn, fontsize=size)
        axes.set_yticks(range(len(places)), labels, fontsize=size)
        for text in (*axes.get_xticklabels(), *axes.get_yticklabels()):
            text.set_parse_math(False)  # a name may contain dollar signs
    else:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_xlabel(f"{len(places)} classes", fontsize=9)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def shorten(name: str) -> str:
    """Shorten a long name in its middle: class names differ at their ends as often as at their beginnings."""
    name = " ".join(name.split())  # a label is one line
    if len(name) <= LONGEST_NAME:
        return name
    half = LONGEST_NAME // 2
    return f"{name[:half].rstrip()}…{name[1 - half :].lstrip()}"


def _order(analysis: Mapping[str, Any], order: str | Sequence[int]) -> list[int]:
    if isinstance(order, str):
        if order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(ORDERS)} or a list of classes, got {order!r}")
        return list(analysis["orders"][order])
    places = [int(c) for c in order]
    if sorted(places) != list(range(analysis["classes"])):
        raise ValueError(f"order must hold each of the {analysis['classes']} classes once, got {len(places)} entries")
    return places


# ------------------------------------------------------------------------------------------------ against k


def points_of_paper() -> dict[int, dict[str, float]]:
    """The paper's accuracy, variability, R² and transfer of ResNet50-D on ImageNet, by dimension k."""
    points = {}
    for k, key in PAPER_BY_DIMENSION.items():
        row = paper.figures(key)
        points[k] = {"accuracy": row["top1"], "variability": row["variability"], "class_separation": row["r2"],
                     "transfer": row["svm"]["average"]}  # fmt: skip
    return points


def points_of_runs(
    analyses: Sequence[Mapping[str, Any]], transfers: Sequence[Path | None] = ()
) -> dict[int, dict[str, float]]:
    """The points of `points_of_paper`, for runs.

    Runs with equal k are averaged. Runs with class vectors have no k and are left out.

    Args:
        analyses: The results of `analyze`, one per run.
        transfers: The file transfer.json of each run, in the same order; None for a run without one. A point has the
            mean of the SVMs.

    Returns:
        The measures by dimension k.
    """
    collected: dict[int, dict[str, list[float]]] = {}
    for analysis, transfer in zip(analyses, [*transfers, *[None] * (len(analyses) - len(transfers))], strict=True):
        if analysis["representation"] != "subspaces":
            continue
        values = collected.setdefault(analysis["k"], {})
        measured = {
            "accuracy": analysis["scalars"]["top1"],
            "variability": analysis["scalars"]["variability"],
            "class_separation": analysis["scalars"]["class_separation"],
            "transfer": None if transfer is None else _mean_of_svms(transfer),
        }
        for key, value in measured.items():
            if value is not None:
                values.setdefault(key, []).append(value)
    return {k: {key: statistics.fmean(values) for key, values in collected[k].items()} for k in sorted(collected)}


def _mean_of_svms(path: Path) -> float | None:
    results = json.loads(path.read_text(encoding="utf-8"))["results"]
    accuracies = [result["accuracy"] for result in results if result["method"] == "svm"]
    return statistics.fmean(accuracies) if accuracies else None


def against_dimension(
    points: Mapping[int, Mapping[str, float]], baseline: Mapping[str, float] | None = None, title: str = ""
) -> Figure:
    """Draw one panel per measure over logarithmic k.

    Args:
        points: The measures by dimension k, from `points_of_runs` or `points_of_paper`.
        baseline: Measures of another classifier, such as a linear head, drawn as a dashed line.
        title: The title of the figure.

    Returns:
        The figure.

    Raises:
        ValueError: If no point has a measure to draw.
    """
    keys = [(key, name) for key, name in MEASURES if any(key in point for point in points.values())]
    if not keys:
        raise ValueError("there is nothing to draw: no point has accuracy, variability, class_separation or transfer")
    figure = Figure(figsize=(3.0 * len(keys), 2.9 if not title else 3.2), layout="constrained")
    for axes, (key, name) in zip(figure.subplots(1, len(keys), squeeze=False)[0], keys, strict=True):
        having = [(k, point[key]) for k, point in sorted(points.items()) if key in point]
        axes.plot(*zip(*having, strict=True), "o-", color=BLUE, linewidth=2, markersize=6, label="subspaces")
        if baseline is not None and key in baseline:
            axes.axhline(baseline[key], color=ORANGE, linestyle="--", linewidth=1.5, label="class vectors")
            if axes is figure.axes[0]:
                axes.legend(frameon=False, fontsize=9)
        axes.set_xscale("log", base=2)
        axes.set_xticks([k for k, _ in having], [str(k) for k, _ in having])
        axes.minorticks_off()
        axes.set_xlabel("dimension k")
        axes.set_title(name, loc="left", fontsize=11)
        axes.margins(y=0.12)
        tidy(axes)
    if title:
        figure.suptitle(title, fontsize=12)
    return figure


# ------------------------------------------------------------------------------------------------ bars


#: The training strategies to compare: key, name, colour and hatch.
STRATEGIES = (
    ("linear", "class vectors", ORANGE, ""),
    ("grassmann", "subspaces", BLUE, ""),
    ("grassmann-fixres", "subspaces and FixRes", GREEN, "//"),
)


def strategy_bars(results: Mapping[str, Mapping[str, float]] | None = None) -> Figure:
    """Accuracy by training recipe: class vectors, subspaces, and subspaces with FixRes.

    Args:
        results: Accuracies in percent by recipe, such as
            `{"RSB-A3": {"linear": 79.4, "grassmann": 79.6, "grassmann-fixres": 80.2}}`. Some may be missing. None for
            the paper's ResNet50-D with k = 8, with the corrected value where the paper has an error.

    Returns:
        The figure.

    Raises:
        ValueError: If there is no result of any of these recipes.
    """
    of_paper = results is None
    results = _strategies_of_paper() if results is None else results
    drawn = [entry for entry in STRATEGIES if any(entry[0] in row for row in results.values())]
    if not drawn:
        raise ValueError(f"there is nothing to draw: no result of {', '.join(key for key, *_ in STRATEGIES)}")
    values = [row[key] for row in results.values() for key, *_ in drawn if key in row]
    lowest = np.floor(2 * (min(values) - 0.25 * (max(values) - min(values)) - 0.25)) / 2
    figure = Figure(figsize=(max(4.4, 0.2 + 2.0 * len(results)), 3.4), layout="constrained")
    axes = figure.subplots()
    for shift, (key, name, color, hatch) in enumerate(drawn):
        dimension = ", k = 8" if of_paper and key == "grassmann" else ""
        having = [(place, row[key]) for place, row in enumerate(results.values()) if key in row]
        where = [place + 0.27 * (shift - (len(drawn) - 1) / 2) for place, _ in having]
        heights = [height for _, height in having]
        bars = axes.bar(where, heights, 0.25, color=color, hatch=hatch, edgecolor="white", label=name + dimension)
        axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
    axes.set_xticks(range(len(results)), list(results))
    axes.set_ylim(lowest, max(values) + 0.28 * (max(values) - lowest))
    axes.set_ylabel(f"top-1{' on ImageNet' if of_paper else ''} (%), from {lowest:g}")
    axes.legend(frameon=False, fontsize=9, ncols=3, loc="upper left", columnspacing=1.2, handlelength=1.2)
    tidy(axes)
    return figure


def _strategies_of_paper() -> dict[str, dict[str, float]]:
    def top1(key: str) -> float:
        row = paper.figures(key)
        return float(row.get("corrections", {}).get("top1", {}).get("value", row["top1"]))

    return {
        f"RSB-{recipe.upper()}": {key: top1(f"resnet50d-rsb-{recipe}-{key}") for key, *_ in STRATEGIES}
        for recipe in ("a3", "a2", "a1")
    }


def iteration_time(results: Path | Mapping[str, Mapping[str, float]] | None = None) -> Figure:
    """Iteration time with class vectors (100 %) and with subspaces.

    Args:
        results: Times by model, such as `{"ResNet-50": {"linear": 0.21, "grassmann": 0.22}}`, or a results file of
            `benchmarks` with "medians" of a linear and a grassmann head. None for the paper's times.

    Returns:
        The figure.

    Raises:
        ValueError: If a file has no such medians.
    """
    times = _times(results)
    figure = Figure(figsize=(max(4.4, 0.8 + 1.6 * len(times)), 3.2), layout="constrained")
    axes = figure.subplots()
    where = np.arange(len(times))
    for shift, (key, name, color) in enumerate((("linear", "class vectors", ORANGE), ("grassmann", "subspaces", BLUE))):
        relative = [100 * pair[key] / pair["linear"] for pair in times.values()]
        bars = axes.bar(where + 0.38 * (shift - 0.5), relative, 0.35, color=color, label=name)
        axes.bar_label(bars, fmt="%.1f", fontsize=9, padding=2)
    axes.set_xticks(where, [textwrap.fill(name, 16) for name in times])
    axes.set_xlim(-0.6, len(times) - 0.4)
    axes.set_ylim(0, 100 * max(pair["grassmann"] / pair["linear"] for pair in times.values()) * 1.3)
    axes.set_ylabel("time of an iteration (%)")
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="upper left")
    tidy(axes)
    return figure


def _times(results: Path | Mapping[str, Mapping[str, float]] | None) -> dict[str, Mapping[str, float]]:
    if results is None:
        overhead = paper.figures("time-iteration")["overhead_percent"]
        names = {"deit3-s": "DeiT3-S", "resnet50d": "ResNet50-D"}
        return {names[key]: {"linear": 100, "grassmann": 100 + more} for key, more in overhead.items()}
    if isinstance(results, Path):
        medians = json.loads(results.read_text(encoding="utf-8")).get("medians", {})
        if not {"linear", "grassmann"} <= medians.keys():
            raise ValueError(f"{results} has no medians of a linear and a grassmann head")
        return {what: {head: medians[head][what] for head in ("linear", "grassmann")} for what in medians["linear"]}
    return dict(results)


def save_pictures(analyses: Mapping[str, Mapping[str, Any]], folder: Path, suffix: str = ".pdf") -> list[Path]:
    """Write the heatmaps of each run into a folder and, for runs of several k, the measures against k.

    Args:
        analyses: The results of `analyze`, by the name of the run.
        folder: Where to write. It is created if it does not exist.
        suffix: The format of the files: ".pdf", ".svg" or ".png".

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    figures = {}
    for number, (run, analysis) in enumerate(analyses.items(), start=1):
        name = f"angles-{run.replace('/', '-')}"
        figures[f"{name}-{number}" if name in figures else name] = angle_heatmaps(analysis)
    points = points_of_runs(list(analyses.values()))
    if len(points) > 1 and any(points.values()):
        figures["against-k"] = against_dimension(points)
    written = []
    for name, figure in figures.items():
        figure.savefig(folder / f"{name}{suffix}", dpi=200)
        written.append(folder / f"{name}{suffix}")
    return written


def tidy(axes: Axes) -> None:
    """Draw a light horizontal grid, and remove spines and tick marks."""
    axes.grid(axis="y", color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0)
