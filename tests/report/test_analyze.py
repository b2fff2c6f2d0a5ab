"""analysis.json: its numbers are those of grassy.analysis and of plain loops, and what it packs can be unpacked."""

import json
import math

import numpy as np
import pytest
import torch

import grassy
from grassy import analysis, geometry
from grassy.data.images import open_images
from grassy.distributed.processes import find_device
from grassy.heads.base import evaluating
from grassy.inference.feature_models import open_model
from grassy.inference.features import extract
from grassy.inference.load import load
from grassy.models import import_timm
from grassy.report.analyze import analyze, read_analysis, render
from grassy.report.classes import describe
from grassy.report.packing import pack_angles, unpack_angles

timm = import_timm()
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tiny_images, tmp_path_factory):
    return tiny_images(tmp_path_factory.mktemp("data"), classes=5)


@pytest.fixture
def run_of(make_run):
    def make(folder, **head):
        return make_run(folder, {"name": "grassmann", "k": 3, **head} if "name" not in head else head, classes=5)

    return make


def features_of(run, data):
    model = open_model(str(run))
    found = extract(model, open_images("", data, "validation"), run / "features", find_device("cpu"), workers=0)
    return load(run).get_classifier(), found.features, found.labels


def test_features_meet_the_subspaces_as_the_head_sees_them():
    head = grassy.GrassmannHead(10, 4, k=3, standardize=True)
    features, labels = 5 + torch.randn(200, 10), torch.arange(200) % 4
    for _ in range(50):
        head.prepare(features)
    result = describe(head, None, features, labels)
    with evaluating(head):
        seen = head.prepare(features)
    ranks = analysis.class_effective_ranks(seen, labels, head.weight)
    assert result["scalars"]["mean_effective_rank"] == pytest.approx(float(ranks.mean()))
    assert result["scalars"]["variability"] == pytest.approx(analysis.variability(features, labels))
    assert head.training  # as it was


def test_the_scalars_are_those_of_the_analysis_functions(run_of, tmp_path, data):
    run = run_of(tmp_path / "run")
    result = analyze(run, data, device="cpu")
    head, features, labels = features_of(run, data)
    weight = head.weight.detach()
    collapse = analysis.neural_collapse(features, labels, weight)
    ranks = analysis.class_effective_ranks(features, labels, weight)
    angles = torch.rad2deg(analysis.pairwise_principal_angles(weight))
    expected = {
        "top1": 100 * float((head(features).argmax(1) == labels).double().mean()),
        "top5": 100.0,
        "variability": analysis.variability(features, labels),
        "class_separation": analysis.class_separation(features, labels),
        "nc1": collapse.within_over_between,
        "nc2_norms": collapse.norm_deviation,
        "nc2_angles": collapse.cosine_deviation,
        "nc2_simplex": collapse.simplex_deviation,
        "mean_effective_rank": float(ranks.mean()),
        "energy_inside": float(analysis.class_spectra(features, labels, weight).sum(-1).mean()),
        "smallest_angle": float(angles[..., 0][~torch.eye(5, dtype=torch.bool)].min()),
        "orthonormality_error": float(geometry.orthonormality_error(weight)),
    }
    for key, value in expected.items():
        assert result["scalars"][key] == pytest.approx(value, rel=1e-5), key
    assert result["scalars"]["nc3"] is None  # not defined for subspaces


def test_what_is_said_of_a_class_agrees_with_a_plain_loop(run_of, tmp_path, data):
    run = run_of(tmp_path / "run")
    result = analyze(run, data, device="cpu")
    head, features, labels = features_of(run, data)
    predicted = head(features).argmax(1).tolist()
    own = result["per_class"]
    for c in range(5):
        mine = [p for p, label in zip(predicted, labels.tolist(), strict=True) if label == c]
        assert own["images"][c] == len(mine)
        assert own["accuracy"][c] == pytest.approx(100 * mine.count(c) / len(mine), rel=1e-4)
        mistakes = {other: mine.count(other) for other in set(mine) - {c}}
        assert dict(own["confusions"][c]) == mistakes
        assert [count for _, count in own["confusions"][c]] == sorted(mistakes.values(), reverse=True)
        spectrum = analysis.class_spectra(features, labels, head.weight.detach())[c]
        assert own["spectrum"][c] == pytest.approx(spectrum.tolist(), rel=1e-4)
        distances = {
            d: float(torch.rad2deg(geometry.principal_angles(head.weight[c].detach(), head.weight[d].detach())).mean())
            for d in range(5)
            if d != c
        }
        assert [other for other, _ in own["nearest"][c]] == sorted(distances, key=distances.get)
        assert dict(own["nearest"][c]) == pytest.approx(distances, abs=2e-3)
    assert own["name"] == ["class 0", "class 1", "class 2", "class 3", "class 4"]
    assert own["dimension"] == [3] * 5


def test_packed_angles_come_back_to_the_stated_precision(run_of, tmp_path, data):
    run = run_of(tmp_path / "run")
    analyze(run, data, device="cpu")
    written = json.loads((run / "analysis.json").read_text())
    angles = unpack_angles(written["angles"])
    exact = torch.rad2deg(analysis.pairwise_principal_angles(load(run).get_classifier().weight.detach())).numpy()
    assert angles.shape == exact.shape == (5, 5, 3)
    assert np.abs(angles - exact).max() <= 90 / 65534 / 2 + 1e-5


