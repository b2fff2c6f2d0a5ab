"""The search for K of nearest neighbours, 25 values by five folds: `search_knn` against scikit-learn's brute force.

    python -m benchmarks.transfer_knn                                    5,000 x 512, 20 classes
    python -m benchmarks.transfer_knn --device cuda --samples 50000 --classes 10 --no-sklearn
    python -m benchmarks.transfer_knn --device cuda --large              10,000 queries among 1,000,000 x 2,048

scikit-learn gets one search for 49 neighbours a fold, as a careful user would write it, and the votes are counted by
`grassy`: GridSearchCV with KNeighborsClassifier would search anew for each K.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.transfer_features import Features, machine, make_features, timed
from grassy.transfer import KNN, search_knn
from grassy.transfer.solvers.folds import stratified_folds
from grassy.transfer.solvers.knn import vote

KS = tuple(range(1, 50, 2))


def search_sklearn(data: Features) -> np.ndarray:
    """Accuracies (25, 5)."""
    from sklearn.neighbors import NearestNeighbors

    rows, labels = data.train.cpu().numpy(), data.labels.cpu()
    held_out = stratified_folds(labels, 5, 0)
    columns = []
    for fold in range(5):
        outside, inside = held_out != fold, held_out == fold
        search = NearestNeighbors(n_neighbors=max(KS), algorithm="brute", n_jobs=-1).fit(rows[outside.numpy()])
        nearest = torch.from_numpy(search.kneighbors(rows[inside.numpy()], return_distance=False))
        columns.append((vote(labels[outside][nearest], KS) == labels[inside]).double().mean(1))
    return torch.stack(columns, 1).numpy()


def speed(data: Features, device: str, rounds: int, sklearn: bool) -> dict[str, Any]:
    times: list[float] = []
    peer_times: list[float] = []
    if device == "cuda":
        search_knn(data.train[:1000], data.labels[:1000])  # libraries load
    for _ in range(rounds):
        seconds, found = timed(lambda: search_knn(data.train, data.labels), device)
        times.append(seconds)
        print(f"search_knn    {seconds:7.2f} s, K = {found.chosen}", flush=True)
        if sklearn:
            seconds, accuracies = timed(lambda: search_sklearn(data), "cpu")
            peer_times.append(seconds)
            print(f"scikit-learn  {seconds:7.2f} s, K = {KS[accuracies.mean(1).argmax()]}", flush=True)
    result: dict[str, Any] = {
        "seconds": times,
        "chosen": found.chosen,
        "accuracies": found.accuracies.mean(1).tolist(),
        "test_accuracy": found.model.score(data.test, data.test_labels),
    }
    if sklearn:
        result["sklearn_seconds"] = peer_times
        result["ratio"] = statistics.median(peer_times) / statistics.median(times)
        result["largest_difference_of_a_fold"] = float(np.abs(accuracies - found.accuracies.numpy()).max())
        print(f"{result['ratio']:.2f} times as fast; no fold's accuracy differs by more than "
              f"{result['largest_difference_of_a_fold']:.4f}")  # fmt: skip
    return result


def large(samples: int, queries: int, width: int, classes: int, device: str) -> dict[str, Any]:
    """One prediction, and the memory it takes beyond the features."""
    data = make_features(samples, queries, width, classes, device)
    size = data.train.numel() * data.train.element_size()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    seconds, accuracy = timed(lambda: KNN(49).fit(data.train, data.labels).score(data.test, data.test_labels), device)
    result = {
        "samples": samples,
        "queries": queries,
        "width": width,
        "classes": classes,
        "seconds": seconds,
        "accuracy": accuracy,
        "features_bytes": size,
    }
    if device == "cuda":
        result["extra_bytes_over_features"] = (torch.cuda.max_memory_allocated() - before) / size
    print(json.dumps(result))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--classes", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of torch; scikit-learn takes all cores")
    parser.add_argument("--no-sklearn", action="store_true", help="only time search_knn")
    parser.add_argument("--large", action="store_true", help="10,000 queries among 1,000,000 x 2,048 instead")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    result = machine(args.device)
    if args.large:
        result["large"] = large(1_000_000, 10_000, 2048, 10, args.device)
    else:
        data = make_features(args.samples, 2000, args.width, args.classes, args.device)
        result |= {"samples": args.samples, "width": args.width, "classes": args.classes}
        result["search"] = speed(data, args.device, args.rounds, not args.no_sklearn)
        if not args.no_sklearn:
            import sklearn

            result["scikit-learn"] = sklearn.__version__
    name = "transfer_knn_large" if args.large else "transfer_knn"
    output = args.output or Path(f"runs/bench/{name}_{args.device}.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"Saved {output}")


if __name__ == "__main__":
    main()
