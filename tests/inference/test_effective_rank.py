"""How much of its subspace a class uses, while a model is validated: the measure of `grassy.analysis`, in one pass."""

import csv
import math

import pytest
import torch
from torch import nn

import grassy
from grassy.analysis import class_effective_ranks
from grassy.inference.effective_rank import SubspaceUse
from grassy.inference.validate import validate
from grassy.runs.weights import LAST
from grassy.surgery import HeadOnMap
from grassy.train.loop import train
from training_cases import tiny_arrays, tiny_recipe

N, C, K = 12, 5, 3


def a_model(**options):
    return nn.Sequential(nn.Linear(6, N), grassy.GrassmannHead(N, C, k=K, **options)).eval()


def rank(model, batches):
    with torch.no_grad(), SubspaceUse(model) as use:
        for x, y in batches:
            model(x)
            use.add(y)
    assert not model[1]._forward_pre_hooks  # none is left behind
    return use.effective_rank()


@pytest.mark.parametrize("standardize", [False, True])
def test_batch_by_batch_it_is_the_mean_of_the_effective_ranks_of_the_classes(standardize):
    model = a_model(standardize=standardize)
    if standardize:
        for _ in range(50):
            model.train()(3 + torch.randn(40, 6))
        model.eval()
    x, y = torch.randn(300, 6), torch.randint(0, C - 1, (300,))  # the last class has no images
    with torch.no_grad():
        features = model[1].prepare(model[0](x))
    expected = class_effective_ranks(features, y, model[1].weight).nanmean().item()
    assert rank(model, zip(x.split(70), y.split(70), strict=True)) == pytest.approx(expected, rel=1e-5)
    assert 1 < expected < K
    unread = y.clone()
    unread[::3] = -1
    kept = unread >= 0
    assert rank(model, [(x, unread)]) == pytest.approx(rank(model, [(x[kept], y[kept])]))


def test_a_class_at_one_point_uses_one_direction_and_an_absent_one_none():
    model = nn.Sequential(nn.Identity(), grassy.GrassmannHead(N, C, k=[1, 2, 3, 3, 3], standardize=False)).eval()
    y = torch.arange(C).repeat(100)
    points = model[1].weight[:, 0].detach()[y]
    assert rank(model, [(points, y)]) == pytest.approx(1)
    anywhere = (torch.randn(len(y), 1, K) @ model[1].weight[y].detach()).squeeze(1)
    assert rank(model, [(anywhere, y)]) == pytest.approx((1 + 2 + 3 + 3 + 3) / 5, rel=0.02)


def test_where_there_is_nothing_to_measure_there_is_no_number():
    x, y = torch.randn(20, 6), torch.randint(0, C, (20,))
    linear = nn.Sequential(nn.Linear(6, N), grassy.create_head("linear", N, C)).eval()
    assert rank(linear, [(x, y)]) is None
    assert rank(a_model(riemannian=False), [(x, y)]) is None
    assert rank(a_model(), []) is None
    assert rank(a_model(), [(x * math.nan, y)]) is None
    on_map = HeadOnMap(grassy.GrassmannHead(N, C, k=K)).eval()
    with SubspaceUse(on_map) as use:
        on_map(torch.randn(20, N, 2, 2))
        use.add(y)
    assert use.effective_rank() is None


def test_a_run_records_it(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    data = tiny_arrays(tmp_path / "data")
    state = train(tiny_recipe(), data, tmp_path / "run")
    rows = list(csv.DictReader((tmp_path / "run" / "summary.csv").open()))
    ranks = [float(row["eval_effective_rank"]) for row in rows]
    assert all(1 <= value <= 2 for value in ranks)
    assert ranks == [row["eval_effective_rank"] for row in state.rows]
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("eval_effective_rank")] == pytest.approx(ranks)
    assert validate(tmp_path / "run" / LAST, data).to_dict()["effective_rank"] == pytest.approx(ranks[-1])
    train(tiny_recipe(head={"name": "linear"}), data, tmp_path / "linear")
    rows = list(csv.DictReader((tmp_path / "linear" / "summary.csv").open()))
    assert [row["eval_effective_rank"] for row in rows] == ["", ""]
    assert "effective_rank" not in validate(tmp_path / "linear", data).to_dict()
