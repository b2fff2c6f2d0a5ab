"""The tables of docs/performance.md about the step: its time, the factorisations that it avoids, orthonormality."""

from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.markdown import Result, elements, microseconds, number, shape, table
from grassy.report import pictures


def step(result: Result, images: Path) -> str:
    rows = result["rows"]
    step_roofline(rows, result["copy_bytes_per_ms"]).savefig(images / "step_roofline.png", dpi=150)
    heads = ["classes x k x n", "limit (µs)", "copy (µs)", "launch (µs)", "step (µs)", "step / limit"]
    heads += ["cache full / limit", "by", "plain torch (µs)", "Algorithm 1 (µs)", "step in a larger graph (µs)"]
    heads += ["/ limit", "far / limit"]
    return table(
        heads,
        (
            [
                shape(row),
                microseconds(row["floor_ms"]),
                microseconds(row.get("copy_ms")),
                microseconds(row.get("launch_ms")),
                microseconds(row["step_ms"]),
                f"{row['step_over_floor']:.2f}",
                number(row.get("dirty_step_over_floor"), ".2f"),
                row["implementation"],
                microseconds(row.get("all_ms", {}).get("reference")),
                microseconds(row.get("algorithm_1_ms")),
                microseconds(row.get("in_graph_ms", {}).get("step")),
                number(row.get("in_graph_over_floor"), ".2f"),
                number(row.get("far_step_over_floor"), ".2f"),
            ]
            for row in rows
        ),
    )


def step_roofline(rows: list[Result], bandwidth: float) -> Figure:
    """Time against the bytes of five passes, both logarithmic, with the line that no step can be below."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    rows = sorted(rows, key=elements)
    megabytes = [20e-6 * elements(row) for row in rows]
    floor = [1e9 * size / bandwidth for size in megabytes]
    axes.plot(megabytes, floor, color="0.35", linewidth=1.5, label=f"five passes at {bandwidth / 1e9:.2f} TB/s")
    series: list[tuple[str, str, str, Callable[[Result], float | None]]] = [
        ("our step", "o", pictures.BLUE, lambda row: row["step_ms"]),
        ("the same in plain torch", "s", pictures.GREEN, lambda row: row.get("all_ms", {}).get("reference")),
        ("Algorithm 1 by SVD and QR", "^", pictures.ORANGE, lambda row: row.get("algorithm_1_ms")),
    ]
    for name, marker, color, pick in series:
        points = [(size, 1e3 * ms) for size, row in zip(megabytes, rows, strict=True) if (ms := pick(row)) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker, color=color, markersize=6, label=name)
    axes.set(xscale="log", yscale="log", xlabel="bytes that a step has to move (MB)", ylabel="time of a step (µs)")
    axes.legend(frameon=False, fontsize=9)
    pictures.tidy(axes)
    axes.tick_params(which="minor", length=0)
    return figure


def svd_qr(result: Result, _: Path) -> str:
    rows = result["rows"]
    kinds = list(dict.fromkeys(name for row in rows for name in row["ms"]))
    return table(
        ["classes x k x n", "our step", *kinds, "svd, paper", "qr, paper"],
        (
            [
                shape(row),
                f"{row['step_ms']:.3f}",
                *(number(row["ms"].get(kind), ".2f") for kind in kinds),
                *(number(row.get("paper_ms", {}).get(kind), "g") for kind in ("svd", "qr")),
            ]
            for row in rows
        ),
    )


def svd_qr_on_cpu(result: Result, _: Path) -> str:
    return table(
        ["classes x k x n", "svd / our step", "qr / our step", "svd, paper (ms)", "qr, paper (ms)", "step by"],
        (
            [
                shape(row),
                *(f"{row['ms'][kind] / row['step_ms']:.1f}" for kind in ("svd", "qr")),
                *(number(row.get("paper_ms", {}).get(kind), "g") for kind in ("svd", "qr")),
                row["implementation"],
            ]
            for row in result["rows"]
        ),
    )


def drift(result: Result, _: Path) -> str:
    published = result.get("paper", {})
    return table(
        ["steps", "Algorithm 1 without step 5", "with step 5", "ours", "without step 5, paper (ResNet50-D)"],
        (
            [
                f"{row['step']:,}",
                *(f"{row[key]:.1e}" for key in ("without_step_5", "with_step_5", "ours")),
                number(published.get(str(row["step"])), ".1e"),
            ]
            for row in result["rows"]
        ),
    )
