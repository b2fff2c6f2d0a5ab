"""The table and the picture of docs/performance.md about input from JPEG files."""

import statistics
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.input import whole_waves
from benchmarks.markdown import Result, table
from grassy.report.pictures import BLUE, GREEN, GREY, ORANGE, tidy

#: What `benchmarks.input` does unless told otherwise.
USUAL = {"grain": 16.0, "count": 10_000, "batch_size": 256, "turns": 5}
#: By their names in the results; the copy is measured on a GPU alone.
PARTS = {"disk": GREY, "decode": BLUE, "augment": ORANGE, "collate": GREEN, "copy": "0.4"}
IMAGENET_SIZE = [500, 375]


def command(result: Result) -> str:
    """What was run."""
    words = ["python -m benchmarks.input"]
    words += [f"--train {result['model']}"] if result["model"] else []
    words += ["--workers 0"] if not result["workers"] else []
    words += ["--size {} {}".format(*result["size"])] if result["size"] != IMAGENET_SIZE else []
    turns = len(next(iter(next(iter(result["loaders"].values()))["images_per_second"].values())))
    ran = {"batches": 20, **result, "count": result["files"], "turns": turns}  # 20: before results said so
    for name, usual in {**USUAL, "batches": whole_waves(result["workers"])}.items():
        if (value := ran.get(name, usual)) != usual:
            words.append(f"--{name.replace('_', '-')} {value:g}")
    return " ".join(words)


def input_from_files(result: Result, images: Path) -> str:
    """Images per second of the loaders, alone and in training, and a picture of the parts."""
    size = "" if result["size"] == IMAGENET_SIZE else "_large"
    picture(result).savefig(images / f"input{size}_{'gpu' if result['gpu'] else 'cpu'}.png", dpi=110)
    rows = {**result["loaders"], **{f"{title}, training": found for title, found in result["training"].items()}}
    kinds = ("grassy, packed", "grassy", "timm", "torchvision", "resident")
    names = [name for name in kinds if any(name in found["medians"] for found in rows.values())]
    ratios = [("grassy", "timm"), ("grassy, packed", "timm"), ("grassy, packed", "resident")]
    ratios = [(one, other) for one, other in ratios if one in names and other in names]
    titles = (f"{one.removeprefix('grassy, ')} / {other}" for one, other in ratios)
    return table(
        ["images per second", *names, *titles],
        (
            [
                title,
                *(f"{medians[name]:,.0f}" if name in medians else "–" for name in names),
                *(f"{medians[one] / medians[other]:.2f}" if other in medians else "–" for one, other in ratios),
            ]
            for title, medians in ((title, found["medians"]) for title, found in rows.items())
        ),
    )


def picture(result: Result) -> Figure:
    """The time of each part per image, in each way, over the workers that share it.

    An iteration runs at the same time. A dashed line marks its time per image, which the input must not exceed.
    """
    bars = {
        f"{title}\n{way}": _parts(result, title, way) for title, ways in result["stages_us"].items() for way in ways
    }
    figure = Figure(figsize=(7.2, 0.9 + 0.55 * len(bars)), layout="constrained")
    axes = figure.subplots()
    for row, parts in enumerate(bars.values()):
        start = 0.0
        for part, milliseconds in parts.items():
            axes.barh(row, milliseconds, 0.7, start, color=PARTS[part], label=part if row == 0 else None)
            start += milliseconds
        beside = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
        axes.annotate(f"{start:.2f}", (start, row), bbox={"color": "white", "pad": 1}, **beside)
    if compute := _compute(result):
        label = f"iteration of {result['model']}: {compute:.2f}"
        axes.axvline(compute, color="0.2", linewidth=1, linestyle="--", label=label)
    axes.set_yticks(range(len(bars)), list(bars), fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(sum(parts.values()) for parts in bars.values()))
    share = f", shared by {result['workers']} workers" if result["workers"] > 1 else ", one process"
    axes.set_xlabel(f"milliseconds per image{share}")
    figure.legend(frameon=False, fontsize=9, ncols=len(PARTS) + 1, loc="outside upper center")
    tidy(axes)
    return figure


def _parts(result: Result, title: str, way: str) -> dict[str, float]:
    parts = {part: us / 1000 / max(1, result["workers"]) for part, us in result["stages_us"][title][way].items()}
    if result["gpu"]:
        parts["copy"] = 1000 / result["device"]["copy of uint8 to the device"]
    return parts


def _compute(result: Result) -> float | None:
    """Milliseconds of an iteration per image, without input."""
    rates = [found["medians"]["resident"] for found in result["training"].values()]
    return 1000 / statistics.median(rates) if rates else None
