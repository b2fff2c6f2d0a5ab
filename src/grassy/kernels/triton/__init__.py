"""Kernels in Triton, for the head and for the step; Triton itself is optional and loaded when it is first used."""

import functools
import importlib.util
import os

import torch
from torch.utils._python_dispatch import _disable_current_modes

#: Found out once: torch.compile cannot look for modules.
INSTALLED = importlib.util.find_spec("triton") is not None


def unavailable(device: torch.device) -> str | None:
    """Why no kernel in Triton can run on a device; None if they can."""
    if not INSTALLED:
        return "triton is not installed (it comes with torch for GPUs)"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device.type != "cuda":
        return "it needs a GPU, or TRITON_INTERPRET=1 in the environment from the start"
    if torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return None  # nothing can be tried out here; by now kernels have run, as a rule
    try:
        return _failure_of_a_launch(device)
    except torch.OutOfMemoryError:
        return None  # which says nothing about Triton


@functools.cache
def _failure_of_a_launch(device: torch.device) -> str | None:
    """Triton needs a C compiler, for one, and the headers of Python: only a launch shows whether they are there."""
    try:
        from grassy.kernels.triton import head  # imports triton

        with _disable_current_modes():  # fake tensors cannot be launched on
            head.unit(torch.ones(1, 1, dtype=torch.float32, device=device), torch.float32)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"Triton fails: {' '.join(str(error).split())[:200]}"
    return None
