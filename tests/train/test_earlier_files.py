"""Files of earlier versions are read by this one.

tests/fixtures/runs holds two runs of three epochs, of a transformer with 1,000 weights on `tiny_arrays`, that SIGTERM
stopped after seven updates. They were written by commit 2989cec (version 0.1.0, before the package was regrouped).
"""

import shutil
from pathlib import Path

import pytest
import torch

import grassy
from grassy.heads import LinearHead
from grassy.inference.validate import validate
from grassy.recipes.files import load_recipe
from grassy.report.analyze import analyze
from grassy.runs.weights import BEST, LAST, read_description
from grassy.train.loop import train
from training_cases import tiny_arrays, weights

RUNS = Path(__file__).parents[1] / "fixtures" / "runs"
HEADS = {"grassmann": grassy.GrassmannHead, "linear": LinearHead}


@pytest.fixture(params=["grassmann", "linear"])
def run(request, tmp_path):
    return Path(shutil.copytree(RUNS / request.param, tmp_path / "run"))


@pytest.fixture
def data(tmp_path):
    return tiny_arrays(tmp_path / "data")


def test_a_model_is_loaded_validated_and_analyzed(run, data):
    about = read_description(run / BEST)
    assert isinstance(grassy.load(run).head, HEADS[about.head["name"]])
    metrics = validate(run / BEST, data)
    assert metrics.top1 == pytest.approx(about.metrics["eval_top1"])
    assert metrics.loss == pytest.approx(about.metrics["eval_loss"], rel=1e-4)
    assert analyze(run, data)["data"]["images"] == 20


def test_a_run_is_resumed_and_ends_as_one_of_this_version(run, data, tmp_path):
    recipe = load_recipe(run / "args.yaml")
    resumed = train(recipe, data, run, resume="auto", quiet=True)
    whole = train(recipe, data, tmp_path / "whole", quiet=True)
    assert [row["epoch"] for row in resumed.rows] == [0, 1, 2]
    for one, other in zip(resumed.rows, whole.rows, strict=True):
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=1e-4)
    first, second = weights(run, LAST), weights(tmp_path / "whole", LAST)
    for name in second:
        torch.testing.assert_close(first[name], second[name], rtol=1e-3, atol=1e-5, msg=name)
