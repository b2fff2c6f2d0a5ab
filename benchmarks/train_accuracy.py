"""The accuracy that recipes reach, over several seeds, and how long an epoch of them takes.

    python -m benchmarks.train_accuracy cifar100-resnet18-linear cifar100-resnet18-grassmann --data-dir DATA --seeds 3

The accuracy is that of the last epoch: the best one would be chosen on the test images.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from grassy.training.distributed import find_device
from grassy.training.journal import environment
from grassy.training.loop import train
from grassy.training.recipe import load_recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/accuracy"), help="folder of the runs; done ones are kept"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/bench/train_accuracy.json"))
    args = parser.parse_args()
    result: dict[str, Any] = {**environment(find_device("auto")), "runs": []}
    for name in args.recipes:
        accuracies = []
        for seed in range(args.seeds):
            recipe = load_recipe(name).changed({"seed": seed})
            state = train(recipe, args.data_dir, args.runs / f"{name}-seed{seed}", resume="auto", quiet=True)
            seconds = statistics.median(row["seconds"] for row in state.rows[1:])
            row = state.rows[-1]
            accuracies.append(row["eval_top1"])
            run = {
                "recipe": name,
                "seed": seed,
                "epochs": recipe.epochs,
                "top1": row["eval_top1"],
                "top5": row["eval_top5"],
            }
            result["runs"].append({**run, "best_top1": state.best, "seconds_an_epoch": seconds})
            print(f"{name} seed {seed}: top-1 {row['eval_top1']:.2f}, {seconds:.3f} s an epoch", flush=True)
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(result, indent=1) + "\n")
        spread = f" ± {statistics.stdev(accuracies):.2f}" if len(accuracies) > 1 else ""
        print(f"{name}: {statistics.mean(accuracies):.2f}{spread} over {len(accuracies)} seeds", flush=True)
    print(f"Saved {args.output}")


if __name__ == "__main__":
    main()
