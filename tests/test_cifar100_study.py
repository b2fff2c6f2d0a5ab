"""The study of CIFAR-100, small: it tunes, runs, resumes and answers; and its statistics are right."""

import functools
import json
import math
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest
import torch
from experiments.cifar100 import answer, measure, run
from experiments.cifar100.claims import NOT_YET, Interval, Part, Study, difference, slope, verdict
from experiments.cifar100.pictures import best_of_both
from experiments.cifar100.plan import (
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
    read,
    seconds,
    tune,
)

from grassy.training import features
from grassy.training.feature_models import open_model
from grassy.transfer.protocol import transfer
from training_cases import tiny_arrays

TINY = ["model_kwargs={channels: [4, 4, 8, 16]}", "img_size=8", "batch_size=16", "epochs=1", "warmup_epochs=0"]
ROWS_RUN = ["softmax", "grassmann-8", "grassmann-4", "finetune-head"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name, size in (("cifar100", 8), ("cifar10", 8), ("flowers", 8), ("pets64", 12)):
        tiny_arrays(folder / name, images=60, classes=3, size=size)
    tiny_arrays(folder / "more", images=30, classes=3, seed=1)
    (folder / "more" / "train.npz").rename(folder / "flowers" / "val.npz")
    return folder


def call(monkeypatch, module, *words):
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, words)])
    module.main()


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


# ------------------------------------------------------------------------------------------------ end to end


def test_the_study_tunes_runs_answers_and_resumes(data, tmp_path, monkeypatch, capsys):
    results, page = tmp_path / "results.jsonl", tmp_path / "page.md"
    where = ["--data-dir", data, "--results", results, "--scratch", tmp_path / "scratch", "--only", *ROWS_RUN]
    call(monkeypatch, run, *where, "--set", *TINY)
    lines = list(read(results).values())
    assert [line.get("error") for line in lines] == [None] * len(lines)
    assert sum(line["stage"] == TUNE for line in lines) == 16
    final = {row: [line for line in lines if (line["stage"], line["row"]) == (FINAL, row)] for row in ROWS_RUN}
    assert {row: len(each) for row, each in final.items()} == dict(zip(ROWS_RUN, (5, 5, 3, 3), strict=True))
    for line in lines:
        assert ("transfer" in line) == (line["stage"] == FINAL)  # test images only when nothing is left to choose
        assert set(line["transfer_cv"]) == {"cifar10", "flowers", "pets"}
        assert 0 < line["variability_train"] < 180
        assert line["torch"] == torch.__version__
    assert all(line["orthonormality_error"] < 1e-5 for line in final["grassmann-4"])
    assert {line["start"] for line in final["finetune-head"]} <= {line["key"] for line in final["softmax"]}
    assert not list((tmp_path / "scratch" / "runs").iterdir())  # numbers stay, weights do not

    page.write_text(
        "before\n<!-- study:claims -->\nold\n<!-- /study -->\n<!-- study:rows -->\n<!-- /study -->\nafter\n"
    )
    call(monkeypatch, answer, "--results", results, "--pages", page, "--images", tmp_path / "images", "--set", *TINY)
    text = page.read_text()
    assert (text[:7], text[-6:]) == ("before\n", "after\n")
    assert "old" not in text
    first = next(line for line in text.splitlines() if line.startswith("| 1 |"))
    assert NOT_YET not in first
    assert f"**{NOT_YET}**" in next(line for line in text.splitlines() if line.startswith("| 2 |"))
    assert (tmp_path / "images" / "results-front.png").stat().st_size > 1000

    before = results.read_bytes()
    call(monkeypatch, run, *where, "--set", *TINY)
    assert results.read_bytes() == before
    assert "all jobs are done" in capsys.readouterr().out

    where[-len(ROWS_RUN) :] = ["grassmann-4"]
    call(monkeypatch, run, *where, "--minutes", 0.001, "--set", *TINY, "batch_size=20")  # waits for other trials
    assert results.read_bytes() == before
    where[-1] = "softmax"
    call(monkeypatch, run, *where, "--minutes", 0.25, "--set", *TINY, "batch_size=20")
    assert len(read(results)) > len(lines)  # another setting is another run
    assert "jobs remain" in capsys.readouterr().out


