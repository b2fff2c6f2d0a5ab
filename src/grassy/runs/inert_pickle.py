"""Read tensors from torch.save files that also hold objects of other packages, without running their code.

`torch.load(weights_only=True)` refuses a file that names any other class. Here, every other class or function is
replaced by an inert object that accepts any argument and does nothing. The result is discarded.
"""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grassy.schema import open_regular


class Inert:
    """Replaces any class or function in a file: it can be called, filled and set, and does nothing."""

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
    """The tensors of a checkpoint by name, from its `state_dict` or the checkpoint itself; a ValueError without any."""
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
            f"{path} is not a torch checkpoint that can be read without running its code: {reason}"
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
