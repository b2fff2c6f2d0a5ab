"""timm models with a head of ours, and one model that timm lacks."""

import inspect
import sys
from typing import Any

from torch import nn

from grassy.spelling import nearest
from grassy.surgery import replace_head
from grassy.torchvision_import import import_torchvision

#: Not handed on, whatever a constructor takes.
UNSAFE = {"self", "args", "kwargs", "num_classes", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay"}
UNSAFE |= {"checkpoint_path", "cache_dir", "features_only"}


def create_model(name: str, num_classes: int, head: dict[str, Any], options: dict[str, Any]) -> nn.Module:
    """A timm model with the head that `head` describes: {"name": ..., and its options}."""
    timm = import_timm()
    if not timm.is_model(name):
        raise ValueError(f"timm has no model {name!r}{nearest(name, timm.list_models())}")
    known = architecture_options(name) | {"pretrained"}
    if wrong := next((key for key in options if key not in known), None):
        raise ValueError(f"model {name} has no option {wrong!r}{nearest(wrong, known)}; check model_kwargs {options}")
    try:
        model = timm.create_model(name, num_classes=num_classes, **options)
    except Exception as error:  # at values that do not fit together a constructor raises all sorts of things
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"model {name}: {reason}; check model_kwargs {options}") from error
    head_options = {key: value for key, value in head.items() if key != "name"}
    replace_head(model, head.get("name", "linear"), **head_options)
    return model


def architecture_options(name: str) -> set[str]:
    """Options that say what a model of timm is like: the arguments of its constructor, and of those of its blocks.

    timm's `create_model` knows others, which read files or fetch weights; they are not among them.
    """
    entry = import_timm().models.model_entrypoint("resnet18" if name == "resnet18_cifar" else name)
    module = sys.modules[entry.__module__]
    kinds = [each for each in vars(module).values() if inspect.isclass(each) and issubclass(each, nn.Module)]
    return {option for kind in kinds for option in inspect.signature(kind.__init__).parameters} - UNSAFE


def import_timm() -> Any:
    """Import timm, beside a CPU build of torch too, with grassy's own models registered."""
    import_torchvision()
    import timm

    if not timm.is_model("resnet18_cifar"):
        timm.models.register_model(resnet18_cifar)
    return timm


def resnet18_cifar(pretrained: bool = False, **options: Any) -> nn.Module:
    """A ResNet-18 of timm for images of about 32 pixels: first a 3x3 convolution of stride 1, no pooling after it.

    Its blocks start with their last norm at 1, not at 0 as timm has it for ImageNet: under weight decay on norms a
    block that starts at 0 can die there.
    """
    import timm

    if pretrained:
        raise ValueError("there are no pretrained weights of resnet18_cifar")
    model = timm.create_model("resnet18", **{"zero_init_last": False, **options, "pretrained_cfg": None})
    first = model.conv1
    model.conv1 = nn.Conv2d(first.in_channels, first.out_channels, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    model.pretrained_cfg = model.default_cfg = {**model.pretrained_cfg, "architecture": "resnet18_cifar"}
    return model
