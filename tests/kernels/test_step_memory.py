"""The step works on blocks of classes and needs little memory."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from grassy import geometry as g
from grassy import kernels

F64 = torch.float64


def test_blocks_of_classes_do_not_change_the_result(monkeypatch):
    w, d, m = (
        g.random_subspace(37, 3, 16, dtype=F64),
        torch.randn(37, 3, 16, dtype=F64),
        torch.randn(37, 3, 16, dtype=F64),
    )
    results = []
    for size in (1000, 5):
        monkeypatch.setattr(kernels.reference, "_classes_in_a_block", lambda weight, size=size, **_: size)
        moved, buffer = w.clone(), m.clone()
        kernels.geodesic_step(moved, d, buffer, 0.1, 0.9)
        results.append((moved, buffer))
    assert torch.allclose(results[0][0], results[1][0], atol=1e-14)
    assert torch.allclose(results[0][1], results[1][1], atol=1e-14)


class PeakMemory(TorchDispatchMode):
    """The largest number of bytes that tensors made under this mode held at one time."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak = weakref.WeakKeyDictionary(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {
            t.untyped_storage().data_ptr()
            for t in torch.utils._pytree.tree_leaves((args, kwargs))
            if torch.is_tensor(t)
        }
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if torch.is_tensor(tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.alive[tensor] = tensor.untyped_storage().nbytes()
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


@pytest.mark.parametrize("impl", ["reference", "auto"])
def test_a_step_takes_little_memory_beyond_its_arguments(impl):
    w = g.random_subspace(1000, 8, 2048)
    buffer, d = torch.zeros_like(w), 1e-2 * torch.randn_like(w)
    with PeakMemory() as memory:
        kernels.geodesic_step(w, d, buffer, 0.01, 0.9, impl=impl)
    assert w.nbytes / 1000 < memory.peak < w.nbytes / 10
