"""The study of CIFAR-100 without running it: which runs there are, what is chosen, and what the results decide."""

import math
import statistics

import numpy as np
import pytest
from studies.cifar100 import answer, measure
from studies.cifar100.claims import NOT_YET, Interval, Part, Study, difference, slope, verdict
from studies.cifar100.pictures import best_of_both
from studies.cifar100.plan import (
    CONTESTANTS,
    FINAL,
    FIVE_SEEDS,
    HEADS,
    ROWS,
    TUNE,
    VARIANTS,
    best,
    choose,
    plan,
    seconds,
    tune,
)

pytestmark = pytest.mark.slow  # a study is not part of the package


def invented(jobs, lines, top1, **more):
    """Lines as if all jobs that can begin had run; top1: a function of the job."""
    for job in jobs:
        if job.base and job.key not in lines:
            facts = {"stage": job.stage, "row": job.row, "number": job.number, "device": "cpu", "seconds": 1.0}
            facts["settings"] = job.settings
            lines[job.key] = {"key": job.key, **facts, "top1": top1(job), "transfer_cv": {"cifar10": 60.0}, **more}
    return lines


def all_invented(top1=lambda job: 50.0 + job.number % 7, **more):
    lines = {}
    for _ in range(3):  # first trials, second trials, final runs
        invented(plan(lines), lines, top1, **more)
    return lines


# ------------------------------------------------------------------------------------------------ the plan


def test_every_head_has_as_many_different_trials_and_every_row_its_seeds():
    lines = all_invented()
    jobs = plan(lines)
    assert set(ROWS) == {*HEADS, *VARIANTS}
    for name in HEADS:
        keys = [job.key for job in jobs if (job.stage, job.row) == (TUNE, name)]
        assert len(keys) == len(set(keys)) == (16 if name in CONTESTANTS else 8)
    for row in ROWS:
        seeds = [job.recipe.seed for job in jobs if (job.stage, job.row) == (FINAL, row)]
        assert seeds == list(range(200, 205) if row in CONTESTANTS else range(100, 105 if row in FIVE_SEEDS else 103))


def test_contestants_have_fresh_seeds_even_if_their_settings_are_those_of_another_row():
    def top1(job):  # the fourth long trial has the settings of a row of its own
        right = {"grassmann-16-std": 6, "grassmann-long": 4}.get(job.row, job.number)
        return 60 if job.number == right else 55

    jobs = {(job.row, job.number): job for job in plan(all_invented(top1))}
    row, contestant = jobs["grassmann-16-std", 100], jobs["grassmann-long", 200]
    assert row.settings == contestant.settings
    assert row.key != contestant.key


def test_a_trial_that_failed_by_accident_is_waited_for_and_one_that_diverged_is_not():
    lines = all_invented(lambda job: 50.0 + job.number)
    trials = tune(lines)["softmax"]
    assert best(trials, lines) == trials[-1]
    line = lines[trials[-1].key]
    del line["top1"]
    line |= {"error": "RuntimeError: CUDA error", "diverged": False}
    assert best(trials, lines) is None
    assert not any(job.base for job in plan(lines) if (job.stage, job.row) == (FINAL, "softmax"))
    line["diverged"] = True
    assert best(trials, lines) == trials[-2]


def test_settings_are_chosen_by_the_held_out_score_alone():
    def top1(job):
        right = job.recipe.lr == 0.2 and job.recipe.weight_decay == 1e-3
        return 60 + 5 * right + 2 * (job.recipe.head.get("gamma") == 20)

    jobs = plan(all_invented(top1))
    final = {job.row: job for job in jobs if job.stage == FINAL}
    assert all(job.recipe.lr == 0.2 for row, job in final.items() if not row.endswith(("-beyond", "grassmann-long")))
    assert final["grassmann-32"].recipe.head == {"name": "grassmann", "k": 32, "gamma": 20}
    assert final["finetune-all"].start.row == "softmax"
    assert all(job.recipe.epochs == (20 if job.stage == TUNE and not job.row.endswith("-long") else 60) for job in jobs)


