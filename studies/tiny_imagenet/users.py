"""What users of a trained network get beside accuracy and transfer: retrieval, few-shot learning, outlier detection,
calibration, and smaller subspaces.

Shapes: B samples, N features, C classes, K subspace dimension.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from grassy import kernels
from grassy.heads import GrassmannHead, Head
from grassy.heads.base import evaluating

WAYS, QUERIES, EPISODES, SEED = 5, 15, 1000, 0
BINS = 15
#: Shares of a class's energy below which pruning drops a direction.
BOUNDS = (0.001, 0.01, 0.03)
AT_ONCE = 4096


@torch.inference_mode()
def recall_at_1(features: Tensor, labels: Tensor) -> float:
    """How often the nearest other sample by cosine has the same label, in percent."""
    x = normalize(features.float(), dim=-1)
    right = 0
    for begin in range(0, len(x), AT_ONCE):
        similar = x[begin : begin + AT_ONCE] @ x.mT
        rows = torch.arange(len(similar), device=x.device)
        similar[rows, rows + begin] = -torch.inf
        right += int((labels[similar.argmax(-1)] == labels[begin : begin + AT_ONCE]).sum())
    return 100 * right / len(x)


@torch.inference_mode()
def few_shot(features: Tensor, labels: Tensor, shots: int, episodes: int = EPISODES) -> float:
    """Accuracy of the nearest class mean by cosine in 5-way episodes with 15 queries per class, in percent."""
    rng = np.random.default_rng(SEED)
    each = shots + QUERIES
    numbers = labels.cpu().numpy()
    members = [np.flatnonzero(numbers == label) for label in np.unique(numbers)]
    members = [own for own in members if len(own) >= each]
    ways = min(WAYS, len(members))
    if ways < 2:
        return float("nan")
    x, right = normalize(features.float(), dim=-1), 0
    for _ in range(episodes):
        classes = rng.choice(len(members), ways, replace=False)
        index = np.stack([rng.choice(members[label], each, replace=False) for label in classes])
        own = x[torch.from_numpy(index).to(x.device)]  # (ways, each, N)
        means = normalize(own[:, :shots].mean(1), dim=-1)
        predicted = (own[:, shots:] @ means.mT).argmax(-1)
        right = right + (predicted == torch.arange(ways, device=x.device)[:, None]).sum()
    return 100 * float(right) / (episodes * ways * QUERIES)


def auroc(inside: Tensor, outside: Tensor) -> float:
    """How often an outlier has a higher score than an inlier, in percent; ties count half."""
    ordered = inside.double().sort().values
    below = torch.searchsorted(ordered, outside.double())
    not_above = torch.searchsorted(ordered, outside.double(), right=True)
    return 50 * float((below + not_above).double().mean()) / len(ordered)


def fpr95(inside: Tensor, outside: Tensor) -> float:
    """The share of outliers that pass where 95 % of inliers do, in percent."""
    return 100 * float((outside.double() <= inside.double().quantile(0.95)).double().mean())


@torch.inference_mode()
def outlier_scores(head: Head, features: Tensor) -> dict[str, Tensor]:
    """The usual scores, and the head's own; high means outlier."""
    logits = head.scores(features).float()
    scores = {
        "max-softmax": -logits.softmax(-1).amax(-1),
        "max-logit": -logits.amax(-1),
        "energy": -logits.logsumexp(-1),
    }
    if isinstance(head, GrassmannHead):
        scores["outlier_score"] = head.outlier_score(features)
    return scores


def detection(head: Head, inside: Tensor, outside: dict[str, Tensor]) -> dict[str, Any]:
    """AUROC and FPR95 by data set and score, for the features of inliers and of other data sets."""
    own = outlier_scores(head, inside)
    found: dict[str, Any] = {}
    for name, features in outside.items():
        other = outlier_scores(head, features)
        found[name] = {
            score: {"auroc": auroc(own[score], other[score]), "fpr95": fpr95(own[score], other[score])} for score in own
        }
    return found


