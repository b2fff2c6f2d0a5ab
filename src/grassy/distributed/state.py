"""The state of a model on many ranks: all of them save it in parallel, and any number of them loads it.

A save is a folder of its own, `save-N`, which gets its name when it is whole. Tensors lie in safetensors files, which
torch's distributed checkpoint (DCP) writes and reads: each rank writes its shards, and reads what it needs of all.
Everything plain lies in `state.json`, with the size and the SHA-256 of every file. DCP's own format is not used: it
unpickles. Before the first value is read, the files are compared with what `state.json` says of them.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from grassy.distributed.processes import gathered
from grassy.heads.state import KEY, decode, difference
from grassy.shards import groups_of, local

MANIFEST = "state.json"
FORMAT = 1
#: The largest `state.json` that is read, in bytes: it names every class.
MOST_BYTES = 2**31
#: The name of a save that is not whole yet ends so, and the name of one that is being removed.
PART, GONE = ".part", ".gone"
#: State of an optimizer that is a sum over classes: of a sharded weight, each rank has the sum over its own.
SUMMED = ("counts",)

T = TypeVar("T")
#: By the names that safetensors has for them.
DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


# ------------------------------------------------------------------------------------------------ saving


def save_state(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    plain: Mapping[str, Any] | None = None,
    *,
    average: nn.Module | None = None,
    own: Mapping[str, Tensor] | None = None,
    keep: int = 1,
) -> Path:
    """Write the state of a run as a new save in `folder`, whole or not at all, and return its path.

    All ranks call it. Parameters may be DTensors, or the same on all ranks; the optimizer's state goes by their names.

    plain: what JSON can hold; rank 0's is written.
    average: another model to save, such as a moving average of the weights.
    own: tensors that each rank has its own values of. They are restored on the same number of ranks only.
    keep: so many saves stay, at least this one; older ones are removed once this one is whole.
    """
    if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
        raise ValueError(f"keep must be an integer of at least 1, got {keep!r}")
    tensors = {**_model_tensors("model", model), **_model_tensors("average", average)}
    described = None
    if optimizer is not None:
        states, described = _optimizer_state(model, optimizer)
        tensors |= states
    for name, tensor in (own or {}).items():
        tensors[f"own.{name}"] = _rows_of_ranks(tensor)
    return save_tensors(Path(folder), tensors, {"plain": dict(plain or {}), "optimizer": described}, keep)


def save_tensors(folder: Path, tensors: Mapping[str, Tensor], plain: Mapping[str, Any], keep: int = 1) -> Path:
    """Write tensors, sharded or the same on all ranks, and what JSON can hold, as a new save in `folder`."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    content = {"format": FORMAT, "ranks": _ranks(), "tensors": everywhere(lambda: _described(tensors)), **plain}
    target, part = on_rank_0(lambda: _begin(folder, content))
    # safetensors builds a file in memory first: a file for each kind of tensors needs less of it than one for all.
    kinds = sorted({_kind(name) for name in tensors})
    places = {name: 1 + kinds.index(_kind(name)) for name in tensors}
    try:
        writer = HuggingFaceStorageWriter(str(part), places, save_distributed=True)
        with _in_one_sentence(f"{target} could not be written"), _without_warnings():
            dcp_save(dict(tensors), storage_writer=writer, no_dist=not dist.is_initialized())
        written = gathered([everywhere(lambda: _written(part, content["tensors"]))])
        on_rank_0(lambda: _finish(part, target, content, written, keep))
    except BaseException:
        if _rank() == 0:
            shutil.rmtree(part, ignore_errors=True)
        raise
    return target


def _described(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """The dtype and the shape of each tensor, as `state.json` has them."""
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in NAMES)
            raise ValueError(f"{name} must be a tensor of {allowed}, got {tensor.dtype}")
    return {name: [NAMES[tensor.dtype], *tensor.shape] for name, tensor in sorted(tensors.items())}


def _begin(folder: Path, content: Mapping[str, Any]) -> tuple[Path, Path]:
    """The path of the next save, and the empty folder to write it to; what a killed process was writing is removed.

    The folder has a name that no other start knows: a process that outlives an earlier one cannot write into it.

    content: what `state.json` is to say. What JSON cannot hold is refused here, before any tensor is written.
    """
    for name, value in content.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{name} must hold only what JSON can: {_one_line(error)}") from None
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


