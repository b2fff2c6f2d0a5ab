"""`grassy.save`: write a model to one file or folder that `grassy.load` and all commands accept."""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import swa_utils

from grassy._version import __version__
from grassy.extras import needs
from grassy.heads import Head, describe, heads_of
from grassy.heads.base import evaluating
from grassy.inference.hub import (
    check_class_names,
    check_folder,
    is_transformers_model,
    take_over_dtypes,
    write_timm_folder,
    write_transformers_folder,
)
from grassy.inference.load import load
from grassy.models import create_model, import_timm
from grassy.recipes.recipe import DEFAULTS
from grassy.runs.hub import REMOTE
from grassy.runs.weights import Description, description_text, read_description, save_weights, weights_file
from grassy.shards import is_dtensor
from grassy.subspaces import has_adapters

#: Suffixes of other file formats. A path with any other suffix but .safetensors is a folder.
OTHER_FILES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".onnx", ".pt2", ".tar", ".zip", ".json", ".h5")

#: Replaces the path of a run's initial weights in a published folder.
NOT_PUBLISHED = "not published"
#: An absolute path in a setting, also after the name of a timm reader, as in "hfds//data".
PATH = re.compile(r"(^|[/:=\s])(/|~|[A-Za-z]:[\\/])")


@needs("grassy.save", extra="train")
def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    class_names: Sequence[str] | None = None,
    img_size: int | None = None,
    *,
    architecture: str | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    crop_pct: float | None = None,
    crop_mode: Literal["center", "squash", "border"] | None = None,
    interpolation: str | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    epoch: int | None = None,
    metrics: Mapping[str, float] | None = None,
) -> None:
    """Write a model with a grassy head to a .safetensors file, or to a folder for the Hugging Face Hub.

    A file holds a timm model and everything that `grassy.load` needs. A folder holds a timm or transformers model: the
    library's config extended by the head, the weights and a model card. A transformers model needs no argument but
    `class_names`.

    The head, classes, architecture and preprocessing are read from the model. Pass what timm cannot know:
    `model_kwargs` if the model was built with options, `architecture` if timm did not build it, and your preprocessing
    if it differs from timm's. Before writing, `save` rebuilds the model from its description and compares weights and
    logits.

    Args:
        model: The model. DDP, torch.compile and averaging wrappers are removed.
        path: A file that ends in .safetensors, or a folder.
        class_names: One name per class, in the order of the labels.
        img_size: Side of the input image in pixels (default: timm's).
        architecture: Name of the timm model (default: read from the model).
        model_kwargs: Options that the model was built with.
        crop_pct: Side of the crop relative to the short side of the resized image (default: timm's).
        crop_mode: "center" crops the middle, "squash" distorts the image to a square, "border" adds one (default:
            timm's).
        interpolation: Interpolation for resizing, such as "bicubic" (default: timm's).
        mean: Mean for normalisation, one value per channel (default: timm's).
        std: Standard deviation for normalisation, one value per channel (default: timm's).
        epoch: Stored with the weights, for your information.
        metrics: Stored with the weights, for your information.

    Raises:
        ValueError: If the rebuilt model differs, is sharded, if a value cannot be stored, or `path` holds other files.
        TypeError: If `class_names` is no list.
    """
    path = Path(path)
    if path.suffix in OTHER_FILES:
        raise ValueError(f"path must be a folder or end in .safetensors, got {path}")
    model = _unwrapped(model)
    if any(map(is_dtensor, model.parameters())):
        raise ValueError(
            f"{type(model).__name__} is sharded over processes: save it with grassy.distributed.save_state, and load "
            "that into a model that is not sharded, in one process"
        )
    if has_adapters(model):
        raise ValueError(
            f"{type(model).__name__} has PEFT adapters: save model.merge_and_unload(), or the adapters alone with "
            "their own save_pretrained"
        )
    in_a_folder = path.suffix != ".safetensors"
    if is_transformers_model(model):
        for_timm = (img_size, architecture, model_kwargs, crop_pct, crop_mode, interpolation, mean, std)
        if not in_a_folder or any(each is not None for each in for_timm):
            raise ValueError(
                f"{type(model).__name__} is a transformers model: give a folder, and only class_names, epoch and "
                "metrics; save its image processor or tokenizer with their own save_pretrained"
            )
        write_transformers_folder(model, path, class_names, epoch, metrics)
        return
    head = _head_of(model)
    config = getattr(model, "pretrained_cfg", None) or {}
    architecture = _checked_architecture(model, architecture or config.get("architecture"))
    names = config.get("label_names") if class_names is None else class_names
    if names is not None:
        check_class_names(names, head.num_classes)
    prepared = _preparation(model)
    views = {"img_size": img_size, "crop_pct": crop_pct, "crop_mode": crop_mode, "interpolation": interpolation}
    given = {**views, "mean": mean, "std": std}
    description = Description(
        model=architecture,
        num_classes=head.num_classes,
        head=describe(head),
        model_kwargs=dict(config.get("model_kwargs", {}) if model_kwargs is None else model_kwargs),
        class_names=None if names is None else [str(name) for name in names],
        epoch=epoch,
        metrics=dict(metrics or {}),
        version=__version__,
        **{**prepared, **{name: value for name, value in given.items() if value is not None}},
    )
    description_text(description)  # raises for a bad value before a model is built
    _check_that_it_can_be_built_again(model, description)
    if in_a_folder:
        write_timm_folder(model, description, path)
    else:
        save_weights(model, description, path)


