"""Measures of a head and of features: the body of analysis.json, computed from tensors alone.

Shapes: B samples, C classes, K subspace dimension, N feature dimension.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from grassy import geometry
from grassy.analysis import (
    class_effective_ranks,
    class_separation,
    class_spectra,
    class_vector_angles,
    cluster_order,
    neural_collapse,
    pairwise_principal_angles,
    variability,
)
from grassy.heads import GrassmannHead, Head
from grassy.heads.base import evaluating
from grassy.heads.multi import MultiHead
from grassy.kernels import unit
from grassy.report.examples import choose_examples, share_inside
from grassy.report.packing import pack_angles, rounded
from grassy.schema import finite
from grassy.spelling import natural_key

NEAREST = 8
CONFUSIONS = 40
ROWS_AT_ONCE = 4096
MOST_ANGLES = 400_000_000  # in float32 they take 1.6 GB

#: The scalars of an analysis: title, number of decimals to show, and meaning.
SCALARS: dict[str, tuple[str, int, str]] = {
    "top1": ("Top-1 accuracy (%)", 2, "images whose label has the largest logit"),
    "top5": ("Top-5 accuracy (%)", 2, "images whose label is among the five largest logits"),
    "variability": ("Variability (°)", 2, "mean angle between two centred features of the same class"),
    "class_separation": ("Class separation R²", 4, "share of the spread of features that lies between classes"),
    "energy_inside": ("Energy inside", 4, "share of a feature's squared norm inside its class's subspace (or vector)"),
    "mean_effective_rank": ("Effective rank", 2, "subspace directions that a class uses, mean over classes"),
    "smallest_angle": ("Smallest angle (°)", 2, "smallest angle between any two classes"),
    "mean_smallest_angle": ("Mean smallest angle (°)", 2, "smallest angle of a pair of classes, mean over pairs"),
    "nc1": ("NC1", 4, "spread within classes over spread of the class means, tr(Σ_W Σ_B⁺)/C; 0 is collapse"),
    "nc2_norms": ("NC2, norms", 4, "relative deviation of the norms of the class means; 0 is collapse"),
    "nc2_angles": ("NC2, angles", 4, "deviation of the cosines between class means; 0 is collapse"),
    "nc2_simplex": ("NC2, simplex", 4, "mean distance of these cosines from −1/(C − 1); 0 is collapse"),
    "nc3": ("NC3, duality", 4, "distance between normalised class vectors and class means; 0 is collapse"),
    "orthonormality_error": ("Orthonormality error", 9, "largest entry of |WWᵀ − I| over all subspaces"),
}  # fmt: skip


@torch.no_grad()
def describe(
    head: nn.Module, class_names: Sequence[str] | None, features: Tensor | None = None, labels: Tensor | None = None
) -> dict[str, Any]:
    """All measures of a head with C classes and, if given, of features (B, N) with integer labels (B,).

    Without features, the measures that need them are None or empty. Angles are in degrees, accuracies in percent. All
    values are plain Python values, for JSON.
    """
    weight = class_weight(head)
    subspaces = weight.ndim == 3
    k = weight.shape[1] if subspaces else 1
    if len(weight) ** 2 * k > MOST_ANGLES:
        most = math.isqrt(MOST_ANGLES // k)
        raise ValueError(
            f"{len(weight)} classes are too many for the angles of all pairs: at most {most} are allowed for k = {k}"
        )
    angles = torch.rad2deg(pairwise_principal_angles(weight) if subspaces else class_vector_angles(weight)[..., None])
    angles = angles.float().cpu()
    count = len(weight)
    names = [str(i) for i in range(count)] if class_names is None else [str(name) for name in class_names]
    if len(names) != count:
        raise ValueError(f"there are {len(names)} class names for {count} classes")
    dims = geometry.present_rows(weight if subspaces else weight[:, None]).sum(-1).tolist()
    distance = angles.nanmean(-1)
    distance = distance.masked_fill(distance.isnan(), 90.0).fill_diagonal_(0.0)  # classes without a direction
    scalars: dict[str, float | None] = dict.fromkeys(SCALARS)
    if count > 1:
        first = angles[..., 0][tuple(torch.triu_indices(count, count, 1))]
        first = first[first.isfinite()]
        if len(first):
            scalars |= {"smallest_angle": float(first.min()), "mean_smallest_angle": float(first.double().mean())}
    if subspaces:
        scalars["orthonormality_error"] = float(geometry.orthonormality_error(weight))
    per_class = {"name": names, "dimension": dims, "nearest": _nearest(distance)}
    examples = None
    if features is not None and labels is not None:
        of_features, of_classes, examples = _with_features(head, weight, features, labels)
        scalars |= of_features
        per_class |= of_classes
    return {
        "representation": "subspaces" if subspaces else "vectors",
        "classes": count,
        "k": angles.shape[-1],
        "width": weight.shape[-1],
        "scalars": {key: finite(value) for key, value in scalars.items()},
        "per_class": per_class,
        "orders": {
            "index": list(range(count)),
            "name": sorted(range(count), key=lambda i: natural_key(names[i])),
            "cluster": cluster_order(distance).tolist(),
        },
        "angles": pack_angles(angles.numpy(), 90.0 if subspaces else 180.0),
        **({} if examples is None else {"examples": examples}),
    }


def class_weight(head: nn.Module) -> Tensor:
    """The subspace bases (C, K, N) of a Grassmann head, or the class vectors (C, N) of any other head.

    For several linear layers this is their mean, which gives the logits; for several centres per class, their mean
    direction.
    """
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor):
        raise ValueError(f"{type(head).__name__} has no weight to take class vectors or subspaces from")
    weight = weight.detach()
    if isinstance(head, GrassmannHead):
        return weight
    if isinstance(head, MultiHead):
        return weight.mean(0)
    if not isinstance(head, Head):
        return weight.flatten(1)  # of a linear layer or a 1x1 convolution
    return unit(weight).mean(1) if weight.ndim == 3 else weight


def _with_features(
    head: nn.Module, weight: Tensor, features: Tensor, labels: Tensor
) -> tuple[dict[str, float | None], dict[str, list[Any]], dict[str, Any]]:
    """Measures of labelled features: scalars, lists with one entry per class, and example images."""
    bases = weight if weight.ndim == 3 else weight[:, None]
    seen = _as_seen_by(head, features)
    spectra = class_spectra(seen, labels, bases.to(features.device)).cpu()
    ranks = class_effective_ranks(seen, labels, bases.to(features.device)).cpu() if weight.ndim == 3 else None
    classes = len(weight)
    confusion = torch.zeros(classes, classes, dtype=torch.long)
    among_five = 0
    judged: list[tuple[Tensor, ...]] = []
    for start, logits in _logits(head, features):
        own = labels[start : start + len(logits)].to(logits.device)
        best = logits.topk(min(5, classes)).indices
        among_five += int((best == own[:, None]).any(1).sum())
        pairs = (own * classes + best[:, 0]).cpu()
        confusion.view(-1).index_add_(0, pairs, torch.ones_like(pairs))  # bincount would be slow for many classes
        sure = logits.softmax(-1).amax(-1)
        rows = features[start : start + len(logits)]
        judged.append((best[:, 0], sure, head.outlier_score(rows) if isinstance(head, Head) else 1 - sure))
    predicted, confidence, outlier = (torch.cat(parts).cpu().numpy() for parts in zip(*judged, strict=True))
    inside = share_inside(seen, labels, weight).cpu().numpy()
    examples = choose_examples(labels.cpu().numpy(), predicted, confidence, inside, outlier, classes)
    images, right = confusion.sum(1), confusion.diagonal()
    scalars: dict[str, float | None] = {
        "top1": 100 * int(right.sum()) / len(labels),
        "top5": 100 * among_five / len(labels),
        "variability": variability(features, labels),
        "energy_inside": float(spectra.sum(-1).nanmean()),
        "mean_effective_rank": None if ranks is None else float(ranks.nanmean()),
    }
    if len(labels.unique()) > 1:
        collapse = neural_collapse(seen, labels, weight.to(features.device))
        names = ("nc1", "nc2_norms", "nc2_angles", "nc2_simplex", "nc3")
        scalars |= {"class_separation": class_separation(features, labels), **dict(zip(names, collapse, strict=True))}
    return (
        scalars,
        {
            "images": images.tolist(),
            "accuracy": [rounded(value) for value in (100 * right / images).tolist()],
            "effective_rank": [None] * classes if ranks is None else [rounded(value) for value in ranks.tolist()],
            "spectrum": [[rounded(value) for value in row] for row in spectra.tolist()],
            "confusions": _confusions(confusion),
        },
        examples,
    )


def _as_seen_by(head: nn.Module, features: Tensor) -> Tensor:
    """Features as the head sees them: standardised, if the head does that."""
    if not isinstance(head, Head):
        return features
    with evaluating(head):
        return head.prepare(features)


def _logits(head: nn.Module, features: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Logits in blocks, each with the index of its first row."""
    for start in range(0, len(features), ROWS_AT_ONCE):
        rows = features[start : start + ROWS_AT_ONCE]
        yield start, (head.scores(rows) if isinstance(head, Head) else _plain_logits(head, rows)).float()


