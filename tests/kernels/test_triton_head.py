"""The kernels of the head, by Triton's interpreter in a process of its own, and whether they compile for a GPU."""

import pytest
import torch

from grassy import geometry, kernels

from .triton_cases import interpreted

pytest.importorskip("triton", reason="triton is not installed: pip install -e '.[dev]'")

COMPARE = """
import itertools, json, torch
import torch.nn.functional as F
from grassy import geometry, kernels
from grassy.kernels import cross_entropy, fused_logits
from cross_entropy_cases import SHAPES, errors, example, gradients, plain

torch.manual_seed(0)
torch.set_num_threads(1)

def relative(ours, exact):
    return [float((a - b).abs().max() / b.abs().max().clamp_min(1e-3)) for a, b in zip(ours, exact)]

def logits_errors(x, w, impl, normalize=True, dtype=None):
    # Some sum of the logits that does not cancel and gives every class a gradient.
    def loss_of(impl):
        def loss(x, w):
            found = kernels.subspace_logits(x, w, 25.0, normalize=normalize, impl=impl)
            return (found * torch.arange(w.shape[0]).cos()).sum(-1)
        return loss
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        ours = gradients(loss_of(impl), x, w)
    return relative(ours, gradients(loss_of("reference"), x.double(), w.double()))

cases = SHAPES[:2] + [(9, 5, 8, 129)] + SHAPES[3:]
losses, of_logits, half = {}, {}, {}
for shape, soft in itertools.product(cases, (False, True)):
    x, w, t = example(*shape, soft)
    if not soft and len(t) > 1:
        t[1] = -100
    losses[f"{shape} soft={soft}"] = errors(x, w, t, "triton", label_smoothing=0.1)
    losses[f"{shape} soft={soft} raw"] = errors(x, w, t, "triton", 2.0, normalize=False, reduction="sum")
    if not soft:
        of_logits[str(shape)] = logits_errors(x, w, "triton")
        of_logits[f"{shape} raw"] = logits_errors(x, w, "triton", normalize=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half[f"{shape} soft={soft}"] = errors(x, w, t, "triton"), errors(x, w, t, "reference")
    if not soft:
        half[str(shape)] = [logits_errors(x, w, impl, dtype=torch.bfloat16) for impl in ("triton", "reference")]

names = "WHOLE", "CHUNK", "BLOCK", "KEEP", "ROWS"
before = [getattr(cross_entropy, name) for name in names]
for size, soft in itertools.product((1, 700, 2**24), (False, True)):
    for name, value in zip(names, (0, size, size, 800 if soft else 0, 2)):
        setattr(cross_entropy, name, value)
    losses[f"chunks {size} soft={soft}"] = errors(*example(3, 23, 3, 20, soft), "triton", label_smoothing=0.1)
for name, value in zip(names, before):
    setattr(cross_entropy, name, value)

x, w, t = example(4, 5, 3, 7)
x[1], x[2, 3], t[3] = 0, float("nan"), 99
loss, dx, dw = gradients(lambda x, w: kernels.subspace_cross_entropy(x, w, t, reduction="none", impl="triton"), x, w)
values, dx_logits, dw_logits = gradients(lambda x, w: kernels.subspace_logits(x, w, impl="triton"), x, w)
rows = torch.tensor([0, 1, 3])
fine = gradients(lambda x, w: kernels.subspace_cross_entropy(x[rows], w, t[rows] % 5, impl="triton"), x, w)[2]
x, w, t = example(6, 5, 3, 7)
odd = torch.stack([x, x], -1)[..., 0], w.mT.contiguous().mT
function = lambda x, w: kernels.subspace_cross_entropy(x, w, t, impl="triton")
layouts = [gradients(function, *pair) for pair in ((x, w), odd)]
cube = kernels.subspace_logits(odd[0].unflatten(0, (2, 3)), odd[1], impl="triton").flatten(0, 1)
kept = []
with torch.autograd.graph.saved_tensors_hooks(lambda s: kept.append((list(s.shape), str(s.dtype))) or s, lambda s: s):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gradients(lambda x, w: kernels.subspace_logits(x, w, impl="triton").sin(), x, w)
one = x.clone().requires_grad_(), w.clone().requires_grad_()
for dtype in (torch.float32, torch.bfloat16):
    torch.library.opcheck(fused_logits._forward, (*one, dtype, True, 25.0, True), rtol=1e-3, atol=1e-4)
    torch.library.opcheck(
        cross_entropy._forward, (*one, t, dtype, 2, 4, 25.0, 0.1, -100, True, True), rtol=1e-3, atol=1e-4
    )
compiled = torch.compile(lambda x, w: kernels.subspace_logits(x, w, impl="triton"), fullgraph=True, backend="aot_eager")
both = [gradients(f, x, w) for f in (compiled, lambda x, w: kernels.subspace_logits(x, w, impl="triton"))]
print(json.dumps({
    "losses": losses,
    "logits": of_logits,
    "half": half,
    "nan rows": loss.isnan().tolist(),
    "zero loss": float(loss[1]),
    "zero gradient": bool((dx[1] == 0).all() and (dx_logits[1] == 0).all() and (values[1] == 0).all()),
    "nan gradient": dx_logits.isnan().any(-1).tolist(),
    "absent": bool((fine[1, 1:] == 0).all()) and bool(fine.isfinite().all()),
    "layouts": all(torch.equal(a, b) for a, b in zip(*layouts)),
    "cube": torch.equal(cube, kernels.subspace_logits(x, w, impl="triton")),
    "kept": kept,
    "compiled": all(torch.equal(a, b) for a, b in zip(*both)),
}))
"""


