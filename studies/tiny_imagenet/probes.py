"""The four probes of transfer: two linear SVMs, the second on standardised features, k-NN and logistic regression.

Shapes: B samples, N features.
"""

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grassy.transfer import search_knn, search_probe, search_svm
from grassy.transfer.protocol import accuracy
from grassy.transfer.solvers.knn import KS, samples_outside_folds
from grassy.transfer.solvers.search import Search

#: C of the SVM on standardised features, half a decade apart, from 1e-3 to 1e3: far beyond what either side chose in
#: the CIFAR-100 study. A later piece is tried only if one of the last two values before it is the best so far: fits at
#: large C take very long, and accuracy hardly ever rises again once it has fallen.
CS = (
    (0.001, 0.003162, 0.01, 0.03162, 0.1, 0.3162, 1.0, 3.162, 10.0),
    (31.62, 100.0),
    (316.2, 1000.0),
)
#: How far its objective may be from the minimum, relative to it.
TOLERANCE = 1e-4


class Probed(NamedTuple):
    """What one probe says of one data set, accuracies in percent."""

    cv: float
    chosen: float
    at_end: bool  # of its grid
    test: float | None
    seconds: float
    warning: str | None  # of the solver


def _svm(x: Tensor, y: Tensor, metric: str) -> Search[Any]:
    return search_svm(x, y, metric=metric)


def _standardised(x: Tensor, y: Tensor, metric: str) -> Search[Any]:
    tried: list[Search[Any]] = []
    for piece in CS:
        tried.append(search_svm(x, y, piece, metric=metric, tol=TOLERANCE))
        best = max(tried, key=_accuracy)  # the first of equal ones
        if best is not tried[-1] or best.chosen not in piece[-2:]:
            break
    values = tuple(value for search in tried for value in search.values)
    return Search(values, torch.cat([search.accuracies for search in tried]), best.chosen, best.model)


def _accuracy(search: Search[Any]) -> float:
    return float(search.accuracies.mean(-1).max())


def _knn(x: Tensor, y: Tensor, metric: str) -> Search[Any]:
    return search_knn(x, y, [k for k in KS if k <= samples_outside_folds(len(y))] or [1], metric=metric)


def _logistic(x: Tensor, y: Tensor, metric: str) -> Search[Any]:
    return search_probe(x, y, metric=metric)


PROBES: dict[str, Callable[[Tensor, Tensor, str], Search[Any]]] = {
    "svm": _svm,
    "svm-standardised": _standardised,
    "knn": _knn,
    "logistic": _logistic,
}


def standardise(train: Tensor, *others: Tensor) -> list[Tensor]:
    """Each feature with mean 0 and variance 1 on the training samples (B, N), and others with the same statistics.

    A feature that is constant on the training samples becomes zero.
    """
    mean, std = train.mean(0), train.std(0)
    factor = torch.where(std > 1e-6 * std.max(), std, torch.inf).reciprocal()
    return [(x - mean) * factor for x in (train, *others)]


def probe(
    name: str, train: Tensor, labels: Tensor, metric: str, test: Tensor | None = None, test_labels: Tensor | None = None
) -> Probed:
    """One probe on features (B, N) of a data set; on test features too if they are given."""
    begin = time.monotonic()
    given = [train] if test is None else [train, test]
    if name == "svm-standardised":
        given = standardise(*given)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        search = PROBES[name](given[0], labels, metric)
    place = search.values.index(search.chosen)
    score = None
    if test is not None and test_labels is not None:
        score = 100 * accuracy(search.model.predict(given[1]).cpu(), test_labels.cpu(), metric)
    return Probed(
        100 * float(search.accuracies[place].mean()),
        float(search.chosen),
        place in (0, len(search.values) - 1),
        score,
        round(time.monotonic() - begin, 2),
        str(caught[-1].message)[:200] if caught else None,
    )


def table(found: dict[str, dict[str, Probed]]) -> dict[str, Any]:
    """Results by probe and data set, as a line of results.jsonl has them."""

    def of(field: str) -> dict[str, dict[str, Any]]:
        return {name: {data: getattr(each, field) for data, each in sets.items()} for name, sets in found.items()}

    lines: dict[str, Any] = {"transfer_cv": of("cv"), "transfer_chosen": of("chosen"), "transfer_at_end": of("at_end")}
    if any(each.test is not None for sets in found.values() for each in sets.values()):
        lines["transfer"] = of("test")
    lines["transfer_seconds"] = {name: round(sum(p.seconds for p in sets.values()), 2) for name, sets in found.items()}
    said = {f"{name}, {data}": p.warning for name, sets in found.items() for data, p in sets.items() if p.warning}
    return {**lines, "transfer_warnings": said} if said else lines


def names(with_test: bool, linear: Sequence[str], others: Sequence[str]) -> list[str]:
    """The probes of a run: logistic regression, which decides nothing, only where test images are measured."""
    return [*linear, *(name for name in others if with_test or name != "logistic")]