def test_packing_keeps_the_ends_of_the_range_and_absent_angles():
    degrees = np.zeros((3, 3, 2))
    degrees[0, 1] = degrees[1, 0] = [0, 90]
    degrees[0, 2] = degrees[2, 0] = [45, np.nan]
    degrees[1, 2] = degrees[2, 1] = [1e-3, 89.9999]
    back = unpack_angles(pack_angles(degrees, 90.0))
    np.testing.assert_allclose(back, degrees, atol=90 / 65534 / 2 + 1e-5)
    assert pack_angles(np.zeros((1, 1, 4)), 90.0)["k"] == 4  # one class: no pairs
    with pytest.raises(ValueError, match="damaged"):
        unpack_angles({**pack_angles(degrees, 90.0), "data": "AAAA"})


def test_a_head_of_vectors_has_one_angle_a_pair_up_to_180_degrees(run_of, tmp_path, data):
    run = run_of(tmp_path / "run", name="linear")
    result = analyze(run, data, device="cpu")
    weight = load(run).get_classifier().weight.detach()
    angles = unpack_angles(result["angles"])[..., 0]
    assert result["representation"] == "vectors"
    assert np.abs(angles - torch.rad2deg(analysis.class_vector_angles(weight)).numpy()).max() < 180 / 65534
    assert angles.max() > 90
    assert result["scalars"]["nc3"] is not None
    assert result["scalars"]["orthonormality_error"] is None


@pytest.mark.parametrize("name", ["cosine", "arcface", "multi", "softtriple", "subcenter-arcface"])
def test_every_other_head_is_described_by_one_vector_a_class(name):
    head = grassy.create_head(name, 12, 4).eval()
    features, labels = torch.randn(40, 12), torch.arange(40) % 4
    result = describe(head, None, features, labels)
    assert (result["representation"], result["classes"], result["k"]) == ("vectors", 4, 1)
    accuracy = 100 * float((head(features).argmax(1) == labels).double().mean())
    assert result["scalars"]["top1"] == pytest.approx(accuracy)
    json.dumps(result, allow_nan=False)


def test_unequal_dimensions_and_classes_without_images_leave_gaps_and_no_nan():
    head = grassy.GrassmannHead(10, 4, k=[1, 3, 2, 3])
    result = describe(head, ["b10", "B2", "a", "b1"], torch.randn(30, 10), torch.arange(30) % 3)
    json.dumps(result, allow_nan=False)
    assert result["per_class"]["dimension"] == [1, 3, 2, 3]
    assert result["per_class"]["accuracy"][3] is None
    assert result["orders"]["name"] == [2, 3, 1, 0]  # a, b1, B2, b10
    assert sorted(result["orders"]["cluster"]) == [0, 1, 2, 3]
    counts = np.isfinite(unpack_angles(result["angles"])).sum(-1)
    assert counts[0, 1] == 1
    assert counts[1, 2] == 2
    assert counts[1, 3] == 3


@pytest.mark.parametrize("name", ["linear", "grassmann"])
def test_a_zero_class_vector_or_a_single_class_is_no_obstacle(name):
    head = grassy.create_head(name, 9, 3, **({"k": 2} if name == "grassmann" else {}))
    with torch.no_grad():
        head.weight[1].zero_()
    json.dumps(describe(head, None, torch.randn(12, 9), torch.arange(12) % 3), allow_nan=False)
    single = grassy.create_head(name, 9, 1, **({"k": 2} if name == "grassmann" else {}))
    result = describe(single, None, torch.randn(5, 9), torch.zeros(5, dtype=torch.long))
    assert result["scalars"]["top1"] == 100
    assert result["scalars"]["class_separation"] is None
    json.dumps(result, allow_nan=False)


def test_more_classes_than_all_pairs_can_be_held_of_are_refused():
    with pytest.raises(ValueError, match=r"8000 classes are too many .* at most 7071 are allowed for k = 8"):
        describe(grassy.GrassmannHead(8, 8000, k=8), None)


def test_without_data_the_weights_alone_are_measured(run_of, tmp_path):
    run = run_of(tmp_path / "run")
    result = analyze(run, device="cpu")
    assert result["data"] is None
    assert result["scalars"]["variability"] is None
    assert result["scalars"]["orthonormality_error"] < 1e-6
    assert "accuracy" not in result["per_class"]
    assert read_analysis(run) == json.loads((run / "analysis.json").read_text())
    assert "weights only" in render(result)
    assert math.isclose(result["angles"]["limit"], 90)


def test_bad_input_is_one_sentence_and_leaves_no_file(run_of, make_run, tmp_path, data):
    run = run_of(tmp_path / "run")
    with pytest.raises(ValueError, match="does not exist"):
        analyze(run, tmp_path / "nowhere", device="cpu")
    with pytest.raises(ValueError, match="--data-dir"):
        analyze(run, split="train", device="cpu")
    with pytest.raises(ValueError, match="no checkpoint"):
        analyze(tmp_path / "missing")
    with pytest.raises(ValueError, match="4"):
        analyze(make_run(tmp_path / "small", {"name": "linear"}, classes=3), data, device="cpu")
    with pytest.raises(ValueError, match="run grassy analyze first"):
        read_analysis(run)
    (run / "analysis.json").write_text("{}")
    with pytest.raises(ValueError, match="run grassy analyze again"):
        read_analysis(run)


def test_a_model_with_several_classifiers_is_refused_by_their_names(tmp_path):
    model = timm.create_model("crossvit_tiny_240", num_classes=3)
    grassy.replace_head(model, "grassmann", k=2)
    grassy.save(model, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has 2 classifiers, head\.0, head\.1, each with features of its own"):
        analyze(tmp_path / "model.safetensors", device="cpu")
