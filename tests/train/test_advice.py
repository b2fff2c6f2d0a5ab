"""A run whose figures show that something is off says so at its end, and what to try."""

import pytest

from grassy.heads import GrassmannHead
from grassy.inference.evaluate import Metrics
from grassy.train.advice import is_chance, what_is_off
from grassy.train.loop import train
from training_cases import tiny_arrays, tiny_recipe


def metrics(top1=90.0, images=1000, rank=4.0):
    return Metrics(1.0, top1, 100.0, images, rank)


@pytest.mark.parametrize(
    ("top1", "images", "classes", "chance"),
    [
        (10.0, 1000, 10, True),
        (11.8, 1000, 10, True),
        (12.2, 1000, 10, False),
        (60.0, 30, 2, True),
        (100.0, 9, 1, False),
    ],
)
def test_an_accuracy_within_two_deviations_of_guessing_is_chance(top1, images, classes, chance):
    assert is_chance(metrics(top1, images), classes) == chance


def test_a_good_run_is_not_advised():
    assert what_is_off(metrics(), 10, GrassmannHead(64, 10, k=8), 1000) == []
    assert what_is_off(metrics(rank=None), 10, None, 1000) == []


def test_an_effective_rank_near_one_is_advised_of_unless_k_is_one_or_images_are_few():
    head = GrassmannHead(64, 10, k=8)
    (line,) = what_is_off(metrics(rank=1.1), 10, head, 1000)
    assert "classes use 1.1 of their 8 directions" in line
    assert "head.standardize=true" in line
    (line,) = what_is_off(metrics(rank=1.1), 10, GrassmannHead(64, 10, k=8, standardize=True, normalize=False), 1000)
    assert line.endswith("try more epochs, or a smaller head.k")  # the rest is set already
    assert what_is_off(metrics(rank=1.0), 10, GrassmannHead(64, 10, k=1), 1000) == []
    assert what_is_off(metrics(rank=1.1, images=30), 10, head, 1000) == []


def test_a_run_that_only_guesses_says_so_at_its_end(tmp_path, capsys):
    train(tiny_recipe(lr=0.0, head_lr=0.0, epochs=2, head={"name": "linear"}), tiny_arrays(tmp_path), tmp_path / "run")
    told = capsys.readouterr().err
    assert told.count("images is not clearly above chance (33.33)") == 1


def test_a_gamma_far_from_the_rule_is_said_on_both_sides(tmp_path, capsys):
    train(tiny_recipe(epochs=1, **{"head.gamma": 1.0}), tiny_arrays(tmp_path), tmp_path / "run")
    assert "gamma 1 is small for 3 classes" in capsys.readouterr().err


def test_chance_after_few_updates_asks_for_more_of_them():
    (line,) = what_is_off(metrics(top1=11.0), 10, None, 8)
    assert line.endswith("8 updates are few: try more --epochs or a smaller --batch-size")
    (line,) = what_is_off(metrics(top1=11.0), 10, None, 1000)
    assert line.endswith("check the labels, then try a tenth of lr, or more epochs")
