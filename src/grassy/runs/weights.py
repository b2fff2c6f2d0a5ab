"""Files of weights with a description from which the model is rebuilt. Loading never runs code from a file."""

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from grassy.atomic import file_digest, write_atomically
from grassy.distributed.saves import MANIFEST, Saved, newest, open_state, read_plain
from grassy.distributed.state import read_saved
from grassy.heads import GrassmannHead
from grassy.models import without_pretrained
from grassy.recipes.files import ARGS
from grassy.runs import hub
from grassy.runs.state import SAVES, STATE, read_torch
from grassy.schema import check_description, parse_json

BEST, LAST = "model_best.safetensors", "last.safetensors"
#: The folder that replaces the best weights if they are sharded over processes. The last weights are in `SAVES`.
BEST_SAVES = "model_best"

#: The fields of a description, and of a recipe, that say how an image is prepared, beside its size.
PREPARATION = ("crop_pct", "crop_mode", "interpolation", "mean", "std")
#: Fields of a description that have another name in timm's config.
CALLED_IN_CONFIG = {
    **{"model": "architecture", "head": hub.HEAD, "model_kwargs": "model_args"},
    **{"class_names": "label_names", "img_size": "input_size"},
}


@dataclass(frozen=True)
class Description:
    """The description of a model in its file of weights: how to build it and how to preprocess images."""

    model: str
    num_classes: int
    head: dict[str, Any]
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    class_names: list[str] | None = None
    img_size: int = 224
    crop_pct: float = 0.875
    crop_mode: str = "center"
    interpolation: str = "bilinear"
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    recipe: dict[str, Any] = field(default_factory=dict)
    epoch: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    version: str = ""
    #: Images with a higher outlier score are flagged; `outlier_rate` of the validation images are.
    outlier_threshold: float | None = None
    outlier_rate: float | None = None


def save_weights(weights: nn.Module | Mapping[str, Tensor], description: Description, path: Path) -> None:
    """Write the weights of a model, or its state_dict, with its description, atomically.

    A description that could not be loaded raises a ValueError.
    """
    state = weights.state_dict() if isinstance(weights, nn.Module) else weights
    if isinstance(weights, nn.Module):
        description = with_number_for_gamma(description, weights)
    text = description_text(description)
    # Clones: safetensors refuses tensors that share memory, as tied weights do.
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
    data = save(tensors, metadata={"format": "pt", "grassy": text})
    write_atomically(path, lambda file: file.write(data))


def check_rgb(description: Description, file: Path) -> None:
    """Raise a ValueError if the model takes other images than the commands read."""
    channels = description.model_kwargs.get("in_chans", 3)
    if channels != 3:
        raise ValueError(
            f"{file} takes images of {channels} channels, and grassy reads RGB images only: use grassy.load(...) and "
            "prepare the images yourself"
        )


def with_number_for_gamma(description: Description, model: nn.Module) -> Description:
    """Replace gamma="auto" in the description by the model's value, which no later version can change."""
    heads = [module for module in model.modules() if isinstance(module, GrassmannHead)]
    if not heads or description.head.get("gamma") != "auto":
        return description
    return dataclasses.replace(description, head={**description.head, "gamma": heads[0].initial_gamma})


def description_text(description: Description) -> str:
    """The description as JSON; a ValueError names a field that could not be loaded."""
    text = json.dumps(dataclasses.asdict(description), default=_plain)
    check_description(parse_json(text))
    return text


