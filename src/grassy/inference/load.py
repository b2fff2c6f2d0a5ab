"""`grassy.load`: rebuild a trained model from its file or folder alone."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from grassy.distributed import mesh, shard_head
from grassy.distributed.saves import open_state
from grassy.distributed.state import check_options_of_heads, load_tensors
from grassy.extras import needs
from grassy.heads import heads_of
from grassy.heads.per_class import PerClassHead
from grassy.heads.saved_options import options_in
from grassy.inference.hub import check_described_head, load_adapters, load_transformers
from grassy.models import create_model, without_pretrained
from grassy.runs.hub import base_of_adapters, is_of_transformers, local_folder, read_config
from grassy.runs.weights import PREPARATION, Description, evaluated_kind, read_description, read_weights, weights_file

#: The dtypes that weights may have.
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)


@needs("grassy.load", extra="train")
def load(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> nn.Module:
    """Load a trained model.

    The model is rebuilt from the file alone, without unpickling. `timm.data.resolve_model_data_config(model)` returns
    its preprocessing. `model.pretrained_cfg["label_names"]` holds the class names, if the training data had any.

    Args:
        path: A file of weights, the folder of a run (its best weights are loaded), or a folder for the Hugging Face
            Hub. "hf-hub:user/name" downloads a timm or transformers model with a grassy head from the Hub.
        device: Where to put the model.

    Returns:
        The model, in eval mode.

    Raises:
        ValueError: If there is no checkpoint at `path`, or if it does not hold the weights that it describes.
    """
    path = local_folder(Path(path))
    config = read_config(path) if path.is_dir() else None
    if config is None and path.is_dir() and (base := base_of_adapters(path)) is not None:
        return load_adapters(path, _base_model(path, base)).to(device)
    if config is not None and is_of_transformers(config):
        return load_transformers(path).to(device)
    file = weights_file(path)
    description = read_description(file)
    check_described_head(description.head, file)
    weights = read_weights(file)
    _check_weights(weights, description, file)
    # The file holds the weights, so the pretrained weights that training started from are not needed.
    options = without_pretrained(description.model_kwargs)
    head = {**_options_with_weights(weights, file), **description.head}
    model = create_model(description.model, description.num_classes, head, options)
    try:
        model.load_state_dict(weights)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{file} does not hold the weights that it describes: {error}") from None
    own = getattr(model, "pretrained_cfg", None) or {}
    model.pretrained_cfg = model.default_cfg = {  # type: ignore[assignment]
        **{name: own[name] for name in ("first_conv", "classifier") if name in own},  # timm's names of these layers
        "architecture": description.model,
        "model_kwargs": options,
        "num_classes": description.num_classes,
        "input_size": (options.get("in_chans", 3), description.img_size, description.img_size),
        **{name: getattr(description, name) for name in PREPARATION},
        "label_names": description.class_names,
    }
    return model.eval().to(device)


def _base_model(adapters: Path, base: str) -> nn.Module:
    folder = local_folder(Path(base))
    if not folder.is_dir() or read_config(folder) is None:
        raise ValueError(
            f"{adapters} holds adapters for {base!r}, which describes no head: replace that model's head as before "
            "training, then pass the model to PeftModel.from_pretrained"
        )
    return load(folder)


def load_sharded(save: Path, device: torch.device) -> nn.Module:
    """Load a distributed save so that each process holds a shard of the classes.

    A head without per-class weights stays whole in every process.
    """
    description = read_description(save)
    check_described_head(description.head, save)
    saved = open_state(save)
    kind = evaluated_kind(saved)
    shapes = (shape for name, (_, shape) in saved.tensors.items() if name.startswith(f"{kind}."))
    _check_size(sum(math.prod(shape) for shape in shapes), description, save)
    options = without_pretrained(description.model_kwargs)
    model = create_model(description.model, description.num_classes, description.head, options, head_on_meta=True)
    if not all(isinstance(head, PerClassHead) for head in heads_of(model)):
        return load(save, device)
    shard_head(model, mesh(device.type))
    model = model.to(device)
    tensors = {f"{kind}.{name}": tensor for name, tensor in model.state_dict().items()}
    check_options_of_heads(saved, tensors)
    load_tensors(saved, tensors)
    return model.eval()


def _options_with_weights(weights: Mapping[str, Tensor], file: Path) -> dict[str, Any]:
    """The head's options that are saved with its weights. They fill in for a description that lacks them."""
    try:
        found = next(iter(options_in(weights).values()), {})
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    options = {name: value for name, value in found.items() if name != "head"}
    return {**options, "standardize": bool(options.get("standardize"))} if options else {}


def _check_weights(weights: Mapping[str, Tensor], description: Description, file: Path) -> None:
    """Raise a ValueError for an unknown dtype, or if the file is too small for the head that it describes."""
    if wrong := next((name for name, tensor in weights.items() if tensor.dtype not in DTYPES), None):
        raise ValueError(f"{file} holds {wrong} in {weights[wrong].dtype}, which is no dtype of weights")
    _check_size(sum(tensor.numel() for tensor in weights.values()), description, file)


def _check_size(elements: int, description: Description, file: Path) -> None:
    """Raise a ValueError before a hostile description allocates a huge head."""
    rows = description.head.get("k", 1)
    rows = max(rows, default=1) if isinstance(rows, list) else rows
    needed = description.num_classes * (rows if isinstance(rows, int) else 1)
    if needed > elements:
        raise ValueError(f"{file} does not hold the weights that it describes: a head of {needed} rows needs more")
