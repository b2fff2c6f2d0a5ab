"""The benchmarks run; what they measure is not judged here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import grassy
from benchmarks import train_epoch
from training_cases import tiny_arrays, tiny_recipe

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_benchmark_of_training_runs_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(train_epoch, "load_recipe", lambda _: tiny_recipe())
    output, data = tmp_path / "result.json", tiny_arrays(tmp_path / "data")
    words = ["--data-dir", data, "--epochs", 2, "--turns", 1, "--output", output]
    monkeypatch.setattr(sys, "argv", ["train_epoch", *map(str, words)])
    train_epoch.main()
    result = json.loads(output.read_text())
    for head in ("linear", "grassmann"):
        assert len(result["seconds"][head]["epoch"]) == len(result["seconds"][head]["bare"]) == 1


@pytest.mark.slow
def test_the_benchmark_of_texts_runs(tmp_path):
    pytest.importorskip("transformers")
    output = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.text_heads", "--seeds", "1", "--epochs", "1"]
    command += ["--heads", "subspaces, normalised"]
    subprocess.run([*command, "--output", str(output)], cwd=ROOT, check=True, capture_output=True)
    found = json.loads(output.read_text())["accuracy"]
    assert found["subspaces, normalised"][0]["train"] > 50  # of four classes


def test_the_page_on_heads_has_the_recorded_accuracies_on_texts():
    found = json.loads((ROOT / "benchmarks" / "results" / "text_heads_cpu.json").read_text())["accuracy"]
    means = [
        round(sum(run["test"] for run in found[name]) / len(found[name]))
        for name in ("subspaces, standardised", "subspaces, normalised", "linear")
    ]
    text = " ".join((ROOT / "docs" / "heads.md").read_text().split())
    standardised, normalised, linear = means
    assert (
        f"five seeds, reached {standardised} % with standardised features, {normalised} % with normalised ones, and "
        f"{linear} % with a linear layer"
    ) in text
    assert f"cost a small BERT {linear - standardised} of {linear} points" in grassy.heads.recommended_options.__doc__
