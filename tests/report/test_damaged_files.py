"""An analysis.json or a summary.csv that is damaged: what can be read is, and the rest is one ValueError."""

import base64
import copy
import json
import zlib

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import grassy
from grassy.report.analyze import ANALYSIS, VERSION, read_analysis, render
from grassy.report.classes import describe
from grassy.report.curves import read_curves
from grassy.report.page import PageRun, render_page
from grassy.report.pictures import angle_heatmaps

SOON = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


@pytest.fixture(scope="module")
def good():
    """What `analyze` writes, of noise."""
    torch.manual_seed(0)
    head = grassy.GrassmannHead(16, 5, k=2)
    facts = {"version": VERSION, "model": "noise", "head": {"name": "grassmann", "k": 2}, "epoch": 3}
    facts["data"] = {"dataset": "", "folder": None, "split": "test", "images": 20, "unreadable": 0}
    return {**facts, **describe(head, list("abcde"), torch.randn(20, 16), torch.arange(20) % 5)}


def used(folder):
    """All that an analysis is read for."""
    found = read_analysis(folder)
    render(found)
    angle_heatmaps(found)
    render_page([PageRun("run", found)])


def test_what_is_whole_is_read(good, tmp_path):
    (tmp_path / ANALYSIS).write_text(json.dumps(good))
    used(tmp_path)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (["scalars"], None, "scalars must be a mapping"),
        (["scalars", "top1"], "high", "scalars.top1 must be a number"),
        (["data"], [], "data must be a mapping"),
        (["data", "split"], 3, "data.split must be a string"),
        (["classes"], 10**9, "classes must be an integer"),
        (["classes"], 4, "angles of 5 classes"),
        (["per_class", "name"], ["a"], "per_class.name must be a list of length 5"),
        (["per_class", "name"], [1, 2, 3, 4, 5], "per_class.name"),
        (["orders", "cluster"], [0, 0, 0, 0, 0], "orders.cluster must hold each class once"),
        (["orders", "name"], [0, 1, 2, 3, 99], "must be an integer from 0 to 4"),
        (["angles", "limit"], 1e308, "angles.limit must be a number"),
        (["angles", "data"], 5, "angles.data must be a string"),
        (["examples"], 7, "examples must be a mapping"),
        (["examples", "label"], [99], "examples.label must be a list"),
        (["examples", "mistakes"], [10**6], "examples.mistakes"),
        (["examples", "typical"], [[0]], "examples.typical must be a list of length 5"),
        (["examples", "outlier", 0], "<b>", "examples.outlier.* must be a number from 0 to 1"),
        (["representation"], "clouds", "representation must be one of subspaces, vectors"),
    ],
)
def test_a_damaged_analysis_is_refused_by_what_is_wrong_with_it(good, tmp_path, path, value, words):
    damaged = copy.deepcopy(good)
    place = damaged
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (tmp_path / ANALYSIS).write_text(json.dumps(damaged))
    with pytest.raises(ValueError, match=f"is damaged, run grassy analyze again: .*{words}"):
        used(tmp_path)


def test_angles_that_unpack_to_more_than_there_can_be_are_refused(good, tmp_path):
    damaged = copy.deepcopy(good)
    damaged["angles"]["data"] = base64.b64encode(zlib.compress(bytes(10**8))).decode()
    (tmp_path / ANALYSIS).write_text(json.dumps(damaged))
    with pytest.raises(ValueError, match="the packed angles are damaged: they should be 40 bytes"):
        used(tmp_path)


@pytest.mark.slow
@SOON
@given(st.data())
def test_an_analysis_with_any_value_in_any_place_is_used_or_refused(good, tmp_path_factory, data):
    damaged = copy.deepcopy(good)
    place = damaged
    while True:
        keys = sorted(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(VALUES)
    folder = tmp_path_factory.mktemp("damaged")
    (folder / ANALYSIS).write_text(json.dumps(damaged))
    try:
        used(folder)
    except ValueError as error:
        message = str(error)
    else:
        message = ""
    assert len(message) < 2000


@SOON
@given(st.binary(max_size=300))
def test_any_bytes_in_place_of_an_analysis_are_refused(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("damaged")
    (folder / ANALYSIS).write_bytes(content)
    with pytest.raises(ValueError, match=ANALYSIS):
        read_analysis(folder)


@SOON
@given(st.binary(max_size=300) | st.text(max_size=300).map(str.encode))
def test_any_bytes_in_a_summary_are_curves_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("damaged") / "summary.csv"
    path.write_bytes(b"epoch,train_loss\n" + content)
    try:
        curves = read_curves(path)
    except ValueError:
        return
    render_page([PageRun("run", {}, curves)])


def test_a_cell_of_a_summary_beyond_the_limit_of_csv_is_a_value_error(tmp_path):
    (tmp_path / "summary.csv").write_text("epoch\n" + "1" * 200_000 + "\n")
    with pytest.raises(ValueError, match=r"summary\.csv is damaged: field larger"):
        read_curves(tmp_path / "summary.csv")
