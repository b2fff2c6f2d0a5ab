"""Make `import torchvision`, and so `import timm`, work beside a CPU build of torch.

PyPI's torchvision is built for CUDA. Beside a CPU build of torch its compiled operators do not load, and the import
stops at "operator torchvision::nms does not exist", though transforms, models and data sets need none of them.
Declaring the two operators that the import itself refers to is enough.
"""

import importlib
import sys

import torch

_declared: list[torch.library.Library] = []  # a library's declarations live as long as it does


def import_torchvision() -> None:
    """Import torchvision; act only on that very error."""
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