def test_the_grassmann_contestant_is_the_one_closest_to_the_goal_in_both():
    scores = {1: (73.0, 62.0), 2: (72.4, 63.2), 3: (72.6, 65.0), 4: (70.0, 70.0)}
    lines = {key: line for key, line in all_invented(lambda job: 70.0).items() if line["stage"] == TUNE}
    for line in lines.values():
        if line["row"] == "softmax-long":
            line["top1"], line["transfer_cv"] = 72.0 if line["number"] == 5 else 71.0, {"cifar10": 60.0}
        if line["row"] == "grassmann-long":
            line["top1"], cifar10 = scores.get(line["number"], (60.0, 60.0))
            line["transfer_cv"] = {"cifar10": cifar10}
    found = choose(tune(lines), lines)
    assert found["softmax-long"].number == 5
    assert found["grassmann-long"].number == 3  # leads of 0.6 and 5: more than the goal in both, as none of the others
    third = next(key for key, line in lines.items() if (line["row"], line["number"]) == ("grassmann-long", 3))
    lines[third]["transfer_cv"] = {"cifar10": 61.0}
    assert choose(tune(lines), lines)["grassmann-long"].number == 2  # 0.4 of 0.5 is better than 2 of 3, and 1 of 3
    del lines[next(key for key, line in lines.items() if line["row"] == "softmax-long")]
    assert choose(tune(lines), lines)["grassmann-long"] is None  # not before all is known


def test_the_held_out_images_are_a_tenth_of_every_class():
    labels = np.repeat(np.arange(5), 40)[np.random.default_rng(1).permutation(200)]
    kept, held_out = measure.split(labels)
    assert sorted([*kept, *held_out]) == list(range(200))
    assert (np.bincount(labels[held_out]) == 4).all()


def test_time_is_estimated_from_the_same_row_on_the_same_hardware():
    lines = all_invented()
    job = plan({})[0]
    assert seconds(job, {}) == 20 * 0.8 + 12
    assert seconds(job, lines, "cpu") == 1.0
    assert seconds(job, lines, "a GPU") == seconds(job, {})


# ------------------------------------------------------------------------------------------------ the answer


def test_intervals_agree_with_scipy():
    from scipy.stats import ttest_ind

    rng = np.random.default_rng(0)
    a, b = rng.normal(1, 1, 5).tolist(), rng.normal(0, 2, 3).tolist()
    low, high = ttest_ind(a, b, equal_var=False).confidence_interval()
    assert difference(a, b) == pytest.approx((statistics.mean(a) - statistics.mean(b), low, high))
    x = np.repeat([0.0, 1, 2], 3)
    found = slope(x, 2 * x + rng.normal(0, 0.1, 9))
    assert found.low < 2 < found.high
    assert found.high - found.low < 0.5


@pytest.mark.parametrize(
    ("interval", "side", "expected"),
    [
        ((1, 0.5, 1.5), "+", "holds"),
        ((1, 0.5, 1.5), "-", "does not hold"),
        ((1, -0.5, 2.5), "+", "undecided"),
        ((0.1, -0.2, 0.4), "=", "holds"),
        ((0.1, -0.2, 0.6), "=", "undecided"),
        ((1, 0.6, 1.4), "=", "does not hold"),
        ((0.1, -0.2, 0.4), "<", "holds"),
        ((-3, -4, -2), "<", "holds"),
        ((0.1, -0.2, 0.6), "<", "undecided"),
        ((1, 0.6, 1.4), "<", "does not hold"),
        ((math.inf, math.inf, math.inf), "+", "holds"),
        ((-math.inf, -math.inf, -math.inf), "+", "does not hold"),
    ],
)
def test_verdicts_follow_the_rule(interval, side, expected):
    part = Part("", Interval(*interval), side)
    assert part.verdict() == expected
    assert verdict([part, Part("", None, "")]) == expected  # what stands beside a claim does not count
    assert verdict([part, Part("", None, "+")]) == (expected if expected == "does not hold" else NOT_YET)


def test_a_row_whose_runs_diverge_is_worse():
    lines = all_invented(lambda job: 70.0 + job.number % 3)
    for line in lines.values():
        if (line["stage"], line["row"]) == (FINAL, "grassmann-8-unnormalized"):
            del line["top1"]
            line |= {"error": "loss is nan", "diverged": True}
    study = Study(lines)
    part = study.gap("grassmann-8", "grassmann-8-unnormalized")
    assert part.verdict() == "holds"
    assert str(part) == "top-1, grassmann-8 − grassmann-8-unnormalized (5 and 0 seeds): the second diverged"
    assert study.gap("grassmann-8-unnormalized", "grassmann-8").verdict() == "does not hold"
    assert study.gap("grassmann-8", "softmax").interval is not None


