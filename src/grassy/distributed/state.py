"""The state of a model on many ranks: all of them save it in parallel, and any number of them loads it.

Tensors lie in safetensors files, which torch's distributed checkpoint (DCP) writes and reads: each rank writes its
shards, and reads what it needs of all. DCP's own format is not used: it unpickles. `grassy.distributed.saves` has the
folders and their checks, `grassy.distributed.named_tensors` the names of the tensors.
"""

import contextlib
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn

from grassy.distributed.named_tensors import (
    check_names,
    dtypes_and_shapes,
    empty_optimizer_state,
    fill_optimizer,
    kind_of,
    model_tensors,
    optimizer_state,
    rows_of_ranks,
)
from grassy.distributed.processes import everywhere, gathered, on_rank_0, own_rank, world_size
from grassy.distributed.saves import FORMAT, Saved, begin, finish, one_line, open_state, written_here
from grassy.heads.state import KEY, decode, difference
from grassy.shards import local


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
    tensors = {**model_tensors("model", model), **model_tensors("average", average)}
    described = None
    if optimizer is not None:
        states, described = optimizer_state(model, optimizer)
        tensors |= states
    for name, tensor in (own or {}).items():
        tensors[f"own.{name}"] = rows_of_ranks(tensor)
    return save_tensors(Path(folder), tensors, {"plain": dict(plain or {}), "optimizer": described}, keep)


def save_tensors(folder: Path, tensors: Mapping[str, Tensor], plain: Mapping[str, Any], keep: int = 1) -> Path:
    """Write tensors, sharded or the same on all ranks, and what JSON can hold, as a new save in `folder`."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    shapes = everywhere(lambda: dtypes_and_shapes(tensors))
    content = {"format": FORMAT, "ranks": world_size(), "tensors": shapes, **plain}
    target, part = on_rank_0(lambda: begin(folder, content))
    # safetensors builds a file in memory first: a file for each kind of tensors needs less of it than one for all.
    kinds = sorted({kind_of(name) for name in tensors})
    places = {name: 1 + kinds.index(kind_of(name)) for name in tensors}
    try:
        writer = HuggingFaceStorageWriter(str(part), places, save_distributed=True)
        with _in_one_sentence(f"{target} could not be written"), _without_warnings():
            dcp_save(dict(tensors), storage_writer=writer, no_dist=not dist.is_initialized())
        written = gathered([everywhere(lambda: written_here(part, shapes))])
        on_rank_0(lambda: finish(part, target, content, written, keep))
    except BaseException:
        if own_rank() == 0:
            shutil.rmtree(part, ignore_errors=True)
        raise
    return target


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
    tensors = {**model_tensors("model", model), **model_tensors("average", average)}
    wanted = [("model", model), *([] if average is None else [("average", average)])]
    for prefix, _ in wanted:
        check_names(saved, prefix, {name for name in tensors if kind_of(name) == prefix})
    _check_options(saved, tensors)
    if optimizer is not None:
        tensors |= empty_optimizer_state(saved, model, optimizer)
    rows: dict[str, Tensor] = {}
    if own is not None and saved.ranks == world_size():
        rows = {f"own.{name}": rows_of_ranks(tensor) for name, tensor in own.items()}
        check_names(saved, "own", set(rows))
    load_tensors(saved, {**tensors, **rows})
    for name, tensor in (own or {}).items():
        if f"own.{name}" in rows:
            tensor.copy_(local(rows[f"own.{name}"])[0])
    if optimizer is not None:
        fill_optimizer(saved, model, optimizer, tensors)
    return saved.plain


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


def _check_options(saved: Saved, tensors: Mapping[str, Tensor]) -> None:
    """Raise a ValueError if a head has other options that change its logits: they are tensors of its state."""
    own = {name: tensor for name, tensor in tensors.items() if name.endswith(f".{KEY}")}
    found = {name: torch.empty(saved.tensors[name][1], dtype=saved.tensors[name][0]) for name in own}
    load_tensors(saved, found)
    for name, tensor in own.items():
        if what := difference(decode(found[name]), decode(tensor)):
            raise ValueError(f"{saved.path} is of another head: {what}")


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
        raise kind(f"{what}: on rank {rank}, {one_line(first)}") from None
    except SafetensorError as error:
        raise ValueError(f"{what}: {one_line(error)}") from None


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """DCP warns of a process that is alone, and of an empty folder that it may write to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
