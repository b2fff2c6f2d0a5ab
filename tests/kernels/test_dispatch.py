"""Which implementation of the step is taken, and how the CUDA kernel divides its work."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grassy import geometry as g
from grassy import kernels
from grassy.kernels import dispatch, fused_logits, reference, triton
from grassy.kernels.cuda import nvrtc
from grassy.kernels.cuda import step as cuda_step
from grassy.kernels.cuda.step import plan, source

ROOT = Path(__file__).parents[2]
HOPPER, AMPERE, CONSUMER = (9, 0), (8, 0), (8, 6)
SHARED = {HOPPER: 227, AMPERE: 163, CONSUMER: 99}


@given(st.integers(1, 64), st.integers(1, 10_000), st.sampled_from([HOPPER, AMPERE, CONSUMER]))
def test_a_plan_covers_all_columns_and_fits_the_device(k, n, capability):
    chosen = plan(k, n, capability)
    if chosen is None:
        return
    assert chosen.k * chosen.classes <= chosen.rows
    assert chosen.k == k
    assert chosen.classes == 1 or 2 * k <= 8
    assert chosen.classes == 2 or k > 4 or cuda_step._plan(k, n, 2, capability) is None
    assert chosen.columns % 32 == 0
    assert chosen.cluster * chosen.columns >= n
    assert chosen.shared_bytes <= 1024 * SHARED[capability]
    assert chosen.blocks * (chosen.shared_bytes + 1024) <= 228 * 1024 or chosen.blocks == 1
    assert chosen.cluster == 1 or capability >= HOPPER


def test_the_usual_heads_have_a_plan_and_large_classes_do_not():
    for k in (1, 3, 8, 17, 32):
        for n in (1, 7, 384, 512, 768, 2047, 2048, 4096):
            assert plan(k, n, HOPPER) is not None
    assert plan(33, 64, HOPPER) is None
    assert plan(8, 64, (7, 5)) is None  # no TF32


def test_what_would_not_stay_in_the_cache_is_not_brought_ahead(monkeypatch):
    chosen, kernel = plan(8, 2048, HOPPER), SimpleNamespace(resident_clusters=lambda *_: 100)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda size: SimpleNamespace(L2_cache_size=size))
    monkeypatch.setattr(cuda_step, "_resident", lambda *_: 100)
    ahead = cuda_step._bringing_ahead.__wrapped__
    needed = 50 * 8 * 2048 * 12
    assert ahead(kernel, chosen, 2048, 2 * needed) == 100
    assert ahead(kernel, chosen, 2048, 2 * needed - 1) == 2**31 - 1


@pytest.mark.parametrize("file", [cuda_step.SOURCE, cuda_step.STREAM_SOURCE], ids=lambda file: file.name)
def test_the_source_of_the_kernel_is_in_the_package(file):
    text = source(file)
    assert 'extern "C" __global__' in text
    assert "#include" not in text
    assert text.isascii()  # NVRTC is not told an encoding


def test_how_large_a_class_may_be_is_what_the_documentation_says():
    text = " ".join((ROOT / "docs/kernels.md").read_text().split())

    def largest(k, capability):
        return max(n for n in range(32, 40_000, 32) if plan(k, n, capability))

    widths = " | ".join(f"n = {largest(k, HOPPER):,}" for k in (8, 16, 32))
    assert f"| H200 | {widths} |" in text
    for gpu, capability in (("A100", (8, 0)), ("RTX 4090", (8, 9))):
        assert f"| {gpu} (no thread-block clusters) | n = {largest(8, capability):,} |" in text


def test_small_classes_have_a_plan_that_takes_two_of_them_together():
    for k in (1, 2):
        for n in (64, 384, 2048, 4096):
            chosen = plan(k, n, HOPPER)
            assert (chosen.classes, chosen.rows) == (2, 8)


def test_the_choice_of_the_step_is_explained():
    small = g.random_subspace(3, 2, 8)
    reasons = kernels.explain(small)
    assert list(reasons) == ["native", "reference"]
    assert "1,048,576 elements" in reasons["native"]
    assert reasons["reference"] is None
    assert kernels.choose("auto", small) == "reference"
    assert kernels.explain(small.to("meta"))["reference"] is None
    large = torch.empty(2**11, 8, 64)
    for options, tensors in (({"retraction": "qf"}, ()), ({"max_angle": 1.0}, ()), ({}, (large.bfloat16(),))):
        assert "it supports" in kernels.explain(large, *tensors, **options)["native"]
    with pytest.raises(ValueError, match="max_angle must be None or positive"):
        kernels.explain(large, max_angle=0.0)


def test_the_choice_of_the_logits_is_explained(monkeypatch):
    x, w = torch.randn(5, 8), g.random_subspace(3, 2, 8)
    reasons = kernels.explain_logits(x, w)
    assert list(reasons) == ["triton", "reference"]
    assert "GPU" in reasons["triton"]
    assert reasons["reference"] is None
    assert fused_logits.supports(x, w, 1.0) is None
    assert "float32 and bfloat16" in fused_logits.supports(x.double(), w.double(), 1.0)
    assert "incompatible shapes" in fused_logits.supports(x[:, :7], w, 1.0)
    assert "torch.func" in fused_logits.supports(MaskedFeatures(x), w, 1.0)


@pytest.mark.parametrize("impl", ["native", "cuda", "chunks", "fast"])
def test_every_operator_has_its_own_names_of_implementations(impl):
    x, w = torch.randn(5, 8), g.random_subspace(3, 2, 8)
    with pytest.raises(ValueError, match=rf"impl must be 'auto' or one of \['reference', 'triton'\], got '{impl}'"):
        kernels.subspace_logits(x, w, impl=impl)
    if impl != "chunks":
        with pytest.raises(ValueError, match=r"one of \['chunks', 'reference', 'triton'\]"):
            kernels.subspace_cross_entropy(x, w, torch.zeros(5, dtype=torch.int64), impl=impl)


def test_a_loss_by_name_is_that_one_or_an_error(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x, w, target = torch.randn(5, 8), g.random_subspace(3, 2, 8), torch.tensor([0, 1, 2, 0, 1])
    losses = [kernels.subspace_cross_entropy(x, w, target, impl=impl) for impl in ("auto", "chunks", "reference")]
    assert torch.equal(losses[0], losses[1])
    torch.testing.assert_close(losses[1], losses[2])
    with pytest.raises(RuntimeError, match="impl='triton' cannot be used here: it needs a GPU"):
        kernels.subspace_cross_entropy(x, w, target, impl="triton")
    soft = torch.rand(5, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="impl='chunks' cannot be used here: the target requires a gradient"):
        kernels.subspace_cross_entropy(x, w, soft, impl="chunks")
    with pytest.raises(RuntimeError, match="impl='chunks' cannot be used here: it supports float32 and bfloat16"):
        kernels.subspace_cross_entropy(x.double(), w.double(), target, impl="chunks")


class MaskedFeatures(torch.Tensor):
    """A subclass of Tensor."""


def test_where_triton_cannot_launch_a_kernel_plain_torch_takes_over(monkeypatch):
    """As without a C compiler, or without the headers of Python."""
    pytest.importorskip("triton", reason="triton is not installed: pip install -e '.[dev]'")
    from grassy.kernels.triton import head

    def fail(*_):
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable.")

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: None)  # there is no GPU to put it on
    monkeypatch.setattr(head, "unit", fail)
    monkeypatch.setattr(dispatch.cuda, "supports", lambda *_: "no NVRTC")
    triton._failure_of_a_launch.cache_clear()
    weight = SimpleNamespace(device=torch.device("cuda", 0), shape=(3, 2, 8))
    reason = "Triton fails: Failed to find C compiler. Please specify via CC environment variable."
    assert kernels.explain(weight) == {"cuda": "no NVRTC", "triton": reason, "reference": None}
    assert kernels.choose("auto", weight) == "reference"
    assert kernels.explain_logits(None, weight) == {"triton": reason, "reference": None}
    triton._failure_of_a_launch.cache_clear()


@pytest.mark.parametrize("impl", ["cuda", "triton"])
def test_a_kernel_that_cannot_run_says_why(impl, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    w = g.random_subspace(3, 2, 8)
    with pytest.raises(RuntimeError, match=rf"impl='{impl}' cannot be used here: .+"):
        kernels.geodesic_step(w, torch.zeros_like(w), None, 0.1, impl=impl)


@pytest.mark.parametrize("impl", ["reference", "auto"])
def test_a_step_that_is_to_be_skipped_changes_nothing(impl):
    w = g.random_subspace(3, 2, 8)
    d, m = torch.randn_like(w), torch.randn_like(w)
    d[0] = float("inf")
    before = w.clone(), m.clone()
    counts = kernels.geodesic_step(w, d, m, 0.1, 0.9, skip=torch.tensor(1.0), impl=impl)
    assert torch.equal(w, before[0])
    assert torch.equal(m, before[1])
    assert int(counts.skipped) == int(counts.capped) == 0
    kernels.geodesic_step(w, d, m, 0.1, 0.9, skip=torch.tensor(0.0), impl=impl)
    assert not torch.equal(w, before[0])


def test_an_a100_takes_the_head_of_a_resnet():
    chosen = plan(8, 2048, AMPERE)
    assert chosen is not None
    assert chosen.shared_bytes < 1024 * SHARED[AMPERE]
    assert plan(8, 2048, CONSUMER) is None


def test_no_more_is_asked_about_than_has_to_be(monkeypatch):
    asked = []
    monkeypatch.setattr(dispatch, "_order", lambda _: ["triton", "cuda", "reference"])
    monkeypatch.setattr(dispatch, "_why_not", lambda name, *_: asked.append(name))
    assert kernels.choose("auto", torch.empty(3, 2, 8)) == "triton"
    assert asked == ["triton"]


def test_a_kernel_that_cannot_be_compiled_is_tried_once(monkeypatch):
    tries = []

    def fail(*_):
        tries.append(0)
        raise RuntimeError("NVRTC: no such thing")

    monkeypatch.setattr(cuda_step, "_kernel", fail)
    cuda_step._failure.cache_clear()
    for _ in range(3):
        assert cuda_step._failure(plan(8, 64, HOPPER), False, False, torch.device("cuda", 0)) == "NVRTC: no such thing"
    cuda_step._failure.cache_clear()
    assert len(tries) == 1


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """A stand-in for NVRTC and the driver: `compile()` gives the binary that is loaded, `runs` counts compilations."""

    class Compiler:
        runs = 0

        def compile(self):
            return nvrtc.compile_kernels("source", ["step"], {"ROWS": 8}, HOPPER)[0]

    found = Compiler()

    def compiled(*_):
        found.runs += 1
        return b"binary"

    def load(binary, names):
        if binary != b"binary":
            raise RuntimeError("CUDA: device kernel image is invalid (200)")
        return [binary for _ in names]

    monkeypatch.setenv("GRASSY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: SimpleNamespace(nvrtcVersion=lambda *_: 0))
    monkeypatch.setattr(nvrtc, "_compiled", compiled)
    monkeypatch.setattr(nvrtc, "load", load)
    return found


def test_what_has_been_compiled_is_kept_and_a_torn_file_is_replaced(compiler, tmp_path):
    assert compiler.compile() == compiler.compile() == b"binary"
    assert compiler.runs == 1
    (file,) = (tmp_path / "cache").iterdir()
    file.write_bytes(b"bin")
    assert compiler.compile() == b"binary"
    assert compiler.runs == 2
    assert file.read_bytes() == b"binary"


def test_without_a_place_for_the_cache_a_kernel_is_compiled_all_the_same(compiler, monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("a file, not a folder")
    assert compiler.compile() == b"binary"
    monkeypatch.delenv("GRASSY_CACHE")

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(nvrtc.Path, "home", homeless)
    assert compiler.compile() == b"binary"


def test_gradient_and_momentum_must_be_like_the_weight():
    w = g.random_subspace(3, 2, 8)
    with pytest.raises(ValueError, match=r"momentum of the weight's shape \(3, 2, 8\)"):
        kernels.geodesic_step(w, torch.zeros_like(w), torch.zeros(3, 1, 8), 0.1, 0.9)
    with pytest.raises(ValueError, match="on meta"):
        kernels.geodesic_step(w, torch.zeros_like(w), torch.zeros_like(w, device="meta"), 0.1, 0.9)


def test_numbers_on_the_host_are_not_left_to_a_kernel(monkeypatch):
    found = []
    monkeypatch.setattr(dispatch, "choose", lambda *_: "cuda")
    monkeypatch.setattr(dispatch.cuda, "geodesic_steps", lambda w, d, m, lr, momentum, *_: found.extend([lr, momentum]))
    w = torch.empty(3, 2, 8, device="meta")
    kernels.geodesic_step(w, w, w, torch.tensor(0.5), torch.tensor([0.25], dtype=torch.float64))
    kernels.geodesic_step(w, w, w, 1, 0)  # integers would be another kernel, which does not compile
    assert found == [0.5, 0.25, 1.0, 0.0]
    assert all(isinstance(number, float) for number in found)


@pytest.mark.parametrize("impl", ["reference", "auto"])
def test_a_rate_may_be_a_tensor_of_any_precision_with_one_element(impl):
    w = g.random_subspace(3, 2, 8)
    d, results = torch.randn_like(w), []
    for lr in (0.1, torch.tensor(0.1, dtype=torch.float64), torch.tensor([0.1], dtype=torch.float64)):
        moved, buffer = w.clone(), torch.zeros_like(w)
        kernels.geodesic_step(moved, d, buffer, lr, 0.9, impl=impl)
        results.append(moved)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    with pytest.raises(ValueError, match=r"lr must be one number, got a tensor of shape \(2,\)"):
        kernels.geodesic_step(w, d, None, torch.ones(2))


def test_the_reference_leaves_all_as_it_is_if_told_so_on_the_device():
    """As on a GPU, where the flag is not read back: it is a mask."""
    w = g.random_subspace(3, 2, 8)
    d, m = torch.randn_like(w), torch.randn_like(w)
    d[0], d[1] = float("inf"), 1e6
    for flag, counted in ((1.0, [0, 0]), (0.0, [1, 2])):
        moved, buffer, counts = w.clone(), m.clone(), torch.zeros(2, dtype=torch.int64)
        options = kernels.StepOptions(max_angle=0.1)
        reference.geodesic_step(moved, d, buffer, 0.1, 0.9, options, counts, torch.tensor(flag))
        assert counts.tolist() == counted
        assert torch.equal(moved, w) == torch.equal(buffer, m) == bool(flag)


def test_several_heads_step_as_each_alone():
    shapes = [(3, 2, 8), (5, 2, 8), (4, 3, 8), (2, 2, 8)]
    weights = [g.random_subspace(*shape, dtype=torch.float64) for shape in shapes]
    grads = [torch.randn_like(w) for w in weights]
    grads[1][4, 0, 0] = torch.nan
    momenta = [None, *(g.project(w, torch.randn_like(w)) for w in weights[1:])]
    expected = []
    for w, d, m in zip(weights, grads, momenta, strict=True):
        w, m = w.clone(), None if m is None else m.clone()
        expected.append((w, m, kernels.geodesic_step(w, d, m, 0.3, 0.9)))
    counts = kernels.geodesic_steps(weights, grads, momenta, 0.3, 0.9)
    assert [int(c.skipped) for c in counts] == [0, 1, 0, 0]
    for w, m, count, (w_alone, m_alone, count_alone) in zip(weights, momenta, counts, expected, strict=True):
        assert torch.equal(w, w_alone)
        assert m is m_alone is None or torch.equal(m, m_alone)
        assert count == count_alone
    assert kernels.geodesic_steps([], [], [], 0.3) == []
    totals = [torch.tensor([10 * i, 1]) for i in range(4)]
    again = kernels.geodesic_steps(weights, grads, momenta, 0.3, 0.9, counts=totals)
    assert [int(c.skipped) for c in again] == [0, 11, 20, 30]
    assert [total.tolist() for total in totals] == [[0, 1], [11, 1], [20, 1], [30, 1]]
    skipped = kernels.geodesic_steps(weights, grads, momenta, 0.3, 0.9, counts=totals, skip=torch.ones(()))
    assert totals[1].tolist() == [11, 1]
    assert int(skipped[1].skipped) == 11
    assert [
        int(each.skipped) for each in kernels.geodesic_steps(weights, grads, momenta, 0.3, skip=torch.ones(()))
    ] == [0] * 4
    with pytest.raises(ValueError, match="need weight and gradient of one shape"):
        kernels.geodesic_steps(weights, grads[::-1], momenta, 0.3)


def test_heads_that_are_alike_are_launched_together(monkeypatch):
    """With a kernel in CUDA C++ that takes everything but k = 6 and notes what it is given."""
    launched = []
    monkeypatch.setattr(dispatch.cuda, "HEADS", 3)
    monkeypatch.setattr(dispatch.cuda, "geodesic_steps", lambda weights, *_: launched.append([len(w) for w in weights]))
    monkeypatch.setattr(dispatch, "_order", lambda _: ["cuda", "reference"])

    def supports(weight, grad, momentum, options):
        return None if weight.shape[1] < 5 and options.retraction == "geodesic" else "too large"

    monkeypatch.setattr(dispatch.cuda, "supports", supports)
    shapes = [(1, 2, 8), (2, 3, 8), (3, 2, 8), (4, 2, 8), (5, 2, 8), (6, 2, 9), (7, 6, 8), (8, 6, 8), (9, 2, 8)]
    weights = [g.random_subspace(*shape) for shape in shapes]
    momenta = [torch.zeros_like(w) for w in weights]
    momenta[-1] = None
    kernels.geodesic_steps(weights, [*momenta[:-1], torch.zeros_like(weights[-1])], momenta, 0.1)
    assert sorted(launched) == [[1, 3, 4], [2], [5], [6], [9]]
    for options in ({"impl": "reference"}, {"retraction": "qf"}):  # neither is for the kernel
        launched.clear()
        kernels.geodesic_steps(weights[:3:2], momenta[:3:2], momenta[:3:2], 0.1, **options)
        assert launched == []
    kernels.geodesic_steps(weights[:1] * 2, momenta[:1] * 2, momenta[:1] * 2, 0.1)
    assert launched == [[1], [1]]  # one weight, two steps
    with pytest.raises(RuntimeError, match="impl='cuda' cannot be used here: too large"):
        kernels.geodesic_steps(weights, [torch.zeros_like(w) for w in weights], momenta, 0.1, impl="cuda")


def test_a_weight_without_a_class_is_no_work_for_anyone():
    empty = torch.empty(0, 2, 8)
    for impl in ("auto", "native", "reference"):
        assert [int(each) for each in kernels.geodesic_step(empty, empty, None, 0.1, impl=impl)] == [0, 0]
    with pytest.raises(ValueError, match="impl must be 'auto' or one of"):
        kernels.geodesic_step(empty, empty, None, 0.1, impl="fortran")


@pytest.mark.parametrize(
    "count",
    [torch.zeros(3, dtype=torch.int64), torch.zeros(2), torch.zeros(2, dtype=torch.int64, device="meta")],
    ids=["three", "float", "elsewhere"],
)
def test_counts_that_a_kernel_could_not_add_to_are_refused(count):
    w = g.random_subspace(3, 2, 8)
    with pytest.raises(ValueError, match=r"counts must be one int64 tensor \(2,\) on cpu"):
        kernels.geodesic_steps([w], [w.clone()], [None], 0.1, counts=[count])
    with pytest.raises(ValueError, match="shorter"):
        kernels.geodesic_steps([w], [w.clone()], [None], 0.1, counts=[])
