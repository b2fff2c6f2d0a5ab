"""The sections of docs/performance.md about the step: its time, the factorisations that it avoids, orthonormality."""

from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.page_text import Result, between, microseconds, number, numbers, table
from grassy.report import pictures


def step(result: Result, images: Path) -> list[str]:
    rows, bandwidth = result["rows"], result["copy_bytes_per_ms"]
    ratios = [row["step_over_floor"] for row in rows if row["k"] <= MOST_ROWS]
    larger = "".join(f", {row['step_over_floor']:.2f} with k = {row['k']}" for row in rows if row["k"] > MOST_ROWS)
    launches = [1e3 * row["launch_ms"] for row in rows if "launch_ms" in row]
    usual = [row for row in rows if row["k"] <= MOST_ROWS]
    dirty = [row["dirty_step_over_floor"] for row in usual if "dirty_step_over_floor" in row]
    among = [1e3 * row["in_graph_ms"]["launch"] for row in rows if "in_graph_ms" in row]
    far = [row["far_step_over_floor"] for row in rows if "far_step_over_floor" in row]
    intensity = {row["k"]: 12 * row["k"] / 20 for row in rows}
    least, most = min(intensity), max(intensity)
    rates = [12e-9 * row["k"] * numbers(row) / row["step_ms"] for row in rows]
    peers = [row for row in rows if "algorithm_1_ms" in row]
    text = [
        "A step reads weight, gradient and momentum and writes weight and momentum. Each is float32, so that no "
        "implementation can move fewer than five passes, 20 bytes for each number of the weight. The arithmetic is six "
        "products with K x N matrices of a class, three that make K x K matrices and three that apply them: 12k "
        f"operations for each number, or 0.6k for each byte: {intensity[least]:.1f} for k = {least}, "
        f"{intensity[most]:.1f} for k = {most}. Our kernels do up to {max(rates):.1f} TFLOP/s of it. What we call the "
        f"floor is the time of the five passes alone, at the bandwidth of a device copy, {bandwidth / 1e9:.2f} TB/s "
        f"here. The step takes {between(ratios, '.2f')} times as long{larger}. {aims(rows)}"
        + (
            " If the cache is full of what another kernel has just written, which has to go to memory first, it takes "
            f"{between(dirty, '.2f')} times as long."
            if dirty
            else ""
        )
        + (
            f" Each figure contains a launch, {between(launches, '.1f')} µs for a kernel that does next to nothing; "
            "the column `copy` is a kernel that does nothing but copy as many bytes."
            if launches
            else ""
        )
        + (
            " In training the step is one of many kernels, often in one graph, and the launch of that graph is not its "
            "to pay for. Two columns have it so: between two events that are nodes of a graph whose other "
            f"nodes empty the cache. A kernel that does next to nothing takes {between(among, '.1f')} µs there."
            if among
            else ""
        )
        + (
            " All this is for classes that turn by less than about 8 degrees in a step. Those that turn by 0.3 "
            "radians, 17 degrees, need more terms and more care; the column `far` has them, as half the time of two "
            "steps, there and back, of which the second may find data in the cache. Where classes are taken in pairs, "
            "with k = 3 and 4, they are then taken one by one."
            if far
            else ""
        ),
        *(
            [
                "Algorithm 1 as the paper has it, with an SVD in every step and a QR in every fifth, takes "
                f"{between((row['algorithm_1_over_step'] for row in peers), '.0f')} times as long as our step. Its "
                "factorisations cannot be captured in a graph."
            ]
            if peers
            else []
        ),
        table(
            [
                "classes x k x n",
                "floor (µs)",
                "copy (µs)",
                "step (µs)",
                "step / floor",
                "by",
                "plain torch (µs)",
                "Algorithm 1 (µs)",
                "step in a larger graph (µs)",
                "/ floor",
                "far / floor",
            ],
            (
                [
                    f"{row['classes']:,} x {row['k']} x {row['n']:,}",
                    microseconds(row["floor_ms"]),
                    microseconds(row.get("copy_ms")),
                    microseconds(row["step_ms"]),
                    f"{row['step_over_floor']:.2f}",
                    row["implementation"],
                    microseconds(row.get("all_ms", {}).get("reference")),
                    microseconds(row.get("algorithm_1_ms")),
                    microseconds(row.get("in_graph_ms", {}).get("step")),
                    f"{row['in_graph_over_floor']:.2f}" if "in_graph_over_floor" in row else "–",
                    f"{row['far_step_over_floor']:.2f}" if "far_step_over_floor" in row else "–",
                ]
                for row in rows
            ),
        ),
        *better_ones(rows),
    ]
    step_roofline(rows, bandwidth).savefig(images / "step_roofline.png", dpi=150)
    text.append("![Time of a step against the bytes it has to move](images/step_roofline.png)")
    return text


def better_ones(rows: list[Result]) -> list[str]:
    """Where another implementation was quicker than the one that was taken."""
    found = []
    for row in rows:
        others = {name: ms for name, ms in row.get("all_ms", {}).items() if name not in ("auto", row["implementation"])}
        name = min(others, key=lambda each: others[each], default=None)
        if name is not None and others[name] < 0.99 * row["step_ms"]:
            size = f"{row['classes']:,} x {row['k']} x {row['n']:,}"
            found.append(f"with {size} `{name}` takes {microseconds(others[name])} µs")
    return [f"Quicker than what was taken: {'; '.join(found)}."] if found else []


