"""timm models with a grassy head, and one model that timm lacks."""

import dataclasses
import inspect
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from grassy.spelling import nearest
from grassy.surgery import replace_head
from grassy.torchvision_import import import_torchvision

#: Arguments of timm's factory functions that a user may pass. The others load weights, read files or wrap the model.
HARMLESS = {"pretrained", "scriptable", "exportable"}


def create_model(
    name: str,
    num_classes: int,
    head: dict[str, Any],
    options: dict[str, Any],
    head_on_meta: bool = False,
) -> nn.Module:
    """Create a timm model with a head.

    Args:
        name: Name of a timm model, or "resnet18_cifar".
        num_classes: Number of classes C.
        head: Description of the head: its name under "name", and its options.
        options: Options of the model.
        head_on_meta: Create the head on the meta device, for `grassy.distributed.shard_head` to initialise. timm's own
            classifier then has one class, so that no memory for all classes is ever allocated.

    Returns:
        The model.

    Raises:
        ValueError: If timm does not have the model or one of its options, or the head is invalid.
    """
    timm = import_timm()
    check_name(name)
    check_options(name, options)
    try:
        model = timm.create_model(name, num_classes=1 if head_on_meta else num_classes, **options)
    except Exception as error:  # constructors raise all kinds of errors for incompatible values
        if (key := _unexpected(error)) in options:
            raise _no_option(name, str(key), options) from None
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"model {name}: {reason}; check model_kwargs {options}") from error
    head_options = {key: value for key, value in head.items() if key != "name"}
    if head_on_meta:
        head_options |= {"num_classes": num_classes, "device": "meta"}
    replace_head(model, head.get("name", "linear"), **head_options)
    return model


def without_pretrained(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a model, for an architecture whose weights come from elsewhere."""
    return {name: value for name, value in options.items() if name != "pretrained"}


def check_name(name: str) -> None:
    """Raise ValueError for a model that timm does not have."""
    timm = import_timm()
    if not timm.is_model(name):
        raise ValueError(f"timm has no model {name!r}{nearest(name, timm.list_models())}")


def check_options(name: str, options: dict[str, Any]) -> None:
    """Raise ValueError for an option that is not part of a model's architecture, such as `checkpoint_path`.

    Most constructors reject unknown options. Some, such as Swin's, ignore them: for these the check is here.
    """
    plumbing = _plumbing()
    if wrong := next((key for key in options if key in plumbing), None):
        raise _no_option(name, wrong, options)
    known = _architecture_options(name) | HARMLESS
    wrong = next((key for key in options if key not in known), None)
    if wrong is not None and _ignores_unknown_options(name):
        raise _no_option(name, wrong, options)


def _architecture_options(name: str) -> set[str]:
    """Return the arguments of all modules and the fields of all configs in the file that defines a model."""
    timm = import_timm()
    name = timm.models.get_deprecated_models().get(name.split(".")[0]) or name
    entry = timm.models.model_entrypoint("resnet18" if name == "resnet18_cifar" else name)
    kinds = [each for each in vars(sys.modules[entry.__module__]).values() if inspect.isclass(each)]
    kinds = [each for each in kinds if issubclass(each, nn.Module) or dataclasses.is_dataclass(each)]
    found = {option for kind in kinds for option in inspect.signature(kind.__init__).parameters}
    return found - {"self", "args", "kwargs"}


def _plumbing() -> set[str]:
    """Return the arguments of timm's factory functions, except the harmless ones."""
    timm = import_timm()
    functions = (timm.create_model, timm.models.build_model_with_cfg)
    named = {key for function in functions for key in inspect.signature(function).parameters}
    taken_from_kwargs = {"num_classes", "features_only", "feature_cls", "pruned"}
    return (named | taken_from_kwargs) - HARMLESS


def _ignores_unknown_options(name: str) -> bool:
    """Whether timm builds the model although it gets an option that no model has."""
    try:
        with torch.device("meta"):
            import_timm().create_model(name, an_option_that_no_model_has=1)
    except Exception:  # usually a TypeError; other errors come up again when the model is built
        return False
    return True


def _unexpected(error: Exception) -> str | None:
    """Return the name of the unexpected argument that caused the error, or None for other errors."""
    found = re.search(r"unexpected keyword argument '(\w+)'", str(error)) if isinstance(error, TypeError) else None
    return found and found[1]


def _no_option(name: str, key: str, options: dict[str, Any]) -> ValueError:
    hint = nearest(key, _architecture_options(name) - _plumbing() - {key})
    return ValueError(f"model {name} has no option {key!r}{hint}; check model_kwargs {options}")


def import_timm() -> Any:
    """Import timm, also with a CPU build of torch, and register grassy's own models."""
    import_torchvision()
    import timm

    if not timm.is_model("resnet18_cifar"):
        timm.models.register_model(resnet18_cifar)
    return timm


def resnet18_cifar(pretrained: bool = False, **options: Any) -> nn.Module:
    """Create timm's ResNet-18 for images of about 32 pixels: a first 3x3 convolution with stride 1 and no pooling.

    The last norm of each block starts at 1, not at 0 as in timm. With weight decay on norms, a block that starts at 0
    may stay there.
    """
    import timm

    if pretrained:
        raise ValueError("resnet18_cifar has no pretrained weights")
    model = timm.create_model("resnet18", **{"zero_init_last": False, **options, "pretrained_cfg": None})
    first = model.conv1
    model.conv1 = nn.Conv2d(first.in_channels, first.out_channels, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    model.pretrained_cfg = model.default_cfg = {**model.pretrained_cfg, "architecture": "resnet18_cifar"}
    return model
