"""A slice of the real CIFAR-100, if its pack is there, through the recipes that are made for it."""

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

UNPACK = Path(__file__).parents[3] / "shared" / "data" / "unpack.py"
pytestmark = pytest.mark.skipif(not UNPACK.is_file(), reason="needs the packs of images")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """512 images to train on and 256 to test with, of the ten first classes."""
    folder = tmp_path_factory.mktemp("cifar")
    command = [sys.executable, str(UNPACK), "cifar100", str(folder), "--as", "npz"]
    subprocess.run(command, check=True, capture_output=True)
    for name, count in (("train", 512), ("test", 256)):
        with np.load(folder / "cifar100" / f"{name}.npz") as arrays:
            x, y, classes = (arrays[key] for key in ("x", "y", "classes"))
        chosen = np.flatnonzero(y < 10)[:count]
        (folder / "slice").mkdir(exist_ok=True)
        np.savez(folder / "slice" / f"{name}.npz", x=x[chosen], y=y[chosen], classes=classes[:10])
    return folder / "slice"


@pytest.mark.parametrize("recipe", ["cifar100-resnet18-linear", "cifar100-resnet18-grassmann"])
def test_a_slice_of_cifar_trains(recipe, images, tmp_path):
    small = ["model_kwargs.channels=[16,16,32,32]", "batch_size=64", "lr=0.05"]
    command = [sys.executable, "-m", "grassy", "train", recipe, "--data-dir", str(images), "--epochs", "6"]
    subprocess.run([*command, "--output", str(tmp_path / "run"), *small], check=True, capture_output=True, timeout=300)
    rows = list(csv.DictReader((tmp_path / "run" / "summary.csv").open()))
    assert len(rows) == 6
    assert float(rows[-1]["train_loss"]) < 0.9 * float(rows[0]["train_loss"])
    assert max(float(row["eval_top1"]) for row in rows) > 20  # chance is 10
