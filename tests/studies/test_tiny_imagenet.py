"""The study of Tiny-ImageNet, small: its plan, its queue, what it measures and how it chooses."""

import functools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from studies.tiny_imagenet import data, plan, probes, run
from studies.tiny_imagenet.plan import ARMS, PARTS, TRIALS, read

from grassy.heads import create_head
from training_cases import tiny_arrays

pytestmark = pytest.mark.slow  # a study is not part of the package

TINY = ["model_kwargs={channels: [4, 4, 8, 64]}", "img_size=8", "batch_size=16", "epochs=1", "warmup_epochs=0"]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name, size in (("tiny32", 8), ("cifar100", 8), ("cifar10", 8), ("flowers", 8), ("pets64", 12)):
        tiny_arrays(folder / name, images=60, classes=3, size=size)
    return folder


def made_up(entry, top1=50.0, transfer=60.0, **more):
    """A line of results as a run would leave it."""
    cv = {probe: dict.fromkeys(plan.SETS[entry.data], transfer) for probe in (*plan.LINEAR_PROBES, "knn")}
    facts = {"key": entry.key, "stage": entry.stage, "row": entry.row, "name": entry.name, "device": "none"}
    return {**facts, "top1": top1, "transfer_cv": cv, "seconds": 1.0, **more}


def lines_of(entries, **more):
    return {entry.key: made_up(entry, **more) for entry in entries}


# ------------------------------------------------------------------------------------------------ the plan


@pytest.mark.slow
def test_every_entry_is_a_recipe_and_every_part_has_its_runs():
    lines = {}
    while waiting := [entry for entry in plan.plan(lines) if entry.base and entry.key not in lines]:
        lines |= lines_of(waiting)
    entries = plan.plan(lines)
    assert all(entry.recipe.epochs == 60 for entry in entries)
    assert len({entry.name for entry in entries}) == len(entries)
    counts = Counter(entry.stage for entry in entries)
    assert set(counts) == set(PARTS)
    assert counts["audit"] == 2 * 5
    assert counts["splits"] == len(ARMS) * 3 * 2
    assert counts["final"] == 8 * 5
    of_arms = Counter(entry.row for entry in entries if entry.stage == TRIALS)
    assert of_arms == {"softmax": 12, "subspaces": 12, "cosine": 6, "signed": 6}
    assert len({entry.key for entry in entries if entry.stage == TRIALS}) == 36
    for entry in entries:
        head = create_head(in_features=512, num_classes=200, **entry.recipe.head)
        assert head(torch.randn(2, 512)).shape == (2, 200)


def test_the_audit_has_the_settings_and_seeds_of_the_cifar100_study():
    before = [json.loads(line) for line in plan.CIFAR100_RESULTS.read_text().splitlines()]
    before = {(line["row"], line["seed"]): line["settings"] for line in before if line["stage"] == "final"}
    entries = plan.audit({})
    assert {entry.number for entry in entries} == set(range(200, 205))
    for entry in entries:
        assert entry.settings == before[entry.row, entry.number]


def test_the_readme_lists_the_trials_of_the_plan():
    text = (Path(plan.__file__).parent / "README.md").read_text()
    assert text.split("<!-- trials -->\n")[1].split("\n<!-- /trials -->")[0] == plan.listing()


def test_splits_are_disjoint_and_have_the_same_share_of_every_class():
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(7), 50))
    held_out = []
    for number in range(plan.NUMBER_OF_SPLITS):
        kept, out = data.split(labels, number)
        assert sorted([*kept, *out]) == list(range(350))
        assert set(np.bincount(labels[out])) == {5}
        held_out += [*out]
    assert len(set(held_out)) == len(held_out)


# ------------------------------------------------------------------------------------------------ the choice


