"""MLflow in a folder of files: parameters of the head, one row of metrics per epoch, and the weights as an artifact.

python examples/mlflow_files.py    # needs: pip install mlflow-skinny
"""

import os
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions ask for it; a database needs more packages

import mlflow
from safetensors.torch import save_file

import grassy

torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x).float() / 16, torch.tensor(y)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
head = grassy.replace_head(model)
optimizer = grassy.make_optimizer(model, "adamw", lr=3e-3, head_lr=0.1)

mlflow.set_tracking_uri(Path("mlruns").absolute().as_uri())
mlflow.set_experiment("digits")
with mlflow.start_run() as run:
    mlflow.log_params(grassy.heads.describe(head))
    for epoch in range(5):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            loss = grassy.classification_loss(model, x[rows], y[rows])
            loss.backward()
            optimizer.step()
        error = float(grassy.geometry.orthonormality_error(head.weight.detach()))
        mlflow.log_metrics({"loss": loss.item(), "orthonormality_error": error}, step=epoch)
    save_file(model.state_dict(), "model.safetensors")
    mlflow.log_artifact("model.safetensors")
logged = mlflow.get_run(run.info.run_id).data
print("logged:", sorted(logged.metrics), sorted(logged.params))