@torch.inference_mode()
def calibration(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Calibration error in percent and loss on one half of the samples, also with a temperature fitted on the other."""
    fit, held = slice(0, None, 2), slice(1, None, 2)
    logits = logits.float()
    temperatures = torch.logspace(-1, 1, 201).tolist()
    best = min(temperatures, key=lambda t: float(cross_entropy(logits[fit] / t, labels[fit])))
    found: dict[str, float] = {"temperature": best}
    for name, scaled in (("", logits[held]), ("_scaled", logits[held] / best)):
        found[f"ece{name}"] = calibration_error(scaled.softmax(-1), labels[held])
        found[f"loss{name}"] = float(cross_entropy(scaled, labels[held]))
    return found


def calibration_error(probabilities: Tensor, labels: Tensor) -> float:
    """The mean distance of confidence from accuracy over 15 bins of equal width, in percent."""
    confidence, predicted = probabilities.max(-1)
    right = (predicted == labels).double()
    cell = (confidence * BINS).long().clamp(max=BINS - 1)
    counts = cell.bincount(minlength=BINS)
    gap = cell.bincount(weights=confidence.double(), minlength=BINS) - cell.bincount(weights=right, minlength=BINS)
    return 100 * float(gap.abs().sum() / counts.sum())


@torch.inference_mode()
def pruning(head: GrassmannHead, train: Tensor, labels: Tensor, test: Tensor, test_labels: Tensor) -> dict[str, Any]:
    """What is left of subspaces, and of top-1, without the directions that hold less than a bound of a class's energy.

    The features are those before the head. Each class first rotates to the principal axes of its own coordinates, which
    changes no logit.
    """
    with evaluating(head):
        z, test = head.prepare(train).float(), head.prepare(test).float()
    weight = head.weight.float()
    classes, k, _ = weight.shape
    moments = weight.new_zeros(classes, k, k)
    for rows, own in zip(z.split(AT_ONCE), labels.split(AT_ONCE), strict=True):
        t = torch.einsum("bkn,bn->bk", weight[own], rows)
        moments.index_add_(0, own, t[:, :, None] * t[:, None, :])
    energies, axes = torch.linalg.eigh(moments)
    shares = energies.clamp(min=0) / energies.clamp(min=0).sum(-1, keepdim=True).clamp(min=1e-30)
    rotated = axes.mT @ weight

    def logits(weight: Tensor) -> Tensor:
        options = {"gamma": head.gamma, "normalize": head.normalize}
        return torch.cat([kernels.subspace_logits(rows, weight, **options) for rows in test.split(AT_ONCE)])

    before = logits(weight)
    found = {"top1": _top1(before, test_labels), "k": float(k)}
    for bound in BOUNDS:
        kept = (shares >= bound) | (shares == shares.amax(-1, keepdim=True))
        after = logits(rotated * kept[..., None])
        found |= {
            f"top1 at {bound:g}": _top1(after, test_labels),
            f"k at {bound:g}": float(kept.sum(-1).double().mean()),
            f"largest change of a logit at {bound:g}": float((after - before).abs().max()),
        }
    return found


def _top1(logits: Tensor, labels: Tensor) -> float:
    return 100 * float((logits.argmax(-1) == labels).double().mean())


@torch.inference_mode()
def inside_and_residual(head: Head, features: Tensor) -> tuple[Tensor, Tensor]:
    """Features (B, N), as the head prepares them, split into the part inside the predicted class and the rest.

    The inside of a class is its subspace, or the direction of its vector.
    """
    with evaluating(head):
        z = head.prepare(features).float()
    predicted = head.scores(features).argmax(-1)
    weight = head.get_parameter("weight").float()
    basis = weight if weight.ndim == 3 else normalize(weight, dim=-1)[:, None]
    parts = []
    for rows, own in zip(z.split(AT_ONCE), predicted.split(AT_ONCE), strict=True):
        coordinates = torch.einsum("bkn,bn->bk", basis[own], rows)
        parts.append(torch.einsum("bkn,bk->bn", basis[own], coordinates))
    inside = torch.cat(parts)
    return inside, z - inside
