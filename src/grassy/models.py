"""timm models with a head of ours, and one model that timm lacks."""

import dataclasses
import inspect
import re
import sys
from typing import Any

import torch
from torch import nn

from grassy.spelling import nearest
from grassy.surgery import find_classifiers, replace_head
from grassy.torchvision_import import import_torchvision

#: Arguments of timm's own functions that a user may give; the others fetch weights, read files or wrap the model.
HARMLESS = {"pretrained", "scriptable", "exportable"}


def create_model(
    name: str,
    num_classes: int,
    head: dict[str, Any],
    options: dict[str, Any],
    k_share: float = 1.0,
    head_on_meta: bool = False,
) -> nn.Module:
    """A timm model with the head that `head` describes: {"name": ..., and its options}.

    k_share: the most that k may be of the width of the features, in which a narrow model has a smaller k.
    head_on_meta: the head has no memory yet, for `grassy.distributed.shard_head` to create it; nor has timm's
        classifier, whose place it takes, ever had any for all the classes.
    """
    timm = import_timm()
    check_name(name)
    check_options(name, options)
    try:
        model = timm.create_model(name, num_classes=1 if head_on_meta else num_classes, **options)
    except Exception as error:  # for values that do not fit together constructors raise all sorts of things
        if (key := _unexpected(error)) in options:
            raise _no_option(name, str(key), options) from None
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"model {name}: {reason}; check model_kwargs {options}") from error
    head_options = {key: value for key, value in head.items() if key != "name"}
    if k_share < 1 and isinstance(head_options.get("k"), int):
        most = max(1, int(k_share * min(_widths(model), default=head_options["k"] / k_share)))
        head_options["k"] = min(head_options["k"], most)
    if head_on_meta:
        head_options |= {"num_classes": num_classes, "device": "meta"}
    replace_head(model, head.get("name", "linear"), **head_options)
    return model


def check_name(name: str) -> None:
    """Raise a ValueError for a model that timm does not have."""
    timm = import_timm()
    if not timm.is_model(name):
        raise ValueError(f"timm has no model {name!r}{nearest(name, timm.list_models())}")


def _widths(model: nn.Module) -> list[int]:
    """Of the features in front of each classifier of a model."""
    found = find_classifiers(model).values()
    return [layer.weight.shape[1] for layer in found]  # type: ignore[union-attr, index, misc]


def check_options(name: str, options: dict[str, Any]) -> None:
    """Raise a ValueError for an option that does not say what a model of timm is like, such as `checkpoint_path`.

    The constructor refuses what it does not know. Some ignore it instead, Swin for one: there, it is refused here.
    """
    plumbing = _plumbing()
    if wrong := next((key for key in options if key in plumbing), None):
        raise _no_option(name, wrong, options)
    known = architecture_options(name) | HARMLESS
    wrong = next((key for key in options if key not in known), None)
    if wrong is not None and _ignores_unknown_options(name):
        raise _no_option(name, wrong, options)


def architecture_options(name: str) -> set[str]:
    """Arguments of a model's constructor, of those of its blocks, and fields of its configuration, as far as found."""
    timm = import_timm()
    name = timm.models.get_deprecated_models().get(name.split(".")[0]) or name
    entry = timm.models.model_entrypoint("resnet18" if name == "resnet18_cifar" else name)
    kinds = [each for each in vars(sys.modules[entry.__module__]).values() if inspect.isclass(each)]
    kinds = [each for each in kinds if issubclass(each, nn.Module) or dataclasses.is_dataclass(each)]
    found = {option for kind in kinds for option in inspect.signature(kind.__init__).parameters}
    return found - {"self", "args", "kwargs"}


def _plumbing() -> set[str]:
    """Arguments of the functions of timm that build a model, except the harmless ones."""
    timm = import_timm()
    functions = (timm.create_model, timm.models.build_model_with_cfg)
    named = {key for function in functions for key in inspect.signature(function).parameters}
    taken_from_kwargs = {"num_classes", "features_only", "feature_cls", "pruned"}
    return (named | taken_from_kwargs) - HARMLESS


def _ignores_unknown_options(name: str) -> bool:
    """Whether timm builds the model in spite of an option that no model has."""
    try:
        with torch.device("meta"):
            import_timm().create_model(name, an_option_that_no_model_has=1)
    except Exception:  # mostly a TypeError that names the option; if not, building the model itself tells what is wrong
        return False
    return True


def _unexpected(error: Exception) -> str | None:
    """The argument that a function does not have, if this is the error."""
    found = re.search(r"unexpected keyword argument '(\w+)'", str(error)) if isinstance(error, TypeError) else None
    return found and found[1]


def _no_option(name: str, key: str, options: dict[str, Any]) -> ValueError:
    hint = nearest(key, architecture_options(name) - _plumbing() - {key})
    return ValueError(f"model {name} has no option {key!r}{hint}; check model_kwargs {options}")


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
