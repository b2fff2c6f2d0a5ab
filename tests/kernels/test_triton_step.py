"""The portable step in Triton, by its interpreter: in a process of its own, which has to know from its start that
kernels are to be interpreted.
"""

from types import SimpleNamespace

import pytest
import torch

from grassy import kernels
from grassy.kernels import StepOptions

from .triton_cases import interpreted

triton = pytest.importorskip("triton", reason="triton is not installed: pip install -e '.[dev]'")

COMPARE = """
import itertools, json, torch
from grassy import geometry, kernels
from grassy.kernels import StepOptions
from grassy.kernels.triton import step as triton_step

torch.manual_seed(0)
rows = []
shapes = [(2, 8, 1050), (1, 8, 520), (2, 17, 33), (2, 33, 70), (1, 64, 65), (2, 3, 7), (1, 1, 5), (1, 2, 130)]
settings = [("projection", None, False), ("parallel", 0.1, True), ("projection", 1e-3, False)]
settings += [("parallel", None, False)]
radians = (0.02, 0.5, 4.0)  # the usual way, that of larger turns, and that with care
for (c, k, n), (transport, max_angle, maximize), turn in itertools.product(shapes, settings, radians):
    w = geometry.random_subspace(c, k, n)
    scale = 10 * turn / (k * n) ** 0.5
    d, m = scale * torch.randn_like(w), geometry.project(w, scale * torch.randn_like(w))
    if c > 1:
        w[0, k - 2 :], m[0, k - 2 :] = 0, 0  # absent directions
    if turn == 0.5:
        d, m = d.bfloat16(), None
    results = []
    for impl, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        weight, buffer = w.to(dtype, copy=True), None if m is None else m.to(dtype, copy=True)
        mu = torch.tensor(0.9) if maximize or max_angle is None else 0.9
        counts = kernels.geodesic_step(
            weight, d if impl == "triton" else d.to(dtype), buffer, torch.tensor(0.1), mu,
            transport=transport, max_angle=max_angle, maximize=maximize, impl=impl,
        )
        results.append((weight, buffer, [int(count) for count in counts]))
    (weight, buffer, counts), (exact, exact_buffer, exact_counts) = results
    rows.append({
        "what": f"{c}x{k}x{n} turn {turn} {transport} {max_angle}",
        "turn": turn,
        "weight": float((weight - exact).abs().max()),
        "momentum": 0.0 if buffer is None else float((buffer - exact_buffer).abs().max() / exact_buffer.abs().max()),
        "orthonormality": float(geometry.orthonormality_error(weight)),
        "counts": counts == exact_counts,
        "absent": c == 1 or not weight[0, k - 2 :].any() and (buffer is None or not buffer[0, k - 2 :].any()),
    })

def step(weight, grad, buffer, lr=0.1, **options):
    return [int(count) for count in kernels.geodesic_step(weight, grad, buffer, lr, 0.9, impl="triton", **options)]

facts = {}
triton_step.SCRATCH_BYTES = 2 * 4 * 4 * 32 * 32  # two classes at a time
w = geometry.random_subspace(5, 20, 70)
d, m = torch.randn_like(w), geometry.project(w, torch.randn_like(w))
d[1, 2, 3], d[3], m[3] = float("nan"), 0, 0
d[4] *= 1e15
before = w.clone(), m.clone()
facts["counts"] = step(w, d, m, max_angle=0.1)
facts["untouched"] = torch.equal(w[1], before[0][1]) and torch.equal(m[1], before[1][1])
facts["still"] = torch.equal(w[3], before[0][3]) and not m[3].any()
facts["moved"] = [not torch.equal(w[i], before[0][i]) for i in (0, 2, 4)]
facts["angle"] = float(geometry.principal_angles(w[4:].double(), before[0][4:].double()).max())

w, m = before[0].clone(), before[1].clone()
# By the kernel itself: the dispatcher looks at flags on the host.
counts = torch.zeros(2, dtype=torch.int64)
triton_step.geodesic_step(w, d, m, 0.1, 0.9, StepOptions(), counts, torch.ones(()))
facts["skip"] = counts.tolist()
facts["skipped"] = torch.equal(w, before[0]) and torch.equal(m, before[1])

w = geometry.random_subspace(3, 20, 70)
w[0, 18:] = 0
d, before = torch.zeros_like(w), w.clone()
d[0, 19] = 1  # a gradient in an absent row alone
step(w, d, torch.zeros_like(w))
facts["absent alone"] = torch.equal(w, before)

facts["lost"] = []
for shape in ((4, 20, 70), (4, 3, 16)):
    w = geometry.random_subspace(*shape)
    w[1, 2, 5], w[2, 1:] = float("nan"), 0
    d, m, before = torch.randn_like(w), torch.zeros_like(w), w.clone()
    d[2, 2, 3] = float("nan")  # in a row that is absent
    for rate, many in ((0.1, 2), (float("nan"), 4), (float("inf"), 4)):
        facts["lost"] += [step(w, d, m, rate) == [many, 0], not m[1:3].any(), m[0].any().item() == (rate == 0.1)]
        facts["lost"] += [torch.equal(w[1:3].nan_to_num(9), before[1:3].nan_to_num(9))]
        w, m = before.clone(), torch.zeros_like(w)

wide = geometry.random_subspace(1, 8, 1040)
inside = torch.randn(1, 8, 8) @ wide
d = inside + 1e-3 * geometry.project(wide, torch.randn_like(wide))
found = []
for impl, dtype in (("triton", torch.float32), ("reference", torch.float64)):
    weight = wide.to(dtype, copy=True)
    kernels.geodesic_step(weight, d.to(dtype), None, 0.1, max_angle=1e-4, impl=impl)
    found.append(weight.double())
facts["almost within"] = float((found[0] - found[1]).abs().max())

steep = geometry.random_subspace(1, 20, 70)
d = 60 * torch.randn(1, 20, 20) @ steep + 0.3 * geometry.project(steep, torch.randn_like(steep))
found = []
for impl, dtype in (("triton", torch.float32), ("reference", torch.float64)):
    weight = steep.to(dtype, copy=True)
    kernels.geodesic_step(weight, d.to(dtype), None, 0.1, impl=impl)
    found.append(weight.double())
facts["steep"] = [float((found[0] - found[1]).abs().max()), float(geometry.orthonormality_error(found[0]))]

long, momentum = geometry.random_subspace(1, 20, 64), torch.zeros(1, 20, 64)
for _ in range(60):
    step(long, 0.3 * torch.randn_like(long), momentum)
facts["drift"] = float(geometry.orthonormality_error(long))
before, half = long.clone(), geometry.project(long, torch.randn_like(long)).bfloat16()
d, exact = torch.randn_like(long), half.double()
version = long._version, half._version
step(long, d, half)
facts["version"] = [long._version > version[0], half._version > version[1]]
expected = before.double()
kernels.geodesic_step(expected, d.double(), exact, 0.1, 0.9, impl="reference")
facts["bfloat16"] = [float((long - expected).abs().max()), float((half - exact).abs().max() / exact.abs().max())]

d = 4000 * geometry.project(long, torch.randn_like(long))  # by more than the largest angle there is
found = []
for impl, dtype in (("triton", torch.float32), ("reference", torch.float64)):
    weight = long.to(dtype, copy=True)
    counts = kernels.geodesic_step(weight, d.to(dtype), None, 0.1, impl=impl)
    found.append((weight, [int(count) for count in counts]))
facts["far"] = [found[0][1], found[1][1], float(geometry.orthonormality_error(found[0][0]))]
facts["far"] += [float(geometry.distance(found[0][0].double(), found[1][0]).max())]

totals = torch.tensor([5, 7])
bad = torch.full_like(w, float("inf"))
for _ in range(2):
    kernels.geodesic_steps([w.clone()], [bad], [None], 0.1, counts=[totals], impl="triton")
facts["totals"] = totals.tolist()

half = geometry.random_subspace(3, 4, 10), torch.randn(3, 4, 10).bfloat16()
results = [half[0].clone() for _ in range(2)]
for weight, gradient in zip(results, (half[1], half[1].float())):
    step(weight, gradient, None)
facts["bfloat16 gradients"] = torch.equal(*results)

# A gradient inside the subspace, and k = n: nothing but rounding is left of it.
facts["inside"] = []
for k, n in ((4, 16), (8, 8), (20, 70), (33, 33), (1, 1)):
    for size, transport in itertools.product((1.0, 1e3, 1e6, 1e12), ("projection", "parallel")):
        weight = geometry.random_subspace(2, k, n)
        gradient = torch.randn(2, k, k) @ weight
        gradient *= size / torch.linalg.matrix_norm(gradient, keepdim=True)
        buffer = torch.zeros_like(weight)
        step(weight, gradient, buffer, 1.0, transport=transport)
        facts["inside"].append([float(geometry.orthonormality_error(weight.double())), bool(buffer.isfinite().all())])

import warnings
from grassy.kernels.step_options import NotCompiledYet
triton_step._capturing = lambda weight: True  # as if a graph were captured
facts["early"] = []
for width in (10, 11):  # a variant that was launched before, and one that was not
    new = geometry.random_subspace(3, 4, width)
    try:
        step(new, torch.randn_like(new).bfloat16(), None)
        facts["early"].append("made")
    except NotCompiledYet as error:
        facts["early"].append(str(error))
dispatch = kernels.dispatch
dispatch._order = lambda _: ("triton", "reference")
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    before = new.clone()
    kernels.geodesic_step(new, torch.randn_like(new), None, 0.1)
facts["plain torch"] = [str(each.message) for each in said] + [not torch.equal(before, new)]
print(json.dumps({"rows": rows, **facts}))
"""