def _plain(value: Any) -> Any:
    """Convert NumPy scalars, arrays, tensors and ranges, which head options may be, to plain Python values."""
    if isinstance(value, range):
        return list(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a description cannot hold {value!r}, a {type(value).__name__}")


def read_description(path: Path) -> Description:
    """The description in a file of weights; a ValueError if it has none."""
    if path.is_dir():
        text = read_plain(path).get("description")
    else:
        with _opened(path) as file:
            text = (file.metadata() or {}).get("grassy")
    config = hub.read_config(path.parent) if path.name == hub.WEIGHTS else None
    if not isinstance(text, str) and config is None:
        raise ValueError(f"{path} does not describe its model: it was not written by grassy train or grassy.save")
    try:
        fields = check_description(parse_json(text) if text is not None else hub.timm_description(config or {}))
    except ValueError as error:
        raise ValueError(f"{path} has a description that cannot be read: {error}") from None
    if text is not None and config is not None and not hub.is_of_transformers(config):
        _check_that_they_agree(fields, config, path)
    return Description(**fields)


def _check_that_they_agree(fields: Mapping[str, Any], config: dict[str, Any], path: Path) -> None:
    """Raise a ValueError if the config beside a file of weights differs from the description in it."""
    file = path.with_name(hub.CONFIG)
    try:
        others = check_description(hub.timm_description(config))
    except ValueError as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    own = dataclasses.asdict(Description(**fields))
    own["model_kwargs"] = without_pretrained(own["model_kwargs"])
    if name := next((name for name in others if others[name] != own[name]), None):
        called = CALLED_IN_CONFIG.get(name, name)
        raise ValueError(
            f"{file} and the description in {path.name} have different values of {called}: change both with grassy.save"
        )


def run_folder(weights: Path) -> Path:
    """The folder of the run with these weights: a file, or a save in the run's folder `model_best` or `resume`."""
    folder = weights.parent
    return folder.parent if folder.name in (BEST_SAVES, SAVES) and (weights / MANIFEST).is_file() else folder


def weights_digest(weights: Path) -> str:
    """A SHA-256 that identifies weights. For a save it is that of the manifest, which holds those of all its files."""
    return file_digest(weights / MANIFEST if weights.is_dir() else weights)


def weights_file(path: Path) -> Path:
    """The file itself; in the folder of a run its best, else its last weights; or the weights of a Hub folder.

    For weights sharded over processes it is the folder of a save.
    """
    path = hub.local_folder(path)
    if path.is_dir():
        if (path / MANIFEST).is_file():
            return path
        for name in (BEST, LAST):
            if (path / name).is_file():
                return path / name
        if (config := hub.read_config(path)) is not None:
            if hub.is_of_transformers(config):
                raise ValueError(f"{path} holds a transformers model: use grassy.load; the commands accept timm models")
            return path / hub.WEIGHTS
        for folder in (path / BEST_SAVES, path / SAVES, path):
            if (save := newest(folder)) is not None:
                return save
        if (path / ARGS).is_file():
            raise ValueError(f"{path} is a run that has not saved its weights yet: wait, or resume it if it has ended")
        other = f"; its {hub.CONFIG} describes no head of grassy's" if (path / hub.CONFIG).is_file() else ""
        raise ValueError(
            f"{path} holds no {BEST} or {LAST}: is it the output folder of grassy train, or of grassy.save?{other}"
        )
    if not path.is_file():
        raise ValueError(f"there is no checkpoint {path}{_hint_at_hub(path)}")
    if path.name == STATE:
        raise ValueError(f"{path} is for resuming: give the folder it is in, or {BEST} there")
    return path


def _hint_at_hub(path: Path) -> str:
    """A phrase to append for a path that may be a repository: `user/name`, where no folder `user` exists."""
    if path.is_absolute() or len(path.parts) != 2 or path.parent.exists() or path.parts[0] == os.pardir:
        return ""
    return f"; for a Hugging Face Hub repository that grassy wrote, give {hub.REMOTE}{path.as_posix()}"


def read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors by name, from safetensors or from a torch.save file that holds only tensors."""
    path = weights_file(path)
    if path.is_dir():
        return _read_whole(path)
    if path.suffix == ".safetensors":
        with _opened(path):
            return load_file(path)
    weights = read_torch(path)
    for key in ("state_dict", "model", "state_dict_ema"):
        if isinstance(weights.get(key), Mapping):
            weights = weights[key]
            break
    return {name.removeprefix("module."): value for name, value in weights.items() if isinstance(value, Tensor)}


def evaluated_kind(saved: Saved) -> str:
    """The prefix of the validated weights in a save: "average" if there is an average, else "model"."""
    return "average" if any(name.startswith("average.") for name in saved.tensors) else "model"


def _read_whole(save: Path) -> dict[str, Tensor]:
    """All weights of a save, gathered in this process."""
    saved = open_state(save, alone=True)
    kind = evaluated_kind(saved)
    sizes = [
        dtype.itemsize * math.prod(shape) for name, (dtype, shape) in saved.tensors.items() if name.startswith(kind)
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else math.inf
    if sum(sizes) > memory / 2:
        raise ValueError(
            f"{save} holds {sum(sizes) / 2**30:.0f} GiB of weights, and this machine has {memory / 2**30:.0f} GiB of "
            "memory: use several processes, as in torchrun --nproc-per-node 8 -m grassy validate"
        )
    weights = read_saved(saved, kind)
    weights.pop("n_averaged", None)
    return weights


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        if path.suffix != ".safetensors":
            raise ValueError(f"{path} is not a .safetensors file: no other format describes its model") from None
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from None
