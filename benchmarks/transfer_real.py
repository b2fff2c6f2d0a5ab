"""`search_svm` against scikit-learn on the features of a trained model: quality, choices and time.

    python -m benchmarks.transfer_real --checkpoint RUN --datasets cifar10 pets flowers --data-dir DATA

For each dataset it runs both searches (nine values of C by five folds, scikit-learn's GridSearchCV on all cores) and
reports the chosen C and accuracy. At that C it also reports how far each objective lies above the best one found, and
how many test images get the same label as from LinearSVC with tol=1e-6.
"""

import argparse
import json
import warnings
from pathlib import Path

from benchmarks.transfer_features import Features, machine
from benchmarks.transfer_svm import quality, speed
from grassy.distributed.processes import find_device
from grassy.inference.feature_models import open_model
from grassy.inference.features import extract
from grassy.transfer.datasets import open_transfer_set


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--datasets", nargs="+", required=True)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--no-quality", nargs="*", default=[], help="data sets for which only the search is compared")
    parser.add_argument("--output", type=Path, default=Path("runs/bench/transfer_real.json"))
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning, module="sklearn")
    device = find_device(args.device)
    model = open_model(args.checkpoint, device)
    result = {**machine(device.type), "model": model.recipe.get("model"), "rows": []}
    for name in args.datasets:
        data = open_transfer_set(name, args.data_dir)
        train, test = (
            extract(model, images, args.output.parent / "features", device) for images in (data.train, data.test)
        )
        on_device = Features(*(t.to(device) for t in (train.features, train.labels, test.features, test.labels)))
        print(f"{name}: {tuple(train.features.shape)}, {int(train.labels.max()) + 1} classes")
        row = {"dataset": name, "shape": list(train.features.shape), "classes": int(train.labels.max()) + 1}
        row["search"] = speed(on_device, device.type, args.rounds, sklearn=True)
        if name not in args.no_quality:
            row["quality"] = quality(name, Features(*(t.cpu() for t in on_device)), row["search"]["chosen"])
        result["rows"].append(row)
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"Saved {args.output}")


if __name__ == "__main__":
    main()
