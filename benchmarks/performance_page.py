"""Write docs/performance.md, with its pictures, from the results of the GPU benchmarks.

    python -m benchmarks.performance_page

Every number on the page is one of benchmarks/results/*_gpu.json, or follows from one; of a benchmark without results
the page says so.
"""

import argparse
import json
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from grassy import paper
from grassy.report import pictures

ROOT = Path(__file__).parent.parent
Result = dict[str, Any]

#: The paper's names by timm's.
ARCHITECTURES = {
    "resnet50": "ResNet50",
    "resnet50d": "ResNet50-D",
    "resnet101d": "ResNet101-D",
    "resnet152d": "ResNet152-D",
    "resnext50_32x4d": "ResNeXt50",
    "vgg13_bn": "VGG13-BN",
    "swin_tiny_patch4_window7_224": "Swin-T",
    "deit3_small_patch16_224": "DeiT3-S",
}
IN_PAPER = {"resnet50d": "resnet50d", "deit3_small_patch16_224": "deit3-s"}

#: The ways to compute loss and gradients, by their names in the results.
WAYS = {"fused": "loss without logits", "logits": "logits by kernels", "naive": "plain torch"}
LINEAR = {"linear C": "`nn.Linear(n, C)` with cross-entropy", "linear C*k": "`nn.Linear(n, C*k)`, products alone"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/performance.md")
    args = parser.parse_args()
    images = args.output.parent / "images"
    images.mkdir(parents=True, exist_ok=True)
    args.output.write_text(page(args.results, images), encoding="utf-8")
    print(f"Saved {args.output}")


def page(results: Path, images: Path) -> str:
    """The whole page; pictures go to the folder `images`, which lies beside it."""
    text = [
        "# Performance on a GPU",
        "This page is written by `python -m benchmarks.performance_page` from `benchmarks/results`. Times are medians, "
        "contestants take turns in one run, and ratios are of times in one run. Unless it is said otherwise, work is "
        "replayed as a CUDA graph with the L2 cache emptied first, and no data in it that waits to be written.",
    ]
    sections: dict[str, tuple[str, Callable[[Result, Path], list[str]]]] = {
        "step_gpu": ("The step", step),
        "svd_qr_gpu": ("The factorisations that the step avoids", svd_qr),
        "svd_qr_cpu": ("The same on a CPU", svd_qr_on_cpu),
        "drift_gpu": ("Orthonormality", drift),
        "head_gpu": ("The head", head),
        "memory_gpu": ("Memory", memory),
        "iteration_gpu": ("A training iteration", iteration),
    }
    for stem, (title, write) in sections.items():
        text.append(f"## {title}")
        path, (name, _, place) = results / f"{stem}.json", stem.rpartition("_")
        if not path.is_file():
            text.append(f"There are no results yet: run `python -m benchmarks.{name}` on a {place.upper()}.")
            continue
        result = json.loads(path.read_text(encoding="utf-8"))
        text += write(result, images)
        command = f"python -m benchmarks.{name}" + (" --large" if name == "memory" else "")
        command += " --device cpu" if place == "cpu" else ""
        text.append(f"`{command}` on {machine(result)}.{result.get('note', '')}")
    return "\n\n".join(block if block[0] in "#|!" else wrapped(block) for block in text) + "\n"


# ------------------------------------------------------------------------------------------------ the step


def step(result: Result, images: Path) -> list[str]:
    rows, bandwidth = result["rows"], result["copy_bytes_per_ms"]
    ratios = [row["step_over_floor"] for row in rows]
    launches = [row["launch_ms"] for row in rows if "launch_ms" in row]
    dirty = [row["dirty_step_over_floor"] for row in rows if "dirty_step_over_floor" in row]
    among = [row["in_graph_ms"]["launch"] for row in rows if "in_graph_ms" in row]
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
        f"here. The step takes {between(ratios, '.2f')} times as long. {aims(rows)}"
        + (
            " If the cache is full of what another kernel has just written, which has to go to memory first, it takes "
            f"{between(dirty, '.2f')} times as long."
            if dirty
            else ""
        )
        + (
            f" Each figure contains a launch, {1e3 * min(launches):.1f} µs for a kernel that does next to nothing; the "
            "column `copy` is a kernel that does nothing but copy as many bytes."
            if launches
            else ""
        )
        + (
            " In training the step is one of many kernels, often in one graph, and the launch of that graph is not its "
            "to pay for. Two columns have it so: between two events that are nodes of a graph whose other "
            f"nodes empty the cache. A kernel that does next to nothing takes {1e3 * min(among):.1f} µs there."
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
    ]
    step_roofline(rows, bandwidth).savefig(images / "step_roofline.png", dpi=150)
    text.append("![Time of a step against the bytes it has to move](images/step_roofline.png)")
    return text


#: How long a step may take: for very small classes, 15 µs more than the floor, else so many times as long.
AIM_MS, AIM, AIM_LARGE_K = 0.015, 1.5, 2.5


def aims(rows: list[Result]) -> str:
    """What was aimed at, and where it is missed."""

    def limit(row: Result) -> float:
        if row["k"] <= 2:
            return float(row["floor_ms"] + AIM_MS)
        return float(row["floor_ms"] * (AIM_LARGE_K if row["k"] >= 32 else AIM))

    missed = [row for row in rows if row["step_ms"] > limit(row)]
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


# ------------------------------------------------------------------------------------------------ the head


def head(result: Result, images: Path) -> list[str]:
    rows = result["rows"]
    names = {**WAYS, "linear C": "nn.Linear(n, C)"}
    rates = [row["yardstick_tflops"] for row in rows]
    fused = [row["over_yardstick"]["fused"] for row in rows]
    again = [row for row in rows if row["fused_products"] > 3]
    text = [
        "Forward and backward are three products of 2·B·n·C·k operations each, which work on B·n, C·k·n and B·C·k "
        "numbers. What is left, norms, the softmax and the gradients of both, is a few passes over the B·C·k "
        "coordinates. The yardstick is the products as torch does them, `nn.Linear(n, C*k)` forward and backward under "
        "bfloat16 autocast, which casts the float32 weight and the gradients, too: "
        f"{between(rates, '.0f')} TFLOP/s in all. The loss without logits, `ops.subspace_cross_entropy`, with which "
        f"`GrassmannHead(fuse_loss=True)` trains, takes {between(fused, '.2f')} times as long.",
        table(
            ["B, n, C, k", "yardstick (ms)", *(f"{name} / yardstick" for name in names.values())],
            (
                [
                    f"{row['batch']:,}, {row['n']:,}, {row['classes']:,}, {row['k']}",
                    f"{row['ms']['linear C*k']:.3f}",
                    *(f"{row['over_yardstick'][key]:.2f}" for key in names),
                ]
                for row in rows
            ),
        ),
    ]
    if again:
        text.append(
            f"With {' and '.join(format(row['classes'], ',') for row in again)} classes the loss without logits "
            "computes the coordinates that it did not keep again in the backward, to save memory: "
            f"{' and '.join(format(row['fused_products'], '.2f') for row in again)} products instead of three."
        )
    return text


def memory(result: Result, images: Path) -> list[str]:
    extra = result["extra_mib"]
    text = [
        f"The peak of a forward and backward beyond the weight, {result['weight_mib']:,.0f} MiB, and its gradient: B = "
        f"{result['batch']:,}, n = {result['n']:,}, C = {result['classes']:,}, k = {result['k']}. Not captured.",
        table(
            ["", "MiB", "of plain torch"],
            (
                [name, f"{extra[key]:,.0f}", f"{100 * extra[key] / extra['naive']:.0f} %"]
                for key, name in {**WAYS, **LINEAR}.items()
                if key in extra
            ),
        ),
    ]
    if large := result.get("large"):
        text.append(
            f"A whole training step of {large['classes']:,} classes, B = {large['batch']:,}, n = {large['n']:,}, k = "
            f"{large['k']}, forward, backward and the step of the subspaces, takes {large['peak_gib']:.1f} GiB and "
            f"{large['step_ms']:.1f} ms ({large['eager_ms']:.1f} ms without a CUDA graph). That is "
            f"{large['step_over_sum']:.2f} times {large['sum_ms']:.1f} ms, the sum of its parts: "
            f"{large['four_products_ms']:.1f} ms for four products at {large['product_tflops']:.0f} TFLOP/s, "
            f"{large['five_passes_ms']:.1f} ms for the five passes of the step and {large['cast_ms']:.1f} ms for "
            f"casting the weight to bfloat16, at {large['copy_bytes_per_ms'] / 1e9:.2f} TB/s."
            + (f" (This was {large['note']}.)" if "note" in large else "")
        )
    return text


# ------------------------------------------------------------------------------------------------ an iteration


def iteration(result: Result, images: Path) -> list[str]:
    rows = result["rows"]
    published = paper.figures("time-iteration")["overhead_percent"]
    text = [
        f"Forward, backward and the optimizer's step (SGD) at {result['image_size']} pixels and {result['classes']:,} "
        "classes, bfloat16 autocast, channels last, without torch.compile: with a linear classifier, and with "
        f"subspaces of dimension {result['k']}.",
    ]
    if rows:
        over = [row["overhead_percent"] for row in rows]
        text[0] += f" Subspaces add {between(over, '.1f')} percent."
        text.append(
            table(
                ["model", "batch", "vectors (ms)", "subspaces (ms)", "overhead", "overhead in the paper"],
                (
                    [
                        ARCHITECTURES.get(row["model"], row["model"]),
                        str(row["batch"]),
                        f"{row['ms']['linear']:.2f}",
                        f"{row['ms']['grassmann']:.2f}",
                        f"{row['overhead_percent']:+.1f} %",
                        f"{published[IN_PAPER[row['model']]]:g} %" if row["model"] in IN_PAPER else "–",
                    ]
                    for row in rows
                ),
            )
        )
        times = {
            f"{ARCHITECTURES.get(row['model'], row['model'])} batch\u00a0{row['batch']}": row["ms"] for row in rows
        }
        pictures.iteration_time(times).savefig(images / "iteration_time.png", dpi=110)
        text.append("![Time of an iteration with vectors and with subspaces](images/iteration_time.png)")
    if failed := result.get("failed"):
        text.append(f"Could not be measured: {', '.join(failed)}.")
    return text


# ------------------------------------------------------------------------------------------------ small things


def machine(result: Result) -> str:
    where = result.get("gpu") or f"a CPU with {result.get('threads')} threads"
    return f"{where}, torch {result['torch']}, grassy {result['grassy']}, {result['date']}"


def numbers(row: Result) -> int:
    """In the weight."""
    return int(row["classes"] * row["k"] * row["n"])


def between(values: Iterable[float], form: str) -> str:
    """The smallest and the largest, or the one number if they look the same."""
    values = list(values)
    return " to ".join(dict.fromkeys(format(value, form) for value in (min(values), max(values))))


def wrapped(paragraph: str) -> str:
    return textwrap.fill(paragraph, 120, break_long_words=False, break_on_hyphens=False)


def number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def microseconds(ms: float | None) -> str:
    return "–" if ms is None else f"{1e3 * ms:,.0f}" if ms >= 0.1 else f"{1e3 * ms:.1f}"


def table(heads: list[str], rows: Iterable[list[str]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    main()
