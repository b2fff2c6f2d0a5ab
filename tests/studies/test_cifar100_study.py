"""The study of CIFAR-100, small: it tunes, runs, resumes and answers."""

import functools
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch
from studies.cifar100 import answer, measure, run
from studies.cifar100.claims import NOT_YET
from studies.cifar100.plan import (
    FINAL,
    TUNE,
    plan,
    read,
)

from grassy.inference import features
from grassy.inference.feature_models import open_model
from grassy.transfer.protocol import transfer
from training_cases import tiny_arrays

pytestmark = pytest.mark.slow  # a study is not part of the package

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


# ------------------------------------------------------------------------------------------------ end to end


@pytest.mark.slow
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
    began = {line["key"]: line["top1"] for line in final["softmax"]}
    assert all(line["start_top1"] == began[line["start"]] for line in final["finetune-head"])
    assert not list((tmp_path / "scratch" / "runs").iterdir())  # numbers stay, weights do not

    page.write_text("before\n<!-- table: claims -->\nold\n<!-- end -->\n<!-- table: rows -->\n<!-- end -->\nafter\n")
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


@pytest.mark.slow
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
    from grassy.train.loop import train

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
    first = plan({})[0].key
    line = next(line for key, line in read(run.HERE / "results.jsonl").items() if key == first)
    (tmp_path / "one.jsonl").write_text(json.dumps(line) + "\n")
    call(monkeypatch, answer, "--results", tmp_path / "one.jsonl")
    assert [page.read_text() for page in pages] == before
    assert "not yet run" in capsys.readouterr().out


def test_the_tables_in_docs_have_the_figures_of_the_results(tmp_path, monkeypatch):
    for name in ("docs/results.md", "README.md", "studies/cifar100/tables.md"):
        page, own = tmp_path / "page.md", answer.ROOT / name
        page.write_text(own.read_text())
        call(monkeypatch, answer, "--pages", page, "--images", tmp_path)
        assert page.read_text() == own.read_text(), "run python -m studies.cifar100.answer"


def test_what_cannot_be_answered_or_run_is_said_in_one_line(data, tmp_path, monkeypatch, capsys):
    own = run.HERE / "results.jsonl"
    there = ["--data-dir", data, "--results", tmp_path / "new.jsonl"]
    for module, words, said in (
        (answer, ["--results", tmp_path / "none.jsonl"], f"there is no file of results {tmp_path / 'none.jsonl'}"),
        (answer, ["--results", tmp_path], f"there is no file of results {tmp_path}"),
        (answer, ["--results", own, "--set", "epochs=1"], "is of this plan: with --set, give what run had"),
        (run, ["--list", "--set", "lr=["], "--set lr=[ is not YAML"),
        (run, ["--list", "--set", "seed=5"], "--set seed=5: every run has a seed of its own, from the plan"),
        (run, [*there, "--scratch", own], f"--scratch {own} is a file, not a folder"),
        (run, [*there, "--device", "gpu"], "unknown device 'gpu'"),
    ):
        with pytest.raises(SystemExit):
            call(monkeypatch, module, *words)
        assert said in capsys.readouterr().err.splitlines()[-1]


def test_rows_that_wait_for_trials_that_were_not_asked_for_say_so(data, tmp_path, monkeypatch, capsys):
    where = ["--data-dir", data, "--results", tmp_path / "results.jsonl", "--scratch", tmp_path / "scratch"]
    call(monkeypatch, run, *where, "--only", "finetune-*", "--set", *TINY)
    assert "they wait for trials of grassmann-8, softmax, which --only leaves out" in capsys.readouterr().out


def test_other_images_in_the_same_place_are_other_images(tmp_path):
    view, place = measure.View(8, 1.0, "bilinear"), run.Place(tmp_path / "scratch", "cpu")
    arrays = place.scratch / "data"
    job = next(job for job in plan(read(run.HERE / "results.jsonl")) if (job.stage, job.row) == (FINAL, "softmax"))
    seen, folders = [], []
    for seed in (0, 1):
        for name in ("cifar100", "cifar10", "flowers", "pets"):
            tiny_arrays(tmp_path / "data" / name, images=30, classes=3, size=8, seed=seed)
        measure.write_arrays(tmp_path / "data", arrays, view)
        before = (arrays / "final" / "train.npz").stat().st_mtime_ns
        measure.write_arrays(tmp_path / "data", arrays, view)  # nothing to do
        assert (arrays / "final" / "train.npz").stat().st_mtime_ns == before
        seen.append(measure.Lab.open(arrays, torch.device("cpu")).images["final"]["train"][0])
        folders.append(run._start_folder(job, place))
    assert not torch.equal(*seen)
    assert folders[0] != folders[1]  # weights of the one are no start for the other


def test_arrays_of_two_sources_are_never_taken_for_those_of_one(tmp_path, monkeypatch):
    view, arrays = measure.View(8, 1.0, "bilinear"), tmp_path / "arrays"
    for seed, folder in enumerate(("first", "second")):
        for name in ("cifar100", "cifar10", "flowers", "pets"):
            tiny_arrays(tmp_path / folder / name, images=30, classes=3, size=8, seed=seed)
    measure.write_arrays(tmp_path / "first", arrays, view)
    whole = measure.np.savez

    def cut_short(path, **values):
        if "final" in str(path):
            raise KeyboardInterrupt
        whole(path, **values)

    monkeypatch.setattr(measure.np, "savez", cut_short)
    with pytest.raises(KeyboardInterrupt):
        measure.write_arrays(tmp_path / "second", arrays, view)
    monkeypatch.undo()
    measure.write_arrays(tmp_path / "first", arrays, view)
    for name in ("cifar10", "pets"):
        with (
            measure.np.load(arrays / name / "train.npz") as kept,
            measure.np.load(tmp_path / "first" / name / "train.npz") as own,
        ):
            assert (kept["x"] == own["x"]).all()


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


def test_weights_that_others_begin_with_are_trained_once_and_stay_what_they_are(tmp_path):
    place = run.Place(tmp_path, "cpu")
    jobs = {(job.row, job.number): job for job in plan(read(run.HERE / "results.jsonl")) if job.stage == FINAL}
    softmax, head, everything = (jobs[row, 100] for row in ("softmax", "finetune-head", "finetune-all"))
    other = jobs["finetune-all", 101]
    assert not run._in_the_making(head.start, [], place)  # it can be trained
    assert run._in_the_making(head.start, [everything], place)
    assert run._in_the_making(head.start, [softmax], place)
    assert not run._in_the_making(head.start, [other], place)
    kept = run._start_folder(softmax, place)
    for number, top1 in enumerate((70.0, 71.0)):  # the second comes too late
        weights = tmp_path / f"{number}.safetensors"
        weights.write_text(str(number))
        run.keep_start(weights, top1, kept)
    assert not run._in_the_making(head.start, [everything], place)
    start = run._start(head.start, place, tmp_path / "none")
    assert (start.weights.read_text(), start.top1) == ("0", 70.0)
    assert [each.name for each in kept.parent.iterdir()] == [f"{softmax.key}-none"]  # of no images yet
