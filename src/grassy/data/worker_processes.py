"""Worker processes that load images: how many, and how they start, compute and end."""

import contextlib
import ctypes
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

CGROUP = Path("/sys/fs/cgroup")


def processors() -> int:
    """The number of CPU cores that this process may use; more workers would not help."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, _quota())))


def _quota() -> float:
    """The CPU time per second that a container may use, by its cgroup; infinite without a limit.

    Kubernetes and Docker limit containers this way. The process still sees all cores, and is throttled beyond its time.
    """
    for names in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):  # versions 2 and 1
        with contextlib.suppress(OSError, ValueError):  # ValueError: "max", which is no limit
            quota, period = map(int, " ".join((CGROUP / name).read_text() for name in names).split())
            return quota / period if quota > 0 and period > 0 else math.inf  # -1: no limit, in version 1
    return math.inf


def worker_options(workers: int, device: torch.device, collate: Callable[[Any], Any]) -> dict[str, Any]:
    """Options of a DataLoader that yields `Batch`es."""
    options: dict[str, Any] = {"collate_fn": collate, "num_workers": workers}
    if workers:  # persistent, because starting them costs seconds
        options |= {"persistent_workers": True, "worker_init_fn": _start_worker}
        if sys.platform == "linux":  # Python 3.14 defaults to forkserver, but _start_worker needs fork
            options["multiprocessing_context"] = "fork"
    if device.type == "cuda":
        options |= {"pin_memory": True}
    return options


def _start_worker(_: int) -> None:
    torch.set_num_threads(1)
    keep_memory()
    # Only the main process handles Ctrl-C and SIGTERM, though Slurm, systemd and Kubernetes send them to all processes.
    # It still needs its workers then, and ends them by its own SIGTERM if necessary. This needs fork:
    # the main process is then the parent, and there are no threads yet that would let a SIGTERM through.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with_parent, daemon=True).start()


def keep_memory() -> None:
    """Let glibc keep freed memory. By default it returns arrays of an image's size to the system.

    Each page of the next array is a page fault then, with which some operations take four times as long.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, the largest that is allowed
            libc.mallopt(-1, 2**27)  # M_TRIM_THRESHOLD


def _end_with_parent() -> None:
    """Exit on a SIGTERM from the parent; ignore those of others."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread, as in a worker: several threads on one small image take many times as long."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
