"""What the features of a classifier are like: how far they spread within classes, how well classes separate."""

from grassy.analysis.separation import class_separation
from grassy.analysis.variability import variability

__all__ = ["class_separation", "variability"]
