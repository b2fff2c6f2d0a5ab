"""The transfer protocol on features of any model: data sets, methods, tables, the command."""

import csv
import dataclasses
import json

import numpy as np
import pytest
import torch
from PIL import Image

import grassy
from grassy.atomic import TEMPORARY
from grassy.cli import main
from grassy.data.batch import Failure
from grassy.data.images import ArrayImages
from grassy.inference.feature_models import FeatureModel
from grassy.inference.features import Features
from grassy.train.loop import train
from grassy.transfer import datasets, protocol, table
from grassy.transfer.datasets import MissingData, open_transfer_set
from training_cases import tiny_arrays, tiny_folders, tiny_recipe, tiny_run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return tiny_run(tmp_path_factory.mktemp("run"))


# ------------------------------------------------------------------------------------------------ data sets


def test_known_names_have_the_metrics_of_the_paper():
    metrics = {name: row[3] for name, row in datasets.KNOWN.items()}
    assert [name for name in metrics if metrics[name] == "mean_per_class"] == ["pets", "flowers"]
    assert set(metrics) == set(grassy.paper.figures("resnet50d-grassmann")["svm"]) - {"average"}


def test_a_validation_split_beside_a_test_split_is_trained_on(tmp_path):
    tiny_arrays(tmp_path / "flowers", images=12)
    (tmp_path / "flowers" / "val.npz").write_bytes((tmp_path / "flowers" / "train.npz").read_bytes())
    data = open_transfer_set("flowers", tmp_path)
    assert (len(data.train), len(data.test), data.metric) == (24, 6, "mean_per_class")
    assert data.train.labels().tolist() == [0, 1, 2] * 8
    assert data.train.load(13)[1] == 1
    assert data.train.name(13) == "val.npz[1]"


def test_torchvisions_own_copies_are_read(tmp_path):
    """Oxford pets as torchvision lays them out: annotations and images, made here."""
    base = tmp_path / "oxford-iiit-pet"
    (base / "annotations").mkdir(parents=True)
    (base / "images").mkdir()
    for split, count in (("trainval", 4), ("test", 2)):
        rows = []
        for i in range(count):
            name = f"{('Abyssinian', 'beagle')[i % 2]}_{split}{i}"
            Image.new("RGB", (9, 9), (i * 20, 0, 0)).save(base / "images" / f"{name}.jpg")
            rows.append(f"{name} {i % 2 + 1} 1 1\n")
        (base / "annotations" / f"{split}.txt").write_text("".join(rows))
    data = open_transfer_set("pets", tmp_path)
    assert data.train.labels().tolist() == [0, 1, 0, 1]
    assert data.test.load(1)[1] == 1
    assert data.train.name(2).endswith("Abyssinian_trainval2.jpg")


def test_absent_data_says_what_to_do(tmp_path):
    for name in datasets.KNOWN:
        with pytest.raises(MissingData, match=rf"{name} is not in .*torchvision\.datasets\.\w+\(.*download=True"):
            open_transfer_set(name, tmp_path)
    with pytest.raises(MissingData, match="give --data-dir"):
        open_transfer_set("pets", None)
    with pytest.raises(MissingData, match="the known datasets are cifar10"):
        open_transfer_set("petz", tmp_path)


# ------------------------------------------------------------------------------------------------ protocol


def test_mean_per_class_accuracy_weighs_classes_equally():
    labels = torch.tensor([0, 0, 0, 0, 2])
    predicted = torch.tensor([0, 0, 0, 1, 2])
    assert protocol.accuracy(predicted, labels, "top1") == pytest.approx(4 / 5)
    assert protocol.accuracy(predicted, labels, "mean_per_class") == pytest.approx((3 / 4 + 1) / 2)


