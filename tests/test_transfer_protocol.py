"""Features of any model, kept on the disk as long as nothing changes, and the protocol on top of them."""

import csv
import json
import os
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import grassy
from grassy.cli import main
from grassy.training import feature_models
from grassy.training import features as feature_module
from grassy.training.datasets import ArrayImages, open_images
from grassy.training.feature_models import FeatureModel, open_model
from grassy.training.features import Features, extract
from grassy.training.loader import Failure
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
        ("torchvision/resnet51", "torchvision has no classifier of images 'resnet51', did you mean"),
        ("nowhere/run", "no checkpoint nowhere/run"),
        ("timm/resnet18.nonsense", "timm/resnet18.nonsense: Invalid pretrained tag"),
        ("timm/test_vit4", "timm/test_vit4: "),
        ("torchvision/deeplabv3_resnet50", "torchvision has no classifier of images"),
    ]:
        with pytest.raises(ValueError, match=message):
            open_model(name)


def counted(monkeypatch):
    """How often features are computed."""
    calls = []
    original = feature_module._batches
    monkeypatch.setattr(feature_module, "_batches", lambda *a: calls.append(0) or original(*a))
    return calls


def test_a_batch_of_no_images_is_refused(run, tmp_path):
    images = ArrayImages(np.zeros((2, 8, 8, 3), np.uint8), np.array([0, 1]), None, "black")
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        extraction(open_model(str(run)), images, tmp_path, batch_size=0)


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


def test_an_image_that_has_become_readable_is_noticed_and_one_that_has_not_costs_nothing(run, tmp_path, monkeypatch):
    calls = counted(monkeypatch)
    images = ArrayImages(np.zeros((5, 8, 8, 3), np.uint8), np.arange(5), None, "a")
    original, broken = images.load, {1, 4}

    def load(index):
        if index in broken:
            raise OSError("the disk is away")
        return original(index)

    monkeypatch.setattr(images, "load", load)
    source = open_model(str(run))
    for _ in range(2):
        found = extraction(source, images, tmp_path, batch_size=2)
        assert found.labels.tolist() == [0, 2, 3]
        assert [failure.name for failure in found.failures] == ["a[1]", "a[4]"]
    assert len(calls) == 1
    assert len(list(tmp_path.iterdir())) == 1  # no second file, which could be lost
    broken.remove(4)
    assert extraction(source, images, tmp_path).labels.tolist() == [0, 2, 3, 4]
    assert len(calls) == 2


