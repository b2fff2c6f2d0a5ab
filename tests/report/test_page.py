"""The page as a file: complete, small, and safe whatever the classes are called."""

import html
import json
import re

import numpy as np
import pytest
import torch

from grassy import cli
from grassy.data.images import open_images
from grassy.report.analyze import analyze
from grassy.report.page import PageRun, open_run, read_curves, render_page, report, run_names
from grassy.report.samples import sample_images

HOSTILE = "<img src=x onerror=alert(1)>"


def data_of(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_the_page_refers_to_nothing_outside_of_itself(random_run):
    page = render_page([random_run("a", 4, k=2), random_run("b", 4, head="linear")])
    assert not re.search(r"https?:|//cdn|@import|\bimport[ (]|\bfetch\(|XMLHttpRequest|WebSocket", page)
    references = re.findall(r"""(?:src|href)\s*=\s*["']([^"']*)""", page)
    assert references
    assert all(reference.startswith(("data:", "#")) for reference in references)
    assert "default-src 'none'" in page  # and the browser is told to refuse anything that was overlooked
    assert "{{" not in page.split('id="data"')[0]


@pytest.mark.slow
def test_a_thousand_classes_of_eight_angles_and_samples_stay_below_12_megabytes(random_run):
    torch.manual_seed(0)
    names = [f"n{i:08d} a synset of words" for i in range(1000)]
    samples = [["data:image/jpeg;base64," + "A" * 2400] for _ in names]  # about the budget of sample_images
    page = render_page([random_run("imagenet", 1000, k=8, width=256, names=names, samples=samples)])
    assert len(page.encode()) < 12e6


def test_a_hostile_class_name_appears_only_escaped(random_run, tmp_path):
    evil = [HOSTILE, "</script><script>alert(2)</script>", "<!--", "{{data}}"]
    run = random_run(f"run {HOSTILE}", 4, k=2, names=evil)
    page = render_page([run], title=HOSTILE)
    assert "<img" not in page
    assert "alert(2)</script>" not in page
    assert page.count("<!--") == 0
    assert html.escape(HOSTILE) in page
    assert data_of(page)["runs"][0]["analysis"]["per_class"]["name"] == evil  # and is whole in the data


def test_the_data_of_the_page_is_the_analysis(tiny_images, make_run, tmp_path):
    runs = [make_run(tmp_path / name, {"name": name}) for name in ("grassmann", "linear")]
    data = tiny_images(tmp_path / "data")
    written = report(runs, tmp_path / "out" / "report.html", data, device="cpu")
    shown = data_of(written.read_text())["runs"]
    for run, entry in zip(runs, shown, strict=True):
        assert entry["name"] == run.name
        assert entry["analysis"] == json.loads((run / "analysis.json").read_text())
        assert entry["curves"]["eval_top1"] == [50, 60, 70]
        assert entry["curves"]["epoch"] == [0, 1, 2]
    assert [len(images) for images in shown[0]["samples"]] == [4] * 5
    assert shown[1]["samples"] == 0  # the same as those of run 0


def test_an_analysis_is_made_again_when_the_weights_have_changed_or_data_is_given(make_run, tiny_images, tmp_path):
    run, page = make_run(tmp_path / "run", {"name": "linear"}), tmp_path / "report.html"
    report([run], page, device="cpu")
    first = (run / "analysis.json").read_text()
    report([run], page, device="cpu")
    assert (run / "analysis.json").read_text() == first  # kept
    make_run(tmp_path / "run", {"name": "linear"}, seed=1)
    report([run], page, device="cpu")
    second = json.loads((run / "analysis.json").read_text())
    assert second["angles"] != json.loads(first)["angles"]
    assert second["data"] is None
    report([run], page, tiny_images(tmp_path / "data"), device="cpu")
    assert json.loads((run / "analysis.json").read_text())["data"]["images"] == 60


def test_runs_are_named_by_the_ends_of_their_paths_that_differ(tmp_path):
    assert run_names([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    assert run_names([tmp_path / "x" / "a", tmp_path / "y" / "a"]) == ["x/a", "y/a"]


def test_curves_skip_what_is_empty_or_not_a_number(tmp_path):
    (tmp_path / "summary.csv").write_text("epoch,train_loss,eval_loss\n0,1.5,\n1,nan,\n")
    assert read_curves(tmp_path / "summary.csv") == {"epoch": [0, 1], "train_loss": [1.5, None]}
    assert read_curves(tmp_path / "missing.csv") == {}
    (tmp_path / "summary.csv").write_text("epoch,train_loss\n0,1.5,7,8\n1\n")  # lines too long and too short
    assert read_curves(tmp_path / "summary.csv") == {"epoch": [0, 1], "train_loss": [1.5, None]}


def test_samples_keep_to_their_budget_and_give_each_class_one_before_any_a_second(tiny_images, tmp_path):
    images = open_images("", tiny_images(tmp_path), "test")
    everything = sample_images(images, 5)
    assert [len(own) for own in everything] == [4] * 5
    assert everything[0][0].startswith("data:image/png;base64,")
    some = sample_images(images, 5, budget=sum(len(own[0]) for own in everything) + 10)
    assert [len(own) for own in some] == [1] * 5


def test_bad_input_is_one_sentence(tiny_images, make_run, tmp_path):
    with pytest.raises(ValueError, match="at least one run"):
        report([], tmp_path / "report.html")
    with pytest.raises(ValueError, match="is a folder"):
        report([make_run(tmp_path / "run", {"name": "linear"})], tmp_path)
    with pytest.raises(ValueError, match="no checkpoint"):
        report([tmp_path / "missing"], tmp_path / "report.html")
    data = tiny_images(tmp_path / "data")
    few = make_run(tmp_path / "few", {"name": "linear"}, classes=3)
    with pytest.raises(ValueError, match=r"few: .*classes"):  # of several runs, which one
        report([tmp_path / "run", few], tmp_path / "report.html", data, device="cpu")
    assert not (tmp_path / "report.html").exists()


def test_a_run_without_curves_or_samples_is_enough_for_a_page(random_run):
    run = random_run("a", 1, k=1)
    assert "grassy report" in render_page([PageRun("a", run.analysis)])


def test_samples_are_of_the_images_that_an_earlier_analysis_measured(tiny_images, make_run, tmp_path):
    data, run = tiny_images(tmp_path / "data"), make_run(tmp_path / "run", {"name": "grassmann", "k": 2})
    bright = tiny_images(tmp_path / "bright")
    with np.load(bright / "test.npz") as file:
        np.savez(data / "train.npz", x=255 - file["x"] // 4, y=file["y"], classes=file["classes"])
    pages = [open_run(run, "run", data, split, "cpu") for split in ("test", "train", None)]
    assert [page.analysis["data"]["split"] for page in pages] == ["test", "train", "train"]
    assert pages[0].samples != pages[1].samples
    assert pages[2].samples == pages[1].samples


def test_runs_that_were_measured_on_different_images_are_told_apart(tiny_images, make_run, tmp_path, capsys):
    runs, data = [make_run(tmp_path / name, {"name": "linear"}) for name in "ab"], tiny_images(tmp_path / "data")
    (data / "train.npz").write_bytes((data / "test.npz").read_bytes())
    page = str(tmp_path / "report.html")
    for run, split in zip(runs, ("train", "test"), strict=True):
        analyze(run, data, split, "cpu")
    cli.main(["report", *map(str, runs), "-o", page, "--device", "cpu"])
    said = capsys.readouterr().out
    assert "different images" in said
    assert re.search(r"a: \d+ images of train in .*; b: \d+ images of test in ", said)
    cli.main(["report", *map(str, runs), "-o", page, "--split", "test", "--data-dir", str(data), "--device", "cpu"])
    assert "different" not in capsys.readouterr().out
    analyze(runs[0], data / ".." / "data", "validation", "cpu")  # other words for the same images
    cli.main(["report", *map(str, runs), "-o", page, "--device", "cpu"])
    assert "different" not in capsys.readouterr().out
    (runs[1] / "analysis.json").unlink()
    cli.main(["report", *map(str, runs), "-o", page, "--device", "cpu"])
    assert "b: weights alone" in capsys.readouterr().out