def test_the_command_measures_several_runs_on_several_sets_and_names_what_is_missing(run, tmp_path, capsys):
    data = tmp_path / "data"
    tiny_arrays(data / "pets", images=60, classes=2)
    own = tiny_folders(tmp_path / "own", images=30, classes=("a", "b"))
    second = tmp_path / "second"
    train(tiny_recipe(epochs=1, seed=7), tiny_arrays(tmp_path / "train"), second, quiet=True)
    output = tmp_path / "out"
    words = ["transfer", "--checkpoint", str(run), str(second), "--datasets", "pets", "food101", f"mine={own}"]
    words += ["--data-dir", str(data), "--output", str(output), "--workers", "0", "--methods", "svm", "probe"]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert "left out: food101 is not in" in captured.err
    head, *lines, saved = captured.out.splitlines()
    assert head.split() == ["model", "method", "pets", "mine", "mean"]
    assert len(lines) == 2
    assert all("and 1 more seed" in line and "±" in line for line in lines)
    rows = list(csv.DictReader((output / "transfer.csv").open()))
    assert len(rows) == 2 * 2 * 2
    assert {row["recipe_seed"] for row in rows} == {"0", "7"}
    whole = json.loads((output / "transfer.json").read_text())
    assert list(whole["missing"]) == ["food101"]
    for result in whole["results"]:
        assert len(result["fold_accuracies"]) == 5
        assert 0 <= result["accuracy"] <= 100
        assert result["parameter"] == "C"
    assert whole["torch"] == torch.__version__
    assert "transfer.csv" in saved


@pytest.mark.slow
def test_both_backends_of_the_svm_agree(run, tmp_path, capsys):
    tiny_arrays(tmp_path / "pets", images=60, classes=3)
    accuracies = []
    for backend in ("torch", "sklearn"):
        words = ["transfer", "--checkpoint", str(run), "--datasets", "pets", "--data-dir", str(tmp_path), "--workers"]
        words += ["0", "--methods", "svm", "--output", str(tmp_path / backend), "--backend", backend]
        assert main(words) == 0
        accuracies.append(json.loads((tmp_path / backend / "transfer.json").read_text())["results"][0]["accuracy"])
    assert accuracies[0] == pytest.approx(accuracies[1], abs=4)  # one of thirty test images


def test_what_cannot_be_done_is_one_line(run, tmp_path, capsys):
    data = ["--data-dir", str(tmp_path), "--output", str(tmp_path / "out"), "--workers", "0"]
    for words, message in [
        (["--checkpoint", str(run), "--datasets", "food101"], "none of the datasets was found: food101 is not in"),
        (
            ["--checkpoint", str(run), "--datasets", "pets", "--methods", "svn"],
            "unknown method 'svn', did you mean 'svm'",
        ),
        (["--checkpoint", str(tmp_path / "no"), "--datasets", "pets"], "there is no run or file of weights"),
        (["--checkpoint", str(run), "--datasets", "pets", "--amp", "float16"], "--amp: invalid choice: 'float16'"),
    ]:
        assert main(["transfer", *words, *data]) == 2
        assert message in capsys.readouterr().err
    tiny_arrays(tmp_path / "few", images=6, classes=3)
    assert main(["transfer", "--checkpoint", str(run), "--datasets", str(tmp_path / "few"), *data]) == 2
    assert "every class needs at least folds=5 samples" in capsys.readouterr().err


