"""The search for C of a linear SVM, nine values by five folds: `search_svm` against scikit-learn's GridSearchCV.

    python -m benchmarks.transfer_svm                                  5,000 x 512, 20 classes, on all cores
    python -m benchmarks.transfer_svm --device cuda --samples 50000 --classes 10 --no-quality --sklearn-limit 60
    python -m benchmarks.transfer_svm --device cuda --large            one fit of 1,000,000 x 2,048, and its memory

Both refit with the C they choose. The quality of a solution has two measures. One is how far its objective lies above
the best one found by any contestant, LinearSVC with tol=1e-6 among them. The other is how many of 2,000 test samples
get the same label as from that LinearSVC.

`--sklearn-limit` stops GridSearchCV after that many seconds; the ratio is then a lower bound.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.transfer_features import Features, machine, make_features, make_parser, save, timed, timed_with_memory
from grassy.transfer import LinearSVM, search_svm
from grassy.transfer.solvers.folds import mean_norm

CS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 20)


def grid_search(rows: np.ndarray, labels: np.ndarray) -> Any:
    from sklearn.model_selection import GridSearchCV, StratifiedKFold
    from sklearn.svm import LinearSVC

    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    return GridSearchCV(LinearSVC(max_iter=10_000), {"C": list(CS)}, cv=folds, n_jobs=-1).fit(rows, labels)


def grid_search_is_slower_than(limit: float, rows: np.ndarray, labels: np.ndarray) -> bool:
    """Whether GridSearchCV takes longer than that; it is stopped then, with the processes that it started."""
    with tempfile.TemporaryDirectory() as folder:
        np.savez(f"{folder}/features.npz", rows=rows, labels=labels)
        code = (
            "import sys, numpy; from benchmarks.transfer_svm import grid_search; "
            "data = numpy.load(sys.argv[1]); rows, labels = data['rows'], data['labels']; "
            "print('ready', flush=True); grid_search(rows, labels)"
        )
        command = [sys.executable, "-c", code, f"{folder}/features.npz"]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        assert child.stdout is not None
        child.stdout.readline()  # imports and reading do not count
        try:
            if child.wait(limit) != 0:
                raise RuntimeError("GridSearchCV failed")
            return False
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            return True


def speed(data: Features, device: str, rounds: int, sklearn: bool, limit: float | None = None) -> dict[str, Any]:
    times: list[float] = []
    grid_times: list[float] = []
    rows = (data.train.double() / mean_norm(data.train)).cpu().numpy()
    if device == "cuda":
        search_svm(data.train[:1000], data.labels[:1000])  # libraries load
    for _ in range(rounds):
        seconds, found = timed(lambda: search_svm(data.train, data.labels), device)
        times.append(seconds)
        print(f"search_svm    {seconds:7.2f} s, C = {found.chosen}", flush=True)
        if sklearn and limit is None:
            seconds, grid = timed(lambda: grid_search(rows, data.labels.cpu().numpy()), "cpu")
            grid_times.append(seconds)
            print(f"GridSearchCV  {seconds:7.2f} s, C = {grid.best_params_['C']}", flush=True)
    result: dict[str, Any] = {
        "seconds": times,
        "chosen": found.chosen,
        "accuracies": found.accuracies.mean(1).tolist(),
        "spread_of_folds": found.accuracies.std(1).tolist(),
        "test_accuracy": found.model.score(data.test, data.test_labels),
    }
    if sklearn and limit is not None:
        if not grid_search_is_slower_than(limit, rows, data.labels.cpu().numpy()):
            raise SystemExit(f"GridSearchCV ends within {limit:.0f} s: leave --sklearn-limit away to time it")
        result |= {"grid_search_seconds_above": limit, "ratio_above": limit / statistics.median(times)}
        print(f"GridSearchCV did not end within {limit:.0f} s: more than {result['ratio_above']:.1f} times as fast")
    elif sklearn:
        accuracies = np.stack([grid.cv_results_[f"split{fold}_test_score"] for fold in range(5)], 1)
        result |= {
            "grid_search_seconds": grid_times,
            "grid_search_chosen": grid.best_params_["C"],
            "grid_search_accuracies": accuracies.mean(1).tolist(),
            "largest_difference_of_a_fold": float(np.abs(accuracies - found.accuracies.numpy()).max()),
            "ratio": statistics.median(grid_times) / statistics.median(times),
        }
        print(f"{result['ratio']:.1f} times as fast; no fold's accuracy differs by more than "
              f"{result['largest_difference_of_a_fold']:.4f}")  # fmt: skip
    return result


def objectives(rows: np.ndarray, labels: np.ndarray, coef: np.ndarray, intercept: np.ndarray, C: float) -> np.ndarray:
    """½‖w‖² + C Σ max(0, 1 − y f)² of every class, the intercept in w."""
    signs = np.where(labels[:, None] == np.unique(labels), 1, -1)
    excess = np.maximum(0, 1 - signs * (rows @ coef.T + intercept))
    return (np.square(coef).sum(1) + np.square(intercept)) / 2 + C * np.square(excess).sum(0)


def quality(name: str, data: Features, C: float) -> dict[str, Any]:
    from sklearn.svm import LinearSVC

    scale = mean_norm(data.train)
    rows, test = ((part.double() / scale).cpu().numpy() for part in (data.train, data.test))
    labels = data.labels.cpu().numpy()
    contestants = {
        "grassy": LinearSVM(C).fit(rows, labels),
        "LinearSVC": LinearSVC(C=C, max_iter=10_000).fit(rows, labels),
        "LinearSVC, tol=1e-6": LinearSVC(C=C, tol=1e-6, max_iter=100_000).fit(rows, labels),
    }
    values = {
        who: objectives(rows, labels, np.asarray(model.coef_), np.asarray(model.intercept_), C)
        for who, model in contestants.items()
    }
    best = np.minimum.reduce(list(values.values()))
    reference = contestants["LinearSVC, tol=1e-6"].predict(test)
    row = {
        "features": name,
        "C": C,
        "certified_gap": float(contestants["grassy"].gap_.max()),
        "above_the_best": {who: float(((value - best) / best).max()) for who, value in values.items()},
        "same_labels": {who: float(np.mean(model.predict(test) == reference)) for who, model in contestants.items()},
    }
    above, same = row["above_the_best"], row["same_labels"]
    print(f"{name:>8} C={C:<4} above the best: grassy {above['grassy']:.1e} (certified {row['certified_gap']:.1e}), "
          f"LinearSVC {above['LinearSVC']:.1e}; same labels: {same['grassy']:.4f}, {same['LinearSVC']:.4f}",
          flush=True)  # fmt: skip
    return row


def digits() -> Features:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    pixels, labels = torch.from_numpy(bunch.data).float(), torch.from_numpy(bunch.target)
    return Features(pixels[:1200], labels[:1200], pixels[1200:], labels[1200:])


def large(samples: int, width: int, classes: int, device: str) -> dict[str, Any]:
    """One fit, and the memory it takes beyond the features."""
    data = make_features(samples, 10_000, width, classes, device)
    svm = LinearSVM(1.0, normalize=True)
    facts, model = timed_with_memory(lambda: svm.fit(data.train, data.labels), data, device)
    found = {"certified_gap": float(model.gap_.max()), "newton_steps": model.n_iter_}
    found["test_accuracy"] = model.score(data.test, data.test_labels)
    result = {"samples": samples, "width": width, "classes": classes, **found, **facts}
    print(json.dumps(result))
    return result


def main() -> None:
    parser = make_parser(__doc__, "search_svm", "one fit of 1,000,000 x 2,048 features")
    parser.add_argument("--sklearn-limit", type=float, metavar="SECONDS", help="stop GridSearchCV after this time")
    parser.add_argument("--no-quality", action="store_true", help="do not compare solutions, only times")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    result = machine(args.device)
    if args.large:
        result["large"] = large(1_000_000, 2048, 10, args.device)
    else:
        data = make_features(args.samples, 2000, args.width, args.classes, args.device)
        result |= {"samples": args.samples, "width": args.width, "classes": args.classes}
        result["search"] = speed(data, args.device, args.rounds, not args.no_sklearn, args.sklearn_limit)
        if not args.no_sklearn:
            import sklearn

            result["scikit-learn"] = sklearn.__version__
            warnings.filterwarnings("ignore", category=UserWarning, module="sklearn")
            sets = {} if args.no_quality else {"network": data, "digits": digits()}
            result["quality"] = [quality(name, one, C) for name, one in sets.items() for C in (0.1, 1, 20)]
    name = "transfer_svm_large" if args.large else "transfer_svm"
    save(result, args.output or Path(f"runs/bench/{name}_{args.device}.json"))


if __name__ == "__main__":
    main()