def test_the_score_weighs_both_in_units_of_the_goal():
    entry = plan.trials({})["softmax"][0]
    base = plan.score(made_up(entry, 50.0, 60.0))
    assert plan.score(made_up(entry, 50.5, 60.0)) - base == pytest.approx(1)
    assert plan.score(made_up(entry, 50.0, 63.0)) - base == pytest.approx(1)
    one_probe = made_up(entry, 50.0, 60.0)
    one_probe["transfer_cv"]["svm"] = dict.fromkeys(plan.SETS[plan.TINY], 66.0)
    assert plan.score(one_probe) - base == pytest.approx(1)  # half of six points, by one of two probes
    one_probe["transfer_cv"]["knn"] = dict.fromkeys(plan.SETS[plan.TINY], 0.0)
    assert plan.score(one_probe) - base == pytest.approx(1)


def test_the_best_three_run_again_and_the_best_mean_is_chosen():
    trials = plan.trials({})["subspaces"]
    lines = lines_of(trials)
    for number, top1 in ((3, 52.0), (5, 51.0), (7, 50.5)):
        lines[trials[number - 1].key] = made_up(trials[number - 1], top1)
    del lines[trials[0].key]
    assert not any(entry.base for entry in plan.reruns("subspaces", trials, lines, {}))  # one is not made yet
    lines[trials[0].key] = made_up(trials[0], error="TrainingStopped", diverged=True)
    again = plan.reruns("subspaces", trials, lines, {})
    assert [(entry.number, entry.split) for entry in again] == [(3, 1), (5, 1), (7, 1), (3, 2), (5, 2), (7, 2)]
    assert plan.chosen(trials, again, lines) is None
    lines |= lines_of(again, top1=50.0)
    assert plan.chosen(trials, again, lines).number == 3
    for entry in again[1::3]:
        lines[entry.key] = made_up(entry, top1=51.0)
    assert plan.chosen(trials, again, lines).number == 5  # 51 each, against 52, 50 and 50
    lines[again[1].key] = made_up(again[1], error="TrainingStopped", diverged=True)
    assert plan.chosen(trials, again, lines).number == 3


def test_final_rows_by_top1_alone_and_by_transfer_alone():
    trials = plan.trials({})
    lines = lines_of(entry for arm in ARMS for entry in trials[arm])
    by_top1, by_transfer, by_both = trials["softmax"][1], trials["softmax"][2], trials["softmax"][3]
    lines[by_top1.key] = made_up(by_top1, 51.0, 50.0)
    lines[by_transfer.key] = made_up(by_transfer, 40.0, 70.0)
    lines[by_both.key] = made_up(by_both, 50.9, 69.0)
    found = plan.sources(lines, {})
    assert found["softmax, best top1"] == by_top1
    assert found["softmax, best transfer"] == by_transfer
    assert found["softmax"] is None
    lines |= lines_of(entry for arm in ARMS for entry in plan.reruns(arm, trials[arm], lines, {}))
    assert plan.sources(lines, {})["softmax"] == by_both
    final = plan.final(lines, {})
    assert [entry.row for entry in final[:5]] == [*ARMS, "softmax"]
    assert {entry.recipe.seed for entry in final} == set(range(300, 305))
    assert all(entry.split is None for entry in final)


# ------------------------------------------------------------------------------------------------ the queue


def queue(images, tmp_path, *words):
    where = ["--data", images, "--output", tmp_path / "results.jsonl", "--scratch", tmp_path / "scratch"]
    run.main([*map(str, where), "--commit", "abc", *words, "--set", *TINY])
    return list(read(tmp_path / "results.jsonl").values())