def publish(checkpoint: str | os.PathLike[str], folder: str | os.PathLike[str]) -> Path:
    """Write the model of a run or file to a folder for the Hub. The card lists the run's settings and results."""
    check_folder(Path(folder))
    file = weights_file(Path(checkpoint))
    about = read_description(file)
    write_timm_folder(load(file), dataclasses.replace(about, recipe=_without_places(about.recipe)), Path(folder))
    return Path(folder)


def _without_places(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run without paths of the machine that it ran on.

    Initial weights stay recorded as `NOT_PUBLISHED`: otherwise the run could pass for a row of the paper.
    """
    found = dict(recipe)
    for name in ("dataset", "train_split", "val_split"):
        if PATH.search(str(recipe.get(name, ""))):
            found[name] = DEFAULTS[name]
    first = recipe.get("initial_checkpoint")
    if first and not str(first).startswith(REMOTE):
        found["initial_checkpoint"] = NOT_PUBLISHED
    return found


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside a torch.compile, DDP or averaging wrapper."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel | swa_utils.AveragedModel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def _head_of(model: nn.Module) -> Head:
    """The head of a model, or the first of several equal ones."""
    heads = heads_of(model)
    if not heads:
        raise ValueError(f"{type(model).__name__} has no head of grassy's: call grassy.replace_head(model, ...) first")
    if any(describe(head) != describe(heads[0]) or head.num_classes != heads[0].num_classes for head in heads):
        raise ValueError(f"{type(model).__name__} has heads with different options: a file describes one head only")
    return heads[0]


def _checked_architecture(model: nn.Module, name: str | None) -> str:
    if name is None or not import_timm().is_model(name):
        what = (
            f"the architecture of {type(model).__name__} is unknown" if name is None else f"timm has no model {name!r}"
        )
        raise ValueError(f"{what}: pass the name of a timm model, such as architecture='resnet18'")
    return name


def _preparation(model: nn.Module) -> dict[str, Any]:
    import_timm()
    from timm.data import resolve_model_data_config

    known = resolve_model_data_config(model)
    return {
        "img_size": known["input_size"][-1],
        "crop_pct": known["crop_pct"],
        "crop_mode": known["crop_mode"],
        "interpolation": known["interpolation"],
        "mean": tuple(known["mean"]),
        "std": tuple(known["std"]),
    }


def _check_that_it_can_be_built_again(model: nn.Module, description: Description) -> None:
    """Raise a ValueError if the description yields a model with other weights, or other logits on a noise image."""
    hint = "pass model_kwargs={...}, the options it was built with, or another architecture="
    with torch.random.fork_rng(devices=[]):
        again = create_model(description.model, description.num_classes, description.head, description.model_kwargs)
        image = torch.randn(1, description.model_kwargs.get("in_chans", 3), description.img_size, description.img_size)
    weight = next(model.parameters())
    again, image = again.to(weight.device).eval(), image.to(weight.device, weight.dtype)
    take_over_dtypes(again, dict((*model.named_parameters(), *model.named_buffers())))
    try:
        again.load_state_dict(model.state_dict())
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise ValueError(f"the model has other weights than timm's {description.model} ({reason}): {hint}") from None
    try:
        with torch.no_grad(), evaluating(model):
            expected, found = model(image).float(), again(image).float()
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"the model does not accept images of {description.img_size} pixels ({reason}): pass img_size=..."
        ) from None
    if found.shape != expected.shape or not torch.allclose(found, expected, rtol=0, atol=1e-3 * _size(expected)):
        raise ValueError(f"the model has other logits than timm's {description.model} with the same weights: {hint}")


def _size(logits: torch.Tensor) -> float:
    return max(1e-6, float(logits.nan_to_num().abs().max()))
