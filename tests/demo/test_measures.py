import math

import pytest
import torch
from scipy import stats
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from torch.nn import functional as F

from grassy.demo.measures import Labelled, difference, few_shot, kept, strongest_direction, style
from grassy.demo.spread import spread_of


def stroke(slant, size=32, thickness=1.0):
    """A straight stroke that moves right by `slant` pixels per row."""
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    distance = columns - size / 2 - slant * (rows - size / 2)
    return torch.exp(-((distance / thickness) ** 2)).unsqueeze(0)


def test_the_slant_of_a_stroke_is_measured_and_its_ink_grows_with_its_thickness():
    slants = [-0.3, 0.0, 0.2]
    found = style(torch.stack([stroke(slant) for slant in slants]))
    torch.testing.assert_close(found["slant"], torch.tensor(slants, dtype=torch.float64), atol=5e-3, rtol=0)
    thin, thick = (style(stroke(0, thickness=t).unsqueeze(0)) for t in (1.0, 3.0))
    assert thick["ink"] > 2.5 * thin["ink"]
    assert thick["width"] == pytest.approx(3 * float(thin["width"]), rel=0.01)


def test_energy_in_one_direction_is_one_over_the_dimensions_that_features_fill():
    collapsed = torch.eye(4)[[0, 0, 0, 1, 1, 1]]
    spread = torch.eye(4)[[0, 1, 2, 1, 2, 3]]
    labels = torch.tensor([0, 0, 0, 1, 1, 1])
    assert strongest_direction(collapsed, labels) == pytest.approx(1)
    assert strongest_direction(spread, labels) == pytest.approx(1 / 3)


def test_few_shot_accuracy_is_that_of_the_nearest_neighbour():
    torch.manual_seed(0)
    labels = torch.arange(60) % 3
    features = F.normalize(torch.randn(60, 8) + 1.5 * torch.eye(8)[labels], dim=-1)
    generator = torch.Generator().manual_seed(5)
    order = torch.randperm(60, generator=generator)
    examples = torch.cat([order[labels[order] == label][:4] for label in range(3)])
    others = torch.tensor([i for i in range(60) if i not in examples])
    oracle = KNeighborsClassifier(1).fit(features[examples], labels[examples]).score(features[others], labels[others])
    assert few_shot(features, labels, 4, seed=5, draws=1) == pytest.approx(oracle)
    assert few_shot(torch.eye(3)[labels], labels, 1, seed=0) == 1


def test_what_is_kept_is_the_r2_of_five_neighbours_of_the_same_class():
    torch.manual_seed(0)
    labels = torch.zeros(80, dtype=torch.long)
    angles = torch.rand(80, dtype=torch.float64)
    features = torch.stack([angles.cos(), angles.sin()], dim=-1)
    train, test = slice(0, 50), slice(50, 80)
    parts = [Labelled(features[part], labels[part], angles[part]) for part in (train, test)]
    oracle = KNeighborsRegressor(5).fit(features[train], angles[train]).score(features[test], angles[test])
    assert kept(*parts) == pytest.approx(oracle)
    assert kept(*parts) > 0.9
    noise = [part._replace(property=torch.randn(len(part.labels), dtype=torch.float64)) for part in parts]
    assert kept(*noise) < 0.2


def test_the_interval_of_a_difference_is_that_of_the_paired_t_test():
    ours, theirs = [3.0, 4.0, 5.5, 4.5], [2.0, 3.5, 4.0, 4.4]
    found = difference(ours, theirs)
    interval = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert not found.is_clear
    assert difference([5.0, 6.1, 7.0], [1.0, 2.0, 3.0]).is_clear


def test_on_the_map_an_image_is_as_far_from_the_middle_as_its_angle_to_it():
    around = torch.arange(4) * math.pi / 2
    features = torch.stack(
        [torch.full((4,), math.cos(0.5)), math.sin(0.5) * around.cos(), math.sin(0.5) * around.sin()]
    )
    (spread,) = spread_of(features.T, torch.rand(4, 1, 8, 8), torch.zeros(4, dtype=torch.long), ["3"])
    assert [math.hypot(*place) for place in spread.places] == pytest.approx([math.degrees(0.5)] * 4, rel=1e-3)
    assert len(set(spread.pictures)) == 4
