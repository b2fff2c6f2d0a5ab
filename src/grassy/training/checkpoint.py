"""Files of a run: weights with a description from which the model is rebuilt, and the state to resume from.

Weights are safetensors and the state is read with `weights_only=True`: loading never runs code out of a file. A file is
written under a temporary name, flushed to the disk and renamed, so that a name always stands for a whole file.
"""

import contextlib
import dataclasses
import errno
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from grassy.heads import GrassmannHead

BEST, LAST, STATE = "model_best.safetensors", "last.safetensors", "resume.pt"
TEMPORARY = ".writing-"
#: Options of timm that would fetch weights from elsewhere.
OTHER_SOURCES = ("pretrained", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")


@dataclass(frozen=True)
class Description:
    """What a file of weights says about its model: enough to build it, and to prepare images for it."""

    model: str
    num_classes: int
    head: dict[str, Any]
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    class_names: list[str] | None = None
    img_size: int = 224
    crop_pct: float = 0.875
    interpolation: str = "bilinear"
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    recipe: dict[str, Any] = field(default_factory=dict)
    epoch: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    version: str = ""


# ------------------------------------------------------------------------------------------------ weights


def save_weights(weights: nn.Module | Mapping[str, Tensor], description: Description, path: Path) -> None:
    """Write the weights of a model, or its state_dict, with its description, whole or not at all."""
    state = weights.state_dict() if isinstance(weights, nn.Module) else weights
    modules = weights.modules() if isinstance(weights, nn.Module) else ()
    heads = [module for module in modules if isinstance(module, GrassmannHead)]
    if heads and description.head.get("gamma") == "auto":  # as a number it is the same in every version
        description = dataclasses.replace(description, head={**description.head, "gamma": heads[0].initial_gamma})
    # Clones: safetensors refuses tensors that share memory, as tied weights do.
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
    text = json.dumps(dataclasses.asdict(description), default=_plain)
    data = save(tensors, metadata={"format": "pt", "grassy": text})
    write_atomically(path, lambda file: file.write(data))


def _plain(value: Any) -> Any:
    """Numbers of NumPy, arrays, tensors and ranges as Python's own: options of a head may be all of them."""
    if isinstance(value, range):
        return list(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a description cannot hold {value!r}, a {type(value).__name__}")


def read_description(path: Path) -> Description:
    """The description in a file of weights; a ValueError if it has none."""
    with _opened(path) as file:
        text = (file.metadata() or {}).get("grassy")
    if text is None:
        raise ValueError(f"{path} says nothing about its model: it was not written by grassy train")
    try:
        values = json.loads(text)
        known = {f.name for f in dataclasses.fields(Description)}
        description = Description(**{key: value for key, value in values.items() if key in known})
        return _checked(description)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} has a description that cannot be read: {error}") from None


def _checked(description: Description) -> Description:
    """The description with the types that its fields must have: a file may say anything."""
    for name, kind in (("model", str), ("num_classes", int), ("head", dict), ("model_kwargs", dict), ("img_size", int)):
        if not isinstance(getattr(description, name), kind):
            raise TypeError(f"{name} must be of type {kind.__name__}, got {getattr(description, name)!r}")
    if not isinstance(description.head.get("name"), str):
        raise TypeError(f"the head must have a name, got {description.head!r}")
    mean, std = (tuple(float(number) for number in numbers) for numbers in (description.mean, description.std))
    return dataclasses.replace(description, mean=mean, std=std)


def load(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> nn.Module:
    """The trained model in a file of weights, or in the folder of a run (its best), ready for inference.

    It is rebuilt from the file alone, without unpickling. `timm.data.resolve_model_data_config(model)` knows how its
    images are prepared; `model.pretrained_cfg["label_names"]` are the names of the classes, if the data had any.
    """
    from grassy.training.models import create_model

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
        "num_classes": description.num_classes,
        "input_size": (3, description.img_size, description.img_size),
        "crop_pct": description.crop_pct,
        "interpolation": description.interpolation,
        "mean": description.mean,
        "std": description.std,
        "label_names": description.class_names,
    }
    return model.eval().to(device)


def weights_file(path: Path) -> Path:
    """The file itself, or the best (else the last) weights in the folder of a run."""
    if path.is_dir():
        for name in (BEST, LAST):
            if (path / name).is_file():
                return path / name
        raise ValueError(f"{path} holds no {BEST} or {LAST}: is it the output folder of grassy train?")
    if not path.is_file():
        raise ValueError(f"there is no checkpoint {path}")
    if path.name == STATE:
        raise ValueError(f"{path} is for resuming: give the folder it is in, or {BEST} there")
    return path


def read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors by name, from safetensors or from a file of torch.save that holds nothing but tensors."""
    path = weights_file(path)
    if path.suffix == ".safetensors":
        with _opened(path):
            return load_file(path)
    weights = read_torch(path)
    for key in ("state_dict", "model", "state_dict_ema"):
        if isinstance(weights.get(key), Mapping):
            weights = weights[key]
            break
    return {name.removeprefix("module."): value for name, value in weights.items() if isinstance(value, Tensor)}


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        if path.suffix != ".safetensors":
            raise ValueError(f"{path} is not a .safetensors file, which alone holds what a model is made of") from None
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from None


# ------------------------------------------------------------------------------------------------ state


def save_state(state: Mapping[str, Any], path: Path) -> None:
    """Write tensors, numbers and strings in dicts and lists, whole or not at all."""

    def write(file: IO[bytes]) -> None:
        try:
            torch.save(dict(state), file)
        except RuntimeError as error:  # torch's words for a write that failed
            raise OSError(errno.ENOSPC, "could not be written: is the disk full?", str(path)) from error

    write_atomically(path, write)


def read_torch(path: Path) -> dict[str, Any]:
    """What torch.save wrote, without unpickling anything but tensors and plain values."""
    import pickle

    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ValueError(
            f"{path} holds more than tensors and plain values, or is damaged, and was not unpickled: save the "
            "state_dict of its model alone"
        ) from None
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:  # at bytes that are no such file torch raises all sorts of things
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} is not a whole file of torch.save: {reason}") from None
    if not isinstance(state, dict):
        raise ValueError(f"{path} does not hold a dict")
    return state


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file under a temporary name and rename it: a crash at any moment leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=TEMPORARY, dir=path.parent)
    except OSError as error:
        raise OSError(error.errno, f"could not be written: {error.strerror}", str(path)) from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp's files are for their owner alone
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.filename is None:
            raise OSError(error.errno, f"could not be written: {error.strerror}", str(path)) from error
        raise
    _sync_folder(path.parent)


def remove_torn_files(folder: Path) -> None:
    """Remove what a killed process was writing."""
    for file in folder.glob(f"{TEMPORARY}*"):
        file.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":  # a rename is safe from a power cut once the folder is on the disk
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
