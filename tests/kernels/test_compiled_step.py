"""torch.compile takes the step as one operator: no graph breaks, and the same numbers as without."""

import copy

import pytest
import torch
import torch._dynamo.testing
from torch import nn

import grassy
from grassy import geometry as g
from grassy import kernels


def case(*shape):
    w = g.random_subspace(*shape)
    return w, torch.randn_like(w), g.project(w, torch.randn_like(w))


@pytest.mark.parametrize(
    ("lr", "options"),
    [
        (0.1, {}),
        (torch.tensor(0.1), {"momentum": torch.tensor(0.5)}),
        (0.1, {"retraction": "qf", "maximize": True}),
        (0.02, {"max_angle": 0.01}),
        (0.1, {"transport": "parallel", "skip": torch.zeros(1)}),
    ],
)
def test_a_compiled_step_is_the_step(lr, options):
    heads = [case(3, 4, 9), case(5, 2, 8), case(5, 2, 8)]
    heads[1] = (*heads[1][:2], None)  # without momentum
    heads[2][1][3, 0, 0] = torch.nan
    options = {"momentum": 0.9, **options}
    both = []
    for compiled in (False, True):
        w, d, m = zip(*copy.deepcopy(heads), strict=True)
        step = (
            torch.compile(kernels.geodesic_steps, fullgraph=True, backend="aot_eager")
            if compiled
            else kernels.geodesic_steps
        )
        counts = step(w, d, m, lr, **options)
        both.append((w, [each for each in m if each is not None], [torch.stack(each) for each in counts]))
    torch.testing.assert_close(both[1], both[0], rtol=0, atol=0)
    assert [int(each.skipped) for each in kernels.geodesic_steps(*zip(*copy.deepcopy(heads), strict=True), 0.1)] == [
        0,
        0,
        1,
    ]


def test_a_rate_that_changes_does_not_compile_again_and_again():
    p = nn.Parameter(g.random_subspace(3, 2, 9))
    optimizer = grassy.RiemannianSGD([p], lr=0.1)
    counter = torch._dynamo.testing.CompileCounter()
    step = torch.compile(optimizer.step, backend=counter)
    alone = grassy.RiemannianSGD([q := nn.Parameter(p.detach().clone())], lr=0.1)
    for i in range(12):
        for each in (optimizer, alone):
            each.param_groups[0]["lr"] = 0.1 / (i + 1)
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
        step()
        alone.step()
    assert counter.frame_count <= 3
    assert torch.equal(p, q)


def test_the_operator_passes_the_checks_of_torch():
    heads = [case(3, 4, 9), case(3, 4, 9)]
    w, d, m = (list(column) for column in zip(*heads, strict=True))
    counts = [torch.zeros(2, dtype=torch.int64) for _ in heads]
    rest = ("geodesic", "projection", None, False, None, "auto")
    rates = (torch.tensor(0.1), torch.tensor(0.9))
    torch.library.opcheck(torch.ops.grassy.geodesic_steps, (w, d, m, counts, *rates, *rest))
    torch.library.opcheck(torch.ops.grassy.geodesic_steps, (w, d, [], counts, *rates, *rest))


def test_products_are_exact_in_compiled_steps_too(monkeypatch):
    w, d, m = case(3, 4, 9)
    seen = []
    step = kernels.reference._step

    def noted(*arguments):
        seen.append(torch.get_float32_matmul_precision())
        return step(*arguments)

    monkeypatch.setattr(kernels.reference, "_step", noted)
    torch.set_float32_matmul_precision("high")
    try:
        torch.compile(kernels.geodesic_step, fullgraph=True, backend="aot_eager")(w, d, m, 0.1, 0.9)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seen == ["highest"]


def test_a_compiled_optimizer_makes_the_same_steps():
    w = g.random_subspace(6, 3, 10)
    params = [nn.Parameter(w.clone()) for _ in range(2)]
    optimizers = [grassy.RiemannianSGD([p], lr=torch.tensor(0.1)) for p in params]
    steps = [optimizers[0].step, torch.compile(lambda: optimizers[1].step(), fullgraph=True, backend="aot_eager")]
    for number in range(3):
        params[0].grad = torch.randn_like(w)
        params[0].grad[number, 0, 0] = torch.inf
        params[1].grad = params[0].grad.clone()
        for step in steps:
            step()
    assert torch.equal(*params)
    assert [optimizer.skipped_classes for optimizer in optimizers] == [3, 3]


def test_each_part_of_a_joint_optimizer_is_one_graph():
    for head, parts in ((nn.Linear(8, 4), 1), (grassy.GrassmannHead(8, 4, k=2), 2)):
        model = nn.Sequential(nn.Linear(8, 8), head)
        optimizer = grassy.make_optimizer(model, "sgd", lr=0.1, momentum=0.9)
        model(torch.randn(5, 8)).sum().backward()
        assert torch._dynamo.explain(lambda each=optimizer: each.step())().graph_count == parts
