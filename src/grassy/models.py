"""timm models with a head of ours, and one model that timm lacks."""

from typing import Any

from torch import nn

from grassy.spelling import nearest
from grassy.surgery import replace_head
from grassy.torchvision_import import import_torchvision


def create_model(name: str, num_classes: int, head: dict[str, Any], options: dict[str, Any]) -> nn.Module:
    """A timm model with the head that `head` describes: {"name": ..., and its options}."""
    timm = import_timm()
    if not timm.is_model(name):
        raise ValueError(f"timm has no model {name!r}{nearest(name, timm.list_models())}")
    try:
        model = timm.create_model(name, num_classes=num_classes, **options)
    except TypeError as error:
        raise ValueError(f"model {name}: {error}; check model_kwargs {options}") from None
    head_options = {key: value for key, value in head.items() if key != "name"}
    replace_head(model, head.get("name", "linear"), **head_options)
    return model


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
