"""Weights & Biases and MLflow record the curves of a run by one line each, which the documentation gives."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import grassy
from grassy.train.loop import train
from training_cases import tiny_arrays, tiny_recipe

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()


@pytest.mark.slow
def test_wandb_reads_the_curves_of_tensorboard(tmp_path):
    """In a process of its own: wandb must come before TensorBoard."""
    pytest.importorskip("wandb")
    assert "`wandb.init(sync_tensorboard=True)`" in PAGE
    recipe, data = tmp_path / "mine.yaml", tiny_arrays(tmp_path / "data")
    recipe.write_text(yaml.safe_dump(tiny_recipe().to_dict()))
    words = ["train", str(recipe), "--data-dir", str(data), "--output", str(tmp_path / "run")]
    code = "import wandb; wandb.init(sync_tensorboard=True); from grassy.cli import main; "
    code += f"main({words}); wandb.finish()"
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}  # nothing leaves the machine
    environment["PYTHONPATH"] = str(Path(grassy.__file__).parents[1])
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, check=True, capture_output=True)
    (record,) = tmp_path.rglob("*.wandb")
    for name in (b"train_loss", b"eval_top1", b"eval_effective_rank", b"subspaces/rotation"):
        assert name in record.read_bytes()


@pytest.mark.slow
def test_mlflow_reads_the_curves_of_tensorboard(tmp_path):
    pytest.importorskip("pandas")  # which mlflow-skinny leaves out
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("mlflow.pytorch")
    assert "`mlflow.pytorch.autolog(log_every_n_step=1)`" in PAGE
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    mlflow.pytorch.autolog(log_every_n_step=1)
    try:
        with mlflow.start_run() as run:
            train(tiny_recipe(), tiny_arrays(tmp_path / "data"), tmp_path / "run", quiet=True)
    finally:
        mlflow.pytorch.autolog(disable=True)
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "eval_top1")
    assert len(history) == 2