#: Name, first row and number of rows of a part of a tensor.
Chunk = tuple[str, int, int]


def _written(part: Path, tensors: Mapping[str, Any]) -> tuple[dict[str, Any], list[Chunk]]:
    """Size and digest of the files that this rank has written, and what is in them; DCP counts ranks from 1."""
    mine = sorted(part.glob(f"shard-{_rank() + 1:05d}-*"))
    files = {file.name: {"bytes": file.stat().st_size, "sha256": _digest(file)} for file in mine}
    return files, [chunk for file in mine for chunk in _chunks(file, tensors)]


def _finish(
    part: Path,
    target: Path,
    content: Mapping[str, Any],
    written: list[tuple[dict[str, Any], list[Chunk]]],
    keep: int,
) -> None:
    """Give a save its name if what all ranks have written is whole, and only then remove older ones."""
    files = {name: each for own, _ in written for name, each in own.items()}
    text = json.dumps({**content, "files": files})
    sealed = json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "content": text})
    with (part / MANIFEST).open("x", encoding="utf-8") as file:
        file.write(sealed)
        file.flush()
        os.fsync(file.fileno())
    try:
        _check_folder(part, files)
        _check_cover(part, content["tensors"], [chunk for _, chunks in written for chunk in chunks])
    except ValueError as error:
        raise OSError(f"{target} could not be written: {error}; do all processes write to the same folder?") from None
    _sync(part)
    part.rename(target)
    _sync(target.parent)
    numbers = saves(target.parent)
    for number in sorted(numbers)[:-keep]:
        _remove(numbers[number])


def _remove(save: Path) -> None:
    """Remove an old save as far as the file system allows: the new one is whole, and the next save tries again."""
    gone = _aside(save, GONE)
    with contextlib.suppress(OSError):
        save.rename(gone)  # first: a save is whole, or has another name
        shutil.rmtree(gone, ignore_errors=True)


def saves(folder: Path) -> dict[int, Path]:
    """The whole saves in a folder by their numbers."""
    entries = folder.iterdir() if folder.is_dir() else ()
    found = ((re.fullmatch(r"save-(\d{1,18})", entry.name), entry) for entry in entries)
    return {int(match[1]): entry for match, entry in found if match}


def newest(folder: Path) -> Path | None:
    """The last save in a folder, or None."""
    numbers = saves(folder)
    return numbers[max(numbers)] if numbers else None


# ------------------------------------------------------------------------------------------------ loading


@dataclass(frozen=True)
class Saved:
    """What `state.json` of a save says."""

    path: Path
    ranks: int
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    plain: dict[str, Any]
    optimizer: dict[str, Any] | None