@pytest.fixture(scope="module")
def report():
    return interpreted(COMPARE)


def test_losses_and_gradients_agree_with_float64(report):
    assert len(report["losses"]) == 30
    for case, found in report["losses"].items():
        assert max(found) < 3e-5, case


def test_logits_and_gradients_agree_with_float64(report):
    for case, found in report["logits"].items():
        assert max(found) < 3e-5, case


def test_in_half_precision_they_are_nearly_as_close_as_plain_torch(report):
    # Nearly: the interpreter cuts numbers off where a GPU rounds them.
    for case, (ours, theirs) in report["half"].items():
        assert all(a < 2 * b + 2e-2 for a, b in zip(ours, theirs, strict=True)), (case, ours, theirs)


def test_zero_features_nans_and_labels_that_are_no_class(report):
    assert report["nan rows"] == [False, False, True, True]
    assert report["zero loss"] == pytest.approx(torch.tensor(5.0).log().item())
    assert report["zero gradient"]
    assert report["nan gradient"] == [False, False, True, False]
    assert report["absent"]


def test_any_layout_and_leading_shape(report):
    assert report["layouts"]
    assert report["cube"]


def test_the_coordinates_are_kept_in_half_precision_once(report):
    assert report["kept"].count([[6, 15], "torch.bfloat16"]) == 1
    assert [[6, 15], "torch.float32"] not in report["kept"]
    assert [[6, 5, 3], "torch.float32"] not in report["kept"]


def test_they_compile_without_a_graph_break(report):
    assert report["compiled"]


def test_on_a_cpu_the_logits_are_those_of_plain_torch():
    x, weight = torch.randn(4, 7), geometry.random_subspace(5, 3, 7)
    assert torch.equal(kernels.subspace_logits(x, weight), kernels.reference.subspace_logits(x, weight, 25.0, True))


def test_without_a_gpu_or_the_interpreter_asking_for_kernels_is_an_error():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    x, weight = torch.randn(4, 7), geometry.random_subspace(5, 3, 7)
    with pytest.raises(RuntimeError, match="needs a GPU"):
        kernels.subspace_logits(x, weight, impl="triton")
    with pytest.raises(RuntimeError, match="needs a GPU"):
        kernels.subspace_cross_entropy(x, weight, torch.zeros(4, dtype=torch.int64), impl="triton")


SCALARS = {"stride": "i32", "start": "i32", "here": "i32", "classes": "i32", "gamma": "fp32", "smoothing": "fp32"}


@pytest.mark.parametrize(
    ("kernel", "k", "types"),
    [
        ("_unit", None, {"x_pointer": "*fp32", "result_pointer": "*bf16"}),
        ("_unit_grad", None, {"x_pointer": "*bf16", "result_pointer": "*bf16"}),
        ("_lengths", 8, {"y_pointer": "*bf16"}),
        ("_lengths_grad", 3, {"y_pointer": "*fp32", "result_pointer": "*fp32"}),
        ("_observe", 8, {"y_pointer": "*bf16", "target_pointer": "*i64", "SOFT": False, "FIRST": True, "LAST": True}),
        ("_observe", 3, {"y_pointer": "*fp32", "target_pointer": "*fp32", "SOFT": True, "FIRST": False, "LAST": False}),
        ("_pull_back", 8, {"y_pointer": "*bf16", "out_pointer": "*bf16", "target_pointer": "*bf16", "SOFT": True}),
        ("_pull_back", 17, {"y_pointer": "*fp32", "out_pointer": "*fp32", "target_pointer": "*i64", "SOFT": False}),
    ],
)
def test_they_compile_for_an_h100(kernel, k, types, monkeypatch, tmp_path):
    import triton
    from triton.backends.compiler import GPUTarget

    from grassy.kernels.triton import head as triton_head

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    function = getattr(triton_head, kernel)
    if not hasattr(function, "arg_names"):
        pytest.skip("kernels are interpreted in this process")
    constants = {"BLOCK": 1024} if k is None else triton_head._tile(k, 1000)
    constants |= {name: value for name, value in types.items() if isinstance(value, bool)}
    known = {**SCALARS, "ignore_index": "i32", "shift": "fp32", "shifted_from": "i32", "n": "i32", **types}
    signature = {name: "constexpr" if name in constants else known.get(name, "*fp32") for name in function.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(signature) if signature[name].startswith("*")}
    source = triton.compiler.ASTSource(fn=function, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": triton_head.WARPS})
    assert "cubin" in compiled.asm
    if kernel == "_unit":
        assert "cvt.rn.bf16" in compiled.asm["ptx"]  # rounds to the nearest
    if kernel == "_lengths":  # a class of 8 in one load of 16 bytes
        assert "ld.global.v4.b32" in compiled.asm["ptx"]
