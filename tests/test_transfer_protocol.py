"""Features of any model, kept on the disk as long as nothing changes, and the protocol on top of them."""

import csv
import json
import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import grassy
from grassy.cli import main
from grassy.training import features as feature_module
from grassy.training.datasets import ArrayImages, open_images
from grassy.training.features import FeatureModel, extract, open_model
from grassy.training.loop import train
from grassy.transfer import datasets, protocol, table
from grassy.transfer.datasets import MissingData, open_set
from training_cases import tiny_arrays, tiny_folders, tiny_recipe

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    train(tiny_recipe(epochs=1), tiny_arrays(folder / "data"), folder / "run", quiet=True)
    return folder / "run"


def extraction(source, images, cache, **options):
    return extract(source, images, cache, CPU, workers=0, **options)


# ------------------------------------------------------------------------------------------------ features


def test_features_are_what_the_classifier_is_given(run, tmp_path):
    source = open_model(str(run))
    images = open_images("", tiny_folders(tmp_path / "images"), "train")
    found = extraction(source, images, tmp_path / "cache", batch_size=5)
    import timm

    model = grassy.load(run)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    pixels = torch.stack([transform(images.load(i)[0]) for i in range(len(images))])
    with torch.no_grad():
        expected = model.forward_head(model.forward_features(pixels), pre_logits=True)
    torch.testing.assert_close(found.features, expected, rtol=1e-4, atol=1e-4)
    assert found.labels.tolist() == images.labels().tolist()
    torch.testing.assert_close(model.head(found.features), model(pixels), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["timm/resnet18", "torchvision/resnet18", "timm/vgg11", "timm/deit_tiny_distilled_patch16_224"]
)
def test_models_are_opened_by_name_from_both_libraries(name, tmp_path):
    source = open_model(name, pretrained=False)
    images = ArrayImages(np.zeros((2, 40, 40, 3), np.uint8), np.array([0, 1]), None, "black")
    found = extraction(source, images, tmp_path)
    widths = {"timm/resnet18": 512, "torchvision/resnet18": 512, "timm/vgg11": 4096}
    assert found.features.shape == (2, widths.get(name, 192))
    assert (source.img_size, len(source.mean)) == (224, 3)


def test_unknown_models_are_named():
    for name, message in [
        ("timm/resnet81", "timm has no model 'resnet81', did you mean"),
        ("torchvision/resnet51", "torchvision has no model 'resnet51', did you mean"),
        ("nowhere/run", "no checkpoint nowhere/run"),
    ]:
        with pytest.raises(ValueError, match=message):
            open_model(name)


def counted(monkeypatch):
    """How often features are computed."""
    calls = []
    original = feature_module._batches
    monkeypatch.setattr(feature_module, "_batches", lambda *a: calls.append(0) or original(*a))
    return calls


def test_features_are_computed_once_and_again_when_something_has_changed(run, tmp_path, monkeypatch):
    calls = counted(monkeypatch)
    folder = tiny_folders(tmp_path / "images")
    cache = tmp_path / "cache"
    source = open_model(str(run))

    def again():
        return extraction(source, open_images("", folder, "train"), cache)

    first = again()
    assert torch.equal(again().features, first.features)
    assert len(calls) == 1
    file = folder / "train" / "cat" / "0.png"
    (folder / "train" / "cat" / "1.png").replace(file)  # another image under the old name
    again()
    assert len(calls) == 2
    status = os.stat(file)
    file.write_bytes(file.read_bytes())
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))  # the same size, touched
    again()
    assert len(calls) == 3
    source = open_model(str(run / "last.safetensors"))  # the same weights under another name
    with_other_size = FeatureModel(**{**vars(source), "img_size": 8, "crop_pct": 0.9})
    extraction(with_other_size, open_images("", folder, "train"), cache)
    assert len(calls) == 4
    extraction(source, open_images("", folder, "train"), cache, amp_dtype=torch.bfloat16)
    assert len(calls) == 5


def test_a_changed_checkpoint_and_changed_arrays_are_noticed(run, tmp_path, monkeypatch):
    calls = counted(monkeypatch)
    images = np.random.default_rng(0).integers(0, 255, (4, 8, 8, 3), dtype=np.uint8)
    source = open_model(str(run))
    for pixels in (images, images, images ^ 1):
        extraction(source, ArrayImages(pixels, np.arange(4), None, "a"), tmp_path)
    assert len(calls) == 2
    extraction(source, ArrayImages(images, np.array([0, 1, 2, 2]), None, "a"), tmp_path)
    assert len(calls) == 3
    changed = FeatureModel(**{**vars(source), "fingerprint": "another"})
    extraction(changed, ArrayImages(images, np.arange(4), None, "a"), tmp_path)
    assert len(calls) == 4
    joined = datasets.Joined(
        [ArrayImages(images, np.arange(4), None, "a"), ArrayImages(images, np.arange(4), None, "b")]
    )
    other = datasets.Joined([joined.parts[0], ArrayImages(images ^ 1, np.arange(4), None, "b")])
    extraction(source, joined, tmp_path)
    extraction(source, other, tmp_path)
    assert len(calls) == 6


