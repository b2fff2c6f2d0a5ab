"""Choose example images for the page: mistakes, the most and least typical images of each class, and outliers.

Shapes: B images, C classes, K subspace dimension, N feature dimension.
"""

import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grassy import schema
from grassy.analysis.class_angles import orthonormal_bases
from grassy.analysis.labelled import members_by_class
from grassy.report.packing import rounded

MISTAKES_OF_PAIR = 12
MOST_MISTAKES = 8000
OUTLIERS = 48
TYPICAL, FEW_TYPICAL, MANY_CLASSES = 6, 4, 250
ROWS_AT_ONCE = 4096

#: The facts about each chosen image: one list per fact, all of the same length.
COLUMNS = ("index", "label", "predicted", "confidence", "inside", "outlier")


@torch.no_grad()
def share_inside(features: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    """The share (B,) of each feature's squared norm that lies in the subspace of its class, in [0, 1].

    features (B, N); labels (B,); weight: subspaces (C, K, N) or class vectors (C, N). For class vectors the share is
    the squared cosine, or 0 for a negative cosine. It is 0 for a zero feature.
    """
    subspaces = weight.ndim == 3
    bases = orthonormal_bases(weight if subspaces else weight[:, None]).to(features.device)
    shares = torch.zeros(len(features), dtype=torch.float64, device=features.device)
    for label, members in members_by_class(labels).items():
        for rows in members.split(ROWS_AT_ONCE):
            unit = torch.nn.functional.normalize(features[rows].double(), dim=-1)
            coordinates = unit @ bases[label].double().mT
            if not subspaces:  # the basis vector of a 1-dimensional subspace has no sign
                towards = (unit @ weight[label].double().to(unit.device)) > 0
                coordinates = coordinates * towards[:, None]
            shares[rows] = coordinates.square().sum(-1)
    return shares.clamp(0, 1)


def choose_examples(
    labels: np.ndarray,
    predicted: np.ndarray,
    confidence: np.ndarray,
    inside: np.ndarray,
    outlier: np.ndarray,
    classes: int,
) -> dict[str, Any]:
    """Choose among B images, described by arrays (B,), and return plain lists for JSON.

    The COLUMNS describe the chosen images; `index` is the index among the B images. The other entries hold positions
    in these columns: `mistakes`, most confident first; `typical` and `untypical`, one list per class, most extreme
    first; `outliers`, highest score first. There are at most MISTAKES_OF_PAIR mistakes per pair of classes and
    MOST_MISTAKES in total, and each class keeps its most confident ones.
    """
    mistakes = _mistakes(labels, predicted, confidence, classes)
    each = TYPICAL if classes <= MANY_CLASSES else FEW_TYPICAL
    typical, untypical = (_of_each_class(labels, sign * inside, classes, each) for sign in (1, -1))
    outliers = np.argsort(-outlier, kind="stable")[:OUTLIERS]
    chosen = np.unique(np.concatenate([mistakes, outliers, *typical, *untypical]).astype(np.int64))

    def positions(rows: np.ndarray) -> list[int]:
        found: list[int] = np.searchsorted(chosen, rows).tolist()
        return found

    return {
        "index": chosen.tolist(),
        "label": labels[chosen].tolist(),
        "predicted": predicted[chosen].tolist(),
        **{
            name: [rounded(value, 4) for value in values[chosen].tolist()]
            for name, values in (("confidence", confidence), ("inside", inside), ("outlier", outlier))
        },
        "mistakes": positions(mistakes),
        "typical": [positions(rows) for rows in typical],
        "untypical": [positions(rows) for rows in untypical],
        "outliers": positions(outliers),
    }


def _mistakes(labels: np.ndarray, predicted: np.ndarray, confidence: np.ndarray, classes: int) -> np.ndarray:
    wrong = np.flatnonzero(predicted != labels)
    surest = wrong[np.argsort(-confidence[wrong], kind="stable")]
    surest = surest[rank_in_group(labels[surest] * classes + predicted[surest]) < MISTAKES_OF_PAIR]
    kept = np.argsort(rank_in_group(labels[surest]), kind="stable")[:MOST_MISTAKES]
    return surest[np.sort(kept)]


def _of_each_class(labels: np.ndarray, values: np.ndarray, classes: int, most: int) -> list[np.ndarray]:
    """For each class, the images with the largest values, largest first; at most half of its images."""
    order = np.lexsort((-values, labels))
    ends = np.searchsorted(labels[order], np.arange(classes + 1))
    return [order[start : start + min(most, (stop - start + 1) // 2)] for start, stop in itertools.pairwise(ends)]


def rank_in_group(groups: np.ndarray) -> np.ndarray:
    """For each entry, the number of earlier entries of the same group: [7, 3, 7, 7] -> [0, 0, 1, 2]."""
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    starts = np.searchsorted(ordered, ordered)
    rank = np.empty(len(groups), np.int64)
    rank[order] = np.arange(len(groups)) - starts
    return rank


def check_examples(examples: Any, classes: int, images: int) -> None:
    """Raise a ValueError for examples that `choose_examples` cannot have returned."""
    if not isinstance(examples, dict):
        raise schema.fail("examples", "a mapping", examples)
    count = len(examples["index"]) if isinstance(examples.get("index"), list) else 0
    share = schema.or_none(schema.number(0, 1))
    label = schema.integer(0, classes - 1)
    kinds = dict(zip(COLUMNS, (schema.integer(0, images), label, label, share, share, share), strict=True))
    for name, each in {**kinds, "name": schema.text(10_000)}.items():
        if name != "name" or name in examples:
            schema.list_of(each, count, count)(f"examples.{name}", examples.get(name))
    position = schema.list_of(schema.integer(0, max(0, count - 1)), 0, count)
    for name in ("mistakes", "outliers"):
        position(f"examples.{name}", examples.get(name))
    for name in ("typical", "untypical"):
        schema.list_of(position, classes, classes)(f"examples.{name}", examples.get(name))
