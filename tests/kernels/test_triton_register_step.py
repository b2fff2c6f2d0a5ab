"""The kernel of the step against the specification, by Triton's interpreter: in a process of its own, which has to
know from its start that kernels are to be interpreted.
"""

import pytest
import torch
from triton_cases import interpreted

from grassy import kernels

pytest.importorskip("triton", reason="triton is not installed: pip install -e '.[dev]'")

COMPARE = """
import itertools, json, sys, torch
from grassy import geometry, kernels
from grassy.kernels.triton import register_step as triton_step

torch.manual_seed(0)
rows = []
shapes = [(2, 4, 16), (2, 3, 7), (2, 1, 5), (1, 8, 33), (1, 5, 20)]
settings = [("projection", None, False), ("parallel", 0.1, True), ("projection", 0.5, False)]
for number, ((c, k, n), (transport, max_angle, maximize)) in enumerate(itertools.product(shapes, settings)):
    scale, momentum = [1e-2, 1.0, 30.0][(number + k) % 3], 0.0 if number % 5 == 4 else 0.9
    w = geometry.random_subspace(c, k, n)
    d, m = scale * torch.randn_like(w), geometry.project(w, scale * torch.randn_like(w)) if momentum else None
    if k == 3:
        w[0, 1:] = 0  # absent directions
        if m is not None:
            m[0, 1:] = 0
    results = []
    for impl, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        weight, buffer = w.to(dtype, copy=True), None if m is None else m.to(dtype, copy=True)
        lr, mu = (torch.tensor(0.1), torch.tensor(momentum)) if k in (4, 8) else (0.1, momentum)
        counts = kernels.geodesic_step(
            weight, d.to(dtype), buffer, lr, mu,
            transport=transport, max_angle=max_angle, maximize=maximize, impl=impl,
        )
        results.append((weight, buffer, [int(count) for count in counts]))
    (weight, buffer, counts), (exact, exact_buffer, exact_counts) = results
    rows.append({
        "what": f"{c}x{k}x{n} scale {scale} {transport} {max_angle} momentum {momentum}",
        "turn": 0.1 * scale * (k * n) ** 0.5,
        "weight": float((weight - exact).abs().max()),
        "momentum": 0.0 if buffer is None else float((buffer - exact_buffer).abs().max() / exact_buffer.abs().max()),
        "orthonormality": float(geometry.orthonormality_error(weight)),
        "counts": counts == exact_counts,
        "absent": bool((weight[0, 1:] == 0).all()) if k == 3 else True,
    })

def step(weight, grad, buffer, **options):
    return [int(count) for count in kernels.geodesic_step(weight, grad, buffer, 0.1, 0.9, impl="triton", **options)]

w, d = geometry.random_subspace(3, 4, 10), torch.randn(3, 4, 10)
d[1, 2, 3] = float("nan")
m = geometry.project(w, torch.randn_like(w))
before = w.clone(), m.clone()
skipped = step(w, d, m)
still, zero = w.clone(), torch.zeros_like(w)
step(still, zero, zero.clone())
half = w.clone(), w.clone()
grad = torch.randn_like(w).bfloat16()
step(half[0], grad, torch.zeros_like(w))
step(half[1], grad.float(), torch.zeros_like(w))
qf = w.clone(), w.clone()
step(qf[0], torch.ones_like(w), torch.zeros_like(w), retraction="qf")
kernels.geodesic_step(qf[1], torch.ones_like(w), torch.zeros_like(w), 0.1, 0.9, retraction="qf", impl="reference")
totals = torch.tensor([5, 7])
bad = torch.full_like(w, float("inf"))
for retraction in ("geodesic", "qf"):
    kernels.geodesic_steps(
        [w.clone()], [bad], [None], 0.1, counts=[totals], retraction=retraction, impl="triton"
    )
flag = w.clone(), m.clone()
options = {"retraction": "geodesic", "transport": "projection", "max_angle": None, "maximize": False}
# By the kernel itself: ops look at flags on the host.
flagged = triton_step.geodesic_step(*flag[:1], d, flag[1], 0.1, 0.9, skip=torch.ones(()), **options)
flagged = [int(count) for count in flagged] == [0, 0] and torch.equal(flag[0], w) and torch.equal(flag[1], m)
version = w._version, m._version
step(w.clone(), d, m)  # of the momentum alone
noticed = m._version > version[1]
far = [w.clone(), w.double()]
steep = 4000 * geometry.project(w, torch.randn_like(w))  # by more than the largest angle there is
far_counts = [[int(count) for count in kernels.geodesic_step(each, steep.to(each.dtype), None, 0.1, impl=impl)]
              for each, impl in zip(far, ("triton", "reference"))]
far = float(geometry.distance(far[0].double(), far[1]).max())

import warnings
triton_step._capturing = lambda weight: True  # as if a graph were captured
early = []
for width in (10, 11):  # a variant that was launched before, and one that was not
    new = geometry.random_subspace(3, 4, width)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step(new, torch.randn_like(new), None)
    early.append(["plain torch" in str(each.message) for each in said])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step(new, torch.randn_like(new), torch.zeros_like(new))
    early.append(["plain torch" in str(each.message) for each in said])
triton_step._capturing = lambda weight: False
long = geometry.random_subspace(1, 2, 24)
momentum = torch.zeros_like(long)
for _ in range(60):
    step(long, torch.randn_like(long), momentum)
print(json.dumps({
    "totals": totals.tolist(),
    "rows": rows,
    "skipped": skipped,
    "untouched": torch.equal(w[1], before[0][1]) and torch.equal(m[1], before[1][1]),
    "others moved": not torch.equal(w[0], before[0][0]) and not torch.equal(w[2], before[0][2]),
    "still": torch.equal(still, w),
    "bfloat16": torch.equal(*half),
    "qf": torch.equal(*qf),
    "flagged": flagged,
    "noticed": noticed,
    "far": [*far_counts, far],
    "early": early,
    "drift": float(geometry.orthonormality_error(long)),
}))
"""


