"""grassy: classifiers whose classes are subspaces."""

from grassy._version import __version__
from grassy.criteria import create_criterion
from grassy.heads import GrassmannHead, Head, LinearHead, create_head
from grassy.inference.load import load
from grassy.inference.save import save
from grassy.loss import classification_loss
from grassy.optim import AveragedModel, RiemannianSGD, clip_grad_norm_, make_optimizer
from grassy.surgery import replace_head

__all__ = [
    "AveragedModel",
    "GrassmannHead",
    "Head",
    "LinearHead",
    "RiemannianSGD",
    "__version__",
    "classification_loss",
    "clip_grad_norm_",
    "create_criterion",
    "create_head",
    "load",
    "make_optimizer",
    "replace_head",
    "save",
]
