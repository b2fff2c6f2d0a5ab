"""Write docs/performance.md, with its pictures, from the results of the GPU benchmarks.

    python -m benchmarks.performance_page

Every number on the page is one of benchmarks/results, or follows from one; of a benchmark without results the page says
so.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from benchmarks.page_text import Result, between, machine, table, wrapped
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

#: Contestants in an iteration beside the two heads.
PEERS = {"plain torch": "plain torch", "algorithm 1": "Algorithm 1"}

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
        "gpu_tests_gpu": ("The tests of all this", kernel_tests),
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


def kernel_tests(result: Result, _: Path) -> list[str]:
    files = result["files"]
    total = {name: sum(found.get(name, 0) for found in files.values()) for name in ("passed", "failed", "error")}
    failed = total["failed"] + total["error"]
    each = ", ".join(f"{found.get('passed', 0)} of {Path(file).name}" for file, found in files.items())
    return [
        "CI has no GPU: it tests the kernels by an interpreter and an emulator. With one there are more tests, against "
        f"float64, which CI skips. Of commit {result['commit'][:7]}, {total['passed']} passed ({each}) and "
        f"{failed or 'none'} failed."
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
        shown = {key: name for key, name in PEERS.items() if any(key in row["ms"] for row in rows)}
        if shown:
            text[0] += (
                " The two columns before the last are what head and step in plain torch add, and the same head with "
                "Algorithm 1: an SVD in every step, a QR in every fifth."
            )

        def added(row: Result, peer: str) -> str:
            return f"{100 * (row['ms'][peer] / row['ms']['linear'] - 1):+.0f} %" if peer in row["ms"] else "–"

        heads = ["model", "batch", "vectors (ms)", "subspaces (ms)", "overhead", *shown.values()]
        text.append(
            table(
                [*heads, "overhead in the paper"],
                (
                    [
                        ARCHITECTURES.get(row["model"], row["model"]),
                        str(row["batch"]),
                        f"{row['ms']['linear']:.2f}",
                        f"{row['ms']['grassmann']:.2f}",
                        f"{row['overhead_percent']:+.1f} %",
                        *(added(row, peer) for peer in shown),
                        f"{published[IN_PAPER[row['model']]]:g} %" if row["model"] in IN_PAPER else "–",
                    ]
                    for row in rows
                ),
            )
        )
        times = {
            f"{ARCHITECTURES.get(row['model'], row['model'])} batch\u00a0{row['batch']}": {
                head: row["ms"][head] for head in ("linear", "grassmann")
            }
            for row in rows
        }
        pictures.iteration_time(times).savefig(images / "iteration_time.png", dpi=110)
        text.append("![Time of an iteration with vectors and with subspaces](images/iteration_time.png)")
    if failed := result.get("failed"):
        text.append(f"Could not be measured: {', '.join(failed)}.")
    return text


if __name__ == "__main__":
    main()
