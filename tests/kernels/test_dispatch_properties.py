"""For any shape, precision and option a named implementation makes the step or raises, and `explain` is right."""

from typing import get_args
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grassy import geometry as g
from grassy import kernels
from grassy.kernels import dispatch, reference
from grassy.kernels.cpu import step as native

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


@st.composite
def steps(draw):
    """Weight, gradient, momentum or None, and options."""
    k = draw(st.integers(1, 6))
    shape = draw(st.integers(1, 4)), k, draw(st.integers(k, 20))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    weight = g.random_subspace(*shape, dtype=F64, generator=generator)
    grad, momentum = (0.3 * torch.randn(shape, dtype=F64, generator=generator) for _ in range(2))
    precision = draw(st.sampled_from([F32, F32, F64]))
    weight = weight.to(precision)
    grad = grad.to(draw(st.sampled_from([precision, BF16])))
    momentum = g.project(weight, momentum.to(precision)).to(draw(st.sampled_from([precision, BF16])))
    turned = draw(st.sampled_from([(), (), (0,), (1,), (2,)]))
    tensors = [x.mT.contiguous().mT if i in turned else x for i, x in enumerate((weight, grad, momentum))]
    retraction = draw(st.sampled_from(kernels.RETRACTIONS))
    options = {
        "retraction": retraction,
        "transport": draw(st.sampled_from(kernels.TRANSPORTS)) if retraction == "geodesic" else "projection",
        "max_angle": draw(st.sampled_from([None, None, 0.05, 2.0])),
        "maximize": draw(st.booleans()),
    }
    return tensors[0], tensors[1], draw(st.sampled_from([tensors[2], None])), options


def copies(*tensors, dtype=None):
    """Of the same strides, or in float64."""
    return [None if t is None else t.clone() if dtype is None else t.to(dtype, copy=True) for t in tensors]


def runs_here(impl, weight, grad, momentum, options):
    """Whether an implementation makes a step on a CPU, by what its page in the documentation says."""
    if impl == "native":
        plain = all(t is None or (t.dtype == F32 and t.is_contiguous()) for t in (weight, grad, momentum))
        plain = plain and options["retraction"] == "geodesic" and options["max_angle"] is None
        return plain and native.unavailable() is None
    return impl in ("auto", "reference")


@settings(max_examples=200, deadline=None)
@given(steps(), st.sampled_from(get_args(dispatch.StepImpl)))
def test_an_implementation_agrees_with_the_float64_reference_or_raises(step, impl):
    weight, grad, momentum, options = step
    exact, exact_grad, exact_momentum = copies(weight, grad, momentum, dtype=F64)
    kernels.geodesic_step(exact, exact_grad, exact_momentum, 0.1, 0.9, impl="reference", **options)
    moved, gradient, buffer = copies(weight, grad, momentum)
    if not runs_here(impl, *step):
        with pytest.raises(RuntimeError, match=f"impl='{impl}' cannot be used here"):
            kernels.geodesic_step(moved, gradient, buffer, 0.1, 0.9, impl=impl, **options)
        assert torch.equal(moved, weight)
        return
    counts = kernels.geodesic_step(moved, gradient, buffer, 0.1, 0.9, impl=impl, **options)
    assert int(counts.skipped) == 0
    assert (moved - exact).abs().max() < (1e-5 if weight.dtype == F32 else 1e-12)
    assert g.orthonormality_error(moved.double()) < 1e-6
    if buffer is not None:
        rounding = 2**-8 if buffer.dtype == BF16 else 1e-5
        assert (buffer - exact_momentum).abs().max() <= rounding * exact_momentum.abs().max() + 1e-6


@settings(max_examples=100, deadline=None)
@given(steps(), st.sampled_from([1, 2**20]))
def test_the_first_that_nothing_is_said_against_is_what_auto_runs(step, worth):
    weight, grad, momentum, options = step
    ran = []

    def noted(name, module):
        function = module.geodesic_step
        return mock.patch.object(module, "geodesic_step", lambda *a: (ran.append(name), function(*a)))

    with (
        mock.patch.object(native, "WORTH_COMPILING_FOR", worth),
        noted("native", native),
        noted("reference", reference),
    ):
        reasons = kernels.explain(weight, grad, momentum, **options)
        kernels.geodesic_step(*copies(weight, grad, momentum), 0.1, 0.9, **options)
    assert ran == [next(name for name, reason in reasons.items() if reason is None)]
