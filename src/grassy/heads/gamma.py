"""A rule of thumb for gamma, the length that the Grassmann head scales features to."""

import math
from collections.abc import Sequence
from typing import Any

from grassy.heads.base import positive_integer

#: The probability that the rule is about.
CONFIDENT = 0.9
#: Where it is anchored: gamma, classes, dimension of the subspaces and width of the features of the paper's ResNet50-D.
PAPER_GAMMA, PAPER_CLASSES, PAPER_K, PAPER_WIDTH = 25.0, 1000, 8, 2048


def recommended_gamma(num_classes: int, k: int | Sequence[int] = PAPER_K, in_features: int = PAPER_WIDTH) -> float:
    """γ = ln((C − 1) p/(1 − p)) / (a (1 − r)), with p = 0.9, r the mean of √(k_c/N), and a so that the paper's γ is 25.

    Logits lie between 0 and γ. A feature with no relation to a class has a logit of about γr there, r = √(k/N) being
    the length of the projection of a random unit vector; the feature of a class can have at most γ. With its own logit
    at a share a of the way from the one to the other, and the C − 1 others at γr, its softmax probability is
    1/(1 + (C − 1) exp(−γ a (1 − r))), and this is p for the γ above. The paper chose 25 for C = 1,000, k = 8 and
    N = 2,048, which means a = 0.39: features stand about two fifths of the way out.

    It grows with the logarithm of the number of classes, and slightly with k/N. From k = N/4 on it no longer does: no
    experience reaches that far. One class is treated as two. Rounded to two decimals, more than the rule deserves.
    """
    return round(_needed(num_classes, k, in_features) / paper_share(), 2)


def automatic_gamma(
    num_classes: int, k: int | Sequence[int], in_features: int, normalize: bool, standardize: bool
) -> float | None:
    """What gamma="auto" is for a head with such options; None if it has no way to know how long features are."""
    rule = recommended_gamma(num_classes, k, in_features)
    if normalize:
        return rule
    # Standardised features have a length of √N, in the mean of squares.
    return float(f"{rule / math.sqrt(in_features):.4g}") if standardize else None


def paper_share() -> float:
    """The share a of `recommended_gamma`: how far out features must stand for the paper's γ to give p = 0.9."""
    return _needed(PAPER_CLASSES, PAPER_K, PAPER_WIDTH) / PAPER_GAMMA


def _needed(num_classes: int, k: int | Sequence[int], in_features: int) -> float:
    """The γ that would do if features came to lie wholly in the subspaces of their classes."""
    classes, width = positive_integer("num_classes", num_classes), positive_integer("in_features", in_features)
    each: Any = k if isinstance(k, Sequence) else [k]
    dims = [positive_integer("k", dim) for dim in each]
    typical = sum(min(math.sqrt(dim / width), 0.5) for dim in dims) / len(dims)
    return math.log(max(1, classes - 1) * CONFIDENT / (1 - CONFIDENT)) / (1 - typical)
