"""The CUDA kernel of the step on a CPU: its source as C++, with threads as fibers (emulated_gpu.h)."""

import contextlib
import ctypes
import functools
import random
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grassy import geometry as g
from grassy import kernels
from grassy.kernels import StepOptions
from grassy.kernels.cuda import step as cuda_step
from grassy.kernels.cuda import stream as cuda_stream
from grassy.kernels.cuda.step import Plan
from grassy.kernels.cuda.stream import KERNELS

COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

F64, BF16 = torch.float64, torch.bfloat16
LAUNCH = """
extern "C" bool emulate_%s(int blocks, int threads, int shared_bytes, unsigned seed, %s) {
    return launch(blocks, threads, shared_bytes, seed, [=] { %s(%s); });
}
"""


class EmulatedKernel:
    """Takes what `nvrtc.Kernel` takes; `seed` decides in which order threads run."""

    seed = 0

    def __init__(self, function):
        self.emulate = function
        self.emulate.restype = ctypes.c_bool

    def launch(self, blocks, threads, shared_bytes, arguments):
        arguments = [
            ctypes.c_void_p(x.data_ptr()) if isinstance(x, torch.Tensor)
            else ctypes.byref(x) if isinstance(x, ctypes.Structure)
            else ctypes.c_double(x) if isinstance(x, float)
            else ctypes.c_int(x)
            for x in arguments
        ]  # fmt: skip
        assert self.emulate(blocks, threads, shared_bytes, self.seed, *arguments), "threads wait for ever"

    def resident_clusters(self, *_):
        return 2


@functools.cache
def compiled(file, defines):
    """All kernels of a source by name, with stand-ins for what is not C++."""
    kernel = file.read_text()
    assert kernel.count('#include "hardware.cuh"') == 1
    kernel = kernel.replace('#include "hardware.cuh"', '#include "emulated_gpu.h"')
    kernel = kernel.replace("__shared__ int verdict;", "int& verdict = blocks[current->block].verdict;")
    found = re.findall(r"^([a-z]+)\((const .+?)\) {", kernel, re.DOTALL | re.MULTILINE)
    assert len(found) == kernel.count("__global__")
    for name, parameters in found:
        parameters = [" ".join(each.split()) for each in parameters.split(",")]
        heads = "const __grid_constant__ Heads heads"
        passed = ["*heads" if each == heads else re.search(r"\w+$", each)[0] for each in parameters]
        taken = ["const Heads* heads" if each == heads else each for each in parameters]
        kernel += LAUNCH % (name, ", ".join(taken), name, ", ".join(passed))
    options = [f"-D{name}={value}" for name, value in defines]
    options += [f"-I{folder}" for folder in (Path(__file__).parent, file.parent)]
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder, "step.cpp"), Path(folder, "step.so")
        source.write_text(kernel)
        flags = ["-O1", "-std=c++17", "-shared", "-fPIC", "-w", "-Wl,-Bsymbolic"]  # glibc has a `step`, too
        subprocess.run([COMPILER, *flags, *options, str(source), "-o", str(built)], check=True)
        library = ctypes.CDLL(str(built))
        return {name: EmulatedKernel(library[f"emulate_{name}"]) for name, _ in found}


@pytest.fixture
def emulated(monkeypatch):
    """`emulated(plan)`: from now on the step with impl="cuda" is taken by the emulated kernel, divided like that."""
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=2**40))
    macros = lambda p, types: tuple(cuda_step.defines(p, *types[:3]).items())
    monkeypatch.setattr(cuda_step, "_kernel", lambda p, *types: compiled(cuda_step.SOURCE, macros(p, types))["step"])
    streams = lambda *types: compiled(cuda_step.STREAM_SOURCE, macros(cuda_step.STREAMED, types))
    monkeypatch.setattr(cuda_step, "_stream_kernels", lambda *types: [streams(*types)[name] for name in KERNELS])
    monkeypatch.setattr(EmulatedKernel, "seed", 0)

    def use(chosen):
        monkeypatch.setattr(cuda_step, "plan", lambda *_: chosen)

    return use


def step(w, d, m, lr=0.05, skip=None, **options):
    """What the kernel makes of copies of weights and momentum, and its two counts."""
    w, m, counts = w.clone(), None if m is None else m.clone(), torch.zeros(2, dtype=torch.int64)
    cuda_step.geodesic_steps([w], [d], [m], lr, 0.9, StepOptions(**options), [counts], skip)
    return w, m, tuple(counts.tolist())


