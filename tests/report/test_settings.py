"""The settings of a run, as the page compares them."""

import dataclasses

from grassy.report.settings import settings_of
from grassy.runs.weights import PREPARATION, Description

ABOUT = Description("resnet18", 10, {"name": "linear"})


def test_everything_that_prepares_an_image_is_a_setting():
    other = {"crop_pct": 0.5, "crop_mode": "squash", "interpolation": "nearest", "mean": (0.0,) * 3, "std": (1.0,) * 3}
    assert other.keys() == set(PREPARATION)
    for name, value in other.items():
        changed = settings_of(dataclasses.replace(ABOUT, **{name: value}), 64)
        assert {key for key in changed if changed[key] != settings_of(ABOUT, 64)[key]} == {name}
