"""Classifier heads: one file per class representation, one contract (`Head`), one registry (`HEADS`)."""

from grassy.criteria import Criterion
from grassy.heads.arcface import ArcFaceHead
from grassy.heads.base import Head, HeadOptions, heads_of
from grassy.heads.cosine import CosineHead
from grassy.heads.gamma import recommended_gamma
from grassy.heads.grassmann import GrassmannHead
from grassy.heads.linear import LinearHead
from grassy.heads.loss_request import LossRequest
from grassy.heads.multi import MultiHead
from grassy.heads.on_map import HeadOnMap
from grassy.heads.registry import (
    HEADS,
    RECOMMENDED,
    RECOMMENDED_K,
    check_head_options,
    create_head,
    describe,
    recommended_options,
)
from grassy.heads.softtriple import SoftTripleHead
from grassy.heads.subcenter_arcface import SubcenterArcFaceHead

__all__ = [
    "HEADS",
    "RECOMMENDED",
    "RECOMMENDED_K",
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
    "recommended_options",
]