def expected(w, d, m, lr=0.05, **options):
    w, d, m = (None if x is None else x.to(F64, copy=True) for x in (w, d, m))
    counts = kernels.geodesic_step(w, d, m, lr, 0.9, impl="reference", **options)
    return w, m, tuple(map(int, counts))


def agree(found, right, distance=1e-6):
    (w, m, counts), (w_right, m_right, right_counts) = found, right
    assert counts == right_counts
    spans = [torch.linalg.qr(x.double().mT).Q.mT for x in (w, w_right)]
    assert g.distance(*spans).max() < distance
    assert g.orthonormality_error(w) < 1e-6
    if m is not None:
        assert (m.double() - m_right).abs().max() < 3e-6 * max(1e-3, float(m_right.abs().max()))


def case(shape, scale=0.3):
    generator = torch.Generator().manual_seed(sum(shape))
    w = g.random_subspace(*shape, generator=generator)
    d, m = (scale * torch.randn(shape, generator=generator) for _ in range(2))
    if shape[0] > 1:
        d[1, 0, -1] = float("nan")
    return w, d, g.project(w, m)


# One block and clusters, columns beyond n, pairs with and without a last single class, all sizes of block.
PLANS = [
    ((5, 8, 100), Plan(8, 8, 1, 128, 4, 1)),
    ((3, 7, 131), Plan(7, 8, 2, 96, 4, 1)),
    ((3, 8, 400), Plan(8, 8, 1, 416, 4, 5)),
    ((2, 5, 516), Plan(5, 8, 1, 544, 2, 1)),
    ((2, 8, 128), Plan(8, 8, 4, 32, 4, 1)),
    ((5, 4, 100), Plan(4, 8, 1, 128, 4, 1, 2)),
    ((4, 3, 131), Plan(3, 8, 2, 96, 4, 1, 2)),
    ((3, 1, 7), Plan(1, 8, 1, 32, 4, 1, 2)),
    ((3, 3, 70), Plan(3, 8, 1, 96, 4, 1)),
    ((3, 13, 100), Plan(13, 16, 1, 128, 8, 1)),
    ((2, 16, 192), Plan(16, 16, 2, 96, 4, 1)),
    ((3, 11, 131), Plan(11, 16, 4, 64, 4, 1)),
    ((2, 16, 250), Plan(16, 16, 2, 128, 8, 1)),
    ((2, 27, 72), Plan(27, 32, 1, 96, 8, 1)),
    ((2, 32, 100), Plan(32, 32, 2, 64, 16, 1)),
    ((3, 19, 203), Plan(19, 32, 2, 128, 16, 1)),
]


@pytest.mark.parametrize("transport", ["projection", "parallel"])
@pytest.mark.parametrize(("shape", "chosen"), PLANS, ids=str)
def test_steps_of_all_sizes(shape, chosen, transport, emulated):
    emulated(chosen)
    w, d, m = case(shape)
    for lr in (5e-4, 5e-3, 0.05):  # as in training, and larger turns
        agree(step(w, d, m, lr, transport=transport), expected(w, d, m, lr, transport=transport))


@pytest.mark.parametrize(("shape", "chosen"), PLANS, ids=str)
def test_the_order_in_which_threads_run_does_not_matter(shape, chosen, emulated, monkeypatch):
    """If a barrier is missing, some order shows it."""
    emulated(chosen)
    w, d, m = case(shape)
    for lr in (5e-4, 0.02, 5.0):  # the usual way, that of larger turns, and that with care
        first = step(w, d, m, lr)
        for seed in range(1, 4):
            monkeypatch.setattr(EmulatedKernel, "seed", seed)
            again = step(w, d, m, lr)
            assert torch.equal(again[0], first[0])
            assert torch.equal(again[1], first[1])
            assert again[2] == first[2]


