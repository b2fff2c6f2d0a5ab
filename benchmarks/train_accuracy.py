"""The accuracy that recipes reach, over several seeds, and how long an epoch of them takes.

    python -m benchmarks.train_accuracy cifar100-resnet18-linear cifar100-resnet18-grassmann --data-dir DATA --seeds 3

The accuracy is that of the last epoch: the best one would be chosen on the test images. With --jobs 3 three runs share
the GPU, which saves time; an epoch then takes longer than it does alone.
"""

import argparse
import csv
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def train(name: str, seed: int, data_dir: Path | None, runs: Path) -> dict[str, Any]:
    """One run by the command line, as a user would make it; one that is done already is only read."""
    folder = runs / f"{name}-seed{seed}"
    command = [sys.executable, "-m", "grassy", "train", name, "--seed", str(seed), "--output", str(folder)]
    command += ["--resume", "auto"] + (["--data-dir", str(data_dir)] if data_dir else [])
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    with open(folder / "summary.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    run = {
        "recipe": name,
        "seed": seed,
        "epochs": len(rows),
        "top1": float(rows[-1]["eval_top1"]),
        "top5": float(rows[-1]["eval_top5"]),
        "best_top1": max(float(row["eval_top1"]) for row in rows),
        "seconds_an_epoch": statistics.median(float(row["seconds"]) for row in rows[1:] or rows),
        **json.loads((folder / "environment.json").read_text()),
    }
    run.pop("data_dir")
    print(f"{name} seed {seed}: top-1 {run['top1']:.2f}, {run['seconds_an_epoch']:.3f} s an epoch", flush=True)
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="how many runs at once")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/accuracy"), help="folder of the runs; done ones are kept"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/bench/train_accuracy.json"))
    args = parser.parse_args()
    with ThreadPoolExecutor(args.jobs) as pool:
        jobs = [
            pool.submit(train, name, seed, args.data_dir, args.runs)
            for name in args.recipes
            for seed in range(args.seeds)
        ]
        runs = [job.result() for job in jobs]
    for name in args.recipes:
        accuracies = [run["top1"] for run in runs if run["recipe"] == name]
        spread = f" ± {statistics.stdev(accuracies):.2f}" if len(accuracies) > 1 else ""
        print(f"{name}: {statistics.mean(accuracies):.2f}{spread} over {len(accuracies)} seeds", flush=True)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({"runs_at_once": args.jobs, "runs": runs}, indent=1) + "\n")
    print(f"Saved {args.output}")


if __name__ == "__main__":
    main()
