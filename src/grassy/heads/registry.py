"""The registry of heads, and what creates, checks and describes a head by its name."""

import contextlib
import inspect
import operator
from collections.abc import Iterable
from typing import Any

from grassy.heads.arcface import ArcFaceHead
from grassy.heads.base import Head, HeadOptions
from grassy.heads.cosine import CosineHead
from grassy.heads.grassmann import GrassmannHead
from grassy.heads.linear import LinearHead
from grassy.heads.multi import MultiHead
from grassy.heads.softtriple import SoftTripleHead
from grassy.heads.subcenter_arcface import SubcenterArcFaceHead
from grassy.spelling import nearest

#: The head classes by name, as `create_head` and recipes use them.
HEADS: dict[str, type[Head]] = {
    "linear": LinearHead,
    "cosine": CosineHead,
    "arcface": ArcFaceHead,
    "multi": MultiHead,
    "softtriple": SoftTripleHead,
    "subcenter-arcface": SubcenterArcFaceHead,
    "grassmann": GrassmannHead,
}


#: The name of a `GrassmannHead` with `recommended_options`, where an option is not given.
RECOMMENDED = "subspaces"
#: Its k, for features that are wide enough.
RECOMMENDED_K = 32


def recommended_options(in_features: int, text: bool = False) -> dict[str, Any]:
    """Return the options of the head "subspaces": the setting that our studies recommend so far.

    k is 32, or a quarter of the feature dimension if that is less. Features of images are standardised and keep their
    length. Those of texts are normalised as in the paper: standardising cost a small BERT 27 of 91 points.

    Args:
        in_features: Feature dimension N.
        text: The features are those of texts.

    Returns:
        Options of `GrassmannHead`.

    Examples:
        >>> import grassy
        >>> grassy.heads.recommended_options(512)
        {'k': 32, 'gamma': 'auto', 'normalize': False, 'standardize': True}
    """
    return {
        "k": min(RECOMMENDED_K, max(1, in_features // 4)),
        "gamma": "auto",
        "normalize": text,
        "standardize": not text,
    }


def create_head(name: str, in_features: int, num_classes: int, **options: Any) -> Head:
    """Create a head by its name.

    Args:
        name: "subspaces", which is a Grassmann head with `recommended_options`, or a key of `HEADS`: "linear",
            "cosine", "arcface", "multi", "softtriple", "subcenter-arcface" or "grassmann". The defaults of "grassmann"
            are those of the paper.
        in_features: Feature dimension N.
        num_classes: Number of classes C.
        **options: Options of the head class and of `Head`, such as `k=8` or `dropout=0.1`.

    Returns:
        The head, an `nn.Module` that maps features (..., N) to logits (..., C).

    Raises:
        ValueError: If the head or one of its options is unknown. The message lists the known ones.

    Examples:
        >>> import torch, grassy
        >>> head = grassy.create_head("grassmann", in_features=64, num_classes=10, k=4)
        >>> head(torch.randn(32, 64)).shape
        torch.Size([32, 10])
    """
    check_head_options(name, options)
    if name == RECOMMENDED:
        with contextlib.suppress(TypeError):  # the head reports what is no integer
            options = {**recommended_options(operator.index(in_features)), **options}
        name = "grassmann"
    return HEADS[name](in_features, num_classes, **options)


def check_head_options(name: str, options: Iterable[str]) -> None:
    """Check the name and the options of a head without creating it.

    Args:
        name: Name of the head, as in `create_head`.
        options: Names of the options.

    Raises:
        ValueError: If the head is unknown or lacks one of the options.
    """
    names = {**HEADS, RECOMMENDED: GrassmannHead}
    if name not in names:
        raise ValueError(f"unknown head {name!r}{nearest(name, names)}; known heads: {', '.join(sorted(names))}")
    known = _options_of(names[name])
    for option in options:
        if option not in known:
            raise ValueError(
                f"head {name!r} has no option {option!r}{nearest(option, known)}; its options: {', '.join(known)}"
            )


def describe(head: Head) -> dict[str, Any]:
    """Return the registered name and the options of a head, from which `create_head` builds an equal one.

    Args:
        head: An instance of a registered head class.

    Returns:
        A dict with the key "name" and one key per option. It holds neither `in_features` nor `num_classes`.

    Raises:
        ValueError: If the class of the head is not in `HEADS`.

    Examples:
        >>> import grassy
        >>> head = grassy.create_head("cosine", in_features=64, num_classes=10, scale=20)
        >>> settings = grassy.heads.describe(head)
        >>> settings["name"], settings["scale"]
        ('cosine', 20.0)
        >>> copy = grassy.create_head(in_features=64, num_classes=10, **settings)
    """
    name = next((name for name, kind in HEADS.items() if kind is type(head)), None)
    if name is None:
        raise ValueError(f"{type(head).__name__} is not a registered head: add it to grassy.heads.HEADS under a name")
    options = {key: value.item() if hasattr(value, "item") else value for key, value in head.options.items()}
    return {"name": name, **options}


def _options_of(kind: type[Head]) -> list[str]:
    parameters = list(inspect.signature(kind).parameters.values())[2:]  # after in_features and num_classes
    own = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
    return own if len(own) == len(parameters) else [*own, *HeadOptions.__annotations__]
