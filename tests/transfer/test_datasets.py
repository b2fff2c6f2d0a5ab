"""Which images of a data set are trained on and which are tested."""

import tarfile

import numpy as np
import pytest
from PIL import Image

from grassy.data.images import ArrayImages
from grassy.transfer import datasets
from grassy.transfer.datasets import MissingData, open_transfer_set

COUNTS = {"train": 4, "training": 4, "val": 3, "valid": 3, "test": 2}


def make(folder, kind, splits):
    """Images of two classes, so many of each as COUNTS says, as class folders, tars or arrays."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in splits:
        count = COUNTS[split]
        if kind == "npz":
            np.savez(folder / f"{split}.npz", x=np.zeros((2 * count, 8, 8, 3), np.uint8), y=np.arange(2 * count) % 2)
            continue
        place = folder / split if kind == "folders" else folder.parent / f"loose-{split}"
        for name in ("a", "b"):
            (place / name).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (8, 8), (i, i, i)).save(place / name / f"{i}.png")
        if kind == "tar":
            with tarfile.open(folder / f"{split}.tar", "w") as tar:
                tar.add(place, arcname=".")
    return folder


@pytest.mark.parametrize("kind", ["npz", "folders", "tar"])
@pytest.mark.parametrize(
    ("splits", "train", "test"),
    [
        (("train", "val", "test"), 14, 4),
        (("training", "valid", "test"), 14, 4),
        (("train", "test"), 8, 4),
        (("train", "valid"), 8, 6),
    ],
)
def test_a_validation_split_is_trained_on_only_beside_a_test_split(kind, splits, train, test, tmp_path):
    data = open_transfer_set(f"mine={make(tmp_path / 'mine', kind, splits)}", None)
    assert (data.name, len(data.train), len(data.test)) == ("mine", train, test)
    assert data.train.labels().tolist().count(1) == train // 2
    assert data.test.load(0)[0].shape == (8, 8, 3)


def test_what_is_not_there_is_named(tmp_path):
    for splits, message in [
        (("val", "test"), "has no train, .*it holds test.npz, val.npz"),
        (("train",), "no test or"),
    ]:
        with pytest.raises(MissingData, match=message):
            open_transfer_set(str(make(tmp_path / "-".join(splits), "npz", splits)), None)
    with pytest.raises(MissingData, match="did you mean 'flowers'"):
        open_transfer_set("flower", tmp_path)


def test_a_single_file_is_not_a_training_and_a_test_set(tmp_path):
    make(tmp_path, "npz", ["train"])
    make(tmp_path / "t", "tar", ["train"])
    for file in (tmp_path / "train.npz", tmp_path / "t" / "train.tar"):
        with pytest.raises(MissingData, match="is a file: give a folder with a training and a test set"):
            open_transfer_set(f"mine={file}", None)


def test_digits_and_the_readers_of_training_are_data_sets(tmp_path):
    data = open_transfer_set("digits", None)
    assert (data.name, len(data.train), len(data.test)) == ("digits", 1437, 360)
    assert open_transfer_set("d=digits", None).name == "d"
    with pytest.raises(MissingData, match=r"torch/cifar10: .*--data-dir"):
        open_transfer_set("torch/cifar10", None)
    with pytest.raises(MissingData, match="torch/cifar10"):
        open_transfer_set("torch/cifar10", tmp_path)


@pytest.mark.parametrize(
    ("name", "kind", "train", "test"),
    [
        ("cifar10", "CIFAR10", [{"train": True}], {"train": False}),
        ("cifar100", "CIFAR100", [{"train": True}], {"train": False}),
        ("food101", "Food101", [{"split": "train"}], {"split": "test"}),
        ("pets", "OxfordIIITPet", [{"split": "trainval"}], {"split": "test"}),
        ("cars", "StanfordCars", [{"split": "train"}], {"split": "test"}),
        ("flowers", "Flowers102", [{"split": "train"}, {"split": "val"}], {"split": "test"}),
    ],
)
def test_torchvision_is_asked_for_the_splits_of_the_paper(name, kind, train, test, tmp_path, monkeypatch):
    import torchvision

    asked = []

    class Fake:
        def __init__(self, root, download, **split):
            asked.append(split)
            assert (root, download) == (str(tmp_path), False)
            self.data, self.targets = np.full((3, 4, 4, 3), len(asked), np.uint8), [0, 1, 0]

    monkeypatch.setattr(torchvision.datasets, kind, Fake)
    data = open_transfer_set(name, tmp_path)
    assert asked == [*train, test]
    assert len(data.train) == 3 * len(train)
    assert isinstance(data.test, ArrayImages)
    assert int(data.test.images[0, 0, 0, 0]) == len(asked)
    assert data.metric == ("mean_per_class" if name in ("pets", "flowers") else "top1")
    assert name in datasets.KNOWN


def test_a_class_may_have_the_name_of_a_split(tmp_path):
    for name in ("train", "bus", "test"):
        (tmp_path / name).mkdir()
        for i in range(5):
            Image.new("RGB", (8, 8), (i, i, i)).save(tmp_path / name / f"{i}.png")
    data = open_transfer_set(str(tmp_path), None)
    assert (len(data.train), len(data.test)) == (12, 3)
    assert list(data.train.class_names) == ["bus", "test", "train"]
