"""The saves of a run on disk: folders that get their names when they are complete, and their checks.

A save is a folder `save-N` with the safetensors files of all ranks and `state.json`. The latter holds all plain values,
and the size and the SHA-256 of every file. Nothing here needs a model.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from grassy.atomic import file_digest, sync_file, sync_folder, write_text_atomically
from grassy.distributed.processes import everywhere, gathered, on_rank_0, own_rank, world_size

MANIFEST = "state.json"
FORMAT = 1
#: Largest `state.json` that is read, in bytes. It holds the names of all classes.
MOST_BYTES = 2**31
#: Suffixes of a save that is not complete yet, and of one that is being removed.
PART, GONE = ".part", ".gone"
#: Dtypes by their names in safetensors.
DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
#: Name, first row and number of rows of a part of a tensor.
Chunk = tuple[str, int, int]


@dataclass(frozen=True)
class Saved:
    """The content of `state.json`."""

    path: Path
    ranks: int
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    plain: dict[str, Any]
    optimizer: dict[str, Any] | None


def begin(folder: Path, content: Mapping[str, Any]) -> tuple[Path, Path]:
    """Return the path of the next save and an empty folder to write it to. Removes incomplete saves.

    The folder has a random name, so that a surviving process of an earlier start cannot write into it. If `content`,
    for `state.json`, is not valid JSON, it raises before any tensor is written.
    """
    for name, value in content.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{name} must be valid JSON: {one_line(error)}") from None
    folder.mkdir(parents=True, exist_ok=True)
    for entry in folder.iterdir():
        if entry.name.startswith("save-") and entry.name.endswith((PART, GONE)):
            shutil.rmtree(entry, ignore_errors=True)
    target = folder / f"save-{max(saves(folder), default=0) + 1}"
    part = _aside(target, PART)
    part.mkdir()
    return target, part


def _aside(save: Path, ending: str) -> Path:
    return save.with_name(f"{save.name}.{secrets.token_hex(8)}{ending}")


def written_here(part: Path, tensors: Mapping[str, Any]) -> tuple[dict[str, Any], list[Chunk]]:
    """Return size, digest and content of the files that this rank wrote, once they are on the disk.

    DCP counts ranks from 1. It syncs a file before its buffer is written.
    """
    mine = sorted(part.glob(f"shard-{own_rank() + 1:05d}-*"))
    for file in mine:
        sync_file(file)
    files = {file.name: {"bytes": file.stat().st_size, "sha256": file_digest(file)} for file in mine}
    return files, [chunk for file in mine for chunk in _chunks(file, tensors)]


def finish(
    part: Path,
    target: Path,
    content: Mapping[str, Any],
    written: list[tuple[dict[str, Any], list[Chunk]]],
    keep: int,
) -> None:
    """Check that the files of all ranks are complete, rename the save, and only then remove older ones."""
    files = {name: each for own, _ in written for name, each in own.items()}
    text = json.dumps({**content, "files": files})
    sealed = json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "content": text})
    write_text_atomically(part / MANIFEST, sealed)
    try:
        _check_folder(part, files)
        _check_cover(part, content["tensors"], [chunk for _, chunks in written for chunk in chunks])
    except ValueError as error:
        raise OSError(f"{target} could not be written: {error}; do all processes write to the same folder?") from None
    part.rename(target)
    sync_folder(target.parent)
    numbers = saves(target.parent)
    for number in sorted(numbers)[:-keep]:
        _remove(numbers[number])


def _remove(save: Path) -> None:
    """Remove an old save. Errors are ignored, because the new one is complete and the next save tries again."""
    gone = _aside(save, GONE)
    with contextlib.suppress(OSError):
        save.rename(gone)  # first, so that a folder named save-N is always complete
        shutil.rmtree(gone, ignore_errors=True)


def saves(folder: Path) -> dict[int, Path]:
    """Return the complete saves in a folder by number."""
    entries = folder.iterdir() if folder.is_dir() else ()
    found = ((re.fullmatch(r"save-(\d{1,18})", entry.name), entry) for entry in entries)
    return {int(match[1]): entry for match, entry in found if match}


def newest(folder: Path) -> Path | None:
    """Return the last save in a folder, or None."""
    numbers = saves(folder)
    return numbers[max(numbers)] if numbers else None


def _find(path: Path) -> Path:
    save = path if (path / MANIFEST).is_file() else newest(path)
    if save is None:
        raise ValueError(f"{path} holds no complete save")
    return save


def read_plain(path: Path) -> dict[str, Any]:
    """Read the plain values of a save. Its other files are neither read nor checked."""
    plain: dict[str, Any] = _read_manifest(_find(path))["plain"]
    return plain


def open_state(path: Path, alone: bool = False) -> Saved:
    """Check the files of a save and return its content. All ranks must call it together and share the work.

    With `alone`, this process does all the work by itself.
    """
    if alone or not dist.is_initialized():
        save = _find(path)
        content = _read_manifest(save)
        _check_folder(save, content["files"])
        chunks = [chunk for name in sorted(content["files"]) for chunk in _checked_chunks(save / name, content)]
    else:
        save = on_rank_0(lambda: _find(path))  # the same save on all ranks, even if another one is written meanwhile
        content = everywhere(lambda: _read_manifest(save))
        seen = gathered([hashlib.sha256(json.dumps(content).encode()).hexdigest()])
        if other := next((rank for rank, digest in enumerate(seen) if digest != seen[0]), None):
            raise ValueError(f"rank {other} sees another {save} than rank 0: all must see the same folder")
        everywhere(lambda: _check_folder(save, content["files"]))
        own = sorted(content["files"])[own_rank() :: world_size()]
        chunks = gathered(
            everywhere(lambda: [chunk for name in own for chunk in _checked_chunks(save / name, content)])
        )
    _check_cover(save, content["tensors"], chunks)
    tensors = {name: (DTYPES[dtype], tuple(shape)) for name, (dtype, *shape) in content["tensors"].items()}
    return Saved(save, content["ranks"], tensors, content["plain"], content["optimizer"])


def _read_manifest(save: Path) -> dict[str, Any]:
    path = save / MANIFEST
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path} has more than {MOST_BYTES:,} bytes")
    try:
        sealed = json.loads(path.read_text(encoding="utf-8"))
        text = sealed["content"]
        if sealed["sha256"] != hashlib.sha256(text.encode()).hexdigest():
            raise ValueError("its SHA-256 is no longer the one that it was saved with")
        content = json.loads(text)
        return _checked_content(content)
    except (KeyError, TypeError, AttributeError, RecursionError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {one_line(error)}") from None


def _checked_content(content: dict[str, Any]) -> dict[str, Any]:
    if content["format"] != FORMAT:
        raise ValueError(f"it is of format {content['format']!r}, and this version of grassy reads {FORMAT}")
    files, tensors = content["files"], content["tensors"]
    if not isinstance(content["ranks"], int) or not isinstance(content["plain"], dict):
        raise ValueError("its number of ranks or its plain values are missing")
    for name, each in files.items():
        if not re.fullmatch(r"[\w-]{1,100}\.safetensors", name, re.ASCII):
            raise ValueError(f"{name!r} is not the name of a tensor file")
        if not isinstance(each["bytes"], int) or not isinstance(each["sha256"], str):
            raise ValueError(f"it lacks the size or the SHA-256 of {name}")
    for name, (dtype, *shape) in tensors.items():
        if dtype not in DTYPES or not all(isinstance(size, int) and 0 <= size < 2**48 for size in shape):
            raise ValueError(f"{name} has an invalid dtype {dtype!r} or shape {shape}")
    if (optimizer := content["optimizer"]) is not None:
        for group in optimizer["groups"]:
            if not all(isinstance(name, str) for name in group["params"]) or not isinstance(group["options"], dict):
                raise ValueError("the parameters or the options of an optimizer are missing")
        if not all(isinstance(each, dict) for each in optimizer["state"].values()):
            raise ValueError("the state of an optimizer is missing")
    return content


def _check_folder(save: Path, files: Mapping[str, Any]) -> None:
    """Raise ValueError if a file is missing, unexpected or of the wrong size."""
    there = {entry.name for entry in os.scandir(save)} - {MANIFEST}
    if missing := sorted(files.keys() - there):
        raise ValueError(f"{save} lacks {missing[0]}, one of the {len(files)} files of this save")
    if foreign := sorted(there - files.keys()):
        raise ValueError(f"{save} holds {foreign[0]}, which is none of the files of this save")
    for name, each in files.items():
        status = os.lstat(save / name)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{save / name} is not a regular file")
        if status.st_size != each["bytes"]:
            raise ValueError(f"{save / name} is damaged: it has {status.st_size:,} bytes, not {each['bytes']:,}")


def _checked_chunks(path: Path, content: Mapping[str, Any]) -> list[Chunk]:
    """Return the rows of tensors in a file. Raises ValueError if it is not the file that was saved."""
    if file_digest(path) != content["files"][path.name]["sha256"]:
        raise ValueError(f"{path} is damaged: its SHA-256 is no longer the one that it was saved with")
    return _chunks(path, content["tensors"])


def _chunks(path: Path, tensors: Mapping[str, Any]) -> list[Chunk]:
    """Return the rows of tensors in a file, from its header."""
    chunks = []
    try:
        with safe_open(path, framework="pt") as file:
            offsets = json.loads((file.metadata() or {})["DCP_SHARDING_INFO"])
            for name in file.keys():  # noqa: SIM118 (it is no dict)
                part = file.get_slice(name)
                start, shape, dtype = offsets[name]["saved_offsets"], part.get_shape(), part.get_dtype()
                expected, *whole = tensors[name]
                if dtype != expected or len(start) != len(shape) or len(shape) != len(whole):
                    raise ValueError(f"{name} has another dtype or shape than {MANIFEST} says")
                if any(start[1:]) or shape[1:] != whole[1:] or not all(isinstance(place, int) for place in start):
                    raise ValueError(f"{name} is not a range of rows")
                chunks.append((name, start[0], shape[0]) if whole else (name, 0, 1))
    except (SafetensorError, KeyError, TypeError, AttributeError, RecursionError, ValueError) as error:
        raise ValueError(f"{path} is not a part of this save: {one_line(error)}") from None
    return chunks


def _check_cover(save: Path, tensors: Mapping[str, Any], chunks: list[Chunk]) -> None:
    """Raise ValueError unless every row of every tensor is present exactly once."""
    ends = dict.fromkeys(tensors, 0)
    for name, start, rows in sorted(chunks):
        if start != ends[name] and rows:
            raise ValueError(f"{save} has rows of {name} twice, or not at all, from row {min(start, ends[name])} on")
        ends[name] += rows
    for name, (_, *shape) in tensors.items():
        if ends[name] != (shape[0] if shape else 1):
            raise ValueError(f"{save} has {ends[name]} rows of {name}, which has {shape[0] if shape else 1}")


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__} {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:200]
