"""`GrassmannClassifier` against LogisticRegression and LinearSVC on features: accuracy and time, tuned the same way.

    python -m benchmarks.estimator FEATURES.npz [FEATURES.npz ...] --output benchmarks/results/estimator_cpu.json

A file holds `train_x` (B, N), `train_y`, `test_x` and `test_y`; `benchmarks.estimator_features` makes such files. All
see the same features, centred and divided by one number, or standardised: what is better for each, by the search.
Each is tuned by GridSearchCV with three folds over ten settings on the training samples, and refitted on all of them.
LogisticRegression and LinearSVC choose C, the Grassmann classifier k. For the Grassmann classifier there is also a row
with no search at all, and one without training.
"""

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.svm import LinearSVC

from benchmarks.transfer_features import machine, save
from grassy.sklearn import GrassmannClassifier

#: Five values of each, with features centred and divided by one number, and with standardised ones: ten settings.
C = [0.0001, 0.001, 0.01, 0.1, 1.0]
K = [2, 4, 8, 16, 32]


class Centred(FunctionTransformer):
    """(x − mean)/s, where s is the root mean square of all centred features."""

    def fit(self, X: Any, y: Any = None) -> "Centred":
        self.mean_ = X.mean(axis=0)
        self.scale_ = float(np.sqrt(np.square(X - self.mean_).mean()))
        return self

    def transform(self, X: Any) -> Any:
        return (X - self.mean_) / self.scale_


def searches() -> dict[str, GridSearchCV]:
    scales = [Centred(), StandardScaler()]
    linear = {
        "LogisticRegression": LogisticRegression(max_iter=1000),
        "LinearSVC": LinearSVC(),
    }
    grids = {name: (estimator, {"scale": scales, "fit__C": C}) for name, estimator in linear.items()}
    grids["GrassmannClassifier"] = (GrassmannClassifier(), {"scale": scales, "fit__k": K})
    return {
        name: GridSearchCV(Pipeline([("scale", Centred()), ("fit", estimator)]), grid, cv=3, error_score="raise")
        for name, (estimator, grid) in grids.items()
    }


def untuned() -> dict[str, Any]:
    return {
        "GrassmannClassifier, defaults": GrassmannClassifier(),
        "GrassmannClassifier, max_iter=0": GrassmannClassifier(max_iter=0),
    }


def chosen(search: GridSearchCV) -> dict[str, Any]:
    best = search.best_params_
    return {
        "scale": type(best["scale"]).__name__,
        **{n.removeprefix("fit__"): v for n, v in best.items() if n != "scale"},
    }


def cpu_seconds(run: Callable[[], Any]) -> float:
    """Processor time of this process, which does not depend on what else the machine does."""
    start = time.process_time()
    run()
    return time.process_time() - start


def measure(arrays: dict[str, Any]) -> dict[str, Any]:
    """Test accuracy; seconds of the search, of one fit with what it chose, and of predicting the test set."""
    rows: dict[str, Any] = {}
    train, labels, test, answers = (arrays[name] for name in ("train_x", "train_y", "test_x", "test_y"))
    for name, estimator in {**searches(), **untuned()}.items():
        row: dict[str, Any] = {}
        if isinstance(estimator, GridSearchCV):
            row["search_cpu_seconds"] = cpu_seconds(partial(estimator.fit, train, labels))
            row["chosen"], row["cross_validated"] = chosen(estimator), float(estimator.best_score_)
            estimator = clone(estimator.best_estimator_)
        row["fit_cpu_seconds"] = cpu_seconds(partial(estimator.fit, train, labels))
        row["predict_cpu_seconds"] = cpu_seconds(partial(estimator.predict, test))
        row["accuracy"] = float(estimator.score(test, answers))
        rows[name] = row
        print(f"  {name}: {row['accuracy']:.4f} in {row['fit_cpu_seconds']:.2f} s {row.get('chosen', '')}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features", nargs="+", type=Path)
    parser.add_argument(
        "--threads", type=int, default=1, help="of torch; set OMP_NUM_THREADS to the same for the others"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/bench/estimator.json"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result = {**machine("cpu"), "rows": []}
    for file in args.features:
        with np.load(file) as opened:
            arrays = {name: opened[name] for name in ("train_x", "train_y", "test_x", "test_y")}
        print(f"{file.stem}: {arrays['train_x'].shape}, {len(np.unique(arrays['train_y']))} classes")
        facts = {
            "features": file.stem,
            "train": list(arrays["train_x"].shape),
            "test": len(arrays["test_x"]),
            "classes": len(np.unique(arrays["train_y"])),
            "dtype": str(arrays["train_x"].dtype),
        }
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            facts["estimators"] = measure(arrays)
        facts["convergence_warnings"] = sum(issubclass(each.category, ConvergenceWarning) for each in caught)
        result["rows"].append(facts)
        save(result, args.output)


if __name__ == "__main__":
    main()