@pytest.fixture(scope="module")
def report():
    return interpreted(COMPARE)


def test_weights_momenta_and_counts_agree_with_the_reference_in_float64(report):
    assert len(report["rows"]) == 96
    for row in report["rows"]:
        assert row["weight"] < 3e-7 * max(1.0, row["turn"]), row
        assert row["momentum"] < 2e-6, row
        assert row["counts"], row
        assert row["absent"], row


def test_results_are_orthonormal_after_one_step_and_after_many(report):
    assert max(row["orthonormality"] for row in report["rows"]) < 1e-6
    assert report["drift"] < 1e-6


def test_momentum_in_bfloat16_is_rounded_once(report):
    weight, momentum = report["bfloat16"]
    assert weight < 1e-6
    assert momentum < 2**-7  # the interpreter cuts off what a GPU rounds


def test_gradients_in_bfloat16_are_taken_as_they_are(report):
    assert report["bfloat16 gradients"]


def test_counts_are_added_to_those_that_are_given(report):
    assert report["totals"] == [5 + 2 * 4, 7]


def test_a_gradient_inside_the_subspace_of_any_size_leaves_the_class_on_the_manifold(report):
    assert len(report["inside"]) == 40
    assert max(error for error, _ in report["inside"]) < 1e-6
    assert all(finite for _, finite in report["inside"])