def _plain_logits(layer: nn.Module, rows: Tensor) -> Tensor:
    return nn.functional.linear(rows, layer.weight.flatten(1), layer.bias)  # type: ignore[operator, arg-type]


def _nearest(distance: Tensor) -> list[list[list[float]]]:
    """For each class, the nearest other classes as pairs (class, mean angle in degrees), nearest first."""
    apart = distance.clone().fill_diagonal_(math.inf)
    values, classes = apart.sort(dim=1, stable=True)
    kept = min(NEAREST, len(distance) - 1)
    return [
        [[other, round(value, 3)] for other, value in zip(row, degrees, strict=True)]
        for row, degrees in zip(classes[:, :kept].tolist(), values[:, :kept].tolist(), strict=True)
    ]


def _confusions(confusion: Tensor) -> list[list[list[int]]]:
    """For each class, the wrong predictions of its images as pairs (class, count), most frequent first."""
    wrong = confusion.clone().fill_diagonal_(0)
    counts, classes = wrong.sort(dim=1, descending=True, stable=True)
    return [
        [[other, number] for other, number in zip(row, numbers, strict=True) if number]
        for row, numbers in zip(classes[:, :CONFUSIONS].tolist(), counts[:, :CONFUSIONS].tolist(), strict=True)
    ]