@pytest.mark.slow
def test_the_queue_resumes_and_runs_nothing_twice(images, tmp_path, monkeypatch, capsys):
    begun = []

    def do(entry, store, place):
        begun.append(entry.name)
        if len(begun) == 4:
            raise KeyboardInterrupt
        if len(begun) == 2:
            return made_up(entry) | {"error": "RuntimeError: no luck", "diverged": False}
        return made_up(entry)

    monkeypatch.setattr(run, "do", do)
    with pytest.raises(KeyboardInterrupt):
        queue(images, tmp_path, "--part", "trials")
    results = tmp_path / "results.jsonl"
    assert len(results.read_text().splitlines()) == 3  # one of them failed, and the queue went on
    with results.open("a") as file:
        file.write('{"key": "cut sh')  # killed while writing
    lines = queue(images, tmp_path, "--part", "trials", "splits")
    repeated = begun[3]
    assert Counter(begun) == Counter({entry.name: 1 for entry in plan.plan({}) if entry.stage == TRIALS} | {repeated: 2}
                                     | {name: 1 for name in begun if name.startswith("splits/")})  # fmt: skip
    # The trials of subspaces lack one that failed, so that their splits wait.
    assert {line["row"] for line in lines if line["stage"] == "splits"} == {"softmax", "cosine", "signed"}
    before = len(begun)
    queue(images, tmp_path, "--part", "trials", "splits")
    assert len(begun) == before
    queue(images, tmp_path, "--part", "trials", "splits", "--retry")
    assert begun[before] == begun[1]
    assert len(begun) == before + 1 + 6  # the failed trial, and then the splits that waited for it
    run.main(["--part", "all", "--list", "--output", str(results), "--set", *TINY])
    said = capsys.readouterr().out
    assert "trials: 36 runs, 0 remain" in said
    assert "final: 40 runs, 20 remain" in said  # rows with the same settings share their runs


