"""Models to extract features from: a run, or a timm or torchvision model by name."""

import hashlib
import json
import os
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from grassy.inference.load import load
from grassy.models import import_timm
from grassy.runs.paper_row import paper_row
from grassy.runs.weights import PREPARATION, check_rgb, read_description, weights_digest, weights_file
from grassy.spelling import nearest


@dataclass(frozen=True)
class FeatureModel:
    """A model to extract features from, with its preprocessing."""

    name: str
    model: nn.Module
    img_size: int
    crop_pct: float
    interpolation: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fingerprint: str
    recipe: dict[str, Any] = field(default_factory=dict)
    crop_mode: str = "center"

    def preparation(self) -> str:
        numbers = (self.img_size, self.crop_pct, self.crop_mode, self.interpolation, *self.mean, *self.std)
        return " ".join(map(str, numbers))


def open_model(source: str, device: torch.device | str = "cpu", pretrained: bool = True) -> FeatureModel:
    """Open a run's folder or weights, or "timm/NAME" or "torchvision/NAME" with the library's pretrained weights."""
    library, slash, name = source.partition("/")
    if slash and library == "timm":
        return _from_timm(name, device, pretrained)
    if slash and library == "torchvision":
        return _from_torchvision(name, device, pretrained)
    path = weights_file(Path(source))
    about = read_description(path)
    check_rgb(about, path)
    return FeatureModel(
        name=os.path.normpath(source),
        model=load(path, device),
        img_size=about.img_size,
        **{name: getattr(about, name) for name in PREPARATION},
        fingerprint=weights_digest(path),
        recipe={**about.recipe, "paper": paper_row(about)} if about.recipe else {},
    )


def _from_timm(name: str, device: torch.device | str, pretrained: bool) -> FeatureModel:
    timm = import_timm()
    if not timm.is_model(name):
        raise ValueError(f"timm has no model {name!r}{nearest(name, timm.list_models())}")
    try:
        model = timm.create_model(name, pretrained=pretrained).eval().to(device)
    except RuntimeError as error:  # no pretrained weights, or none with this tag
        raise ValueError(f"timm/{name}: {' '.join(str(error).split())}") from None
    config = timm.data.resolve_model_data_config(model)
    height, width = config["input_size"][-2:]
    if height != width:
        raise ValueError(f"timm/{name} takes images of {height}x{width}: only square images are supported")
    return FeatureModel(
        f"timm/{name}",
        model,
        width,
        config["crop_pct"],
        config["interpolation"],
        tuple(config["mean"]),
        tuple(config["std"]),
        _hash_of_tensors(model, f"timm/{name}"),
        crop_mode=config.get("crop_mode") or "center",
    )


def _from_torchvision(name: str, device: torch.device | str, pretrained: bool) -> FeatureModel:
    import_timm()
    from torchvision import models

    known = models.list_models(module=models)  # image classifiers only
    if name not in known:
        raise ValueError(f"torchvision has no image classifier {name!r}{nearest(name, known)}")
    weights = getattr(models.get_model_weights(name), "DEFAULT", None)
    if weights is None:
        raise ValueError(f"torchvision has no weights for {name!r}")
    try:
        model = models.get_model(name, weights=weights if pretrained else None)
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        file = Path(torch.hub.get_dir()) / "checkpoints" / Path(weights.url).name
        raise ValueError(
            f"torchvision/{name}: its weights cannot be read ({' '.join(str(error).split())[:80]}). If the download of "
            f"{file} was interrupted, delete the file"
        ) from None
    model = model.eval().to(device)
    preset = weights.transforms()
    size, resized = int(preset.crop_size[0]), int(preset.resize_size[0])
    return FeatureModel(
        f"torchvision/{name}",
        model,
        size,
        size / resized,
        str(preset.interpolation.value),
        tuple(preset.mean),
        tuple(preset.std),
        _hash_of_tensors(model, f"torchvision/{name}"),
    )


def _hash_of_tensors(model: nn.Module, name: str) -> str:
    """A hash of the model's name, tensor shapes and weights: equal weights in another model give other features."""
    digest = hashlib.sha256(json.dumps([name, type(model).__qualname__]).encode())
    for path, tensor in model.state_dict().items():
        digest.update(json.dumps([path, str(tensor.dtype), list(tensor.shape)]).encode() + b"\n")
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
