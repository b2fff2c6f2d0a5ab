"""The shipped recipes build their real model, optimizer, schedule and augmentation, and take one real step.

Those that differ from another one in a number k or γ alone are left to the largest k.
"""

import re

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from grassy.distributed.processes import Process
from grassy.models import import_timm
from grassy.optim.joint import GRASSMANN, MANIFOLD
from grassy.recipes.changes import with_changes
from grassy.recipes.files import load_recipe, recipe_names
from grassy.runs.weights import Description, save_weights
from grassy.subspaces import named_subspaces
from grassy.train.model import build_model
from grassy.train.opening import opened_run
from grassy.train.trouble import stop_if_not_finite

#: What makes a model small enough for a test where a smaller image alone does not fit it.
SMALLER = {
    "swin_tiny_patch4_window7_224": {"img_size": 56},
    "deit3_small_patch16_224": {"img_size": 32},
}
SIZE = {"swin_tiny_patch4_window7_224": 56, "resnet18_cifar": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Class folders of photographs' size and shape, if not their content."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in ("apple", "pear"):
            (root / split / name).mkdir(parents=True)
            for i in range(2):
                pixels = rng.integers(0, 255, (48, 64, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{i}.jpg")
    return root


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in recipe_names() if not re.search(r"-(k1|k2|k4|k16|gamma\d+)$", name)])
def test_a_recipe_takes_a_step(name, folder, tmp_path):
    recipe = load_recipe(name)
    size = SIZE.get(recipe.model, 32) or recipe.img_size
    num_classes = {"digits": 10}.get(recipe.dataset, 100 if name.startswith("cifar100") else 1000)
    small = with_changes(
        recipe,
        {
            "img_size": size,
            "test_size": None if recipe.test_size is None else 2 * size,
            "batch_size": 4,
            "workers": 0,
            "num_classes": num_classes,
            "pretrained": False,
            "model_kwargs": {**recipe.model_kwargs, **SMALLER.get(recipe.model, {})},
        },
    )
    if recipe.freeze or recipe.finetune:  # it needs weights to start from
        start = tmp_path / "start.safetensors"
        model = build_model(small, num_classes)
        save_weights(model, Description(small.model, num_classes, small.head), start)
        small = with_changes(small, {"initial_checkpoint": str(start)})
    data_dir = None if recipe.dataset == "digits" else folder
    with opened_run(small, data_dir, tmp_path / "run", "", Process(torch.device("cpu")), quiet=True) as (
        run,
        steps,
        *_,
    ):
        model, optimizer = run.trained.model, run.trained.optimizer
        before = {key: value.clone() for key, value in model.state_dict().items()}
        # At the first update warm-up may begin from 0: take the full rate.
        run.trained.schedule.set(1.0)
        steps.take(next(iter(steps.batches(0, 0))), 0)
        stop_if_not_finite(run)
        after = model.state_dict()
        head = next(key for key in before if key.endswith("weight") and key.startswith(_head_of(model)))
        assert not torch.equal(before[head], after[head])
        backbone = next(iter(before))
        assert torch.equal(before[backbone], after[backbone]) == recipe.freeze
        subspaces = dict(named_subspaces(model))
        named = recipe.head["name"] in ("grassmann", "subspaces")
        assert bool(subspaces) == (named and recipe.head.get("riemannian", True))
        groups = [group[MANIFOLD] for group in optimizer.param_groups]
        assert (GRASSMANN in groups) == bool(subspaces)
        assert all(torch.isfinite(value).all() for value in after.values() if value.is_floating_point())


def _head_of(model):
    from grassy.heads import Head

    return next(name for name, module in model.named_modules() if isinstance(module, Head))


def test_the_blocks_of_the_cifar_model_start_alive():
    """Under weight decay on norms a block whose last norm starts at 0, as timm has it, can stay there."""
    model = import_timm().create_model("resnet18_cifar", num_classes=10)
    assert all((norm.weight == 1).all() for norm in model.modules() if isinstance(norm, nn.BatchNorm2d))