@pytest.fixture(scope="module")
def report():
    return interpreted(COMPARE)


def test_weights_momenta_and_counts_agree_with_the_reference_in_float64(report):
    assert len(report["rows"]) == 15
    for row in report["rows"]:
        tolerance = 3e-7 * max(1.0, row["turn"])  # an angle of many radians is known to as many roundings
        assert row["weight"] < tolerance, row
        assert row["momentum"] < 2e-6, row
        assert row["counts"], row
        assert row["absent"], row


def test_results_are_orthonormal_after_one_step_and_after_many(report):
    assert max(row["orthonormality"] for row in report["rows"]) < 5e-7
    assert report["drift"] < 1e-6


def test_a_class_whose_gradient_is_not_finite_is_left_alone_and_counted(report):
    assert report["skipped"] == [1, 0]
    assert report["untouched"]
    assert report["others moved"]


def test_counts_are_added_to_those_that_are_given(report):
    assert report["totals"] == [5 + 3 + 3, 7]


def test_a_flag_leaves_everything_as_it_is(report):
    assert report["flagged"]


def test_autograd_is_told_of_the_change(report):
    assert report["noticed"]


def test_there_is_a_largest_angle(report):
    """Of 64 radians, known to as many roundings."""
    counts, expected, distance = report["far"]
    assert counts == expected == [0, 3]
    assert distance < 1e-3


def test_a_graph_that_is_captured_before_a_kernel_was_launched_gets_plain_torch(report):
    """Of 10 columns both variants, with momentum and without, were launched before, of 11 neither."""
    assert report["early"] == [[], [], [True], [True]]


def test_zero_gradients_move_nothing_to_the_bit(report):
    assert report["still"]


def test_gradients_in_bfloat16_are_taken_as_they_are(report):
    assert report["bfloat16"]


def test_the_qf_variant_is_left_to_the_reference(report):
    assert report["qf"]


def test_without_a_gpu_or_the_interpreter_asking_for_the_kernel_is_an_error():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    weight = torch.eye(2, 4).unsqueeze(0)
    with pytest.raises(RuntimeError, match="needs a GPU"):
        kernels.geodesic_step(weight, weight, None, 0.1, impl="triton")


def test_only_weights_that_fit_into_registers_are_taken():
    from grassy.kernels.triton import register_step as triton_step

    assert triton_step.fits(torch.empty(2, 8, 1000))
    assert not triton_step.fits(torch.empty(2, 8, 2048))
    assert not triton_step.fits(torch.empty(2, 16, 64))
    assert not triton_step.fits(torch.empty(2, 8, 64, dtype=torch.float64))
    assert not triton_step.fits(torch.empty(2, 64, 8).mT)


def test_what_is_quicker_streamed_goes_there_if_it_can(monkeypatch):
    from grassy.kernels.triton import register_step as triton_step

    quick, slow = [(2, 4, 2048), (2, 8, 512), (2, 5, 64)], [(2, 8, 513), (2, 5, 768)]
    assert not any(triton_step.streamed(torch.empty(shape)) for shape in quick)
    assert all(triton_step.streamed(torch.empty(shape)) for shape in slow)
    assert all(triton_step.fits(torch.empty(shape)) for shape in quick + slow)
    assert triton_step.streamed(torch.empty(2, 4, 4096))  # too large for registers
    monkeypatch.setattr(triton_step.triton_stream, "fits", lambda _: False)  # a GPU of AMD
    assert not any(triton_step.streamed(torch.empty(shape)) for shape in quick + slow)


@pytest.mark.parametrize(("rows", "rate"), [(1, "fp32"), (2, "*fp32"), (4, "*fp64")])
def test_the_kernel_compiles_for_a_gpu(rows, rate):
    """Which needs no GPU, and tells more than the interpreter does: types, for one, must agree."""
    import triton
    from triton.backends.compiler import GPUTarget

    from grassy.kernels.triton import register_step as triton_step

    types = {"k": "i32", "n": "i32", "lr": rate, "momentum": rate, "max_angle": "fp32", "skip": "*fp32"}
    types |= {"weight_pointer": "*fp32", "grad_pointer": "*bf16", "momentum_pointer": "*bf16", "counts_pointer": "*i64"}
    flags = ("HAS_MOMENTUM", "CAN_SKIP", "CAPPED", "PARALLEL", "MAXIMIZE")
    constants = dict.fromkeys(flags, True) | {"K": rows, "N": 128, "LARGEST": 64.0}
    constants |= dict.fromkeys(("LR_ON_DEVICE", "MOMENTUM_ON_DEVICE"), rate[0] == "*")
    signature = {name: types.get(name, "constexpr") for name in triton_step._step.arg_names}
    values = {(i,): constants[name] for i, name in enumerate(signature) if name in constants}
    source = triton.compiler.ASTSource(triton_step._step, signature, values, {})
    compiled = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 1, "enable_fp_fusion": True})
    assert "cubin" in compiled.asm
