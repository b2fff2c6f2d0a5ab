"""Class representations, one file each, under one contract and one registry."""

import inspect
from collections.abc import Iterable
from typing import Any

from grassy.heads.arcface import ArcFaceHead
from grassy.heads.base import Head, HeadOptions, heads_of
from grassy.heads.cosine import CosineHead
from grassy.heads.gamma import recommended_gamma
from grassy.heads.grassmann import GrassmannHead
from grassy.heads.linear import LinearHead
from grassy.heads.multi import MultiHead
from grassy.heads.on_map import HeadOnMap
from grassy.heads.request import Criterion, LossRequest
from grassy.heads.softtriple import SoftTripleHead
from grassy.heads.subcenter_arcface import SubcenterArcFaceHead
from grassy.spelling import nearest

HEADS: dict[str, type[Head]] = {
    "linear": LinearHead,
    "cosine": CosineHead,
    "arcface": ArcFaceHead,
    "multi": MultiHead,
    "softtriple": SoftTripleHead,
    "subcenter-arcface": SubcenterArcFaceHead,
    "grassmann": GrassmannHead,
}


def create_head(name: str, in_features: int, num_classes: int, **options: Any) -> Head:
    """The head registered under `name`; an unknown name or option raises and lists what is known."""
    check_head_options(name, options)
    return HEADS[name](in_features, num_classes, **options)


def check_head_options(name: str, options: Iterable[str]) -> None:
    """Raise a ValueError for an unknown head or an option that it does not have."""
    if name not in HEADS:
        raise ValueError(f"unknown head {name!r}{nearest(name, HEADS)}; known heads: {', '.join(sorted(HEADS))}")
    known = _options_of(HEADS[name])
    for option in options:
        if option not in known:
            raise ValueError(
                f"head {name!r} has no option {option!r}{nearest(option, known)}; its options: {', '.join(known)}"
            )


def describe(head: Head) -> dict[str, Any]:
    """The name and the options of a head: `create_head(in_features=..., num_classes=..., **describe(head))`."""
    name = next((name for name, kind in HEADS.items() if kind is type(head)), None)
    if name is None:
        raise ValueError(f"{type(head).__name__} is not a registered head: add it to grassy.heads.HEADS by a name")
    return {"name": name, **head.options}


def _options_of(kind: type[Head]) -> list[str]:
    parameters = list(inspect.signature(kind).parameters.values())[2:]  # after in_features and num_classes
    own = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
    return own if len(own) == len(parameters) else [*own, *HeadOptions.__annotations__]


__all__ = [
    "HEADS",
    "ArcFaceHead",
    "CosineHead",
    "Criterion",
    "GrassmannHead",
    "Head",
    "HeadOnMap",
    "HeadOptions",
    "LinearHead",
    "LossRequest",
    "MultiHead",
    "SoftTripleHead",
    "SubcenterArcFaceHead",
    "check_head_options",
    "create_head",
    "describe",
    "heads_of",
    "recommended_gamma",
]