def test_all_heads_share_the_compiled_network(data, tmp_path, monkeypatch):
    sizes, rows = [], ("softmax", "cosine", "grassmann-8")

    def backend(graph, _):
        sizes[-1].append(len(graph.graph.nodes))
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    for row in rows:
        sizes.append([])
        results = tmp_path / f"{row}.jsonl"
        monkeypatch.setattr(run, "remaining", lambda args, lines, row=row: [] if lines else [first_of(row)])
        call(monkeypatch, run, "--data-dir", data, "--results", results, "--scratch", tmp_path / "scratch")
        assert [line.get("error") for line in read(results).values()] == [None]
    assert max(sizes[0]) > 100
    assert max(map(max, filter(None, sizes[1:]))) < 20  # the pooling in front of another kind of head


def first_of(row):
    return next(job for job in plan({}, [*TINY, "torchcompile=on"]) if job.row == row)


def test_features_and_transfer_are_those_of_grassy_transfer(data, tmp_path):
    from grassy.training.loop import train

    job = plan({}, TINY)[0]
    train(job.recipe, data / "cifar100", tmp_path / "run", quiet=True)
    view, device = measure.View.of(job.recipe), torch.device("cpu")
    measure.write_arrays(data, tmp_path / "arrays", view)
    lab = measure.Lab.open(tmp_path / "arrays", device)
    found = lab.measure(tmp_path / "run" / "last.safetensors", job.recipe, FINAL)
    model = open_model(str(tmp_path / "run" / "last.safetensors"))
    extracted = features.extract(model, measure.find_set("pets", data).test, tmp_path / "cache", device, workers=0)
    own = measure.features(model, lab.images["pets"]["test"][0], None)
    torch.testing.assert_close(own, extracted.features)
    report = transfer([model], ["cifar10", "flowers"], data, tmp_path / "cache", device, methods=["svm"], workers=0)
    for result in report.results:
        assert found["transfer"][result.dataset] == pytest.approx(result.accuracy)
    assert len(lab.images["flowers"]["train"][1]) == 60 + 30  # train and val
    assert measure.find_set("pets", data).metric == "mean_per_class"


def test_a_failure_is_recorded_and_repeated_only_when_asked(data, tmp_path, monkeypatch, capsys):
    results = tmp_path / "results.jsonl"
    words = ["--data-dir", data, "--results", results, "--scratch", tmp_path / "scratch", "--only", "softmax"]

    def fail(*_, **__):
        raise RuntimeError("no\nluck")

    def lines():
        return [json.loads(line) for line in results.read_text().splitlines()]

    monkeypatch.setattr(run, "train", fail)
    for options, numbers in (([], [1, 2, 3]), ([], [1, 2, 3, 4, 5, 6]), (["--retry"], [1, 2, 3, 4, 5, 6, 1, 2, 3])):
        with pytest.raises(SystemExit, match="stopped: 3 failures in a row: RuntimeError: no luck"):
            call(monkeypatch, run, *words, *options, "--set", *TINY)  # it is not the settings' fault
        assert [line["number"] for line in lines()] == numbers
    assert {line["error"] for line in lines()} == {"RuntimeError: no luck"}
    assert "6 failed, to be repeated with --retry" in capsys.readouterr().out


def test_what_still_runs_when_others_have_failed_is_kept(data, tmp_path, monkeypatch):
    results = tmp_path / "results.jsonl"

    def do(job, place):
        facts = {"key": job.key, "stage": job.stage, "row": job.row, "number": job.number, "settings": job.settings}
        facts |= {"device": "cpu", "seconds": 1.0}
        if job.number < 4:
            return {**facts, "error": "AssertionError: no luck", "diverged": False}
        time.sleep(0.5)
        return {**facts, "top1": 50.0}

    monkeypatch.setattr(run, "do", do)
    monkeypatch.setattr(run, "ProcessPoolExecutor", lambda jobs, _: ThreadPoolExecutor(jobs))
    where = ["--data-dir", data, "--results", results, "--scratch", tmp_path / "scratch", "--only", "softmax"]
    with pytest.raises(SystemExit, match="3 failures in a row: AssertionError: no luck"):
        call(monkeypatch, run, *where, "--jobs", 4, "--set", *TINY)
    assert sorted(line["number"] for line in read(results).values()) == [1, 2, 3, 4]