#: How long a step may take: for very small classes, 15 µs more than the floor, else so many times as long, and up to
#: how many rows.
AIM_MS, AIM, AIM_LARGE_K, MOST_ROWS = 0.015, 1.5, 2.5, 32


def aims(rows: list[Result]) -> str:
    """What was aimed at, and where it is missed."""

    def limit(row: Result) -> float:
        if row["k"] <= 2:
            return float(row["floor_ms"] + AIM_MS)
        return float(row["floor_ms"] * (AIM_LARGE_K if row["k"] == MOST_ROWS else AIM))

    missed = [row for row in rows if row["k"] <= MOST_ROWS and row["step_ms"] > limit(row)]
    text = (
        f"The aim was {AIM} times, {AIM_LARGE_K} times with k = 32, and {1e3 * AIM_MS:.0f} µs more than the floor with "
        "k = 1 and 2: "
    )
    if not missed:
        return text + "reached by all."
    names = ", ".join(
        f"{row['classes']:,} x {row['k']} x {row['n']:,} ({row['step_over_floor']:.2f}"
        + (
            f", of which a launch that does nothing takes {row['launch_ms'] / row['floor_ms']:.2f})"
            if "launch_ms" in row
            else ")"
        )
        for row in missed
    )
    return f"{text}it is missed by {names}; [what bounds it and what was tried](kernels.md#what-bounds-it)."


def step_roofline(rows: list[Result], bandwidth: float) -> Figure:
    """Time against the bytes of five passes, both logarithmic, with the line that no step can be below."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    rows = sorted(rows, key=numbers)
    megabytes = [20e-6 * numbers(row) for row in rows]
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


def svd_qr(result: Result, images: Path) -> list[str]:
    rows = result["rows"]
    kinds = list(dict.fromkeys(name for row in rows for name in row["ms"]))
    theirs = [kind for kind in ("svd", "qr") if any(kind in row.get("paper_ms", {}) for row in rows)]
    quickest = [min(row["ms"].values()) / row["step_ms"] for row in rows if row["ms"]]
    text = [
        "Thin SVD and QR of Gaussian matrices by `torch.linalg`, by the clock, beside our whole step, in ms. "
        "A dash stands for a contestant that had become too slow, or does not take the shape."
        + (" The last columns are what the paper measured on its own machine." if theirs else ""),
        table(
            ["classes x k x n", "our step", *kinds, *(f"{kind}, paper" for kind in theirs)],
            (
                [
                    f"{row['classes']:,} x {row['k']} x {row['n']:,}",
                    f"{row['step_ms']:.3f}",
                    *(number(row["ms"].get(kind), ".2f") for kind in kinds),
                    *(number(row.get("paper_ms", {}).get(kind), "g") for kind in theirs),
                ]
                for row in rows
            ),
        ),
    ]
    if quickest:
        text.append(
            f"The quickest factorisation alone takes {between(quickest, '.1f')} times as long as our whole step."
        )
    if fifths := [row["ms"]["qr"] / 5 for row in rows if "qr" in row["ms"]]:
        text.append(
            f"A fifth of the QR, {between(fifths, '.1f')} ms, is most of what Algorithm 1 takes in the table further "
            "above. It is the QR of `torch.linalg`: a faster batched one would change that table."
        )
    return text


def svd_qr_on_cpu(result: Result, images: Path) -> list[str]:
    rows = result["rows"]
    theirs = [kind for kind in ("svd", "qr") if any(kind in row.get("paper_ms", {}) for row in rows)]
    steps = [value / row["step_ms"] for row in rows for value in row["ms"].values()]
    return [
        "Thin SVD and QR by LAPACK, in steps of ours, since the times of a machine that is shared say little; and what "
        f"the paper measured, in ms. One of them takes as long as {between(steps, '.1f')} of our steps.",
        table(
            [
                "classes x k x n",
                "svd / our step",
                "qr / our step",
                *(f"{kind}, paper (ms)" for kind in theirs),
                "step by",
            ],
            (
                [
                    f"{row['classes']:,} x {row['k']} x {row['n']:,}",
                    *(
                        number(row["ms"][kind] / row["step_ms"] if kind in row["ms"] else None, ".1f")
                        for kind in ("svd", "qr")
                    ),
                    *(number(row.get("paper_ms", {}).get(kind), "g") for kind in theirs),
                    row["implementation"],
                ]
                for row in rows
            ),
        ),
    ]


def drift(result: Result, images: Path) -> list[str]:
    turn, published = result["radians_per_step"], result.get("paper", {})
    last = result["rows"][-1]
    return [
        f"The largest entry of |W Wᵀ − I| of {result['classes']} classes, k = {result['k']}, n = {result['n']}, in "
        f"float32, driven by random gradients that turn them by {turn['smallest']:.3f} to {turn['largest']:.3f} "
        f"radians a step. After {last['step']:,} steps it is {last['ours']:.1e} with ours, {last['with_step_5']:.1e} "
        f"for Algorithm 1 with a QR in every {result['qr_every']}th step and {last['without_step_5']:.1e} without it.",
        table(
            ["steps", "Algorithm 1 without step 5", "with step 5", "ours", "without step 5, paper (ResNet50-D)"],
            (
                [
                    f"{row['step']:,}",
                    *(f"{row[key]:.1e}" for key in ("without_step_5", "with_step_5", "ours")),
                    number(published.get(str(row["step"])), ".1e"),
                ]
                for row in result["rows"]
            ),
        ),
        "One step of ours ends at most "
        f"{result['distance_to_float64']:.1e} radians, over all classes, from where Algorithm 1 in float64 does.",
    ]
