"""Small, quick training runs that several tests share."""

import sys

import numpy as np
import torch
import yaml
from PIL import Image

from grassy.recipes.changes import with_changes
from grassy.recipes.recipe import Recipe
from grassy.runs.weights import LAST, read_weights
from grassy.train.loop import train

#: A transformer of a few thousand weights: no batch statistics, so results do not depend on how a batch is split.
TINY = {
    "model": "vit_tiny_patch16_224",
    "model_kwargs": {"img_size": 8, "patch_size": 4, "depth": 1, "embed_dim": 16, "num_heads": 2},
    "img_size": 8,
    "crop": "padded",
    "padding": 1,
    "crop_pct": 1.0,
    "batch_size": 8,
    "epochs": 2,
    "lr": 0.05,
    "workers": 0,
}


def tiny_recipe(**changes):
    return with_changes(Recipe(**TINY), {"head": {"name": "grassmann", "k": 2, "gamma": 8.0}, **changes})


def tiny_run(folder):
    """The folder of a run of one epoch."""
    train(tiny_recipe(epochs=1), tiny_arrays(folder / "data"), folder / "run", quiet=True)
    return folder / "run"


def tiny_arrays(folder, images=40, classes=3, size=8, seed=0, last=None):
    """train.npz and test.npz of noise with a class-dependent brightness, so that there is something to learn."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", images), ("test", images // 2)):
        y = np.arange(count) % classes
        x = rng.integers(0, 80, (count, size, size, 3)) + (y * 150 // max(1, classes - 1))[:, None, None, None]
        names = [f"class {i}" for i in range(classes)]
        names = np.array(names if last is None else [*names[:-1], last])
        np.savez(folder / f"{split}.npz", x=x.astype(np.uint8), y=y, classes=names)
    return folder


def tiny_folders(folder, images=6, classes=("cat", "dog", "owl"), size=12, seed=0):
    """An ImageFolder tree with `images` a class in train and half as many in val."""
    rng = np.random.default_rng(seed)
    for split, count in (("train", images), ("val", max(1, images // 2))):
        for number, name in enumerate(classes):
            (folder / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 80, (size, size, 3)) + 60 * number
                Image.fromarray(pixels.astype(np.uint8)).save(folder / split / name / f"{i}.png")
    return folder


def weights(folder, name=LAST):
    return read_weights(folder / name)


def assert_same_weights(one, other):
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for key in first:
        assert torch.equal(first[key], second[key]), key


def train_command(data, output, *settings):
    script = (
        "import sys, torch; from grassy.cli import main; from grassy.torchvision_import import import_torchvision; "
        "import_torchvision(); torch.set_num_threads(1); sys.exit(main(sys.argv[1:]))"
    )
    recipe = output.parent / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tiny_recipe().to_dict()))
    words = ["train", str(recipe), "--data-dir", str(data), "--output", str(output), "--resume", "auto", *settings]
    return [sys.executable, "-c", script, *words]
