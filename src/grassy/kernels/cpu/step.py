"""The step on a CPU in C++ (step.cpp), for float32: two to four times as fast as plain torch.

It is compiled at first use if there is a compiler, and cached (compile_cache.py). Otherwise `supports` says why not.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch
from torch import Tensor

from grassy.kernels import compile_cache
from grassy.kernels.step_options import StepOptions

__all__ = ["WORTH_COMPILING_FOR", "geodesic_step", "supports", "unavailable"]

SOURCE = Path(__file__).with_name("step.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-fno-math-errno")
#: Smallest number of elements for which compiling pays. Below, plain torch takes well under a millisecond.
WORTH_COMPILING_FOR = 2**20


def supports(weight: Tensor, grad: Tensor, momentum_buffer: Tensor | None, options: StepOptions) -> str | None:
    """Return why this step cannot be made in C++, or None if it can. The first call compiles, for some seconds."""
    tensors = [tensor for tensor in (weight, grad, momentum_buffer) if tensor is not None]
    if not all(t.device.type == "cpu" and t.dtype == torch.float32 and t.is_contiguous() for t in tensors):
        return "it supports contiguous float32 weights, gradients and momenta on a CPU"
    if options.retraction != "geodesic" or options.max_angle is not None:
        return "it supports retraction='geodesic' without max_angle"
    return unavailable()


def unavailable() -> str | None:
    """Return why the C++ code cannot be compiled or loaded here, or None if it can."""
    return _library()[1]


def geodesic_step(
    weight: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None,
    lr: float | Tensor,
    momentum: float | Tensor,
    options: StepOptions,
    counts: Tensor,
    skip: Tensor | None = None,
) -> None:
    """Make the step in C++, for tensors that `supports` accepts. The caller handles `skip`."""
    library, _ = _library()
    assert library is not None
    assert skip is None
    classes, k, n = weight.shape
    room = library.scratch_size(ctypes.c_long(k), ctypes.c_long(n))  # floats per thread: two classes and a little
    threads = max(1, min(torch.get_num_threads(), weight.numel() // (11 * room)))  # below a tenth of the weight
    scratch = torch.empty(threads, room, dtype=torch.float32, device=weight.device)
    library.step(
        _address(weight),
        _address(grad),
        None if momentum_buffer is None else _address(momentum_buffer),
        *map(ctypes.c_long, (classes, k, n)),
        *map(ctypes.c_float, (float(lr), float(momentum))),
        int(options.maximize),
        int(options.transport == "parallel"),
        _address(scratch),
        _address(counts),
        threads,
    )
    # As torch's in-place operations do, so that autograd notices the change.
    torch.autograd.graph.increment_version([weight] if momentum_buffer is None else [weight, momentum_buffer])


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


@functools.cache
def _library() -> tuple[ctypes.CDLL | None, str | None]:
    """Return the compiled library, or None and the reason."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)
    if compiler is None:
        return None, "no C++ compiler was found"
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
        # -march=native: a library compiled on one machine may not run on another that shares the folder.
        parts = [SOURCE.read_bytes(), version, " ".join(FLAGS).encode(), _cpu()]
        key = hashlib.sha256(b"".join(parts)).hexdigest()[:16]
        library = compile_cache.folder() / f"step-{key}.so"
        if not library.exists():
            with compile_cache.written_whole(library.name) as built:
                subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(built)], capture_output=True, check=True)
        functions = ctypes.CDLL(str(library))
        functions.scratch_size.restype = ctypes.c_long
        return functions, None
    except subprocess.CalledProcessError as error:
        return None, f"{compiler} failed: {error.stderr.decode(errors='replace').strip().splitlines()[-1:]}"
    except (OSError, RuntimeError) as error:
        return None, str(error)


def _cpu() -> bytes:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "".join(line for line in lines if line.startswith(("flags", "Features"))).encode()
    except OSError:
        return f"{platform.machine()} {platform.processor()}".encode()
