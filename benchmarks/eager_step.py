"""What `RiemannianSGD.step()` costs outside of a CUDA graph, where Python launches its kernel.

    python -m benchmarks.eager_step                      the time of a step and of its host part, on a GPU
    python -m benchmarks.eager_step --before SRC         beside another version, whose folder `src` is SRC

Without a GPU only the host part can be measured. Tensors then say that they are on a GPU, and the launch is a call of a
C function that does nothing. The versions take turns, each in a process of its own.
"""

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

SHAPE = (1000, 8, 2048)
STEPS = 300  # in a turn


class OnGpu(torch.Tensor):
    """A tensor on the CPU that says that it is on a GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda _: torch.device("cuda", 0))  # type: ignore[assignment]


def without_gpu() -> None:
    """Let the CUDA step believe in an H200, and launch nothing."""
    from grassy.kernels.cuda import nvrtc
    from grassy.kernels.cuda import step as cuda

    nothing = ctypes.CDLL("libm.so.6").feclearexcept  # returns 0, as a launch does
    kernel = nvrtc.Kernel.__new__(nvrtc.Kernel)
    kernel._driver, kernel._function, kernel._shared = SimpleNamespace(cuLaunchKernel=nothing), ctypes.c_void_p(), 2**20
    kernel.resident_clusters = lambda *_: 1000  # type: ignore[method-assign]
    nvrtc.compile_kernels = lambda *_: [kernel]
    torch.version.cuda = "13.0"
    for name, value in {
        "is_available": True,
        "get_device_capability": (9, 0),
        "get_device_properties": SimpleNamespace(L2_cache_size=60 * 2**20, multi_processor_count=132),
        "is_current_stream_capturing": False,
        "current_stream": SimpleNamespace(cuda_stream=0),
        "device": nullcontext(),
    }.items():
        setattr(torch.cuda, name, value if callable(value) else lambda *_, value=value: value)
    cuda._failure.cache_clear()


def prepared() -> Any:
    """A step to be called."""
    from grassy import RiemannianSGD, geometry

    on_gpu = torch.cuda.is_available()
    like = (lambda tensor: tensor) if on_gpu else (lambda tensor: tensor.as_subclass(OnGpu))
    shape = SHAPE if on_gpu else (10, *SHAPE[1:])  # the data are not looked at
    weight = like(geometry.random_subspace(*shape, device="cuda" if on_gpu else "cpu")).requires_grad_()
    optimizer = RiemannianSGD([weight], lr=1e-4)
    weight.grad = like(1e-3 * torch.randn_like(weight.detach()))
    if not on_gpu:
        optimizer.state[weight]["momentum_buffer"] = like(torch.zeros_like(weight.detach()))
        optimizer.state[weight]["counts"] = like(torch.zeros(2, dtype=torch.int64))
        without_gpu()
    return optimizer.step


def turn(step: Any) -> dict[str, float]:
    """Microseconds of a step, until the device has done all, and of its host part, each alone."""
    synchronize = torch.cuda.synchronize if torch.cuda.device_count() else lambda: None
    synchronize()
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
    synchronize()
    whole = 1e6 * (time.perf_counter() - begin) / STEPS
    host = []
    for _ in range(STEPS):
        synchronize()
        before = time.perf_counter()
        step()
        host.append(1e6 * (time.perf_counter() - before))
    return {"step": whole, "host": statistics.median(host)}


def serve() -> None:
    """Measure a turn for each line that comes in."""
    torch.set_num_threads(1)
    step = prepared()
    turn(step)
    for _ in sys.stdin:
        found = turn(step)
        print(found["step"], found["host"], flush=True)


def main() -> None:
    from benchmarks.gpu import machine, save

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="folder src of the version to compare with")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve()
    root = Path(__file__).parent.parent
    sources = {"now": root / "src"} | ({"before": args.before.resolve()} if args.before else {})
    command = [sys.executable, "-m", "benchmarks.eager_step", "--serve"]
    servers = {
        name: subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(source)},
        )
        for name, source in sources.items()
    }
    times: dict[str, dict[str, list[float]]] = {name: {"step": [], "host": []} for name in servers}
    for _ in range(args.turns):
        for name, server in servers.items():
            assert server.stdin is not None
            assert server.stdout is not None
            server.stdin.write("\n")
            server.stdin.flush()
            step, host = server.stdout.readline().split()
            times[name]["step"].append(float(step))
            times[name]["host"].append(float(host))
    for server in servers.values():
        server.communicate()
    medians = {name: {what: statistics.median(all_) for what, all_ in of.items()} for name, of in times.items()}
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    for name, found in medians.items():
        whole = f"{found['step']:.1f} µs, of which " if kind == "cuda" else ""
        print(f"{name:7} {whole}{found['host']:.1f} µs on the host")
    if args.before:
        ratios = (f"{medians['before'][what] / medians['now'][what]:.2f} ({what})" for what in ("step", "host"))
        print("before / now:", ", ".join(ratios))
    result = {**machine(kind), "shape": SHAPE, "microseconds": times, "medians": medians}
    save(result, args.output or Path(f"runs/bench/eager_step_{kind}.json"))


if __name__ == "__main__":
    main()
