"""Which implementation of the step is taken, and how the CUDA kernel divides its work."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grassy import geometry as g
from grassy import ops
from grassy.ops.cuda_step import SOURCE, plan

HOPPER, AMPERE, CONSUMER = (9, 0), (8, 0), (8, 6)
SHARED = {HOPPER: 227, AMPERE: 163, CONSUMER: 99}


@given(st.integers(1, 64), st.integers(1, 10_000), st.sampled_from([HOPPER, AMPERE, CONSUMER]))
def test_a_plan_covers_all_columns_and_fits_the_device(k, n, capability):
    chosen = plan(k, n, capability)
    if chosen is None:
        return
    assert chosen.k == k <= chosen.rows
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


def test_the_source_of_the_kernel_is_in_the_package():
    text = SOURCE.read_text()
    assert 'extern "C" __global__' in text
    assert text.isascii()  # NVRTC is not told an encoding


def test_ops_explain_what_they_choose():
    small = g.random_subspace(3, 2, 8)
    reasons = ops.explain(small)
    assert list(reasons) == ["native", "reference"]
    assert reasons["native"]
    assert reasons["reference"] is None
    assert ops.choose("auto", small) == "reference"
    assert ops.explain(small.to("meta"))["reference"] is None


@pytest.mark.parametrize("impl", ["cuda", "triton"])
def test_a_kernel_that_cannot_run_says_why(impl, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    w = g.random_subspace(3, 2, 8)
    with pytest.raises(RuntimeError, match=rf"impl='{impl}' cannot be used here: .+"):
        ops.geodesic_step(w, torch.zeros_like(w), None, 0.1, impl=impl)


@pytest.mark.parametrize("impl", ["reference", "auto"])
def test_a_step_that_is_to_be_skipped_changes_nothing(impl):
    w = g.random_subspace(3, 2, 8)
    d, m = torch.randn_like(w), torch.randn_like(w)
    d[0] = float("inf")
    before = w.clone(), m.clone()
    counts = ops.geodesic_step(w, d, m, 0.1, 0.9, skip=torch.tensor(1.0), impl=impl)
    assert torch.equal(w, before[0])
    assert torch.equal(m, before[1])
    assert int(counts.skipped) == int(counts.capped) == 0
    ops.geodesic_step(w, d, m, 0.1, 0.9, skip=torch.tensor(0.0), impl=impl)
    assert not torch.equal(w, before[0])
