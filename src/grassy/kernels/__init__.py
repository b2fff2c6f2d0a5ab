"""The hot paths: the optimizer step (Algorithm 1) and the head. `reference.py` specifies them in plain torch.

`impl="auto"` chooses the fastest implementation that supports the tensors. A named implementation either runs or
raises.
"""

from grassy.kernels.dispatch import choose, explain, explain_logits
from grassy.kernels.fused_logits import product_dtype
from grassy.kernels.head import subspace_cross_entropy, subspace_logits
from grassy.kernels.reference import autocasts, unit
from grassy.kernels.sampling import Sampling
from grassy.kernels.sharded import sharded_cross_entropy
from grassy.kernels.sharded_scores import sharded_largest_probability, sharded_logits, sharded_top
from grassy.kernels.sharded_subspaces import sharded_subspace_cross_entropy
from grassy.kernels.step import geodesic_step, geodesic_steps
from grassy.kernels.step_options import RETRACTIONS, TRANSPORTS, StepCounts, StepOptions

__all__ = [
    "RETRACTIONS",
    "TRANSPORTS",
    "Sampling",
    "StepCounts",
    "StepOptions",
    "autocasts",
    "choose",
    "explain",
    "explain_logits",
    "geodesic_step",
    "geodesic_steps",
    "product_dtype",
    "sharded_cross_entropy",
    "sharded_largest_probability",
    "sharded_logits",
    "sharded_subspace_cross_entropy",
    "sharded_top",
    "subspace_cross_entropy",
    "subspace_logits",
    "unit",
]
