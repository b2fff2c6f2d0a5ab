"""A rule of thumb for gamma, the scale of the logits of the Grassmann head."""

import math
from collections.abc import Sequence
from typing import Any

from grassy.arguments import positive_integer

#: Softmax probability p of the target class that the rule aims for.
CONFIDENT = 0.9
#: Calibration of the rule: the paper's ResNet50-D.
PAPER_GAMMA, PAPER_CLASSES, PAPER_K, PAPER_WIDTH = 25.0, 1000, 8, 2048


def recommended_gamma(num_classes: int, k: int | Sequence[int] = PAPER_K, in_features: int = PAPER_WIDTH) -> float:
    """Recommend a gamma for the Grassmann head from the number of classes and the dimensions.

    The rule is γ = ln((C − 1) p/(1 − p)) / (a (1 − r)) with p = 0.9 and r the mean of √(k_c/N). The constant a = 0.39
    reproduces the paper's choice: γ = 25 for C = 1,000, k = 8 and N = 2,048.

    Where it comes from: logits lie in [0, γ]. A random unit vector has a logit of about γr, where r = √(k/N) is the
    expected length of its projection. Suppose that the target logit lies the fraction a of the way from γr to γ, and
    that all other logits are γr. Then the softmax probability of the target is 1/(1 + (C − 1) exp(−γ a (1 − r))), which
    equals p for the γ above.

    The rule grows with log C and slightly with k/N. It is constant in k from k = N/4 on, where we have no experience.
    One class counts as two.

    Args:
        num_classes: Number of classes C.
        k: Dimension of the subspaces, one for all classes or one per class.
        in_features: Feature dimension N.

    Returns:
        Gamma, rounded to two decimals.

    Raises:
        ValueError: If an argument is not a positive integer.

    Examples:
        >>> import grassy
        >>> grassy.heads.recommended_gamma(1000, k=8, in_features=2048)
        25.0
    """
    return round(_needed(num_classes, k, in_features) / paper_share(), 2)


def automatic_gamma(
    num_classes: int, k: int | Sequence[int], in_features: int, normalize: bool, standardize: bool
) -> float | None:
    """Return the value of gamma="auto" for these options, or None if the length of the features is unknown."""
    rule = recommended_gamma(num_classes, k, in_features)
    if normalize:
        return rule
    # The root mean square length of standardised features is √N.
    return float(f"{rule / math.sqrt(in_features):.4g}") if standardize else None


def paper_share() -> float:
    """Return the constant a of `recommended_gamma`, for which the paper's γ gives p = 0.9."""
    return _needed(PAPER_CLASSES, PAPER_K, PAPER_WIDTH) / PAPER_GAMMA


def _needed(num_classes: int, k: int | Sequence[int], in_features: int) -> float:
    """Return the γ for features that lie in the subspaces of their classes (a = 1)."""
    classes, width = positive_integer("num_classes", num_classes), positive_integer("in_features", in_features)
    each: Any = k if isinstance(k, Sequence) else [k]
    dims = [positive_integer("k", dim) for dim in each]
    typical = sum(min(math.sqrt(dim / width), 0.5) for dim in dims) / len(dims)
    return math.log(max(1, classes - 1) * CONFIDENT / (1 - CONFIDENT)) / (1 - typical)