@pytest.mark.parametrize("options", [{"max_angle": 0.01}, {"max_angle": 0.5}, {"maximize": True}], ids=str)
@pytest.mark.parametrize(("shape", "chosen"), [PLANS[i] for i in (1, 4, 7, 11, 13)], ids=str)
def test_options(shape, chosen, options, emulated):
    emulated(chosen)
    w, d, m = case(shape)
    for lr in (1e-3, 5e-3, 0.05):  # small turns, some of them beyond a small angle, and large ones
        agree(step(w, d, m, lr, **options), expected(w, d, m, lr, **options), 1.5e-6)
    agree(step(w, d, None, 0.05, **options), expected(w, d, None, 0.05, **options), 1.5e-6)


@pytest.mark.parametrize("transport", ["projection", "parallel"])
@pytest.mark.parametrize(("shape", "chosen"), [PLANS[i] for i in (0, 4, 8, 11, 13)], ids=str)
def test_huge_gradients_are_no_reason_to_lose_a_class(shape, chosen, transport, emulated):
    """As long as their squares are finite."""
    emulated(chosen)
    w, d, m = case(shape, scale=1.0)
    for size, lr, max_angle in ((1e10, 1e-12, None), (1e10, 1e-12, 0.5), (1e11, 1.0, 0.1), (1e17, 1e-19, None)):
        options = {"transport": transport, "max_angle": max_angle}
        found, right = step(w, size * d, size * m, lr, **options), expected(w, size * d, size * m, lr, **options)
        agree((found[0], found[1] / size, found[2]), (right[0], right[1] / size, right[2]), 1.5e-6)
    moved, buffer, counts = step(w, 1e9 * d, 1e9 * m, 1e-3, transport=transport)  # by millions of radians, cut to 64
    assert counts == expected(w, 1e9 * d, 1e9 * m, 1e-3, transport=transport)[2]
    assert buffer.isfinite().all()
    assert g.orthonormality_error(moved) < 1e-6


@pytest.mark.parametrize(
    "chosen", [Plan(4, 8, 1, 64, 4, 1, 2), Plan(8, 8, 2, 32, 4, 1), Plan(16, 16, 1, 64, 8, 1),
               Plan(25, 32, 2, 32, 16, 1)], ids=str
)  # fmt: skip
def test_bfloat16(chosen, emulated):
    emulated(chosen)
    w, d, m = case((3, chosen.k, 60))
    for lr in (5e-4, 0.05):
        found, right = step(w, d.to(BF16), m.to(BF16), lr), expected(w, d.to(BF16), m.to(BF16), lr)
        assert found[1].dtype == BF16
        agree((found[0], None, found[2]), right)
        assert (found[1].double() - right[1]).abs().max() < 2**-8 * right[1].abs().max()


@pytest.mark.parametrize("momentum", [True, False])
@pytest.mark.parametrize(
    "chosen", [Plan(1, 8, 1, 64, 4, 1, 2), Plan(3, 8, 2, 32, 4, 1, 2), Plan(4, 8, 1, 64, 4, 1, 2)], ids=str
)
def test_two_classes_that_are_taken_together_do_not_feel_each_other(chosen, momentum, emulated):
    """In every pair one class is as usual; the other one is what the name says, before it or after it."""
    emulated(chosen)
    cases = {"usual": 1.0, "lost": float("nan"), "still": 0.0, "faint": 1e-20, "steep": 100.0, "wide": 1000.0}
    names = [name for case in cases for name in (case, "usual", "usual", case)] + ["steep"]  # an odd number
    generator = torch.Generator().manual_seed(0)
    w = g.random_subspace(len(names), chosen.k, 50, generator=generator)
    factors = torch.tensor([cases[name] for name in names]).view(-1, 1, 1)
    d = factors * g.project(w, torch.randn(w.shape, generator=generator)) / 7
    m = factors.nan_to_num(1) * torch.randn(w.shape, generator=generator) / 70 if momentum else None
    moved, buffer, counts = step(w, d, m, 1e-3)
    assert counts == (2, 0)
    for i, name in enumerate(names):
        one = slice(i, i + 1)
        alone, own, _ = step(w[one], d[one], None if m is None else m[one], 1e-3)  # the same as if it were alone
        assert (moved[i] - alone[0]).abs().max() < 3e-7, (i, name)
        assert m is None or (buffer[i] - own[0]).abs().max() <= 1e-6 * own.abs().max(), (i, name)
        assert torch.equal(moved[i], w[i]) or name not in ("lost", "still"), (i, name)
    fine = torch.tensor([name != "lost" for name in names])
    right = expected(w[fine], d[fine], m[fine] if momentum else None, 1e-3)
    agree((moved[fine], buffer[fine] if momentum else None, (0, 0)), right, 1.5e-6)


