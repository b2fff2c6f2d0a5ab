"""What the demo measures: how features spread, what they are worth for unseen classes, and what they keep of an image.

Shapes: B images, N features. Features have length 1, so that a product of two of them is the cosine of their angle.
"""

import statistics
from typing import NamedTuple

import torch
from scipy.stats import t as student  # type: ignore[import-untyped]
from torch import Tensor

NEIGHBOURS = 5


def style(images: Tensor) -> dict[str, Tensor]:
    """Properties (B,) of images (B, 1, H, W) that say nothing about the class: how a digit leans, its width, its ink.

    Slant is the horizontal shift per row, from the second moments of the ink; width is its horizontal deviation.
    """
    ink = images.squeeze(1).double()
    total = ink.sum((1, 2))
    rows, columns = (torch.arange(size, dtype=torch.float64) for size in ink.shape[1:])

    def mean(values: Tensor) -> Tensor:
        return (ink * values).sum((1, 2)) / total

    across = columns - mean(columns.expand_as(ink))[:, None, None]
    down = rows[:, None] - mean(rows[:, None].expand_as(ink))[:, None, None]
    return {
        "slant": mean(across * down) / mean(down.square()),
        "width": mean(across.square()).sqrt(),
        "ink": total / ink[0].numel(),
    }


def strongest_direction(features: Tensor, labels: Tensor) -> float:
    """The share of the energy of a class's features that lies along one direction, its best one; mean over classes."""
    shares = []
    for label in labels.unique():
        energies = torch.linalg.svdvals(features[labels == label].double()).square()
        shares.append(float(energies[0] / energies.sum()))
    return statistics.fmean(shares)


def few_shot(features: Tensor, labels: Tensor, shots: int, seed: int, draws: int = 50) -> float:
    """Share of images that have the class of the nearest of `shots` random examples of each class; mean over draws."""
    generator = torch.Generator().manual_seed(seed)
    accuracies = []
    for _ in range(draws):
        order = torch.randperm(len(labels), generator=generator)
        examples = torch.cat([order[labels[order] == label][:shots] for label in labels.unique()])
        others = torch.ones(len(labels), dtype=torch.bool)
        others[examples] = False
        nearest = (features[others] @ features[examples].T).argmax(-1)
        accuracies.append(float((labels[examples][nearest] == labels[others]).double().mean()))
    return statistics.fmean(accuracies)


class Labelled(NamedTuple):
    """Features (B, N) of some images, their labels and one property of each (B,)."""

    features: Tensor
    labels: Tensor
    property: Tensor


def kept(train: Labelled, test: Labelled) -> float:
    """R² within classes of a property of test images, predicted as its mean over the nearest training images.

    The neighbours are of the same class. 1: neighbours share the property; 0 or less: they tell nothing about it.
    """
    unexplained = variance = 0.0
    for label in test.labels.unique():
        known, asked = train.labels == label, test.labels == label
        nearest = (test.features[asked] @ train.features[known].T).topk(NEIGHBOURS).indices
        truth = test.property[asked]
        unexplained += float((truth - train.property[known][nearest].mean(-1)).square().sum())
        variance += float((truth - truth.mean()).square().sum())
    return 1 - unexplained / variance


class Difference(NamedTuple):
    """The mean of paired differences over seeds, and its 95 % confidence interval by Student's t."""

    mean: float
    low: float | None
    high: float | None

    @property
    def is_clear(self) -> bool:
        """Whether zero lies outside the interval."""
        return self.low is not None and self.high is not None and self.low * self.high > 0

    def shown(self, decimals: int) -> str:
        if self.low is None or self.high is None:
            return f"{self.mean:+.{decimals}f}"
        return f"{self.mean:+.{decimals}f} ({self.low:+.{decimals}f} to {self.high:+.{decimals}f})"


def difference(values: list[float], against: list[float]) -> Difference:
    """The first minus the second, seed by seed; one seed has no interval."""
    each = [value - other for value, other in zip(values, against, strict=True)]
    mean = statistics.fmean(each)
    if len(each) < 2:
        return Difference(mean, None, None)
    half = float(student.ppf(0.975, len(each) - 1)) * statistics.stdev(each) / len(each) ** 0.5
    return Difference(mean, mean - half, mean + half)
