"""The step on a CPU with its two passes over the data in C++ (native.cpp): 1.5 to 2 times as fast as plain torch.

Optional: it is compiled at first use, if there is a compiler, into the user's cache folder ($GRASSY_CACHE, or
~/.cache/grassy). Without one, and for tensors that it does not take, the reference does the work.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grassy.ops import reference
from grassy.ops.reference import subspace_logits

__all__ = ["geodesic_step", "subspace_logits", "unavailable", "worth_it"]

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-fno-math-errno")
#: Below this number of elements a step takes well under a millisecond either way.
WORTH_COMPILING_FOR = 2**20


def worth_it(weight: Tensor) -> bool:
    """Whether `impl="auto"` should use this for such a weight."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.numel() >= WORTH_COMPILING_FOR
        and unavailable() is None
    )


def unavailable() -> str | None:
    """Why this cannot be used here, or None if it can. The first call compiles, which takes some seconds."""
    return _library()[1]


def geodesic_step(
    weight: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None,
    lr: float | Tensor,
    momentum: float | Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`reference.geodesic_step` with the passes over the data replaced."""
    taken = [tensor for tensor in (weight, grad, momentum_buffer) if tensor is not None]
    if all(t.device.type == "cpu" and t.dtype == torch.float32 and t.is_contiguous() for t in taken):
        reason = unavailable()
        if reason is not None:
            raise RuntimeError(f"impl='native' cannot be used here: {reason}")
        options |= {"tangent": _tangent, "combine": _combine}
    return reference.geodesic_step(weight, grad, momentum_buffer, lr, momentum, **options)


def _tangent(w: Tensor, d: Tensor, m: Tensor | None, momentum: float | Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    classes, k, _ = w.shape
    gram_w, a = torch.empty(2, classes, k, k)
    d = d.contiguous()
    _functions().tangent(
        *map(_address, (h, gram_w, a, w, d)),
        None if m is None else _address(m),
        ctypes.c_float(float(momentum)),
        *map(ctypes.c_long, w.shape),
        torch.get_num_threads(),
    )
    return gram_w, a


def _combine(p: Tensor, w: Tensor, q: Tensor, h: Tensor, _: Tensor) -> Tensor:
    p, q, h = p.contiguous(), q.contiguous(), h.contiguous()
    _functions().combine(*map(_address, (w, p, q, h)), *map(ctypes.c_long, w.shape), torch.get_num_threads())
    return w


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _functions() -> ctypes.CDLL:
    library, reason = _library()
    assert library is not None, reason
    return library


@functools.cache
def _library() -> tuple[ctypes.CDLL | None, str | None]:
    """The compiled library, or None and the reason."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)
    if compiler is None:
        return None, "no C++ compiler was found"
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
        # -march=native: a library compiled on one machine may not run on another that shares the folder.
        key = hashlib.sha256(b"".join([SOURCE.read_bytes(), version, " ".join(FLAGS).encode(), _cpu()])).hexdigest()[
            :16
        ]
        folder = Path(os.environ.get("GRASSY_CACHE", Path.home() / ".cache" / "grassy"))
        library = folder / f"native-{key}.so"
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                built = Path(temporary) / "native.so"
                subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(built)], capture_output=True, check=True)
                built.replace(library)  # whole or not at all, also if two processes do this at once
        return ctypes.CDLL(str(library)), None
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
