"""Optimizers for models with subspaces."""

from grassy.optim.averaging import AveragedModel
from grassy.optim.clipping import clip_grad_norm_
from grassy.optim.joint import JointOptimizer, make_optimizer
from grassy.optim.riemannian_sgd import RiemannianSGD

__all__ = ["AveragedModel", "JointOptimizer", "RiemannianSGD", "clip_grad_norm_", "make_optimizer"]