def load_state(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    average: nn.Module | None = None,
    own: Mapping[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Load the newest save in `folder`, or the save that it is, in place, and return what was plain.

    own: tensors to restore on the same number of ranks; without it, those of the save are left unread.

    All ranks call it, as many as they like. A ValueError, on all of them, if files are damaged, missing or not of this
    save, or if they are of another model; then nothing is loaded.
    """
    saved = open_state(Path(folder))
    tensors = {**_model_tensors("model", model), **_model_tensors("average", average)}
    wanted = [("model", model), *([] if average is None else [("average", average)])]
    for prefix, _ in wanted:
        _check_names(saved, prefix, {name for name in tensors if _kind(name) == prefix})
    _check_options(saved, tensors)
    if optimizer is not None:
        tensors |= _empty_optimizer_state(saved, model, optimizer)
    rows: dict[str, Tensor] = {}
    if own is not None and saved.ranks == _ranks():
        rows = {f"own.{name}": _rows_of_ranks(tensor) for name, tensor in own.items()}
        _check_names(saved, "own", set(rows))
    load_tensors(saved, {**tensors, **rows})
    for name, tensor in (own or {}).items():
        if f"own.{name}" in rows:
            tensor.copy_(local(rows[f"own.{name}"])[0])
    if optimizer is not None:
        _fill_optimizer(saved, model, optimizer, tensors)
    return saved.plain


def read_plain(path: Path) -> dict[str, Any]:
    """What a save says that is plain; of its other files nothing is read or checked."""
    plain: dict[str, Any] = _read_manifest(_find(path))["plain"]
    return plain


def open_state(path: Path, alone: bool = False) -> Saved:
    """What a save says of itself, once its files are found to be whole. All ranks call it, and share the work.

    alone: this process does it all, whatever others do.
    """
    if alone or not dist.is_initialized():
        save = _find(path)
        content = _read_manifest(save)
        _check_folder(save, content["files"])
        chunks = [chunk for name in sorted(content["files"]) for chunk in _checked_chunks(save / name, content)]
    else:
        save = on_rank_0(lambda: _find(path))  # one answer, whatever is saved meanwhile
        content = everywhere(lambda: _read_manifest(save))
        everywhere(lambda: _check_folder(save, content["files"]))
        own = sorted(content["files"])[_rank() :: _ranks()]
        chunks = gathered(
            everywhere(lambda: [chunk for name in own for chunk in _checked_chunks(save / name, content)])
        )
    _check_cover(save, content["tensors"], chunks)
    tensors = {name: (DTYPES[dtype], tuple(shape)) for name, (dtype, *shape) in content["tensors"].items()}
    return Saved(save, content["ranks"], tensors, content["plain"], content["optimizer"])


def _find(path: Path) -> Path:
    save = path if (path / MANIFEST).is_file() else newest(path)
    if save is None:
        raise ValueError(f"{path} holds no whole save")
    return save


def load_tensors(saved: Saved, tensors: Mapping[str, Tensor], alone: bool = False) -> None:
    """Fill tensors, sharded or not, with those of the same names. alone: this process, whatever others do."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

    for name, tensor in tensors.items():
        dtype, shape = saved.tensors.get(name, (None, ()))
        if dtype is None:
            raise ValueError(f"{saved.path} has no {name}: is it of another model?")
        if (dtype, shape) != (tensor.dtype, tuple(tensor.shape)):
            raise ValueError(
                f"{saved.path} has {name} of shape {list(shape)} in {dtype}, not {list(tensor.shape)} in {tensor.dtype}"
            )
    with _in_one_sentence(f"{saved.path} could not be read"), _without_warnings():
        reader = HuggingFaceStorageReader(str(saved.path))
        detached = {name: tensor.detach() for name, tensor in tensors.items()}
        dcp_load(detached, storage_reader=reader, no_dist=alone or not dist.is_initialized())


def read_tensors(saved: Saved, prefix: str) -> dict[str, Tensor]:
    """The whole tensors of one kind, in the memory of this process, by their names without the prefix."""
    names = {name: name.removeprefix(f"{prefix}.") for name in saved.tensors if name.startswith(f"{prefix}.")}
    tensors = {name: torch.empty(saved.tensors[name][1], dtype=saved.tensors[name][0]) for name in names}
    load_tensors(saved, tensors, alone=True)
    return {names[name]: tensor for name, tensor in tensors.items()}


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
        raise ValueError(f"{path} is damaged: {_one_line(error)}") from None


def _checked_content(content: dict[str, Any]) -> dict[str, Any]:
    if content["format"] != FORMAT:
        raise ValueError(f"it is of format {content['format']!r}, and this version of grassy reads {FORMAT}")
    files, tensors = content["files"], content["tensors"]
    if not isinstance(content["ranks"], int) or not isinstance(content["plain"], dict):
        raise ValueError("it does not say what a save says")
    for name, each in files.items():
        if not re.fullmatch(r"[\w-]{1,100}\.safetensors", name, re.ASCII):
            raise ValueError(f"{name!r} is no name of a file of tensors")
        if not isinstance(each["bytes"], int) or not isinstance(each["sha256"], str):
            raise ValueError(f"it does not say what is in {name}")
    for name, (dtype, *shape) in tensors.items():
        if dtype not in DTYPES or not all(isinstance(size, int) and 0 <= size < 2**48 for size in shape):
            raise ValueError(f"{name} can have no dtype {dtype!r} and shape {shape}")
    return content


def _check_folder(save: Path, files: Mapping[str, Any]) -> None:
    """Raise a ValueError for a file too many or too few, or of another size."""
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
    """Which rows of which tensors a file has; a ValueError if it is not the file that was saved."""
    if _digest(path) != content["files"][path.name]["sha256"]:
        raise ValueError(f"{path} is damaged: its SHA-256 is no longer the one that it was saved with")
    return _chunks(path, content["tensors"])


def _chunks(path: Path, tensors: Mapping[str, Any]) -> list[Chunk]:
    """Which rows of which tensors a file has, by its header."""
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
        raise ValueError(f"{path} is not a part of this save: {_one_line(error)}") from None
    return chunks


def _check_cover(save: Path, tensors: Mapping[str, Any], chunks: list[Chunk]) -> None:
    """Raise a ValueError unless each row of each tensor is there exactly once."""
    ends = dict.fromkeys(tensors, 0)
    for name, start, rows in sorted(chunks):
        if start != ends[name] and rows:
            raise ValueError(f"{save} has rows of {name} twice, or not at all, from row {min(start, ends[name])} on")
        ends[name] += rows
    for name, (_, *shape) in tensors.items():
        if ends[name] != (shape[0] if shape else 1):
            raise ValueError(f"{save} has {ends[name]} rows of {name}, which has {shape[0] if shape else 1}")


# ------------------------------------------------------------------------------------------------ tensors by name


def _kind(name: str) -> str:
    return name.partition(".")[0]


def _plain_name(name: str) -> str:
    """The name of a parameter without what DDP, an average and torch.compile put before it."""
    name = ".".join(part for part in name.split(".") if part != "_orig_mod")
    return name.removeprefix("module.")


def _model_tensors(prefix: str, model: nn.Module | None) -> dict[str, Tensor]:
    """Parameters and buffers of a model; of tied ones, the first name."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in {} if model is None else model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[f"{prefix}.{_plain_name(name)}"] = tensor.detach()
    return tensors


def _check_names(saved: Saved, prefix: str, names: set[str]) -> None:
    there = {name for name in saved.tensors if _kind(name) == prefix}
    if wrong := sorted(there ^ names):
        where = "it has" if wrong[0] in there else "it lacks"
        raise ValueError(f"{saved.path} is of another model: {where} {wrong[0]}")


def _check_options(saved: Saved, tensors: Mapping[str, Tensor]) -> None:
    """Raise a ValueError if a head has other options that change its logits: they are tensors of its state."""
    own = {name: tensor for name, tensor in tensors.items() if name.endswith(f".{KEY}")}
    found = {name: torch.empty(saved.tensors[name][1], dtype=saved.tensors[name][0]) for name in own}
    load_tensors(saved, found)
    for name, tensor in own.items():
        if what := difference(decode(found[name]), decode(tensor)):
            raise ValueError(f"{saved.path} is of another head: {what}")


def _named_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[tuple[str, Tensor]]]:
    """The parameters of each group with their names."""
    names = {id(p): _plain_name(name) for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        if any(id(p) not in names for p in group["params"]):
            raise ValueError("the optimizer has a parameter that the model does not have: was it made before sharding?")
    return [[(names[id(p)], p) for p in group["params"]] for group in optimizer.param_groups]


def _optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors of an optimizer's state by name, and everything plain of its groups and state."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {"groups": [], "state": {}}
    for group, params in zip(optimizer.param_groups, _named_groups(model, optimizer), strict=True):
        options = {key: value for key, value in group.items() if key != "params"}
        options = {key: float(value) if isinstance(value, Tensor) else value for key, value in options.items()}
        plain["groups"].append({"params": [name for name, _ in params], "options": options})
        for name, p in params:
            for key, value in optimizer.state.get(p, {}).items():
                if not isinstance(value, Tensor):
                    plain["state"].setdefault(name, {})[key] = value
                elif key in SUMMED and (groups := groups_of(p)):
                    total = value.clone()
                    dist.all_reduce(total, group=groups[0])
                    tensors[f"optim.{name}.{key}"] = total
                else:
                    tensors[f"optim.{name}.{key}"] = value
    return tensors, plain


def _empty_optimizer_state(saved: Saved, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Tensors for all that a save has of an optimizer, sharded as its parameters; the optimizer is left alone."""
    if saved.optimizer is None:
        raise ValueError(f"{saved.path} holds no state of an optimizer")
    groups = _named_groups(model, optimizer)
    try:
        before = [list(group["params"]) for group in saved.optimizer["groups"]]
    except (KeyError, TypeError):
        raise ValueError(
            f"{saved.path / MANIFEST} is damaged: it does not say what the optimizer's groups are"
        ) from None
    if before != [[name for name, _ in params] for params in groups]:
        raise ValueError(f"{saved.path} has the state of an optimizer with other groups of parameters")
    tensors: dict[str, Tensor] = {}
    for group, params in zip(optimizer.param_groups, groups, strict=True):
        on_device = group.get("capturable") or group.get("fused")
        for name, p in params:
            prefix = f"optim.{name}."
            for full, (dtype, shape) in saved.tensors.items():
                key = full.removeprefix(prefix)
                if not full.startswith(prefix) or "." in key:
                    continue
                if key == "step":  # torch keeps it on the CPU, unless its kernels read it
                    tensors[full] = torch.zeros(shape, dtype=dtype, device=p.device if on_device else "cpu")
                elif shape == tuple(p.shape):
                    tensors[full] = torch.zeros_like(p.detach(), dtype=dtype)
                else:
                    tensors[full] = torch.zeros(shape, dtype=dtype, device=p.device)
    return tensors


def _fill_optimizer(
    saved: Saved, model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    """Put the loaded tensors into an optimizer's state, and the saved options into its groups."""
    assert saved.optimizer is not None
    described, groups = saved.optimizer, _named_groups(model, optimizer)
    for group, params, old in zip(optimizer.param_groups, groups, described["groups"], strict=True):
        for key, value in old["options"].items():
            if isinstance(now := group.get(key), Tensor):
                now.fill_(value)
            elif key in group:
                group[key] = tuple(value) if isinstance(now, tuple) else value
        for name, p in params:
            prefix = f"optim.{name}."
            state = {full.removeprefix(prefix): t for full, t in tensors.items() if full.startswith(prefix)}
            state = {key: t for key, t in state.items() if "." not in key}
            for key in SUMMED:
                if key in state and any(dist.get_rank(group) for group in groups_of(p)):
                    state[key].zero_()  # the first rank has the sum
            state |= described["state"].get(name, {})
            optimizer.state[p].clear()
            optimizer.state[p].update(state)


def _rows_of_ranks(tensor: Tensor) -> Tensor:
    """A tensor that differs from rank to rank as one with a row for each."""
    row = tensor.detach().clone()[None]
    if not dist.is_initialized():
        return row
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh(tensor.device.type, (dist.get_world_size(),))
    return DTensor.from_local(row, mesh, [Shard(0)], run_check=False)


# ------------------------------------------------------------------------------------------------ ranks and errors


def everywhere(work: Callable[[], T]) -> T:
    """What `work` returns here. All ranks call it; what it raises on one of them, all raise."""
    result, problem = _tried(work)
    if wrong := next(filter(None, gathered([problem])), None):
        raise wrong
    return result  # type: ignore[return-value]


def on_rank_0(work: Callable[[], T]) -> T:
    """What `work` returns, or raises, on the first rank, where alone it is called."""
    answers = gathered([_tried(work) if _rank() == 0 else (None, None)])
    result, problem = answers[0]
    if problem:
        raise problem
    return result  # type: ignore[no-any-return]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _tried(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except (OSError, ValueError, TypeError) as error:
        return None, error


@contextlib.contextmanager
def _in_one_sentence(what: str) -> Iterator[None]:
    """DCP tells all ranks of an error on one, with a traceback of many lines."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        rank, (first, _) = next(iter(error.failures.items()))
        if isinstance(first, RuntimeError):  # of a rank that cannot be reached
            raise first from None
        kind = OSError if isinstance(first, OSError) else ValueError
        raise kind(f"{what}: on rank {rank}, {_one_line(first)}") from None
    except SafetensorError as error:
        raise ValueError(f"{what}: {_one_line(error)}") from None


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """DCP warns of a process that is alone, and of an empty folder that it may write to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__} {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:200]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    if os.name == "posix":  # a rename is safe from a power cut once the folder is on the disk
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
