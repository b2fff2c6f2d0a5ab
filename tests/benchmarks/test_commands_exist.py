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
