"""The paper's transfer protocol: extract features of a dataset, fit a classifier on them, report its test accuracy.

Features are the inputs of the model's classifier. Five-fold stratified cross-validation on the training images chooses
the parameter of each method: C of the SVM and the probe, K of the nearest neighbours.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grassy import paper
from grassy.inference.feature_models import FeatureModel
from grassy.inference.features import Features, extract
from grassy.spelling import nearest
from grassy.transfer.datasets import MissingData, TransferSet, open_transfer_set
from grassy.transfer.solvers.knn import KS, samples_outside_folds, search_knn
from grassy.transfer.solvers.probe import search_probe
from grassy.transfer.solvers.search import Search
from grassy.transfer.solvers.svm import search_svm

METHODS: dict[str, Callable[..., Search[Any]]] = {"svm": search_svm, "knn": search_knn, "probe": search_probe}
PARAMETERS = {"svm": "C", "knn": "K", "probe": "C"}


@dataclass(frozen=True)
class Result:
    """The result of one method on the features of one model for one dataset; accuracies in percent."""

    model: str
    dataset: str
    method: str
    accuracy: float
    metric: str
    parameter: str
    chosen: float  # an int for K
    fold_accuracies: list[float]  # those of the chosen value
    train_images: int
    test_images: int
    classes: int
    seed: int
    seconds: float
    paper: float | None = None
    paper_chosen: float | None = None
    unreadable: int = 0
    recipe_seed: int | None = None
    tried: list[float] = field(default_factory=list)  # the grid that was searched

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Report:
    """All results, the datasets that were not found, and the measurements that failed, with reasons."""

    results: list[Result] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # by "model, dataset" or "model, dataset, method"
    finished: bool = False  # whether every measurement has been tried


def check_methods(methods: Sequence[str]) -> None:
    for method in methods:
        if method not in METHODS:
            raise ValueError(f"unknown method {method!r}{nearest(method, METHODS)}; known: {', '.join(METHODS)}")


def transfer(
    models: Iterable[FeatureModel],
    datasets: Sequence[str],
    data_dir: Path | None,
    cache: Path,
    device: torch.device,
    *,
    methods: Sequence[str] = ("svm", "knn"),
    seed: int = 0,
    backend: str = "torch",
    say: Callable[[str], None] = lambda _: None,
    keep: Callable[[Report], None] = lambda _: None,
    **extraction: Any,
) -> Report:
    """Run the protocol for all models and datasets. Report what is missing or fails, and measure the rest.

    Repeated model names and methods are measured once.

    backend: implementation of the SVM, "torch" or "sklearn".
    say: called with each progress line.
    keep: called with the report after each result, so that an interruption loses none.
    extraction: options of `features.extract`.
    """
    check_methods(methods)
    report = Report()
    opened: dict[str, TransferSet] = {}
    for name in datasets:
        try:
            opened[name] = open_transfer_set(name, data_dir)
        except MissingData as error:
            report.missing[name] = str(error)
            say(f"left out: {error}")
    if not opened:
        raise ValueError(f"none of the datasets was found: {'; '.join(report.missing.values())}")
    _check_titles(opened)

    def fail(what: str, error: Exception) -> None:
        report.failed[what] = str(error)
        say(f"failed: {what}: {error}")

    seen: set[str] = set()
    for model in models:
        if model.name in seen:
            continue
        seen.add(model.name)
        for data in opened.values():
            what = f"{model.name}, {data.name}"
            try:
                train, test = (
                    extract(model, images, cache, device, progress=f"{what} {part}", **extraction)
                    for part, images in (("train", data.train), ("test", data.test))
                )
                _check_labels(data, train, test)
            except (ValueError, OSError) as error:
                fail(what, error)
                continue
            for part, failures in (("training", train.failures), ("test", test.failures)):
                if failures:
                    first = f"{failures[0].name} first ({failures[0].reason})"
                    say(f"{data.name}: could not read {len(failures)} of the {part} images, {first}")
            for method in dict.fromkeys(methods):
                try:
                    result = measure(model, data, train, test, method, seed, device, backend)
                except (ValueError, OSError) as error:
                    fail(f"{what}, {method}", error)
                    continue
                report.results.append(result)
                keep(report)
                say(line(result))
    report.finished = True
    keep(report)
    if not report.results:
        reasons = [f"{what}: {reason}" for what, reason in report.failed.items()]
        raise ValueError("; ".join(reasons) or "no models to measure")
    return report


def _check_titles(opened: dict[str, TransferSet]) -> None:
    titles: dict[str, str] = {}
    for name, data in opened.items():
        if data.name in titles:
            both = f"{titles[data.name]} and {name} are both called {data.name!r}"
            raise ValueError(f"{both}: give one of them a name of its own, as NAME=PATH")
        titles[data.name] = name


def _check_labels(data: TransferSet, train: Features, test: Features) -> None:
    """Raise a ValueError for a test label that no training image has: the splits may number classes differently."""
    strange = test.labels[~torch.isin(test.labels, train.labels)]
    if len(strange):
        number = int(strange.min())
        names = data.train.class_names
        name = f" ({names[number]})" if names is not None and number < len(names) else ""
        raise ValueError(f"{len(strange)} test images have a label no training image has, such as {number}{name}")


def measure(
    model: FeatureModel,
    data: TransferSet,
    train: Features,
    test: Features,
    method: str,
    seed: int,
    device: torch.device,
    backend: str = "torch",
) -> Result:
    """Fit and test one method on the features of one dataset."""
    begin = time.monotonic()
    features, labels = train.features.to(device), train.labels.to(device)
    options: dict[str, Any] = {"metric": data.metric, "seed": seed}
    if method == "svm":
        options["backend"] = backend
    if method == "knn":
        options["ks"] = [k for k in KS if k <= samples_outside_folds(len(labels))] or [1]
    search = METHODS[method](features, labels, **options)
    predicted = search.model.predict(test.features.to(device))
    chosen = search.values.index(search.chosen)
    return Result(
        model=model.name,
        dataset=data.name,
        method=method,
        accuracy=100 * accuracy(predicted.cpu(), test.labels, data.metric),
        metric=data.metric,
        parameter=PARAMETERS[method],
        chosen=search.chosen if method == "knn" else float(search.chosen),
        fold_accuracies=[100 * float(value) for value in search.accuracies[chosen]],
        train_images=len(train.labels),
        test_images=len(test.labels),
        classes=len(labels.unique()),
        seed=seed,
        seconds=time.monotonic() - begin,
        paper=_figure(model.recipe, method, data.name),
        paper_chosen=_figure(model.recipe, f"{method}_{PARAMETERS[method]}", data.name),
        unreadable=len(train.failures) + len(test.failures),
        recipe_seed=model.recipe.get("seed"),
        tried=list(search.values),
    )


def accuracy(predicted: Tensor, labels: Tensor, metric: str) -> float:
    """The share of correct predictions ("top1"), or its mean over the classes present ("mean_per_class")."""
    right = (predicted == labels).double()
    if metric == "top1":
        return float(right.mean())
    counts = labels.bincount()
    hits = labels.bincount(weights=right, minlength=len(counts))
    present = counts > 0
    return float((hits[present] / counts[present]).mean())


def line(result: Result) -> str:
    """One result as a line of text."""
    folds = statistics.mean(result.fold_accuracies)
    reference = "" if result.paper is None else f", the paper reports {result.paper:.2f}"
    if result.paper_chosen is not None:
        reference += f" with {result.parameter}={result.paper_chosen:g}"
    return (
        f"{result.model}, {result.dataset}, {result.method}: {result.accuracy:.2f} "
        f"({result.parameter}={result.chosen:g}{_of_grid(result)}, {folds:.2f} in cross-validation{reference})"
    )


def _of_grid(result: Result) -> str:
    """A warning if the chosen value is the smallest or largest of its grid, where a value beyond might be better."""
    if not result.tried:
        return ""
    smallest, largest = min(result.tried), max(result.tried)
    words = ""
    if result.method == "knn" and largest < max(KS):
        words = f", tried only up to {largest} for so few images"
    if result.chosen == largest or (result.chosen == smallest and result.method != "knn"):
        words += f", the {'largest' if result.chosen == largest else 'smallest'} value of the grid"
    return words


def _figure(recipe: dict[str, Any], method: str, dataset: str) -> float | None:
    """The paper's result for the row that a model's recipe reproduces; None if there is none."""
    if not recipe.get("paper"):
        return None
    try:
        return paper.figures(recipe["paper"]).get(method, {}).get(dataset)
    except ValueError:
        return None
