"""Make `import torchvision`, and so `import timm`, work with a CPU build of torch.

PyPI's torchvision is built for CUDA. With a CPU build of torch its compiled operators do not load, and the import fails
with "operator torchvision::nms does not exist". Transforms, models and datasets do not need these operators. Declaring
the two that the import refers to is enough.
"""

import importlib
import sys

import torch

_declared: list[torch.library.Library] = []  # keeps the declarations alive


def import_torchvision() -> None:
    """Import torchvision, and repair only this one error."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "operator torchvision::nms does not exist" not in str(error):
            raise
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]  # what the failed import left behind
        importlib.import_module("torchvision")