@pytest.mark.parametrize("chosen", [Plan(4, 8, 1, 64, 4, 1, 2), Plan(8, 8, 2, 32, 4, 1), Plan(16, 16, 1, 64, 8, 1),
                                    Plan(20, 32, 1, 64, 8, 1), Plan(20, 32, 2, 32, 16, 1)], ids=str)  # fmt: skip
@pytest.mark.parametrize("transport", ["projection", "parallel"])
@pytest.mark.parametrize("lr", [1e-3, 0.5])
def test_absent_rows_stay_absent_and_still_classes_still(chosen, lr, transport, emulated):
    emulated(chosen)
    w, d, m = case((5, chosen.k, 60))
    w[2, chosen.k - 2 :] = 0
    d[3], m[3] = 0, 0
    moved, buffer, counts = step(w, d, m, lr, transport=transport)
    assert counts == (1, 0)
    assert (moved[2, chosen.k - 2 :] == 0).all()
    assert (buffer[2, chosen.k - 2 :] == 0).all()
    assert torch.equal(moved[[1, 3]], w[[1, 3]])
    agree((moved, buffer, counts), expected(w, d, m, lr, transport=transport))


@pytest.mark.parametrize("chosen", [Plan(4, 8, 1, 64, 4, 1, 2), Plan(16, 16, 1, 64, 8, 1), Plan(20, 32, 2, 32, 16, 1)],
                         ids=str)  # fmt: skip
@pytest.mark.parametrize("lr", [float("nan"), float("inf")])
def test_a_rate_that_is_not_finite_moves_nothing(chosen, lr, emulated):
    emulated(chosen)
    w, d, m = case((3, chosen.k, 60))
    moved, buffer, counts = step(w, d, m, lr)
    assert counts == (3, 0)
    assert torch.equal(moved, w)
    assert torch.equal(buffer, m)


@pytest.mark.parametrize(
    "chosen", [Plan(3, 8, 2, 64, 4, 1, 2), Plan(8, 8, 1, 96, 4, 1), Plan(17, 32, 1, 96, 8, 1),
               Plan(17, 32, 2, 64, 16, 1)], ids=str
)  # fmt: skip
@pytest.mark.parametrize(("lr", "loads"), [(5e-4, True), (0.05, True), (5e-4, False)])
def test_several_heads_rates_in_tensors_and_a_flag_that_skips(chosen, lr, loads, emulated, monkeypatch):
    emulated(chosen)
    kernel = cuda_step._kernel

    def for_one_head_only(chosen, heads, *types):  # as where a graph is captured that has several for the first time
        if heads > 1:
            raise RuntimeError("CUDA: operation not permitted when stream is capturing (900)")
        return kernel(chosen, heads, *types)

    if not loads:
        monkeypatch.setattr(cuda_step, "_kernel", for_one_head_only)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(cuda_stream, "AT_ONCE", 2)
    sizes = [0, 3, 1, 0, 2]
    weights = [g.random_subspace(size, chosen.k, 70) if size else torch.empty(0, chosen.k, 70) for size in sizes]
    grads = [0.1 * torch.randn_like(w) for w in weights]
    grads[1][2, 0, 0] = float("inf")
    together = [[w.clone() for w in weights], [torch.zeros_like(w) for w in weights]]
    totals = [torch.tensor([5, 7]) for _ in sizes]
    settings = (torch.tensor(lr), torch.tensor(0.9), StepOptions(), totals)
    cuda_step.geodesic_steps(together[0], grads, together[1], *settings, torch.tensor(1.0))
    assert all(torch.equal(a, b) for a, b in zip(together[0], weights, strict=True))
    cuda_step.geodesic_steps(together[0], grads, together[1], *settings, torch.tensor(0.0))
    for i, (w, d) in enumerate(zip(weights, grads, strict=True)):
        if sizes[i]:
            moved, buffer, _ = step(w, d, torch.zeros_like(w), lr)
            assert torch.equal(together[0][i], moved)
            assert torch.equal(together[1][i], buffer)
    assert [total.tolist() for total in totals] == [[5 + (i == 1), 7] for i in range(5)]


