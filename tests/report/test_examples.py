"""Which images of a data set are shown: mistakes, typical and untypical ones, outliers; and their thumbnails."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image

import grassy
from grassy import geometry
from grassy.data.images import ArrayImages, open_images
from grassy.report import examples as examples_module
from grassy.report.analyze import analyze, name_examples
from grassy.report.classes import describe
from grassy.report.examples import check_examples, choose_examples, rank_in_group, share_inside
from grassy.report.thumbnails import short_name, thumbnails


def test_the_share_inside_is_that_of_a_projection():
    torch.manual_seed(0)
    weight = geometry.random_subspace(3, 2, 7, dtype=torch.float64)
    features, labels = torch.randn(20, 7, dtype=torch.float64), torch.arange(20) % 3
    bases = weight[labels]
    projected = (features[:, None] @ bases.mT @ bases).squeeze(1)
    expected = projected.square().sum(-1) / features.square().sum(-1)
    torch.testing.assert_close(share_inside(features, labels, weight), expected)
    rotated = torch.linalg.qr(torch.randn(2, 2, dtype=torch.float64))[0] @ weight
    torch.testing.assert_close(share_inside(features, labels, rotated), expected)  # of the subspace, not the basis


def test_a_feature_opposite_to_its_class_vector_is_not_typical_of_it():
    vectors = torch.tensor([[2.0, 0.0], [0.0, 3.0]])
    features = torch.tensor([[5.0, 0.0], [-5.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    assert share_inside(features, torch.tensor([0, 0, 1, 1]), vectors).tolist() == pytest.approx([1, 0, 0.5, 0])


def test_rank_in_group_counts_what_came_before():
    assert rank_in_group(np.array([7, 3, 7, 7, 3])).tolist() == [0, 0, 1, 2, 1]


def chosen(labels, predicted, confidence, classes=3, inside=None, outlier=None):
    labels, predicted, confidence = map(np.asarray, (labels, predicted, confidence))
    zeros = np.zeros(len(labels))
    return choose_examples(
        labels, predicted, confidence, zeros if inside is None else np.asarray(inside),
        zeros if outlier is None else np.asarray(outlier), classes,
    )  # fmt: skip


def rows(found, positions):
    return [found["index"][position] for position in positions]


def test_mistakes_are_the_wrong_images_surest_first():
    found = chosen([0, 0, 1, 1, 2], [0, 1, 1, 0, 0], [0.9, 0.5, 0.9, 0.8, 0.6])
    assert rows(found, found["mistakes"]) == [3, 4, 1]
    at = found["mistakes"][0]
    assert (found["label"][at], found["predicted"][at], found["confidence"][at]) == (1, 0, 0.8)


def test_a_frequent_confusion_leaves_room_for_the_others(monkeypatch):
    monkeypatch.setattr(examples_module, "MISTAKES_OF_PAIR", 2)
    found = chosen([0] * 5 + [1], [1] * 4 + [2] + [0], [0.9, 0.8, 0.7, 0.6, 0.1, 0.05])
    assert rows(found, found["mistakes"]) == [0, 1, 4, 5]
    monkeypatch.setattr(examples_module, "MOST_MISTAKES", 2)
    found = chosen([0] * 5 + [1], [1] * 4 + [2] + [0], [0.9, 0.8, 0.7, 0.6, 0.1, 0.05])
    assert rows(found, found["mistakes"]) == [0, 5]  # the surest of each class


def test_typical_images_are_those_furthest_inside_and_outliers_those_of_the_highest_score():
    inside, outlier = [0.1, 0.9, 0.5, 0.2, 0.3], [0.1, 0.2, 0.9, 0.3, 0.4]
    found = chosen([0, 0, 0, 0, 1], [0, 0, 0, 0, 1], [1] * 5, inside=inside, outlier=outlier)
    assert [rows(found, own) for own in found["typical"]] == [[1, 2], [4], []]  # at most half of a class
    assert [rows(found, own) for own in found["untypical"]] == [[0, 3], [4], []]
    assert rows(found, found["outliers"]) == [2, 4, 3, 1, 0]
    check_examples({**found, "name": [""] * 5}, classes=3, images=5)


def test_examples_tell_of_the_images_that_could_be_read(tiny_images, make_run, tmp_path):
    names = [f"class {i}" for i in range(5)]
    data = tmp_path / "photos"
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for i, name in enumerate(names):
            (data / split / name).mkdir(parents=True)
            for n in range(4 if split == "val" else 2 + i):
                Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(data / split / name / f"{n}.png")
    (data / "val" / "class 1" / "2.png").write_bytes(b"no image")
    run = make_run(tmp_path / "run", {"name": "grassmann", "k": 2}, names=names)
    analysis = analyze(run, data, device="cpu")
    images = open_images("", data, "val", names)
    found = analysis["examples"]
    for index, name, label in zip(found["index"], found["name"], found["label"], strict=True):
        assert images.name(index).endswith(f"/{name}")
        assert name.startswith(f"class {label}/")
    assert "class 1/2.png" not in found["name"]
    assert analysis["per_class"]["training_images"] == [2, 3, 4, 5, 6]
    pictures = thumbnails(images, found)
    assert all(uri.startswith("data:image/png;base64,") for uri in pictures)
    at = found["name"].index(short_name(images.name(0))) if short_name(images.name(0)) in found["name"] else 0
    shown = Image.open(io.BytesIO(base64.b64decode(pictures[at].split(",")[1])))
    assert np.array_equal(np.asarray(shown), np.asarray(images.load(found["index"][at])[0]))


def test_images_in_another_order_than_the_features_are_not_shown_under_wrong_names():
    head = grassy.GrassmannHead(16, 3, k=2)
    labels = torch.arange(12) % 3
    measured = describe(head, None, torch.randn(12, 16), labels)
    images = ArrayImages(np.zeros((12, 4, 4), np.uint8), np.sort(labels.numpy()), None, "other")
    name_examples(measured, images, [], labels)
    assert measured["examples"] is None


@pytest.fixture
def photos():
    rng = np.random.default_rng(0)
    images = ArrayImages(rng.integers(0, 255, (60, 40, 40, 3), dtype=np.uint8), np.arange(60) % 5, None, "noise")
    head = grassy.GrassmannHead(16, 5, k=2)
    labels = torch.arange(60) % 5
    measured = describe(head, None, torch.randn(60, 16), labels)
    name_examples(measured, images, [], labels)
    return images, measured["examples"]


def test_thumbnails_keep_to_their_budget_and_give_each_class_one_of_a_kind_before_any_a_second(photos):
    images, found = photos
    everything = thumbnails(images, found)
    assert None not in everything
    found = {**found, "outliers": [], "mistakes": []}
    firsts = {own[0] for kind in ("typical", "untypical") for own in found[kind]}
    some = thumbnails(images, found, budget=sum(len(everything[at]) for at in firsts) + 10)
    assert {at for at, uri in enumerate(some) if uri} == firsts


def test_an_image_that_was_replaced_since_has_no_thumbnail(photos):
    images, found = photos
    found = {**found, "name": ["another", *found["name"][1:]], "index": [*found["index"][:-1], 99]}
    assert [at for at, uri in enumerate(thumbnails(images, found)) if uri is None] == [0, len(found["index"]) - 1]
