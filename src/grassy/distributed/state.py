"""The state of a model on many ranks: all ranks save it in parallel, and any number of ranks can load it.

torch's distributed checkpoint (DCP) writes and reads the tensors in safetensors files. Each rank writes its shards and
reads what it needs. DCP's own format is not used, because it unpickles. `grassy.distributed.saves` handles the folders
and their checks, `grassy.distributed.named_tensors` the names of the tensors.
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
from grassy.heads.saved_options import KEY, decode, difference
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
    """Save the state of a run atomically in a new subfolder of `folder`. All ranks must call it together.

    Parameters may be DTensors, or equal on all ranks. The state of the optimizer is stored by parameter name.

    Args:
        folder: Folder of the saves.
        model: The model, wrapped or not.
        optimizer: Its optimizer.
        plain: Other values, which must be valid JSON. Those of rank 0 are stored.
        average: A second model to save, such as an `AveragedModel`.
        own: Tensors with different values on each rank. They can be restored on the same number of ranks only.
        keep: How many saves to keep, including this one. Older ones are removed after this one is complete.

    Returns:
        The path of the save.

    Raises:
        ValueError: If `keep` is invalid or a tensor has an unsupported dtype.
        TypeError: If `plain` is not valid JSON.
        OSError: If the save could not be written.
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
    return _save_tensors(Path(folder), tensors, {"plain": dict(plain or {}), "optimizer": described}, keep)


def _save_tensors(folder: Path, tensors: Mapping[str, Tensor], plain: Mapping[str, Any], keep: int = 1) -> Path:
    """Write tensors, sharded or equal on all ranks, and JSON values as a new save in `folder`."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    shapes = everywhere(lambda: dtypes_and_shapes(tensors))
    content = {"format": FORMAT, "ranks": world_size(), "tensors": shapes, **plain}
    target, part = on_rank_0(lambda: begin(folder, content))
    # safetensors builds a file in memory first, so one file per kind of tensor needs less memory than one for all.
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
    """Load the newest save in `folder` in place. All ranks must call it together, and their number may differ.

    Args:
        folder: Folder of the saves, or one save.
        model: The model, wrapped or not.
        optimizer: Its optimizer. None ignores the saved state.
        average: The second model of the save.
        own: Tensors to restore if the number of ranks is the same. None ignores those of the save.

    Returns:
        The `plain` values of the save.

    Raises:
        ValueError: If a file is damaged, missing or foreign, or the save is of another model. It is raised on all
            ranks, and nothing is loaded.
    """
    saved = open_state(Path(folder))
    tensors = {**model_tensors("model", model), **model_tensors("average", average)}
    wanted = [("model", model), *([] if average is None else [("average", average)])]
    for prefix, _ in wanted:
        check_names(saved, prefix, {name for name in tensors if kind_of(name) == prefix})
    check_options_of_heads(saved, tensors)
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
    """Fill tensors, sharded or not, with the saved ones. With `alone`, only this process does so."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

    for name, tensor in tensors.items():
        dtype, shape = saved.tensors.get(name, (None, ()))
        if dtype is None:
            raise ValueError(f"{saved.path} has no {name}: does it belong to another model?")
        if (dtype, shape) != (tensor.dtype, tuple(tensor.shape)):
            raise ValueError(
                f"{saved.path} has {name} of shape {list(shape)} in {dtype}, not {list(tensor.shape)} in {tensor.dtype}"
            )
    with _in_one_sentence(f"{saved.path} could not be read"), _without_warnings():
        reader = HuggingFaceStorageReader(str(saved.path))
        detached = {name: tensor.detach() for name, tensor in tensors.items()}
        dcp_load(detached, storage_reader=reader, no_dist=alone or not dist.is_initialized())


def read_saved(saved: Saved, prefix: str) -> dict[str, Tensor]:
    """Read the whole tensors of one kind in this process, by their names without the prefix."""
    names = {name: name.removeprefix(f"{prefix}.") for name in saved.tensors if name.startswith(f"{prefix}.")}
    tensors = {name: torch.empty(saved.tensors[name][1], dtype=saved.tensors[name][0]) for name in names}
    load_tensors(saved, tensors, alone=True)
    return {names[name]: tensor for name, tensor in tensors.items()}


def check_options_of_heads(saved: Saved, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError if the saved options of a head would change its logits. Missing ones are left to others."""
    own = {name: tensor for name, tensor in tensors.items() if name.endswith(f".{KEY}") and name in saved.tensors}
    found = {name: torch.empty(saved.tensors[name][1], dtype=saved.tensors[name][0]) for name in own}
    load_tensors(saved, found)
    for name, tensor in own.items():
        if what := difference(decode(found[name]), decode(tensor)):
            raise ValueError(f"{saved.path} belongs to a head with different options: {what}")


@contextlib.contextmanager
def _in_one_sentence(what: str) -> Iterator[None]:
    """Turn an error of DCP, with a long traceback for all ranks, into one sentence."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        rank, (first, _) = next(iter(error.failures.items()))
        if isinstance(first, RuntimeError):  # a rank cannot be reached
            raise first from None
        kind = OSError if isinstance(first, OSError) else ValueError
        raise kind(f"{what}: on rank {rank}, {one_line(first)}") from None
    except SafetensorError as error:
        raise ValueError(f"{what}: {one_line(error)}") from None


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppress DCP's warnings about a single process and about an existing folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