def test_what_was_measured_is_on_the_disk_when_a_later_measurement_stops_everything(run, tmp_path, monkeypatch):
    """And what an earlier crash left behind is gone."""
    output, data = tmp_path / "out", tiny_arrays(tmp_path / "data" / "pets", images=60, classes=2).parent
    (output / "features").mkdir(parents=True)
    torn = [output / f"{TEMPORARY}left", output / "features" / f"{TEMPORARY}left"]
    for file in torn:
        file.write_bytes(b"half of a file")

    def killed(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setitem(protocol.METHODS, "knn", killed)
    words = ["transfer", "--checkpoint", str(run), "--datasets", "pets", "--data-dir", str(data), "--workers", "0"]
    assert main([*words, "--output", str(output), "--methods", "svm", "knn"]) == 130
    assert [row["method"] for row in csv.DictReader((output / "transfer.csv").open())] == ["svm"]
    whole = json.loads((output / "transfer.json").read_text())
    assert (len(whole["results"]), whole["finished"]) == (1, False)
    assert not any(file.exists() for file in torn)
    assert main([*words, "--output", str(output), "--methods", "svm"]) == 0
    assert json.loads((output / "transfer.json").read_text())["finished"]


def test_the_papers_figures_stand_beside_those_of_its_recipes(run):
    result = protocol.Result("a", "pets", "svm", 90.0, "mean_per_class", "C", 1.0, [90.0], 1, 1, 2, 0, 0.0, paper=91.85)
    assert protocol._figure({"paper": "resnet50d-grassmann"}, "svm", "pets") == 91.85
    assert protocol._figure({"paper": ""}, "svm", "pets") is None
    assert protocol._figure({"paper": "resnet50d-grassmann"}, "svm_C", "pets") == 1
    text = table.render(protocol.Report([result]), {"a": "a"})
    assert "(the paper)" in text
    assert "91.85" in text
    words = protocol.line(dataclasses.replace(result, paper_chosen=2.0))
    assert "the paper reports 91.85 with C=2" in words


def lopsided(samples=200, width=4, seed=0):
    """Three classes of very different sizes that overlap, so that both metrics and all methods differ."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.tensor([0] * 6 + [1] * 2 + [2] * 2).repeat(samples // 10)
    features = torch.randn(samples, width, generator=generator)
    features[:, 0] += 1.2 * labels
    return Features(features, labels, [])


def any_set(metric, name="any"):
    nothing = ArrayImages(np.zeros((1, 4, 4, 3), np.uint8), np.zeros(1, np.int64), None, "nothing")
    return datasets.TransferSet(name, metric, nothing, nothing)


def any_model(name="m", **recipe):
    return FeatureModel(name, torch.nn.Identity(), 8, 1.0, "bilinear", (0.0,) * 3, (1.0,) * 3, name, recipe)


@pytest.mark.parametrize("metric", ["top1", "mean_per_class"])
@pytest.mark.parametrize("method", ["svm", "knn", "probe"])
@pytest.mark.parametrize("seed", [0, 3])
def test_a_result_is_that_of_the_search_with_the_metric_and_seed_asked_for(metric, method, seed):
    from grassy.transfer import search_knn, search_probe, search_svm

    train, test = lopsided(), lopsided(seed=1)
    result = protocol.measure(any_model(), any_set(metric), train, test, method, seed, CPU)
    search = {"svm": search_svm, "knn": search_knn, "probe": search_probe}[method]
    found = search(train.features, train.labels, metric=metric, seed=seed)
    assert result.chosen == found.chosen
    accuracies = found.accuracies[found.values.index(found.chosen)]
    assert result.fold_accuracies == pytest.approx((100 * accuracies).tolist())
    right = (found.model.predict(test.features) == test.labels).double()
    by_class = torch.stack([right[test.labels == c].mean() for c in range(3)]).mean()
    assert right.mean() != by_class
    assert result.accuracy == pytest.approx(100 * float(right.mean() if metric == "top1" else by_class))
    assert (result.classes, result.seed, result.metric) == (3, seed, metric)


def test_neighbours_are_tried_as_far_as_a_small_set_allows():
    train = lopsided(50)
    result = protocol.measure(any_model(), any_set("top1"), train, lopsided(50, seed=1), "knn", 0, CPU)
    assert result.tried == list(range(1, 41, 2))
    assert "tried only up to 39 for so few images" in protocol.line(result)
    assert isinstance(result.chosen, int)


def test_a_choice_at_the_end_of_the_grid_is_said():
    def words(method, chosen, tried):
        numbers = (90.0, "top1", "C", chosen, [90.0], 1, 1, 2, 0, 0.0)
        return protocol.line(protocol.Result("a", "pets", method, *numbers, tried=tried))

    assert "C=20, the largest value of the grid" in words("svm", 20.0, [0.1, 1.0, 20.0])
    assert "the smallest value of the grid" in words("probe", 0.1, [0.1, 1.0])
    assert "of the grid" not in words("svm", 1.0, [0.1, 1.0, 20.0])
    assert "of the grid" not in words("knn", 1, [1, 3, 49])  # there is nothing below
    assert "the largest value of the grid" in words("knn", 49, [1, 3, 49])


def sets_in_memory(monkeypatch, **features):
    """Data sets by name whose features are (train, test), without images or a model."""
    opened = {name: any_set("top1", name) for name in features}
    monkeypatch.setattr(protocol, "open_transfer_set", lambda name, _: opened[name])
    calls = []

    def extracted(model, images, *_, progress, **__):
        name, part = progress.rsplit(", ", 1)[1].split()
        calls.append((model.name, name, part))
        return features[name][part == "test"]

    monkeypatch.setattr(protocol, "extract", extracted)
    return calls


def test_what_fails_is_named_and_loses_nothing_else(monkeypatch, tmp_path):
    good = (lopsided(), lopsided(seed=1))
    few = tuple(Features(part.features[:8], part.labels[:8], []) for part in good)
    strange = (good[0], Features(good[1].features, good[1].labels + 2, []))
    sets_in_memory(monkeypatch, few=few, good=good, strange=strange)
    said = []
    names = ["few", "strange", "good"]
    report = protocol.transfer([any_model()], names, None, tmp_path, CPU, methods=["svm", "knn"], say=said.append)
    assert [(r.dataset, r.method) for r in report.results] == [("good", "svm"), ("good", "knn")]
    assert list(report.failed) == ["m, few, svm", "m, few, knn", "m, strange"]
    assert "folds=5" in report.failed["m, few, svm"]
    assert "80 test images have a label no training image has, such as 3" in report.failed["m, strange"]
    assert any(text.startswith("failed: m, few, svm: every class") for text in said)
    table.save(report, tmp_path / "out", {})
    assert json.loads((tmp_path / "out" / "transfer.json").read_text())["failed"] == report.failed
    row = next(csv.DictReader((tmp_path / "out" / "transfer.csv").open()))
    assert [float(value) for value in row["fold_accuracies"].split(";")] == report.results[0].fold_accuracies
    with pytest.raises(ValueError, match="m, few, svm: every class needs"):
        protocol.transfer([any_model()], ["few"], None, tmp_path, CPU, methods=["svm"])


def test_unreadable_images_are_counted_and_the_first_is_named(monkeypatch, tmp_path):
    train, test = lopsided(), lopsided(seed=1)
    broken = Features(test.features, test.labels, [Failure("x/1.png", "truncated"), Failure("x/2.png", "empty")])
    sets_in_memory(monkeypatch, good=(train, broken))
    said = []
    protocol.transfer([any_model()], ["good"], None, tmp_path, CPU, methods=["knn"], say=said.append)
    assert "good: could not read 2 of the test images, x/1.png first (truncated)" in said


def test_a_model_or_method_named_twice_is_measured_once(monkeypatch, tmp_path):
    calls = sets_in_memory(monkeypatch, good=(lopsided(), lopsided(seed=1)))
    models = [any_model("runs/a", seed=0), any_model("runs/a", seed=0)]
    report = protocol.transfer(models, ["good"], None, tmp_path, CPU, methods=["knn", "knn"])
    assert len(report.results) == 1
    assert len(calls) == 2
    assert table.group_by_recipe(models) == {"runs/a": "runs/a"}
    assert "±" not in table.render(report, table.group_by_recipe(models))


def test_two_data_sets_of_one_name_are_refused(tmp_path):
    for place in ("p1/photos", "p2/photos"):
        tiny_arrays(tmp_path / place)
    names = [str(tmp_path / "p1/photos"), f"{tmp_path}/p2/photos/"]
    with pytest.raises(ValueError, match="are both called 'photos': give one of them a name of its own"):
        protocol.transfer([any_model()], names, None, tmp_path, CPU)


def test_runs_are_repetitions_if_their_recipes_agree_and_all_seeds_differ():
    a, b, other = any_model("a", lr=1, seed=0), any_model("b", lr=1, seed=1), any_model("c", lr=2, seed=2)
    assert table.group_by_recipe([a, b, other]) == {"a": "a", "b": "a", "c": "c"}
    same = any_model("d", lr=1, seed=1)  # of other data, or of another machine
    assert table.group_by_recipe([a, b, same]) == {"a": "a", "b": "b", "d": "d"}
    assert table.group_by_recipe([any_model("x"), any_model("y")]) == {"x": "x", "y": "y"}


def test_seeds_share_a_cell_with_mean_and_standard_deviation():
    results = [
        protocol.Result(name, "pets", "svm", value, "top1", "C", 1.0, [value], 1, 1, 2, 0, 0.0)
        for name, value in (("a", 90.0), ("b", 94.0))
    ]
    text = table.render(protocol.Report(results), {"a": "a", "b": "a"})
    assert text.splitlines()[1].split("svm")[1].split() == ["92.00", "±", "2.83", "92.00", "±", "2.83"]


def test_the_mean_is_that_of_models_with_a_result_on_every_set():
    def result(model, dataset, value):
        return protocol.Result(model, dataset, "svm", value, "top1", "C", 1.0, [value], 1, 1, 2, 0, 0.0)

    report = protocol.Report([result("a", "x", 90.0), result("a", "y", 80.0), result("b", "x", 70.0)])
    lines = table.render(report, {"a": "a", "b": "b"}).splitlines()
    assert lines[1].split()[2:] == ["90.00", "80.00", "85.00"]
    assert lines[2].split()[2:] == ["70.00", "-", "-"]
