"""Measures of the features and the classes of a classifier, as functions of tensors.

Shapes: B samples, C classes, K subspace dimension, N feature dimension. All functions compute in float64, in blocks, on
the device of their arguments, without gradients.

- Features and labels: `variability`, `class_separation`, `neural_collapse`.
- Classes: `pairwise_principal_angles` of subspaces, `class_vector_angles`, and `cluster_order` to sort them.
- How features use the subspace of their class: `class_spectra`, `class_effective_ranks`, `effective_rank`.
"""

from grassy.analysis.class_angles import class_vector_angles, pairwise_principal_angles
from grassy.analysis.cluster import cluster_order
from grassy.analysis.neural_collapse import NeuralCollapse, neural_collapse
from grassy.analysis.separation import class_separation
from grassy.analysis.spectrum import class_effective_ranks, class_spectra, effective_rank
from grassy.analysis.variability import variability

__all__ = [
    "NeuralCollapse",
    "class_effective_ranks",
    "class_separation",
    "class_spectra",
    "class_vector_angles",
    "cluster_order",
    "effective_rank",
    "neural_collapse",
    "pairwise_principal_angles",
    "variability",
]
