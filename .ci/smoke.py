"""What a user does first with an installed grassy, and every command of the README's quick start.

Run it by the Python of the environment that has the wheel.

`python -I` keeps the current folder and PYTHONPATH out, so that the checkout cannot stand in for the wheel.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import grassy

environment, installed = Path(sys.prefix), Path(grassy.__file__).parent
assert installed.is_relative_to(environment), f"{installed} is not in {environment}"
root = Path(__file__).parents[1]
source = root / "src" / "grassy"  # recipes, kernels and the page's scripts are files of it, too
files = {file.relative_to(source) for file in source.rglob("*") if file.is_file() and "__pycache__" not in file.parts}
missing = sorted(str(file) for file in files if not (installed / file).is_file())
assert files, f"{source} is empty"
assert not missing, f"the wheel lacks {missing}"

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
grassy.replace_head(model)
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

# The README's quick start, block by block. The README names what to add without a network: here one epoch is enough.
readme = (root / "README.md").read_text(encoding="utf-8")
offline = "--from-scratch model=resnet18 img_size=64 --epochs 1"
assert offline.rsplit(" ", 1)[0] in readme, "the README has another way to try it without a network"


def block(section: str) -> str:
    found = re.search(rf"^## {section}\n.*?^```\w+\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert found, f"the README has no block in {section!r}"
    return found[1]


with tempfile.TemporaryDirectory() as folder:
    cpu_only = "import grassy; grassy.torchvision_import.import_torchvision()\n"  # see docs/install.md
    subprocess.run([sys.executable, "-I", "-c", cpu_only + block("Quick start in Python")], cwd=folder, check=True)
    grassy.torchvision_import.import_torchvision()
    from PIL import Image

    for place in ("photos/cat", "photos/dog", "holiday"):
        (Path(folder) / place).mkdir(parents=True)
        for number in range(10):
            pixels = torch.randint(0, 256, (40, 40, 3), dtype=torch.uint8).numpy()
            Image.fromarray(pixels).save(Path(folder) / place / f"{number}.png")
    path = {**os.environ, "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    commands = block("Quick start on the command line").splitlines()
    assert [line.split()[:2] for line in commands] == [["grassy", word] for word in ("train", "report", "predict")]
    for line in commands:
        words = f"{line} {offline}" if line.startswith("grassy train") else line
        subprocess.run(words, shell=True, cwd=folder, env=path, check=True, stdout=subprocess.DEVNULL)
    assert (Path(folder) / "report.html").stat().st_size > 10_000
print(f"grassy {grassy.__version__} works as installed in {environment}")
