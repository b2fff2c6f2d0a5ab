"""The pictures of docs/results.md: what k does, and top-1 against transfer."""

import itertools
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from studies.cifar100.claims import UNITS, Study
from studies.cifar100.plan import KS, VARIANTS


def pictures(study: Study, folder: Path) -> None:
    """Two pictures, of what k does and of top-1 against transfer, as far as there is something to draw."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    def point(row: str, metric: str) -> tuple[float, float]:
        values = study.values(row, metric)
        return statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0

    rows = [row for row, runs in study.runs.items() if runs]
    ks = [k for k in KS if f"grassmann-{k}" in rows]
    folder.mkdir(parents=True, exist_ok=True)
    if len(ks) > 1 and "softmax" in rows:
        figure, axes = plt.subplots(1, len(UNITS), figsize=(13, 3), layout="constrained")
        for axis, (metric, title) in zip(axes, UNITS.items(), strict=True):
            means, errors = zip(*(point(f"grassmann-{k}", metric) for k in ks), strict=True)
            axis.errorbar(ks, means, errors, marker="o", capsize=3, label="Grassmann")
            axis.axhline(point("softmax", metric)[0], color="gray", linestyle="--", label="softmax")
            axis.set(xscale="log", xlabel="k", title=title, xticks=ks, xticklabels=ks)
            axis.minorticks_off()
        axes[0].legend()
        figure.savefig(folder / "results-k.png", dpi=150)
    rows = [row for row in rows if row not in VARIANTS or not VARIANTS[row].start]  # those trained for twice as long
    if len(rows) > 1:
        figure, axis = plt.subplots(figsize=(8, 6), layout="constrained")
        places = {row: (point(row, "top1"), point(row, "transfer")) for row in rows}
        for row, ((x, dx), (y, dy)) in places.items():
            kind = row.split("-")[0] if row.startswith(("grassmann", "softmax")) else "other heads"
            color = {"grassmann": "C0", "softmax": "C1"}.get(kind, "C2")
            axis.errorbar(x, y, dy, dx, marker="o", capsize=2, color=color, label=kind)
        means = {row: (x, y) for row, ((x, _), (y, _)) in places.items()}
        front = best_of_both(means.values())
        axis.plot(*zip(*front, strict=True), color="gray", linestyle=":", zorder=0)
        axis.set(xlabel="top-1 on CIFAR-100, %", ylabel="mean transfer, %")
        axis.margins(0.08)
        name_points(axis, means, front)
        kinds = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
        axis.legend(kinds.values(), kinds, loc="lower left", frameon=False)
        figure.savefig(folder / "results-front.png", dpi=150)
    plt.close("all")


def best_of_both(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that no other surpasses in both, from left to right."""
    found: list[tuple[float, float]] = []
    for x, y in sorted(points, reverse=True):
        if not found or y > found[-1][1]:
            found.append((x, y))
    return found[::-1]


def name_points(axis: Any, points: dict[str, tuple[float, float]], line: list[tuple[float, float]]) -> None:
    """Names beside points, where they lie on as few names, points and dots of a line as possible."""
    import numpy as np
    from matplotlib.transforms import Bbox

    axis.figure.draw_without_rendering()  # sizes of text are known after that
    spots = axis.transData.transform(list(points.values()))
    taken = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in spots]
    corners = axis.transData.transform(line)
    dots = [dot for ends in itertools.pairwise(corners) for dot in np.linspace(*ends, 50)]
    taken += [Bbox.from_bounds(x - 1, y - 1, 2, 2) for x, y in dots]
    sides = [
        ("left", 5, 5),
        ("left", 5, -9),
        ("right", -5, 5),
        ("right", -5, -9),
        ("center", 0, 12),
        ("center", 0, -16),
    ]
    for name, place in points.items():
        tried = []
        for number, (side, dx, dy) in enumerate(sides):
            text = axis.annotate(name, place, (dx, dy), textcoords="offset points", ha=side, fontsize=7)
            box = text.get_window_extent()
            outside = box.x0 < axis.bbox.x0 or box.x1 > axis.bbox.x1
            tried.append((outside, box.count_overlaps(taken), number, box, text))
        best = min(tried, key=lambda each: each[:3])
        taken.append(best[3])
        for each in tried:
            if each is not best:
                each[4].remove()
