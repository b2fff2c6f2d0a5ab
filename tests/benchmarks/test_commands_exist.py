"""The benchmarks run; what they measure is not judged here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_benchmark_of_training_runs_on_a_cpu(tmp_path):
    command = [sys.executable, "-m", "benchmarks.train_epoch", "--digits", "--epochs", "2", "--turns", "1"]
    output = tmp_path / "result.json"
    subprocess.run([*command, "--output", str(output)], cwd=ROOT, check=True, capture_output=True)
    result = json.loads(output.read_text())
    for head in ("linear", "grassmann"):
        assert len(result["seconds"][head]["epoch"]) == len(result["seconds"][head]["bare"]) == 1


@pytest.mark.slow
def test_the_benchmark_of_texts_runs(tmp_path):
    pytest.importorskip("transformers")
    output = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.text_heads", "--seeds", "1", "--epochs", "1"]
    subprocess.run([*command, "--output", str(output)], cwd=ROOT, check=True, capture_output=True)
    found = json.loads(output.read_text())["accuracy"]
    assert found["linear"][0]["train"] > 50  # of four classes
    assert set(found) >= {"subspaces, normalised", "subspaces, standardised"}
