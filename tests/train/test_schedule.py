"""The learning rate over a run."""

import math

import pytest
import torch

import grassy
from grassy.train.schedule import Schedule, learning_rate_factor
from training_cases import tiny_recipe


def factors(times, **changes):
    recipe = tiny_recipe(lr=0.1, epochs=10, **changes)
    return [learning_rate_factor(recipe, time) for time in times]


def test_a_cosine_goes_from_the_full_rate_to_the_least():
    assert factors([0, 5, 10]) == pytest.approx([1, 0.5, 0])
    assert factors([0, 5, 10], min_lr=0.01) == pytest.approx([1, 0.55, 0.1])
    assert factors([2.5]) == pytest.approx([0.5 * (1 + math.cos(math.pi / 4))])


def test_warm_up_is_linear_and_the_cosine_begins_at_its_end():
    assert factors([0, 1, 2, 6, 10], warmup_epochs=2, warmup_lr=0.02) == pytest.approx([0.2, 0.6, 1, 0.5, 0])


def test_steps_fall_at_their_milestones():
    changes = {"sched": "step", "decay_milestones": [3, 6], "decay_rate": 0.1}
    assert factors([0, 2.999, 3, 5.999, 6, 10], **changes) == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


def test_a_constant_rate_stays():
    assert factors([0, 5, 10], sched="constant") == [1, 1, 1]


@pytest.mark.parametrize("on_device", [False, True])
def test_the_ratio_of_the_two_rates_stays_also_after_loading_a_state(on_device):
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), grassy.GrassmannHead(6, 3, k=2))
    optimizer = grassy.make_optimizer(model, "adamw", lr=1e-3, head_lr=0.2)
    schedule = Schedule(optimizer)
    if on_device:
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"])
    held = [group["lr"] for group in optimizer.param_groups]
    schedule.set(0.25)
    if on_device:  # a captured step reads them where they are
        assert [float(lr) for lr in held] == pytest.approx([2.5e-4, 0.05])
    optimizer.load_state_dict(optimizer.state_dict())
    schedule.set(0.5)
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([5e-4, 0.1])
