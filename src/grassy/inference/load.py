"""`grassy.load`: a trained model, rebuilt from its file alone."""

import os
from pathlib import Path

import torch
from torch import nn

from grassy.models import create_model
from grassy.runs.weights import read_description, read_weights, weights_file

#: Options of timm that would fetch weights from elsewhere.
OTHER_SOURCES = ("pretrained", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")


def load(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> nn.Module:
    """The trained model in a file of weights, or in the folder of a run (its best), ready for inference.

    It is rebuilt from the file alone, without unpickling. `timm.data.resolve_model_data_config(model)` knows how its
    images are prepared; `model.pretrained_cfg["label_names"]` are the names of the classes, if the data had any.
    """
    file = weights_file(Path(path))
    description = read_description(file)
    options = {key: value for key, value in description.model_kwargs.items() if key not in OTHER_SOURCES}
    model = create_model(description.model, description.num_classes, description.head, options)
    try:
        model.load_state_dict(read_weights(file))
    except RuntimeError as error:
        raise ValueError(f"{file} does not hold the weights that it describes: {error}") from None
    model.pretrained_cfg = model.default_cfg = {  # type: ignore[assignment]
        "architecture": description.model,
        "model_kwargs": options,
        "num_classes": description.num_classes,
        "input_size": (3, description.img_size, description.img_size),
        "crop_pct": description.crop_pct,
        "interpolation": description.interpolation,
        "mean": description.mean,
        "std": description.std,
        "label_names": description.class_names,
    }
    return model.eval().to(device)