def test_nothing_readable_is_an_error_and_leaves_no_file(run, tmp_path, monkeypatch):
    images = ArrayImages(np.zeros((3, 8, 8, 3), np.uint8), np.arange(3), None, "a")
    monkeypatch.setattr(images, "load", lambda _: (tmp_path / "nowhere").read_bytes())
    with pytest.raises(ValueError, match=r"none of the images could be read, a\[0\] first"):
        extraction(open_model(str(run)), images, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_is_not(run, tmp_path):
    old, new = tmp_path / ".writing-old", tmp_path / ".writing-new"
    for file in (old, new):
        file.write_bytes(b"half")
    os.utime(old, (0, 0))
    images = ArrayImages(np.zeros((3, 8, 8, 3), np.uint8), np.arange(3), None, "a")
    extraction(open_model(str(run)), images, tmp_path)
    assert not old.exists()
    assert new.exists()


def test_the_key_tells_models_shapes_names_and_tars_apart(tmp_path):
    from torch import nn

    hash_of, key = feature_models._hash_of_tensors, feature_module.fingerprint
    wide, tall = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
    tall.weight.data = wide.weight.data.reshape(4, 2)
    assert hash_of(wide, "a") == hash_of(wide, "a")
    assert hash_of(wide, "a") != hash_of(tall, "a")
    assert hash_of(wide, "a") != hash_of(wide, "b")
    pixels = np.arange(2 * 4 * 6 * 3, dtype=np.uint8)
    shapes = [(2, 4, 6, 3), (2, 6, 4, 3), (2, 8, 3, 3)]
    assert len({key(ArrayImages(pixels.reshape(shape), np.arange(2), None, "a")) for shape in shapes}) == 3
    folder = tmp_path / "data" / "train"
    folder.mkdir(parents=True)

    def pack(shade, name="b.tar"):
        Image.new("RGB", (4, 4), (shade,) * 3).save(tmp_path / "0.png")
        with tarfile.open(folder / name, "w") as tar:
            tar.add(tmp_path / "0.png", arcname="0.png")

    pack(0)
    pack(0, "c.tar")
    before = key(open_images("", tmp_path / "data", "train"))
    assert key(open_images("", tmp_path / "data", "train")) == before
    status = os.stat(folder)
    pack(200)  # a tar in the folder, which itself does not change
    os.utime(folder, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert key(open_images("", tmp_path / "data", "train")) != before


def test_images_in_no_file_are_told_apart_by_what_they_show():
    class Shades:
        def __init__(self, shades):
            self.shades = shades

        def __len__(self):
            return len(self.shades)

        def __getitem__(self, index):
            return Image.new("RGB", (4, 4), (self.shades[index],) * 3), 0

    keys = [feature_module.fingerprint(datasets.ReaderImages(Shades(s), "torch/x")) for s in ([1, 2], [1, 2], [1, 3])]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize(
    ("name", "options", "width"),
    [
        ("vit_tiny_patch16_224", {"num_classes": 0}, 192),
        ("resnet18", {"num_classes": 0, "global_pool": ""}, 512),
        ("crossvit_tiny_240", {}, 96 + 192),
        ("deit_tiny_distilled_patch16_224", {}, 192),
    ],
)
def test_features_of_models_without_a_classifier_and_with_several(name, options, width, tmp_path):
    import timm

    model = timm.create_model(name, **options).eval()
    size = model.default_cfg["input_size"][-1]
    source = FeatureModel(name, model, size, 1.0, "bilinear", (0.0,) * 3, (1.0,) * 3, name)
    images = ArrayImages(np.full((2, size, size, 3), 255, np.uint8), np.array([0, 1]), None, "white")
    found = extraction(source, images, tmp_path).features
    assert found.shape == (2, width)
    if options:
        with torch.no_grad():
            expected = model(torch.ones(2, 3, size, size))
        expected = expected.mean((2, 3)) if expected.ndim == 4 else expected
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_map_in_front_of_the_classifier_is_averaged(tmp_path):
    source = open_model("torchvision/squeezenet1_1", pretrained=False)
    images = ArrayImages(np.full((2, 224, 224, 3), 99, np.uint8), np.array([0, 1]), None, "grey")
    found = extraction(source, images, tmp_path).features
    pixels = (torch.full((2, 3, 224, 224), 99 / 255) - torch.tensor(source.mean)[:, None, None]) / torch.tensor(
        source.std
    )[:, None, None]
    with torch.no_grad():
        torch.testing.assert_close(found, source.model.features(pixels).mean((2, 3)), rtol=1e-3, atol=1e-4)


def test_images_are_cropped_as_the_model_was_trained(monkeypatch, tmp_path):
    import timm

    config = dict(timm.data.resolve_model_data_config(timm.create_model("resnet18")))
    monkeypatch.setattr(timm.data, "resolve_model_data_config", lambda _: {**config, "crop_mode": "squash"})
    squashed = open_model("timm/resnet18", pretrained=False)
    assert squashed.crop_mode == "squash"
    striped = np.zeros((100, 400, 3), np.uint8)
    striped[:, :60] = 255  # cut away by a crop of the centre, and kept by squashing
    image = Image.fromarray(striped)
    center = FeatureModel(**{**vars(squashed), "crop_mode": "center"})
    assert center.preparation() != squashed.preparation()
    assert np.asarray(feature_module._transform(squashed)(image)).max() == 255
    assert np.asarray(feature_module._transform(center)(image)).max() == 0
    monkeypatch.setattr(timm.data, "resolve_model_data_config", lambda _: {**config, "input_size": (3, 128, 256)})
    with pytest.raises(ValueError, match="timm/resnet18 takes images of 128x256: only square"):
        open_model("timm/resnet18", pretrained=False)


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

    assert "C=20, the end of its grid" in words("svm", 20.0, [0.1, 1.0, 20.0])
    assert "the end of its grid" in words("probe", 0.1, [0.1, 1.0])
    assert "the end" not in words("svm", 1.0, [0.1, 1.0, 20.0])
    assert "the end" not in words("knn", 1, [1, 3, 49])  # there is nothing below
    assert "the end" in words("knn", 49, [1, 3, 49])


def sets_in_memory(monkeypatch, **features):
    """Data sets by name whose features are (train, test), without images or a model."""
    opened = {name: any_set("top1", name) for name in features}
    monkeypatch.setattr(protocol, "open_set", lambda name, _: opened[name])
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