def test_what_would_have_to_be_compiled_while_a_graph_is_captured_is_left_to_plain_torch_by_auto_alone(report):
    made, refused = report["early"]
    assert made == "made"
    assert "cannot be compiled while a CUDA graph is captured" in refused
    message, moved = report["plain torch"]
    assert message.endswith("using plain torch instead")
    assert moved


def test_without_a_gpu_or_the_interpreter_asking_for_the_kernel_is_an_error():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    weight = torch.eye(2, 4).unsqueeze(0)
    with pytest.raises(RuntimeError, match="needs a GPU"):
        kernels.geodesic_step(weight, weight, None, 0.1, impl="triton")


def test_autograd_is_told_of_the_change(report):
    assert report["version"] == [True, True]


def test_there_is_a_largest_angle(report):
    """Of 64 radians, known to as many roundings."""
    counts, expected, error, distance = report["far"]
    assert counts == expected == [0, 1]
    assert error < 1e-6
    assert distance < 1e-3


def test_classes_that_are_not_finite_do_not_move_or_turn_too_far_are_told_apart(report):
    assert report["counts"] == [1, 3]
    assert report["untouched"]
    assert report["still"]
    assert report["moved"] == [True, True, True]
    assert report["absent alone"]
    assert report["angle"] == pytest.approx(0.1, rel=1e-3)


def test_what_is_not_finite_already_or_a_rate_that_is_not_moves_nothing(report):
    assert len(report["lost"]) == 24
    assert all(report["lost"])


def test_a_flag_leaves_everything_as_it_is(report):
    assert report["skip"] == [0, 0]
    assert report["skipped"]


def test_a_gradient_that_lies_almost_within_the_subspace(report):
    assert report["almost within"] < 1e-6


def test_a_large_gradient_most_of_which_lies_within_the_subspace(report):
    """Without care the difference of Gram matrices would be off by 1e-4, and without polish not orthonormal."""
    error, orthonormality = report["steep"]
    assert error < 1e-5
    assert orthonormality < 1e-6


