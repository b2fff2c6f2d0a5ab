"""The processes of a run: joining them under torchrun, their devices, and simple collectives."""

import contextlib
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grassy.distributed.rendezvous import UNKNOWN, Meeting, meet

#: Seconds that a process waits for the others.
TIMEOUT = 600.0
#: Errors that processes share, to stop together. Any other error is a bug and ends one process.
FORESEEN = (OSError, ValueError, TypeError)
_meetings: list[Meeting] = []

T = TypeVar("T")


@dataclass(frozen=True)
class Process:
    """Device, rank and world size of this process."""

    device: torch.device
    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0


@contextlib.contextmanager
def joined(device: str = "auto", timeout: float = TIMEOUT) -> Iterator[Process]:
    """Join the processes that torchrun started, or be the only one.

    `timeout` is the number of seconds that every collective waits for the other processes before it raises.
    """
    if not 1 <= timeout <= 10**6:
        raise ValueError(f"timeout must be between 1 and 1,000,000 seconds, got {timeout:g}")
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield Process(find_device(device))
        return
    chosen = find_device(device, int(os.environ.get("LOCAL_RANK", 0)))
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    started_here = not dist.is_initialized()
    if started_here:
        # gloo, next to NCCL, lets processes agree through CPU tensors without synchronising with a GPU.
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
        try:
            _start(backend, timeout)
        except RuntimeError as error:  # torch's message has many lines
            raise ConnectionError(f"cannot join the other processes: {str(error).splitlines()[0][:200]}") from error
    try:
        yield Process(chosen, dist.get_rank(), dist.get_world_size())
    finally:
        if started_here:
            dist.destroy_process_group()


def _start(backend: str, timeout: float) -> None:
    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout)}
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:  # otherwise torch names the missing variable
        _meetings.append(meeting := meet(timeout))
        options |= {"store": meeting.store, "rank": meeting.rank, "world_size": meeting.world_size}
    dist.init_process_group(backend, **options)


def summed(values: Tensor) -> Tensor:
    """Sum the values over all processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def gathered(item: list[Any]) -> list[Any]:
    """Return the concatenated lists of all processes."""
    if not dist.is_initialized():
        return item
    lists: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lists, item)
    return [element for elements in lists for element in elements]


def everywhere(work: Callable[[], T]) -> T:
    """Return the result of `work`, or raise its error on all ranks if one rank fails.

    All ranks must call it, and `work` must not wait for other ranks. The message begins with the rank that failed,
    unless all fail alike.
    """
    result, problem = _tried(work)
    problems = gathered([problem])
    if (rank := next((rank for rank, each in enumerate(problems) if each), None)) is not None:
        first = problems[rank]
        if len({str(each) for each in problems}) == 1:
            raise first
        kind = next(kind for kind in FORESEEN if isinstance(first, kind))
        raise kind(f"rank {rank} of {len(problems)}: {first}")
    return result  # type: ignore[return-value]


def on_rank_0(work: Callable[[], T]) -> T:
    """Call `work` on rank 0 only, and return its result or raise its error on all ranks."""
    answers = gathered([_tried(work) if own_rank() == 0 else (None, None)])
    result, problem = answers[0]
    if problem:
        raise problem
    return result


def own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _tried(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except FORESEEN as error:
        return None, _portable(error)


def _portable(error: Exception) -> Exception:
    """The error, or a plain one of its kind if other processes could not receive it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # a class may refuse in any way
        kind = next(kind for kind in FORESEEN if isinstance(error, kind))
        return kind(str(error))
    return error


def anywhere(flag: int, device: torch.device) -> int:
    """Return the largest flag of all processes, 0 if none is set. All of them must call it together."""
    return int(largest(torch.tensor(int(flag), device=device))) if dist.is_initialized() else flag


def device_to_agree_on(device: torch.device) -> torch.device:
    """Return the device for small tensors that processes exchange: the CPU, unless their group supports GPUs only."""
    alone = not dist.is_initialized()
    return torch.device("cpu") if alone or "cpu:" in dist.get_backend_config() else device


def largest(value: Tensor) -> Tensor:
    """Return the largest value of all processes."""
    if dist.is_initialized():
        value = value.clone()
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value


@contextlib.contextmanager
def averaged_buffers(*models: nn.Module) -> Iterator[None]:
    """Context manager in which batch statistics are averaged over all processes. It restores them on exit."""
    if not dist.is_initialized():
        yield
        return
    buffers = [buffer for model in models for buffer in floating_buffers(model).values()]
    own = [buffer.clone() for buffer in buffers]
    for buffer in buffers:
        dist.all_reduce(buffer)
        buffer /= dist.get_world_size()
    try:
        yield
    finally:
        for buffer, before in zip(buffers, own, strict=True):
            buffer.copy_(before)


def floating_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the floating-point buffers, such as batch statistics, by name. Counters are equal in all processes."""
    return {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}


def missing_processes() -> str:
    """Return the beginning of a sentence that names the processes that do not answer, after a failed collective."""
    return _meetings[-1].missing() if _meetings else UNKNOWN


def find_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the device of that name. "auto" is a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"unknown device {name!r}: give auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("device cuda was asked for, but torch sees no GPU here")
        return torch.device("cuda", device.index if device.index is not None else local_rank)
    if device.type != "cpu" and not (device.type == "mps" and torch.backends.mps.is_available()):
        raise ValueError(f"unknown device {name!r}: give auto, cpu, cuda or cuda:N")
    return device
