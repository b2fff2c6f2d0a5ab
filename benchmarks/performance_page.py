"""Fill the tables of docs/performance.md, and draw its pictures, from the results of the benchmarks.

    python -m benchmarks.performance_page

The sentences of the page are written by hand. A benchmark without results leaves its table as it is.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from benchmarks.markdown import Result, fill, number, table
from benchmarks.performance_input import command as command_of_input
from benchmarks.performance_input import input_from_files
from benchmarks.performance_step import drift, step, svd_qr, svd_qr_on_cpu
from grassy import paper
from grassy.report import pictures

ROOT = Path(__file__).parent.parent

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
WAYS = {"fused": "fused loss", "logits": "logits by kernels", "naive": "plain torch"}
LINEAR = {"linear C": "`nn.Linear(n, C)` with cross-entropy", "linear C*k": "`nn.Linear(n, C*k)`, matmuls alone"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/performance.md")
    args = parser.parse_args()
    images = args.page.parent / "images"
    images.mkdir(parents=True, exist_ok=True)
    fill(args.page, tables(args.results, images))
    print(f"Filled the tables of {args.page}")


def tables(results: Path, images: Path) -> dict[str, str]:
    """A table by its name for each file of results, with a line that says where it was measured."""
    found = {}
    for stem, write in TABLES.items():
        path, (name, _, place) = results / f"{stem}.json", stem.rpartition("_")
        if path.is_file():
            result = json.loads(path.read_text(encoding="utf-8"))
            command = f"python -m benchmarks.{name}" + (" --large" if name == "memory" else "")
            command += " --device cpu" if place == "cpu" else ""
            command = command_of_input(result) if write is input_from_files else command
            found[stem] = f"{write(result, images)}\n\n{measured(result, command)}"
    return found


def measured(result: Result, command: str) -> str:
    """What a table was measured by and on, in two lines."""
    where = result.get("gpu") or f"CPU with {result.get('threads')} threads"
    commit = f" at {result['commit'][:7]}" if result.get("commit") else ""
    versions = f"torch {result['torch']}, grassy {result['grassy']}{commit}"
    return f"`{command}`:\n{where}, {versions}, {result['date']}.{result.get('note', '')}"


def gpu_tests(result: Result, _: Path) -> str:
    rows = [
        [Path(file).name, *(str(count) for count in (found.get("passed", 0), failed))]
        for file, found in result["files"].items()
        for failed in [found.get("failed", 0) + found.get("error", 0)]
    ]
    return table(["file", "passed", "failed"], rows)


def head(result: Result, _: Path) -> str:
    names = {**WAYS, "linear C": "nn.Linear(n, C)"}
    heads = ["B, n, C, k", "baseline (ms)", "baseline (TFLOP/s)", *(f"{name} / baseline" for name in names.values())]
    return table(
        [*heads, "matmuls of the fused loss"],
        (
            [
                f"{row['batch']:,}, {row['n']:,}, {row['classes']:,}, {row['k']}",
                f"{row['ms']['linear C*k']:.3f}",
                f"{row['yardstick_tflops']:.0f}",
                *(f"{row['over_yardstick'][key]:.2f}" for key in names),
                f"{row['fused_products']:.2f}",
            ]
            for row in result["rows"]
        ),
    )


def memory(result: Result, _: Path) -> str:
    extra = result["extra_mib"]
    peaks = table(
        ["", "MiB", "of plain torch"],
        (
            [name, f"{extra[key]:,.0f}", f"{100 * extra[key] / extra['naive']:.0f} %"]
            for key, name in {**WAYS, **LINEAR}.items()
            if key in extra
        ),
    )
    if (large := result.get("large")) is None:
        return peaks
    facts = {
        "peak": f"{large['peak_gib']:.1f} GiB",
        "step": f"{large['step_ms']:.1f} ms",
        "step, without a CUDA graph": f"{large['eager_ms']:.1f} ms",
        f"four matmuls at {large['product_tflops']:.0f} TFLOP/s": f"{large['four_products_ms']:.1f} ms",
        "five passes of the step": f"{large['five_passes_ms']:.1f} ms",
        "casting the weight to bfloat16": f"{large['cast_ms']:.1f} ms",
        "step / sum of the last three": f"{large['step_over_sum']:.2f}",
    }
    size = f"{large['classes']:,} classes, B = {large['batch']:,}, n = {large['n']:,}, k = {large['k']}"
    note = f" ({large['note']})" if "note" in large else ""
    return f"{peaks}\n\n{table([f'{size}{note}', ''], map(list, facts.items()))}"


def iteration(result: Result, images: Path) -> str:
    rows = result["rows"]
    published = paper.figures("time-iteration")["overhead_percent"]

    def added(row: Result, peer: str) -> str:
        return f"{100 * (row['ms'][peer] / row['ms']['linear'] - 1):+.0f} %" if peer in row["ms"] else "–"

    times = {
        f"{ARCHITECTURES.get(row['model'], row['model'])} batch\u00a0{row['batch']}": {
            head: row["ms"][head] for head in ("linear", "grassmann")
        }
        for row in rows
    }
    pictures.iteration_time(times).savefig(images / "iteration_time.png", dpi=110)
    heads = ["model", "batch", "vectors (ms)", "subspaces (ms)", "overhead", "plain torch", "Algorithm 1"]
    return table(
        [*heads, "overhead in the paper"],
        (
            [
                ARCHITECTURES.get(row["model"], row["model"]),
                str(row["batch"]),
                f"{row['ms']['linear']:.2f}",
                f"{row['ms']['grassmann']:.2f}",
                f"{row['overhead_percent']:+.1f} %",
                *(added(row, peer) for peer in ("plain torch", "algorithm 1")),
                number(published.get(IN_PAPER.get(row["model"], "")), "g") + " %" * (row["model"] in IN_PAPER),
            ]
            for row in rows
        ),
    )


#: By the names of their files of results, which are also their names on the page.
TABLES: dict[str, Callable[[Result, Path], str]] = {
    "step_gpu": step,
    "svd_qr_gpu": svd_qr,
    "svd_qr_cpu": svd_qr_on_cpu,
    "drift_gpu": drift,
    "head_gpu": head,
    "memory_gpu": memory,
    "iteration_gpu": iteration,
    "input_gpu": input_from_files,
    "input_cpu": input_from_files,
    "input_large_cpu": input_from_files,
    "gpu_tests_gpu": gpu_tests,
}


if __name__ == "__main__":
    main()
