"""What a user does first with an installed grassy. Run it by the Python of the environment that has the wheel.

`python -I` keeps the current folder and PYTHONPATH out, so that the checkout cannot stand in for the wheel.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import grassy

environment, installed = Path(sys.prefix), Path(grassy.__file__).parent
assert installed.is_relative_to(environment), f"{installed} is not in {environment}"
source = Path(__file__).parents[1] / "src" / "grassy"  # recipes, kernels and the page's scripts are files of it, too
files = {file.relative_to(source) for file in source.rglob("*") if file.is_file() and "__pycache__" not in file.parts}
missing = sorted(str(file) for file in files if not (installed / file).is_file())
assert files, f"{source} is empty"
assert not missing, f"the wheel lacks {missing}"

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
grassy.replace_head(model, "grassmann", k=2)
optimizer = grassy.make_optimizer(model, "sgd", lr=0.1)
x, y = torch.randn(32, 8), torch.arange(32) % 5
losses = []
for _ in range(10):
    optimizer.zero_grad()
    losses.append(grassy.classification_loss(model, x, y))
    losses[-1].backward()
    optimizer.step()
assert losses[-1] < losses[0], losses
assert grassy.geometry.orthonormality_error(model[-1].weight) < 1e-6


def command(*words: str) -> str:
    run = subprocess.run([environment / "bin" / "grassy", *words], capture_output=True, text=True)
    assert run.returncode == 0, f"grassy {' '.join(words)} ended with {run.returncode}:\n{run.stderr}"
    return run.stdout


assert "train" in command("--help")
assert "resnet50-grassmann" in command("recipes")
with tempfile.TemporaryDirectory() as folder:
    command("demo", "--quick", "--output", folder)
    assert (Path(folder) / "report.html").stat().st_size > 10_000
print(f"grassy {grassy.__version__} works as installed in {environment}")
