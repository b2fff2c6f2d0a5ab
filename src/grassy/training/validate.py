"""`grassy validate`: the accuracy of a file of weights, with images prepared as the file says."""

from pathlib import Path

from grassy.training import build, distributed
from grassy.training.checkpoint import load, read_description, weights_file
from grassy.training.data import validation_loader
from grassy.training.datasets import check_labels, open_images
from grassy.training.evaluate import Metrics, evaluate
from grassy.training.loader import Preparation
from grassy.training.recipe import Recipe


def validate(
    checkpoint: Path,
    data_dir: Path | None,
    split: str | None = None,
    dataset: str | None = None,
    batch_size: int | None = None,
    workers: int | None = None,
    device: str = "auto",
) -> Metrics:
    """Metrics of the model in a file of weights, or of the best of a run, on a split of a data set."""
    file = weights_file(checkpoint)
    description = read_description(file)
    recipe = Recipe(**description.recipe) if description.recipe else Recipe()
    changes = {"val_split": split, "dataset": dataset, "val_batch_size": batch_size, "workers": workers}
    recipe = recipe.changed({name: value for name, value in changes.items() if value is not None})
    with distributed.joined(device) as process:
        images = open_images(recipe.dataset, data_dir, recipe.val_split, description.class_names)
        check_labels(images, description.num_classes, f"split {recipe.val_split}")
        model = load(file, process.device)
        prepare = Preparation(description.mean, description.std, process.device)
        batches = validation_loader(recipe, images, process)
        metrics, failures = evaluate(
            model, batches, prepare, process.device, build.amp_dtype(recipe, process.device), process.world_size > 1
        )
    for failure in failures:
        print(f"cannot read {failure.name}: {failure.reason}")
    return metrics
