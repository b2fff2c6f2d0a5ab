"""Tensors out of files of torch.save that also hold objects of other packages, whose code is not run.

torch's reader for tensors alone refuses a file that names anything else. Here everything else that a file names is
replaced by an object that takes whatever it is given and does nothing. What comes of it is thrown away.
"""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grassy.runs.schema import open_regular


class Inert:
    """Stands for any class or function of a file: it can be called, filled and set, and does nothing."""

    def __new__(cls, *_: Any, **__: Any) -> "Inert":
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass

    def __setitem__(self, _: Any, __: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> "Inert":
        return self

    def append(self, _: Any) -> None:
        pass

    extend = add = update = append


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The `state_dict` of a checkpoint, or a checkpoint that is one, by name; a ValueError if there is none."""
    if not path.exists():
        raise ValueError(f"there is no checkpoint {path}")
    open_regular(path).close()
    try:
        named = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        with torch.serialization.safe_globals([(Inert, name) for name in named]):
            found = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, ValueError, EOFError, KeyError, TypeError, AttributeError, pickle.UnpicklingError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ValueError(
            f"{path} is not a checkpoint of torch that can be read without running its code: {reason}"
        ) from None
    if isinstance(found, Mapping) and isinstance(found.get("state_dict"), Mapping):
        found = found["state_dict"]
    tensors = (
        {str(name): each for name, each in found.items() if isinstance(each, Tensor)}
        if isinstance(found, Mapping)
        else {}
    )
    if not tensors:
        raise ValueError(f"{path} holds no state_dict")
    return tensors