def test_a_worker_that_is_killed_is_said_in_one_line(data, tmp_path, monkeypatch):
    def killed(*_):
        raise BrokenProcessPool("A process in the process pool was terminated abruptly")

    monkeypatch.setattr(run, "work", killed)
    where = ["--data-dir", data, "--results", tmp_path / "results.jsonl", "--scratch", tmp_path / "scratch"]
    with pytest.raises(SystemExit, match="stopped: a worker was killed"):
        call(monkeypatch, run, *where, "--jobs", 2, "--set", *TINY)


def test_other_results_than_our_own_do_not_change_our_pages(tmp_path, monkeypatch, capsys):
    pages = [answer.ROOT / "docs" / "results.md", answer.ROOT / "README.md"]
    before = [page.read_text() for page in pages]
    call(monkeypatch, answer, "--results", tmp_path / "none.jsonl")
    assert [page.read_text() for page in pages] == before
    assert "not yet run" in capsys.readouterr().out


def test_no_runs_at_once_is_refused_in_one_line(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        call(monkeypatch, run, "--list", "--jobs", 0)
    assert capsys.readouterr().err.splitlines()[-1].endswith("--jobs must be at least 1, got 0")


def test_nothing_begins_that_would_not_end_in_time(data, tmp_path, monkeypatch, capsys):
    results = tmp_path / "results.jsonl"
    call(monkeypatch, run, "--data-dir", data, "--results", results, "--scratch", tmp_path, "--minutes", 0.2)
    assert not results.exists()
    assert "jobs remain" in capsys.readouterr().out


def test_a_line_cut_short_by_a_crash_is_ignored_and_left_alone(tmp_path):
    path = tmp_path / "results.jsonl"
    run.append(path, {"key": "a"})
    with path.open("a") as file:
        file.write('{"key": "b", "to')
    run.append(path, {"key": "c"})
    assert list(read(path)) == ["a", "c"]


# ------------------------------------------------------------------------------------------------ the plan


def test_every_head_has_eight_different_trials_and_every_row_its_seeds():
    lines = all_invented()
    jobs = plan(lines)
    assert set(ROWS) == {*HEADS, *VARIANTS}
    for name in HEADS:
        keys = [job.key for job in jobs if (job.stage, job.row) == (TUNE, name)]
        assert len(keys) == len(set(keys)) == 8
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
    noise = {100: 0.0, 101: 0.1, 102: -0.1, 103: 0.05, 104: -0.05}

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
    assert answer.goal(study).count("**reached**") == 2
    assert answer.goal(Study(lines_with(lambda line: 60))).count("**not reached**") == 2
    fewer = Study({key: line for key, line in study.lines.items() if line["number"] not in (104, 204)})
    assert answer.goal(fewer).count(f"**{NOT_YET}**") == 2
    assert "grassy train cifar100-resnet18-grassmann head.gamma=12 lr=0.1 weight_decay=0.001" in answer.settings_table(
        study
    )
    assert "74.00 ± 0.04" in answer.summary(study)
    assert "images/results-k.png" in answer.pictures(study, tmp_path)


def test_the_front_is_what_no_row_surpasses_in_both():
    points = [(1.0, 9.0), (2.0, 5.0), (2.0, 7.0), (3.0, 7.0), (0.5, 9.0), (4.0, 1.0), (3.5, 0.5)]
    assert best_of_both(points) == [(1.0, 9.0), (3.0, 7.0), (4.0, 1.0)]
    assert best_of_both(reversed(points)) == best_of_both(points)
