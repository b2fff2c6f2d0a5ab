"""The benchmark of the estimator runs on arrays that a user gives."""

import json
import sys

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from benchmarks import estimator


@pytest.mark.slow
def test_every_estimator_gets_an_accuracy_and_a_time(tmp_path, monkeypatch):
    X, y = load_digits(return_X_y=True)
    train, test, labels, answers = train_test_split(X.astype(np.float32), y, train_size=300, random_state=0, stratify=y)
    np.savez(tmp_path / "digits.npz", train_x=train, train_y=labels, test_x=test, test_y=answers)
    output = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["estimator", str(tmp_path / "digits.npz"), "--output", str(output)])
    estimator.main()
    (row,) = json.loads(output.read_text())["rows"]
    assert row["train"] == [300, 64]
    assert len(row["estimators"]) == 5
    for facts in row["estimators"].values():
        assert facts["accuracy"] > 0.8
        assert facts["fit_cpu_seconds"] > 0