def test_processes_that_share_the_queue_run_each_entry_once(images, tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr(run, "do", lambda entry, *_: begun.append(entry.name) or made_up(entry))
    queue(images, tmp_path, "--part", "trials", "--share", "2/2")
    half = len(begun)
    assert half == 18
    queue(images, tmp_path, "--part", "trials", "--share", "1/2")
    assert len(begun) == len(set(begun)) == 36
    with pytest.raises(SystemExit):
        queue(images, tmp_path, "--share", "3/2")


def test_nothing_begins_that_would_not_end_in_time(images, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "do", lambda entry, *_: pytest.fail(f"{entry.name} was begun"))
    assert queue(images, tmp_path, "--part", "audit", "--minutes", "0.1") == []


def test_the_queue_stops_when_everything_fails(images, tmp_path, monkeypatch):
    failed = {"error": "RuntimeError: the GPU is lost", "diverged": False}
    monkeypatch.setattr(run, "do", lambda entry, *_: made_up(entry) | failed)
    with pytest.raises(SystemExit, match="5 failures in a row: RuntimeError: the GPU is lost"):
        queue(images, tmp_path, "--part", "trials")
    assert len(read(tmp_path / "results.jsonl")) == 5


def test_missing_data_is_named_before_anything_runs(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run.main(["--data", str(tmp_path), "--part", "trials", "--output", str(tmp_path / "r.jsonl"), "--set", *TINY])
    said = capsys.readouterr().err
    assert "tiny32" in said
    assert "flowers" in said


# ------------------------------------------------------------------------------------------------ a run


@pytest.mark.slow
def test_runs_of_all_arms_leave_what_the_page_needs(images, tmp_path, monkeypatch):
    def first(lines, overrides):
        found = plan.trials(overrides)
        return [found["softmax"][5], found["subspaces"][1], found["cosine"][1], found["signed"][1]]

    monkeypatch.setattr(run, "plan", first)
    monkeypatch.setattr(probes, "CS", ((0.1, 1.0, 10.0),))
    lines = queue(images, tmp_path)
    assert [line.get("error") for line in lines] == [None] * 4
    for line in lines:
        assert line["commit"] == "abc"
        assert line["torch"] == torch.__version__
        assert (line["seed"], line["split"], line["data"]) == (0, 0, "tiny32")
        assert (line["images_train"], line["images_test"]) == (54, 6)  # of 60, and no test image among them
        assert {*line} >= {"settings", "top1", "loss", "train_loss", "seconds", "device", "r2_test", "transfer_chosen"}
        assert "transfer" not in line  # test images only when nothing is left to choose
        assert set(line["transfer_cv"]) == {"svm", "svm-standardised", "knn"}
        assert all(set(sets) == {"cifar10", "cifar100", "flowers", "pets"} for sets in line["transfer_cv"].values())
    assert all(line["orthonormality_error"] < 1e-5 for line in lines if line["row"] in ("subspaces", "signed"))
    assert not list((tmp_path / "scratch" / "runs").iterdir())  # numbers stay, weights do not


def test_a_final_run_is_measured_on_test_images_by_all_probes(images, tmp_path, monkeypatch):
    def first(lines, overrides):
        return plan.audit(overrides)[:1]

    monkeypatch.setattr(run, "plan", first)
    monkeypatch.setattr(probes, "CS", ((0.1, 1.0, 10.0),))
    (line,) = queue(images, tmp_path)
    assert "error" not in line
    assert set(line["transfer"]) == {"svm", "svm-standardised", "knn", "logistic"}
    assert all(set(sets) == {"cifar10", "flowers", "pets"} for sets in line["transfer"].values())


@pytest.mark.parametrize("part", ["final", "coarse"])
def test_runs_of_these_parts_leave_what_users_get(images, tmp_path, monkeypatch, part):
    def some(lines, overrides):
        if part == "coarse":
            return plan.coarse(overrides)[1:2]
        (trial, *_) = plan.trials(overrides)["subspaces"]
        return [plan._entry("final", "subspaces", 300, trial.changes | {"seed": 300}, 300, None, overrides)]

    monkeypatch.setattr(run, "plan", some)
    monkeypatch.setattr(probes, "CS", ((0.1, 1.0, 10.0),))
    (line,) = queue(images, tmp_path)
    assert line.get("error") is None
    if part == "coarse":
        assert {name: set(sets) for name, sets in line["fine_classes"].items()} == {
            "inside": {"svm", "svm-standardised"},
            "residual": {"svm", "svm-standardised"},
        }
        return
    assert set(line["users"]) == {"recall_at_1", "1_shot", "5_shot", "outliers", "calibration", "pruning"}
    assert set(line["users"]["outliers"]["flowers"]) == {"max-softmax", "max-logit", "energy", "outlier_score"}
    assert set(line["transfer"]) == {"svm", "svm-standardised", "knn", "logistic"}


@pytest.mark.slow
def test_all_arms_share_the_compiled_network(images, tmp_path, monkeypatch):
    sizes = []

    def backend(graph, _):
        sizes[-1].append(len(graph.graph.nodes))
        return graph.forward

    def first(arm):
        return lambda lines, overrides: plan.trials({**overrides, "torchcompile": "on"})[arm][:2]

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.setattr(run, "measure", lambda *_: {"transfer_cv": {}})
    torch._dynamo.reset()
    for arm in ARMS:
        sizes.append([])
        monkeypatch.setattr(run, "plan", first(arm))
        lines = queue(images, tmp_path)
        assert [line.get("error") for line in lines] == [None] * len(lines)
    assert len(lines) == 2 * len(ARMS)
    assert max(sizes[0]) > 100
    assert max(map(max, filter(None, sizes[1:])), default=0) < 20


@pytest.mark.slow
@pytest.mark.parametrize("network", [*plan.NETWORKS])
def test_other_networks_train_with_mixing(images, tmp_path, monkeypatch, network):
    small = {"convnext": {"dims": [4, 4, 8, 64], "depths": [1, 1, 1, 1], "patch_size": 1}}
    small["vit"] = {"img_size": 8, "patch_size": 4, "depth": 1, "embed_dim": 64, "num_heads": 2}

    def some(lines, overrides):
        overrides = {**overrides, "model_kwargs": small[network]}
        trials = plan.trials(overrides)
        done = lines_of(entry for arm in ARMS for entry in trials[arm])
        done |= lines_of(entry for arm in ARMS for entry in plan.reruns(arm, trials[arm], done, overrides))
        entries = plan.generalise(done, overrides)
        return [entries[f"{network}, {arm}"][0] for arm in ("softmax", "subspaces")]

    monkeypatch.setattr(run, "plan", some)
    monkeypatch.setattr(probes, "CS", ((0.1, 1.0, 10.0),))
    lines = queue(images, tmp_path)
    assert [line.get("error") for line in lines] == [None] * 2
    assert lines[1]["settings"]["head"]["gamma"] == pytest.approx(0.9 * (512 / plan.WIDTHS[network]) ** 0.5, rel=1e-3)
    assert lines[1]["settings"]["opt"] == "adamw"