def test_a_torn_file_is_rebuilt_and_an_interrupted_extraction_leaves_none(run, tmp_path, monkeypatch):
    calls = counted(monkeypatch)
    source = open_model(str(run))
    images = ArrayImages(np.zeros((6, 8, 8, 3), np.uint8), np.arange(6), None, "a")
    first = extraction(source, images, tmp_path).features.clone()  # not the mapped file, which is about to shrink
    (file,) = tmp_path.iterdir()
    for size in (0, 4, 100, file.stat().st_size - 1):
        file.write_bytes(file.read_bytes()[:size])
        assert torch.equal(extraction(source, images, tmp_path).features, first)
    assert len(calls) == 5
    original = source.model.forward

    def failing(x):
        if len(x) == 2:
            raise KeyboardInterrupt
        return original(x)

    monkeypatch.setattr(source.model, "forward", failing)
    with pytest.raises(KeyboardInterrupt):
        extraction(source, images, tmp_path / "other", batch_size=4)
    assert list((tmp_path / "other").iterdir()) == []


def test_files_are_plain_safetensors_and_are_mapped_not_read(run, tmp_path):
    images = ArrayImages(np.zeros((6, 8, 8, 3), np.uint8), np.arange(6), None, "a")
    found = extraction(open_model(str(run)), images, tmp_path)
    (file,) = tmp_path.iterdir()
    plain = load_file(file)
    assert torch.equal(plain["features"], found.features)
    assert torch.equal(plain["labels"], found.labels)


def test_unreadable_images_are_left_out_counted_and_remembered(run, tmp_path):
    folder = tiny_folders(tmp_path / "images")
    (folder / "train" / "dog" / "2.png").write_bytes(b"nothing")
    for _ in range(2):
        found = extraction(open_model(str(run)), open_images("", folder, "train"), tmp_path / "cache")
        assert len(found.labels) == len(found.features) == 17
        assert [failure.name for failure in found.failures] == [str(folder / "train" / "dog" / "2.png")]
        assert found.features.isfinite().all()


def test_a_batch_of_nothing_but_unreadable_images_is_survived(run, tmp_path):
    folder = tiny_folders(tmp_path / "images", images=2)
    for file in (folder / "train" / "cat").iterdir():
        file.write_bytes(b"nothing")
    found = extraction(open_model(str(run)), open_images("", folder, "train"), tmp_path / "cache", batch_size=2)
    assert found.labels.tolist() == [1, 1, 2, 2]


# ------------------------------------------------------------------------------------------------ data sets


def test_known_names_have_the_metrics_of_the_paper():
    metrics = {name: row[3] for name, row in datasets.KNOWN.items()}
    assert [name for name in metrics if metrics[name] == "mean_per_class"] == ["pets", "flowers"]
    assert set(metrics) == set(grassy.paper.figures("resnet50d-grassmann")["svm"]) - {"average"}


def test_a_validation_split_beside_a_test_split_is_trained_on(tmp_path):
    tiny_arrays(tmp_path / "flowers", images=12)
    (tmp_path / "flowers" / "val.npz").write_bytes((tmp_path / "flowers" / "train.npz").read_bytes())
    data = open_set("flowers", tmp_path)
    assert (len(data.train), len(data.test), data.metric) == (24, 6, "mean_per_class")
    assert data.train.labels().tolist() == [0, 1, 2] * 8
    assert data.train.load(13)[1] == 1
    assert data.train.name(13) == "val.npz[1]"


def test_torchvisions_own_copies_are_read(tmp_path):
    """Oxford pets as torchvision lays them out: annotations and images, made here."""
    from PIL import Image

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
    data = open_set("pets", tmp_path)
    assert data.train.labels().tolist() == [0, 1, 0, 1]
    assert data.test.load(1)[1] == 1
    assert data.train.name(2).endswith("Abyssinian_trainval2.jpg")


def test_absent_data_says_what_to_do(tmp_path):
    for name in datasets.KNOWN:
        with pytest.raises(MissingData, match=rf"{name} is not in .*torchvision\.datasets\.\w+\(.*download=True"):
            open_set(name, tmp_path)
    with pytest.raises(MissingData, match="give --data-dir"):
        open_set("pets", None)
    with pytest.raises(MissingData, match="the known data sets are cifar10"):
        open_set("petz", tmp_path)


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
        (["--checkpoint", str(run), "--datasets", "food101"], "none of the data sets is there: food101 is not in"),
        (
            ["--checkpoint", str(run), "--datasets", "pets", "--methods", "svn"],
            "unknown method 'svn', did you mean 'svm'",
        ),
        (["--checkpoint", str(tmp_path / "no"), "--datasets", "pets"], "there is no checkpoint"),
    ]:
        assert main(["transfer", *words, *data]) == 2
        assert message in capsys.readouterr().err
    tiny_arrays(tmp_path / "few", images=6, classes=3)
    assert main(["transfer", "--checkpoint", str(run), "--datasets", str(tmp_path / "few"), *data]) == 2
    assert "every class needs at least folds=5 samples" in capsys.readouterr().err


def test_the_papers_figures_stand_beside_those_of_its_recipes(run):
    result = protocol.Result("a", "pets", "svm", 90.0, "mean_per_class", "C", 1.0, [90.0], 1, 1, 2, 0, 0.0, paper=91.85)
    assert protocol._figure({"paper": "resnet50d-grassmann"}, "svm", "pets") == 91.85
    assert protocol._figure({"paper": ""}, "svm", "pets") is None
    text = table.render(protocol.Report([result]), {"a": "a"})
    assert "(the paper)" in text
    assert "91.85" in text
