"""grassy: classifiers that represent each class by a subspace.

Names and submodules are imported at first use. So `import grassy` is fast, `grassy --help` does not wait for torch, and
`grassy.analysis` needs no separate import.
"""

import importlib
from typing import TYPE_CHECKING, Any

from grassy._version import __version__

if TYPE_CHECKING:
    from grassy import analysis as analysis
    from grassy import criteria as criteria
    from grassy import data as data
    from grassy import distributed as distributed
    from grassy import geometry as geometry
    from grassy import heads as heads
    from grassy import inference as inference
    from grassy import kernels as kernels
    from grassy import loss as loss
    from grassy import mixed_labels as mixed_labels
    from grassy import models as models
    from grassy import optim as optim
    from grassy import paper as paper
    from grassy import recipes as recipes
    from grassy import report as report
    from grassy import sklearn as sklearn
    from grassy import surgery as surgery
    from grassy import torchvision_import as torchvision_import
    from grassy import transfer as transfer
    from grassy.criteria import create_criterion
    from grassy.heads import GrassmannHead, Head, LinearHead, create_head
    from grassy.inference.load import load
    from grassy.inference.save import save
    from grassy.loss import classification_loss
    from grassy.mixed_labels import MixedLabels
    from grassy.optim import AveragedModel, RiemannianSGD, clip_grad_norm_, make_optimizer
    from grassy.surgery import replace_head

__all__ = [
    "AveragedModel",
    "GrassmannHead",
    "Head",
    "LinearHead",
    "MixedLabels",
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

#: The submodule of each public name.
_HOMES = {
    "AveragedModel": "optim",
    "GrassmannHead": "heads",
    "Head": "heads",
    "LinearHead": "heads",
    "MixedLabels": "mixed_labels",
    "RiemannianSGD": "optim",
    "classification_loss": "loss",
    "clip_grad_norm_": "optim",
    "create_criterion": "criteria",
    "create_head": "heads",
    "load": "inference.load",
    "make_optimizer": "optim",
    "replace_head": "surgery",
    "save": "inference.save",
}
#: The submodules of the reference. Others must be imported by name.
_SUBMODULES = (
    "analysis",
    "criteria",
    "data",
    "distributed",
    "geometry",
    "heads",
    "inference",
    "kernels",
    "loss",
    "mixed_labels",
    "models",
    "optim",
    "paper",
    "recipes",
    "report",
    "sklearn",
    "surgery",
    "torchvision_import",
    "transfer",
)

if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            value = getattr(importlib.import_module(f"grassy.{_HOMES[name]}"), name)
            globals()[name] = value
            return value
        if name in _SUBMODULES:
            return importlib.import_module(f"grassy.{name}")
        raise AttributeError(f"module 'grassy' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted([*__all__, *_SUBMODULES])
