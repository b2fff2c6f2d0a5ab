"""The search for K of nearest neighbours, 25 values by five folds: `search_knn` against scikit-learn's brute force.

    python -m benchmarks.transfer_knn                                    5,000 x 512, 20 classes
    python -m benchmarks.transfer_knn --device cuda --samples 50000 --classes 10 --no-sklearn
    python -m benchmarks.transfer_knn --device cuda --large              10,000 queries among 1,000,000 x 2,048

scikit-learn runs one search for 49 neighbours per fold, as a careful user would write it, and grassy counts the votes.
GridSearchCV with KNeighborsClassifier would repeat the search for each K.
"""

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.transfer_features import Features, machine, make_features, make_parser, save, timed, timed_with_memory
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
    knn = KNN(49)
    facts, accuracy = timed_with_memory(
        lambda: knn.fit(data.train, data.labels).score(data.test, data.test_labels), data, device
    )
    shape = {"samples": samples, "queries": queries, "width": width, "classes": classes}
    result = {**shape, "accuracy": accuracy, **facts}
    print(json.dumps(result))
    return result


def main() -> None:
    parser = make_parser(__doc__, "search_knn", "10,000 queries among 1,000,000 x 2,048")
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
    save(result, args.output or Path(f"runs/bench/{name}_{args.device}.json"))


if __name__ == "__main__":
    main()