def test_alike_is_two_one_sided_tests_at_five_percent():
    a, b = [1.0, 1.2, 1.1], [1.0, 1.3, 0.9]
    assert difference(a, b, 0.9).high < difference(a, b).high


def test_a_claim_is_decided_by_the_runs(tmp_path):
    noise = dict(zip((*range(100, 105), *range(200, 205)), 2 * (0.0, 0.1, -0.1, 0.05, -0.05), strict=True))

    def top1(job):
        k = job.recipe.head.get("k", 0) if job.stage == FINAL else 0
        return 70 + {0: 0, 1: 1, 2: 2, 4: 3, 8: 4, 16: 3, 32: 2}[k] + noise.get(job.number, 0)

    def lines_with(transfer):
        lines = all_invented(top1, variability_train=1.0, r2_train=0.5, started="2026-01-01", torch="2", grassy="0")
        for line in lines.values():
            line["transfer"] = {name: transfer(line) + noise.get(line["number"], 0) for name in measure.SETS}
        return lines

    study = Study(lines_with(lambda line: 60 + 4 * line["row"].startswith("grassmann")))
    found = answer.claims_table(study).splitlines()[2:]
    assert [line.split("**")[1] for line in found[:3]] == ["holds", "holds", "holds"]
    assert "does not hold" not in found[3]  # nothing grows: neither holds nor fails
    assert answer.contests_table(study).count("**reached**") == 2
    assert answer.contests_table(Study(lines_with(lambda line: 60))).count("**not reached**") == 2
    fewer = Study({key: line for key, line in study.lines.items() if line["number"] not in (104, 204)})
    assert answer.contests_table(fewer).count(f"**{NOT_YET}**") == 2
    assert "grassy train cifar100-resnet18-grassmann head.gamma=12 lr=0.1 weight_decay=0.001" in answer.settings_table(
        study
    )
    accuracy, transfer = (line.strip("| ").split(" | ") for line in answer.summary(study).splitlines()[2:4])
    assert accuracy[1:3] == ["70.00 ± 0.04", "74.00 ± 0.04"]
    assert transfer[1:3] == ["60.00 ± 0.04", "64.00 ± 0.04"]
    assert transfer[3].startswith("+4.00 (+3.8")
    answer.pictures(study, tmp_path)
    assert {picture.name for picture in tmp_path.iterdir()} == {"results-k.png", "results-front.png"}


def test_a_contest_in_which_runs_diverged_is_not_waited_for():
    lines = all_invented(lambda job: 70.0 + job.number % 5)
    for line in lines.values():
        line["transfer"] = dict.fromkeys(measure.SETS, 60.0 + line["number"] % 5)
    last = next(line for line in lines.values() if (line["row"], line["number"]) == ("grassmann-long", 204))
    last |= {"error": "TrainingStopped: the loss is not finite", "diverged": True}
    assert answer.contest(Study(lines), *CONTESTANTS) == "not reached, since runs diverged: 1"


def test_what_a_row_gains_is_counted_from_the_weights_that_it_began_with():
    lines = all_invented(lambda job: 70.0 + (job.row == "softmax") + job.number % 3)
    for line in lines.values():
        if line["row"].startswith("finetune"):
            line["start_top1"] = 68.0 + line["number"] % 3
    part = Study(lines).gain("finetune-all")
    assert part.interval.mean == pytest.approx(2)
    assert "its start (3 seeds)" in str(part)
    assert Study(lines).gain("softmax").interval is None


def test_the_front_is_what_no_row_surpasses_in_both():
    points = [(1.0, 9.0), (2.0, 5.0), (2.0, 7.0), (3.0, 7.0), (0.5, 9.0), (4.0, 1.0), (3.5, 0.5)]
    assert best_of_both(points) == [(1.0, 9.0), (3.0, 7.0), (4.0, 1.0)]
    assert best_of_both(reversed(points)) == best_of_both(points)
