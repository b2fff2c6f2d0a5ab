"""Triton kernels for the head and the step. Triton is optional and imported at first use."""

import functools
import importlib.util
import os

import torch
from torch.utils._python_dispatch import _disable_current_modes

#: Determined at import, since torch.compile cannot trace find_spec.
INSTALLED = importlib.util.find_spec("triton") is not None


def unavailable(device: torch.device) -> str | None:
    """Return why Triton kernels cannot run on a device, or None if they can."""
    if not INSTALLED:
        return "triton is not installed (it comes with torch for GPUs)"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device.type != "cuda":
        return "it needs a GPU, or TRITON_INTERPRET=1 in the environment from the start"
    if torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return None  # cannot be tested here; usually kernels have run before
    try:
        return _failure_of_a_launch(device)
    except torch.OutOfMemoryError:
        return None  # says nothing about Triton


@functools.cache
def _failure_of_a_launch(device: torch.device) -> str | None:
    """Launch a small kernel and return the error, or None. Triton needs a C compiler and Python's headers."""
    try:
        from grassy.kernels.triton import head  # imports triton

        with _disable_current_modes():  # fake tensors have no memory
            head.unit(torch.ones(1, 1, dtype=torch.float32, device=device), torch.float32)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"Triton fails: {' '.join(str(error).split())[:200]}"
    return None