def test_it_says_what_it_does_not_support():
    from grassy.kernels.triton import step as triton_step

    def reason(weight, grad=None, momentum=None, **options):
        return triton_step.supports(weight, weight if grad is None else grad, momentum, StepOptions(**options))

    w = torch.empty(2, 8, 64)
    assert reason(torch.empty(2, 64, 5000), max_angle=0.1, transport="parallel") is None
    assert reason(w, w.bfloat16(), w.bfloat16()) is None
    assert reason(w, w.mT.contiguous().mT) is None  # copied
    assert "k up to 64" in reason(torch.empty(2, 65, 100))
    assert "float32 weights" in reason(w.double())
    assert "float32 weights" in reason(torch.empty(2, 64, 8).mT)
    assert "float32 weights" in reason(torch.empty(0, 8, 64))
    assert "momenta" in reason(w, w.double())
    assert "momenta" in reason(w, w, w.mT.contiguous().mT)
    assert "geodesic" in reason(w, retraction="qf")


@pytest.mark.parametrize(
    ("capability", "shared", "hip", "most"),
    [((9, 0), 227, None, 64), ((8, 9), 99, None, 32), ((7, 5), 64, None, 32), ((9, 4), 227, "6.2", 32)],
    ids=["H100", "RTX 4090", "T4", "MI300"],
)
def test_how_many_rows_a_gpu_takes(monkeypatch, capability, shared, hip, most):
    from grassy.kernels.triton import step as triton_step

    facts = SimpleNamespace(shared_memory_per_block_optin=1024 * shared)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(triton_step, "_most_rows", triton_step._most_rows.__wrapped__)
    monkeypatch.setattr(triton_step, "precision", triton_step.precision.__wrapped__)

    def taken(k):
        tensor = torch.empty(2, k, 100)
        facts = {name: getattr(tensor, name) for name in ("shape", "dtype", "numel", "is_contiguous")}
        weight = SimpleNamespace(**facts, device=torch.device("cuda"))
        return triton_step.supports(weight, weight, None, StepOptions()) is None

    assert taken(most)
    assert not taken(most + 1)
    assert triton_step.precision(torch.device("cuda")) == ("ieee" if hip or capability < (8, 0) else "tf32x3")


TYPES = {"k": "i32", "n": "i32", "matrices": "i32", "careful": "i32", "lr": "fp32", "momentum": "fp32"}
TYPES |= {"max_angle": "fp32", "skip": "*fp32", "counts_pointer": "*i64", "verdict_pointer": "*i32"}
TYPES |= {f"{name}_pointer": "*fp32" for name in ("weight", "grad", "momentum", "scratch")}


@pytest.mark.parametrize(
    ("rows", "backend", "arch", "shared"),
    [
        (64, "cuda", 90, 227),
        (32, "cuda", 86, 99),
        (16, "cuda", 80, 163),
        (32, "cuda", 75, 48),
        (32, "hip", "gfx942", 64),
    ],
)
def test_the_kernels_compile_for_gpus_and_fit_into_their_shared_memory(rows, backend, arch, shared):
    """Which needs no GPU. The largest variants: momentum in bfloat16 and transported, an angle that is limited."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from grassy.kernels.triton import step as triton_step

    flags = ("HAS_MOMENTUM", "LR_ON_DEVICE", "MOMENTUM_ON_DEVICE", "CAN_SKIP", "CAPPED", "PARALLEL", "MAXIMIZE")
    constants = dict.fromkeys(flags, True) | {"SHARE": triton_step.SHARE, "LARGEST": 64.0}
    tf32 = backend == "cuda" and arch >= 80
    constants |= {"K": rows, "N": triton_step.COLUMNS[rows], "PRECISION": "tf32x3" if tf32 else "ieee"}
    types = {**TYPES, "momentum_pointer": "*bf16", "lr": "*fp32", "momentum": "*fp32"}
    for name, careful in (
        ("_grams", False),
        ("_grams", True),
        ("_turns", None),
        ("_moves", False),
        ("_moves", True),
        ("_polish", None),
    ):
        kernel = getattr(triton_step, name)
        constants["CAREFUL_ONLY"] = careful
        signature = {each: types.get(each, "constexpr") for each in kernel.arg_names}
        values = {(i,): constants[each] for i, each in enumerate(signature) if each in constants}
        source = ASTSource(kernel, signature, values, {})
        options = {"num_warps": triton_step.warps(rows), "num_stages": triton_step.STAGES, "enable_fp_fusion": True}
        compiled = triton.compile(source, GPUTarget(backend, arch, 32 if backend == "cuda" else 64), options)
        assert compiled.metadata.shared <= shared * 1024, name
        assert rows < 64 or compiled.metadata.shared <= triton_step.BYTES_OF_64_ROWS
