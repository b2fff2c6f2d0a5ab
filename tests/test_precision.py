"""Geometry takes products as they are, whatever precision others are reduced to."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from grassy import geometry as g
from grassy import kernels
from grassy.precision import exact_products


class Products(TorchDispatchMode):
    """Records how products of float32 would be taken, on a GPU and on a CPU, whenever there is one."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.__name__.split(".")[0] in ("mm", "bmm", "addmm", "baddbmm"):
            kinds = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
            self.seen.append((torch.get_float32_matmul_precision(), *(kind.fp32_precision for kind in kinds)))
        return function(*args, **(kwargs or {}))


def precisions():
    return [kind.fp32_precision for kind in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)]


@pytest.fixture
def usual_precision():
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("usual_precision")
@pytest.mark.parametrize(
    "reduce",
    [
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
        lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
        lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"transport": "parallel"}, {"retraction": "qf"}], ids=str)
def test_products_are_exact_where_others_are_reduced_to_tf32_or_bfloat16(reduce, options):
    w = g.random_subspace(5, 3, 64)
    h = g.project(w, 0.01 * torch.randn_like(w))
    reduce()
    before = precisions()
    with Products() as products:
        kernels.geodesic_step(w.clone(), h, torch.zeros_like(w), 0.1, 0.9, **options)
        g.log(w, g.geodesic(w, h))
        g.orthonormality_error(g.orthonormalize(w + h))
    assert len(products.seen) > 10
    assert set(products.seen) == {("highest", "ieee", "ieee")}
    assert precisions() == before  # and others are as they were


@pytest.mark.usefixtures("usual_precision")
def test_what_is_set_for_all_products_stays_in_force_after_exact_ones():
    before = torch.backends.fp32_precision
    kinds = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    try:
        for kind in kinds:
            kind.fp32_precision = "none"
        torch.backends.fp32_precision = "tf32"
        with exact_products(torch.zeros(())), exact_products(torch.zeros(())):
            assert precisions() == ["ieee", "ieee"]
        assert precisions()[0] == "tf32"
        torch.backends.fp32_precision = "ieee"
        assert precisions()[0] == "ieee"
    finally:
        torch.backends.fp32_precision = before


@pytest.mark.usefixtures("usual_precision")
def test_products_stay_exact_until_the_last_thread_is_done():
    torch.set_float32_matmul_precision("high")
    first, second = exact_products(torch.zeros(())), exact_products(torch.zeros(()))
    first.__enter__()
    with ThreadPoolExecutor(1) as other:
        other.submit(second.__enter__).result()
        first.__exit__(None, None, None)
        assert torch.get_float32_matmul_precision() == "highest"
        other.submit(second.__exit__, None, None, None).result()
    assert torch.get_float32_matmul_precision() == "high"