@pytest.mark.parametrize("transport", ["projection", "parallel"])
def test_what_needs_care_is_left_to_the_other_kernel(transport, emulated, monkeypatch):
    emulated(Plan(18, 32, 2, 64, 16, 1))
    w, d, m = case((6, 18, 100))
    d[2], m[2] = 0, 0  # still
    d[3] *= 100  # turns by a radian or so
    w[4, 5] = 0  # an absent row
    d[5] *= 10  # turns far, but not that far
    verdicts = []
    steps = cuda_stream.steps
    monkeypatch.setattr(cuda_stream, "steps", lambda *a: verdicts.append(steps(*a)) or verdicts[0])
    found = step(w, d, m, 5e-3, transport=transport)
    skip, again, move, stay = range(4)
    assert verdicts[0].tolist() == [move, skip, stay, again, move, move]
    agree(found, expected(w, d, m, 5e-3, transport=transport))
    assert torch.equal(found[0][1:3], w[1:3])


@pytest.mark.parametrize(
    "chosen", [Plan(1, 8, 1, 64, 4, 1, 2), Plan(4, 8, 1, 64, 4, 1, 2), Plan(8, 8, 2, 32, 4, 1),
               Plan(16, 16, 1, 64, 8, 1), Plan(32, 32, 1, 64, 8, 1), Plan(20, 32, 2, 32, 16, 1)], ids=str
)  # fmt: skip
@pytest.mark.parametrize("transport", ["projection", "parallel"])
def test_a_gradient_inside_the_subspace_of_any_size_leaves_the_class_on_the_manifold(chosen, transport, emulated):
    emulated(chosen)
    for n in (60, chosen.k):  # and k = n, where nothing but rounding is left of any gradient
        w = g.random_subspace(2, chosen.k, n)
        inside = torch.randn(2, chosen.k, chosen.k) @ w
        for size in (1.0, 1e3, 1e6, 1e12):
            d = size * inside / torch.linalg.matrix_norm(inside, keepdim=True)
            moved, buffer, counts = step(w, d, torch.zeros_like(w), 1.0, transport=transport)
            assert g.orthonormality_error(moved.double()) < 1e-6, (n, size)
            assert buffer.isfinite().all()
            assert counts[0] == 0
            assert n > chosen.k or counts == (0, 0)


def guarded(x, offset):
    """A copy of x that begins `offset` numbers after a good address, and all that lies around it."""
    around = torch.full((x.numel() + 64,), 12345.0, dtype=x.dtype)
    inner = around[32 + offset : 32 + offset + x.numel()].view(x.shape)
    return inner.copy_(x), around


@pytest.mark.parametrize("seed", range(8))
def test_whatever_the_shape_and_its_division_nothing_beyond_is_touched(seed, emulated, monkeypatch):
    chance = random.Random(seed)
    classes, cluster, warps = chance.choice([1, 2]), chance.choice([1, 2, 4, 8]), chance.choice([2, 4, 8])
    k = chance.randint(1, 8 // classes)
    n = chance.choice([1, 4]) * chance.randint(k + 2, 250)
    columns = 32 * (-(-n // (32 * cluster)) + chance.choice([0, 1]))  # with 1 the last blocks may have none of them
    emulated(Plan(k, 8, cluster, columns, warps, chance.randint(1, 4), classes))
    w, d, m = case((chance.randint(2, 4), k, n))
    d, m = (x.to(chance.choice([torch.float32, BF16])) for x in (d, m))
    offset = chance.choice([0, 0, 1])
    right = expected(w, d, m)
    found = []
    for order in range(3):
        monkeypatch.setattr(EmulatedKernel, "seed", order)
        copies = [guarded(x, offset) for x in (w, d, m)]
        new_w, gradient, new_m = (inner for inner, _ in copies)
        counts = torch.zeros(2, dtype=torch.int64)
        cuda_step.geodesic_steps([new_w], [gradient], [new_m], 0.05, 0.9, StepOptions(), [counts])
        for _, around in copies:
            assert (around[: 32 + offset] == around[0]).all()
            assert (around[32 + offset + w.numel() :] == around[0]).all()
        found.append((new_w, new_m, tuple(counts.tolist())))
        assert torch.equal(new_w, found[0][0])
        assert torch.equal(new_m, found[0][1])
    agree((found[0][0], found[0][1] if m.dtype == torch.float32 else None, found[0][2]), right, 3e-6)
