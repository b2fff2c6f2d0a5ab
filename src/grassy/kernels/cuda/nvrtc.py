"""CUDA C++ at run time: compiled by NVRTC, which comes with torch for GPUs, and launched through the driver.

It needs no compiler, headers or build step. Compiled kernels are cached on disk (compile_cache.py), since compiling
takes seconds.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grassy.kernels import compile_cache


class Kernel:
    """A kernel function of a module that is loaded on a device."""

    def __init__(self, module: ctypes.c_void_p, name: str) -> None:
        self._driver, self._function = _driver(), ctypes.c_void_p()
        _check(self._driver.cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()))
        self._shared = 48 * 1024

    def launch(self, blocks: int, threads: int, shared: int, arguments: Sequence[Any]) -> None:
        """Launch on torch's current stream. Tensors become pointers, floats doubles; ints and structs stay."""
        self._allow(shared)
        values = [_as_c(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        size = (blocks, 1, 1, threads, 1, 1, shared)
        _check(self._driver.cuLaunchKernel(self._function, *size, stream, pointers, None))

    def resident_clusters(self, cluster: int, threads: int, shared: int) -> int:
        """Return how many clusters of `cluster` thread blocks the device holds at once."""
        self._allow(shared)
        dimension = _LaunchAttribute(id=4, value=(ctypes.c_uint * 16)(cluster, 1, 1))  # CLUSTER_DIMENSION
        size = (ctypes.c_uint * 7)(cluster, 1, 1, threads, 1, 1, shared)
        config = _LaunchConfig(size, None, ctypes.pointer(dimension), 1)
        count = ctypes.c_int()
        if cluster > 1:
            query = self._driver.cuOccupancyMaxActiveClusters
            _check(query(ctypes.byref(count), self._function, ctypes.byref(config)))
            return count.value
        query = self._driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
        _check(query(ctypes.byref(count), self._function, threads, ctypes.c_size_t(shared)))
        return count.value * torch.cuda.get_device_properties().multi_processor_count

    def _allow(self, shared: int) -> None:
        if shared > self._shared:
            dynamic_shared_memory = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _check(self._driver.cuFuncSetAttribute(self._function, dynamic_shared_memory, shared))
            self._shared = shared


def load(binary: bytes, names: Sequence[str]) -> list[Kernel]:
    """Load functions of a compiled module on the current device."""
    torch.zeros((), device="cuda")  # makes the CUDA context of the device current in this thread
    module = ctypes.c_void_p()
    _check(_driver().cuModuleLoadData(ctypes.byref(module), binary))
    return [Kernel(module, name) for name in names]


def _check(status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA: {(text.value or b'unknown error').decode()} ({status})")


class _LaunchAttribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig: grid size, block size and bytes of shared memory, stream, attributes."""

    _fields_ = (
        ("size", ctypes.c_uint * 7),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("count", ctypes.c_uint),
    )


def _as_c(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, ctypes.Structure):
        return argument
    return ctypes.c_int(argument) if isinstance(argument, int) else ctypes.c_double(argument)


def compile_kernels(
    source: str, names: Sequence[str], defines: dict[str, int], capability: tuple[int, int]
) -> list[Kernel]:
    """Compile the kernels `names` of a CUDA C++ source for the current device.

    Raises RuntimeError with the log of the compiler.
    """
    library = _nvrtc()
    options = [f"-D{key}={value}" for key, value in sorted(defines.items())]
    options += [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", "--std=c++17"]
    version = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(version[0]), ctypes.byref(version[1]))
    text = "\n".join([source, *options, f"{version[0].value}.{version[1].value}"])
    file = f"{names[0]}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.cubin"
    with contextlib.suppress(OSError, RuntimeError):  # not cached, unreadable or not loadable
        return load((compile_cache.folder() / file).read_bytes(), names)
    binary = _compiled(library, source, options)
    # If the cache cannot be written, the next process compiles again.
    with contextlib.suppress(OSError, RuntimeError), compile_cache.written_whole(file) as path:
        path.write_bytes(binary)
    return load(binary, names)


def _compiled(library: ctypes.CDLL, source: str, options: list[str]) -> bytes:
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"grassy.cu", 0, None, None)
    words = [option.encode() for option in options]
    status = library.nvrtcCompileProgram(program, len(words), (ctypes.c_char_p * len(words))(*words))
    get_size, get = library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN
    if status:
        get_size, get = library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog
    get_size(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    get(program, buffer)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    if status:
        raise RuntimeError(f"NVRTC: {buffer.value.decode(errors='replace')}")
    return buffer.raw


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """Load NVRTC from torch's packages or the CUDA toolkit. Raises OSError if there is none."""
    name = f"libnvrtc.so.{str(torch.version.cuda).partition('.')[0]}"
    package = importlib.util.find_spec("nvidia")
    folders = list(package.submodule_search_locations or []) if package else []
    beside = [str(path) for folder in folders for path in sorted(Path(folder).glob(f"*/lib/{name}"))]
    for candidate in [*beside, name]:
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise OSError(f"{name} was not found")
