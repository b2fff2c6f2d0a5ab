"""The page as a file: complete, small, and safe whatever the classes are called."""

import dataclasses
import html
import json
import re
from importlib import resources

import numpy as np
import pytest
import torch

import grassy
from grassy import cli
from grassy.models import create_model
from grassy.report.analyze import analyze
from grassy.report.page import MOST_CHARACTERS, PageRun, open_run, render_page, report, run_names
from grassy.report.thumbnails import BUDGET

MODEL = "vit_tiny_patch16_224"
MODEL_KWARGS = {"img_size": 8, "patch_size": 4, "depth": 1, "embed_dim": 16, "num_heads": 2}
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
def test_a_thousand_classes_of_eight_angles_and_pictures_stay_below_14_megabytes(random_run):
    torch.manual_seed(0)
    names = [f"n{i:08d} a synset of words" for i in range(1000)]
    run = random_run("imagenet", 1000, k=8, width=256, names=names)
    room = min(BUDGET, MOST_CHARACTERS - len(json.dumps(run.analysis)))
    pictures = [f"data:image/webp;base64,{number:01500d}" for number in range(room // 1523)]
    pictures += [None] * (len(run.pictures) - len(pictures))
    assert sum(uri is not None for uri in pictures) > 1000
    page = render_page([dataclasses.replace(run, pictures=pictures)])
    assert len(page.encode()) < 14e6


def test_a_hostile_name_of_a_class_a_file_a_setting_or_a_curve_appears_only_escaped(random_run, tmp_path):
    evil = [HOSTILE, "</script><script>alert(2)</script>", "<!--", "{{data}}"]
    run = random_run(f"run {HOSTILE}", 4, k=2, names=evil, files=HOSTILE, settings={HOSTILE: evil[1]})
    run = dataclasses.replace(run, curves={"epoch": [0, 1], evil[1]: [1.0, 2.0]})
    page = render_page([run], title=HOSTILE)
    assert "<img" not in page
    assert "alert(2)</script>" not in page
    assert page.count("<!--") == 0
    assert html.escape(HOSTILE) in page
    shown = data_of(page)["runs"][0]
    assert shown["analysis"]["per_class"]["name"] == evil  # and is whole in the data
    assert shown["analysis"]["examples"]["name"][0] == HOSTILE
    assert shown["settings"] == {HOSTILE: evil[1]}


def test_the_data_of_the_page_is_the_analysis(tiny_images, make_run, tmp_path):
    runs = [make_run(tmp_path / name, {"name": name}) for name in ("grassmann", "linear")]
    data = tiny_images(tmp_path / "data")
    written = report(runs, tmp_path / "out" / "report.html", data, device="cpu")
    page = data_of(written.read_text())
    shown = page["runs"]
    for run, entry in zip(runs, shown, strict=True):
        assert entry["name"] == run.name
        assert entry["analysis"] == json.loads((run / "analysis.json").read_text())
        assert entry["curves"]["eval_top1"] == [50, 60, 70]
        assert entry["curves"]["epoch"] == [0, 1, 2]
        assert len(entry["pictures"]) == len(entry["analysis"]["examples"]["index"])
        assert all(page["pictures"][number].startswith("data:image/png;base64,") for number in entry["pictures"])
    assert len(page["pictures"]) <= 60  # an image that both runs show is kept once
    assert len(set(page["pictures"])) == len(page["pictures"])
    assert {key: shown[1]["settings"][key] for key in ("head.name", "img_size")} == {
        "head.name": "linear",
        "img_size": "8",
    }


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


def test_pictures_are_of_the_images_that_an_earlier_analysis_measured(tiny_images, make_run, tmp_path):
    data, run = tiny_images(tmp_path / "data"), make_run(tmp_path / "run", {"name": "grassmann", "k": 2})
    bright = tiny_images(tmp_path / "bright")
    with np.load(bright / "test.npz") as file:
        np.savez(data / "train.npz", x=255 - file["x"] // 4, y=file["y"], classes=file["classes"])
    pages = [open_run(run, "run", data, split, "cpu") for split in ("test", "train", None)]
    assert [page.analysis["data"]["split"] for page in pages] == ["test", "train", "train"]
    assert pages[0].pictures != pages[1].pictures
    assert pages[2].pictures == pages[1].pictures


def test_an_analysis_of_an_earlier_version_is_made_again_if_there_are_images(tiny_images, make_run, tmp_path):
    data, run = tiny_images(tmp_path / "data"), make_run(tmp_path / "run", {"name": "linear"})
    analysis = analyze(run, data, device="cpu")
    del analysis["examples"]
    (run / "analysis.json").write_text(json.dumps(analysis))
    assert open_run(run, "run", None, None, "cpu").pictures == []
    assert len(open_run(run, "run", data, None, "cpu").pictures) > 10


def test_text_stands_out_from_its_background_in_either_theme():
    """By the contrast ratio of WCAG 2.2, at least 4.5 for text."""
    style = (resources.files("grassy.report") / "web" / "page.css").read_text()
    themes = [
        dict(re.findall(r"--([\w-]+): (#\w{6})", block)) for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    ]
    assert len(themes) == 2
    for theme in themes:
        for text in ("ink", "soft", "link", "bad", "accent"):
            for background in ("page", "card", "pick"):
                dark, light = sorted(luminance(theme[name]) for name in (text, background))
                assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, background)


def luminance(color):
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_a_model_of_ones_own_loop_has_curves_and_settings(tmp_path):
    model = create_model(MODEL, 3, {"name": "grassmann", "k": 2}, MODEL_KWARGS)
    file = tmp_path / "mine" / "model_best.safetensors"
    file.parent.mkdir()
    grassy.save(model, file, class_names=list("abc"), architecture=MODEL, model_kwargs=MODEL_KWARGS, img_size=8)
    (file.parent / "summary.csv").write_text("epoch,train_loss,my accuracy\n1,2.0,0.3\n2,1.0,0.6\n")
    run = open_run(file.parent, "mine", None, None, "cpu")
    assert run.curves == {"epoch": [1, 2], "train_loss": [2, 1], "my accuracy": [0.3, 0.6]}
    assert (run.settings["model"], run.settings["head.k"], run.settings["img_size"]) == (MODEL, "2", "8")


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
