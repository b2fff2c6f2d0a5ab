"""The state to resume a run from: `resume.pt`, read with `weights_only=True`, so that loading never runs code."""

import hashlib
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch

from grassy.atomic import write_atomically
from grassy.distributed.saves import newest

STATE = "resume.pt"
#: The folder that replaces it if weights are sharded over processes: the saves of `grassy.distributed.saves`.
SAVES = "resume"
#: Marks the end of a state, followed by its SHA-256 in hexadecimal digits. torch.load ignores these bytes.
SEAL = b"grassy-sha256:"


def write_torch(state: Mapping[str, Any], path: Path) -> None:
    """Write tensors, numbers and strings in dicts and lists atomically."""

    def write(file: IO[bytes]) -> None:
        hashed = _Hashed(file)
        try:
            torch.save(dict(state), hashed)  # type: ignore[arg-type]  # torch.save only calls write
        except RuntimeError as error:  # torch raises it for a failed write, among others
            raise hashed.error or error from None
        file.write(SEAL + hashed.digest.hexdigest().encode())

    write_atomically(path, write)


class _Hashed:
    """A file being written, with the digest of its contents."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.digest = file, hashlib.sha256()
        self.error: BaseException | None = None

    def write(self, data: bytes) -> int:
        try:
            self.digest.update(data)
            return self.file.write(data)
        except BaseException as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


def _check_seal(path: Path) -> None:
    """Raise a ValueError if a byte has changed since `write_torch`; earlier versions wrote no digest."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        left = max(0, file.seek(0, os.SEEK_END) - len(SEAL) - 2 * digest.digest_size)
        file.seek(left)
        seal = file.read()
        if not seal.startswith(SEAL):
            return
        file.seek(0)
        while left:
            left -= len(chunk := file.read(min(left, 2**20)))
            digest.update(chunk)
    if seal != SEAL + digest.hexdigest().encode():
        raise ValueError(f"{path} is damaged: its SHA-256 is no longer the one that it was saved with")


def read_torch(path: Path) -> dict[str, Any]:
    """Read a torch.save file without unpickling anything but tensors and plain values."""
    _check_seal(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ValueError(
            f"{path} holds more than tensors and plain values, or is damaged, and was not unpickled: save the "
            "state_dict of its model alone"
        ) from None
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:  # torch may raise anything for other bytes
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} is not a complete torch.save file: {reason}") from None
    if not isinstance(state, dict):
        raise ValueError(f"{path} does not hold a dict")
    return state


def state_in(folder: Path) -> Path | None:
    """The state that a run in a folder would resume from: its `resume.pt` or its last save; None without one."""
    return folder / STATE if (folder / STATE).exists() else newest(folder / SAVES)
