"""The state that a run resumes from: `resume.pt`, read with `weights_only=True`, so that loading never runs code."""

import errno
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch

from grassy.runs.atomic import write_atomically

STATE = "resume.pt"


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
